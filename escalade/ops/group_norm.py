"""Group normalisation of images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import Any, ClassVar

import torch

from escalade.device.architecture import WITH_WGMMA
from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, Workspace
from escalade.device.strides import aligned
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, STORAGE, dtype_of, element, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference
from escalade.ops.base.pitch import check_pitches
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.calling.executables import prepare_rung
from escalade.ops.calling.library import define, require_rung
from escalade.ops.shared import activation
from escalade.ops.shared.channels import SIZES
from escalade.ops.shared.images import (
    LAYOUTS,
    Images,
    check_images,
    check_problem,
    empty_images,
    empty_images_like,
    layout_of,
    pack_aligned,
    require_32_bits,
    stored_images,
)

# --- the problem


EPSILON = 1e-5


@dataclass(frozen=True)
class GroupNormProblem(Images, Named):
    """y = activated((x - mean) / sqrt(variance + epsilon) * weight + bias), the last three optional.

    Mean and variance are those of an image's group of channels, over all of its pixels; with as many groups as channels
    that is instance normalisation. weight and bias are one a channel, all of one dtype; sums are fp32. y may be x.
    """

    NAME: ClassVar = NamePattern(
        "group normalization",
        SIZES + "_g{groups}{weight?_weight}{bias?_bias}[_eps{epsilon}]{relu?_relu}" + activation.IN_NAME,
    )

    groups: int
    weight: bool = True
    bias: bool = True
    epsilon: float = EPSILON
    relu: bool = False
    activation: str = ""
    dtype: str = "fp32"
    layout: str = "nhwc"
    x_pitch: int = 0
    y_pitch: int = 0
    """Elements from pixel to pixel in NHWC, of parts of larger buffers; 0: dense."""

    def __post_init__(self) -> None:
        check_problem("group_norm", self, DTYPES, LAYOUTS)
        require_32_bits("group_norm", max(self.channels, self.x_pitch, self.y_pitch) * self.pixels)
        if self.groups < 1 or self.channels % self.groups:
            raise UnsupportedError(
                f"{self.groups} groups of {self.channels} channels: groups are of one size, so their number divides "
                "that of the channels"
            )
        if self.batch * self.groups >= 2**30:
            raise UnsupportedError(
                f"{self.batch} images of {self.groups} groups: group_norm takes fewer than 2^30 groups; split the batch"
            )
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise UnsupportedError(f"an epsilon of {self.epsilon}: it is a number of at least 0")
        activation.normalize(self)
        check_pitches(self, x=self.channels, y=self.channels)

    @property
    def group_channels(self) -> int:
        return self.channels // self.groups

    @property
    def row(self) -> int:
        """Elements of a group of one image, which in NCHW lie together."""
        return self.group_channels * self.pixels

    @property
    def flops(self) -> int:
        """A sum, a difference, a square and its sum, and a product an element; one more each for weight and bias."""
        return (5 + self.weight + self.bias) * self.elements

    @property
    def bytes(self) -> int:
        constants = (self.weight + self.bias) * self.channels
        return (2 * self.elements + constants) * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """Two sums of a group, a root and a quotient."""
        return 2.0**-24 * (4 + math.sqrt(1 + self.row / 6))


# --- rungs, groups: group normalisation: the rungs of group_norm, and how groups of channels lie under a block


MOST_VALUES = 32
"""Values of a thread at most: a block of 1,024 threads has 64 registers for each."""
_THREADS = (128, 256, 512, 1024)
_STATIC_SHARED = 48 * 1024
_PAIR_BYTES = 8
"""Bytes of a mean and what goes with it."""
_SEGMENT_BYTES = 64
"""Bytes of a pixel that blocks read side by side where there are blocks enough: two sectors."""
_MERGED = 4096
"""Pairs at most that a block of the second launch merges: a few for each thread."""
_RESIDENT_THREADS = 1024
"""Threads of a multiprocessor at once, with some 64 registers each."""
_PAUSE_US = 4.5
"""Microseconds from the last loads of blocks to their first stores, and from their end to the loads of the next: those
that begin together stay together, and hide nothing of each other's. By 16 turns of 8 MB on an H200, 134 µs in blocks of
1,024 threads and 119 in clusters of blocks of 128."""
_FIRST = 0.4
"""The part of a pause that a launch takes longer whose blocks all run at once."""


@dataclass(frozen=True)
class Span:
    """The channels under a block: whole groups in whole packs."""

    vector: int
    packs: int
    groups: int
    across: int
    """Blocks that it takes for all channels."""
    group_channels: int

    @staticmethod
    def every(problem: GroupNormProblem) -> tuple[Span, ...]:
        """All of them, the narrowest first."""
        vector = widest_vector(problem.dtype, problem.channels)
        least = lcm(vector, problem.group_channels)
        most = problem.channels // least
        return tuple(
            Span(vector, times * least // vector, times * least // problem.group_channels, most // times,
                 problem.group_channels)
            for times in range(1, most + 1)
            if most % times == 0
        )  # fmt: skip

    @property
    def unit(self) -> int:
        """Channels of one pack and one group."""
        return gcd(self.vector, self.group_channels)

    def fits(self, threads: int) -> bool:
        """Whether a block of so many threads is as wide, and has the shared memory for all that they find."""
        pairs = threads * (self.vector // self.unit) + self.groups
        return self.packs <= threads and pairs * _PAIR_BYTES <= _STATIC_SHARED

    def constants(self, problem: GroupNormProblem, threads: int, packs: int) -> dict[str, Constant]:
        return {
            **_constants(problem, threads),
            "VECTOR": self.vector,
            "WIDTH": self.packs,
            "UNIT": self.unit,
            "GROUP_CHANNELS": self.group_channels,
            "PACKS": packs,
        }


def _seen(problem: GroupNormProblem) -> GroupNormProblem:
    """The problem as kernels see it. In NCHW a group lies together: it is an image whose pixels are packs, with one
    group of as many channels."""
    if problem.layout == "nhwc":
        return problem
    vector = widest_vector(problem.dtype, problem.row)
    return replace(
        problem, batch=problem.batch * problem.groups, channels=vector, height=problem.row // vector, width=1,
        groups=1, layout="nhwc",
    )  # fmt: skip


def _constants(problem: GroupNormProblem, threads: int) -> dict[str, Constant]:
    planes = problem.layout == "nchw" and (problem.weight or problem.bias)
    return {
        "Element": element(problem.dtype),
        "HAS_WEIGHT": problem.weight,
        "HAS_BIAS": problem.bias,
        "THREADS": threads,
        "PLANE": problem.pixels if planes else 0,
        "IMAGE_GROUPS": problem.groups if planes else 1,
        "ROW_CHANNELS": problem.group_channels if planes else 1,
        **activation.constants_of(problem),
    }


def _pitches(problem: GroupNormProblem) -> tuple[int, int]:
    """Elements from pixel to pixel, as kernels see them."""
    return problem.x_pitch or problem.channels, problem.y_pitch or problem.channels


_X, _Y = Buffer("x"), Buffer("y")
_CHANNELWISE = (Buffer("weight", optional=True), Buffer("bias", optional=True))


@dataclass(frozen=True)
class Naive(Rung[GroupNormProblem, ThreadsConfig]):
    def supports(self, problem: GroupNormProblem) -> str | None:
        return None

    def configs(self, problem: GroupNormProblem) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128, 512))

    def recipe(self, problem: GroupNormProblem, config: ThreadsConfig) -> Recipe:
        p = _seen(problem)
        call = KernelCall(
            Program.of("group_norm/naive.cu", "group_norm_naive", _constants(problem, config.threads)),
            (p.batch * p.groups, 1, 1),
            (config.threads, 1, 1),
            (_X, *_CHANNELWISE, _Y, p.groups, p.group_channels, p.pixels, *_pitches(p), float(p.epsilon)),
            overlap=True,
        )
        return Recipe((call,))


@dataclass(frozen=True)
class SpanConfig(Config):
    threads: int
    """Threads of a block."""
    packs: int
    """Pixels of a thread that are under way at once."""
    groups: int
    """Groups under a block."""


@dataclass(frozen=True)
class SplitConfig(SpanConfig):
    splits: int
    """Blocks that share the pixels of an image, about."""


@dataclass(frozen=True)
class Split(Rung[GroupNormProblem, SplitConfig]):
    """Moments of shares of an image in one launch, and all else in a second."""

    def supports(self, problem: GroupNormProblem) -> str | None:
        if self._spans(problem):
            return None
        return f"groups of {problem.group_channels} channels are wider than a block of {_THREADS[-1]} threads"

    def _spans(self, problem: GroupNormProblem) -> list[tuple[Span, int]]:
        """The widest that the fewest threads reach, then by that of more."""
        found = []
        for threads in _THREADS[1:]:
            fitting = [span for span in Span.every(_seen(problem)) if span.fits(threads)]
            if fitting:
                found.append((fitting[-1], threads))
        return found

    def configs(self, problem: GroupNormProblem) -> tuple[SplitConfig, ...]:
        offered, p = [], _seen(problem)
        for span, threads in self._spans(problem):
            for filling in (self.card.busy_blocks, self.card.busy_blocks // 2, 2 * self.card.busy_blocks):
                wanted = ceil_div(filling, max(1, p.batch) * span.across)
                most = ceil_div(p.pixels, 4 * (threads // span.packs))
                splits = max(1, min(wanted, most, _MERGED // span.groups))
                offered += [SplitConfig(threads, packs, span.groups, splits) for packs in (4, 2)]
        return tuple(dict.fromkeys(offered))

    def estimate(self, problem: GroupNormProblem, config: SplitConfig) -> float:
        """Counts x twice, for both launches read it, and somewhat more: 268 MB take 112 to 116 µs on an H200."""
        return self.card.microseconds(0, 1.75 * problem.bytes, launches=2) + _FIRST * _PAUSE_US

    def recipe(self, problem: GroupNormProblem, config: SplitConfig) -> Recipe:
        p = _seen(problem)
        span = _span(p, config)
        per_split = ceil_div(p.pixels, config.splits)
        splits = ceil_div(p.pixels, per_split)
        grid, block = (p.batch * splits, span.across, 1), (config.threads, 1, 1)
        x_pitch, y_pitch = _pitches(p)
        partial = Buffer("partial")
        plain = replace(
            p, weight=False, bias=False, relu=False, activation=""
        )  # one program for all that follows
        moments = KernelCall(
            Program.of(
                "group_norm/split_moments.cu", "group_norm_split_moments",
                span.constants(plain, config.threads, config.packs),
            ),
            grid,
            block,
            (_X, partial, p.pixels, x_pitch, splits, per_split),
            overlap=True,
        )  # fmt: skip
        normalise = KernelCall(
            Program.of(
                "group_norm/split_normalise.cu", "group_norm_split_normalise",
                span.constants(problem, config.threads, config.packs),
            ),
            grid,
            block,
            (_X, partial, *_CHANNELWISE, _Y, p.pixels, x_pitch, y_pitch, splits, per_split, float(p.epsilon)),
            overlap=True,
        )  # fmt: skip
        workspace = Workspace("partial", _PAIR_BYTES * p.batch * splits * p.groups)
        return Recipe((moments, normalise), (workspace,))


@dataclass(frozen=True)
class InRegisters(Rung[GroupNormProblem, SpanConfig]):
    """A block has all pixels of its groups in registers."""

    def supports(self, problem: GroupNormProblem) -> str | None:
        if self._offered(problem):
            return None
        return (
            f"groups of {problem.group_channels} channels of {problem.pixels} pixels do not fit into the registers of "
            "a block; the rung `split` takes any"
        )

    def configs(self, problem: GroupNormProblem) -> tuple[SpanConfig, ...]:
        return self._offered(problem)

    def _offered(self, problem: GroupNormProblem) -> tuple[SpanConfig, ...]:
        """Offers first the widest segments of a pixel that leave blocks enough; of each the fewest threads."""
        offered: list[tuple[bool, int, SpanConfig]] = []
        p = _seen(problem)
        for span in Span.every(p):
            bytes = span.packs * span.vector * ELEMENT_BYTES[p.dtype]
            if offered and bytes > _SEGMENT_BYTES:
                break
            few = p.batch * span.across < 2 * self.card.multiprocessors
            for threads in _THREADS:
                packs = ceil_div(p.pixels, max(1, threads // span.packs))
                if span.fits(threads) and packs * span.vector <= MOST_VALUES:
                    offered.append((few, bytes if few else -bytes, SpanConfig(threads, packs, span.groups)))
        return tuple(config for _, _, config in sorted(offered, key=lambda one: one[:2]))

    def estimate(self, problem: GroupNormProblem, config: SpanConfig) -> float:
        p = _seen(problem)
        return _held_us(self.card, p, _span(p, config), p.batch, config.threads)

    def recipe(self, problem: GroupNormProblem, config: SpanConfig) -> Recipe:
        p = _seen(problem)
        span = _span(p, config)
        call = KernelCall(
            Program.of(
                "group_norm/in_registers.cu", "group_norm_in_registers",
                span.constants(problem, config.threads, config.packs),
            ),
            (p.batch, span.across, 1),
            (config.threads, 1, 1),
            (_X, *_CHANNELWISE, _Y, p.pixels, *_pitches(p), float(p.epsilon)),
            overlap=True,
        )  # fmt: skip
        return Recipe((call,))


@dataclass(frozen=True)
class ClusterConfig(SpanConfig):
    blocks: int
    """Blocks of a cluster, which share the pixels of an image."""


@dataclass(frozen=True)
class Clustered(Rung[GroupNormProblem, ClusterConfig]):
    """The blocks of a cluster have all pixels of their groups in registers."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return WITH_WGMMA

    def supports(self, problem: GroupNormProblem) -> str | None:
        if self.configs(problem):
            return None
        return (
            f"groups of {problem.group_channels} channels of {problem.pixels} pixels do not fit into the registers of "
            "a cluster; the rung `split` takes any"
        )

    def configs(self, problem: GroupNormProblem) -> tuple[ClusterConfig, ...]:
        """Offers of each span and number of threads the fewest blocks."""
        offered, p = [], _seen(problem)
        for span in Span.every(p):
            for threads in _THREADS[:-1]:
                if not span.fits(threads):
                    continue
                for blocks in range(2, len(self.card.clusters) + 1):
                    packs = ceil_div(ceil_div(p.pixels, blocks), threads // span.packs)
                    if packs * span.vector <= MOST_VALUES:
                        offered.append(ClusterConfig(threads, packs, span.groups, blocks))
                        break
        return tuple(sorted(offered, key=lambda config: self.estimate(problem, config)))

    def estimate(self, problem: GroupNormProblem, config: ClusterConfig) -> float:
        p = _seen(problem)
        return _held_us(self.card, p, _span(p, config), p.batch * config.blocks, config.threads)

    def recipe(self, problem: GroupNormProblem, config: ClusterConfig) -> Recipe:
        p = _seen(problem)
        span = _span(p, config)
        call = KernelCall(
            Program.of(
                "group_norm/clustered.cu", "group_norm_clustered",
                span.constants(problem, config.threads, config.packs),
            ),
            (p.batch * config.blocks, span.across, 1),
            (config.threads, 1, 1),
            (_X, *_CHANNELWISE, _Y, p.pixels, *_pitches(p), ceil_div(p.pixels, config.blocks), float(p.epsilon)),
            cluster=(config.blocks, 1, 1),
            overlap=True,
        )  # fmt: skip
        return Recipe((call,))


def _span(problem: GroupNormProblem, config: SpanConfig) -> Span:
    return next(span for span in Span.every(problem) if span.groups == config.groups)


def _held_us(card: Card, problem: GroupNormProblem, span: Span, blocks: int, threads: int) -> float:
    """The bytes, and a pause in each turn of blocks. Narrow segments of pixels take longer (16 bytes of them five times
    as long, on an H200)."""
    bytes = span.packs * span.vector * ELEMENT_BYTES[problem.dtype]
    narrow = max(1.0, _SEGMENT_BYTES / bytes) if problem.channels > span.packs * span.vector else 1.0
    turns = blocks * span.across * threads / (card.multiprocessors * _RESIDENT_THREADS)
    return (
        card.rates.launch_us
        + card.transfer_us(narrow * problem.bytes)
        + _PAUSE_US * (_FIRST + max(0.0, turns - 1))
    )


# Predictions are for 256 channels in 32 groups, 56 x 56, batch 32, fp16: 51 MB in, 51 MB out.
NAIVE = Naive("naive", "a block a group of an image, in three passes of single elements", None, None)

SPLIT = Split(
    "split",
    "16 bytes a load; blocks share an image, and a second launch merges what they have found and normalises",
    below="naive",
    # naive: 25 k elements a block in three passes, each load 16 bytes of a sector and two divisions, 75 M loads and
    # stores of 2 bytes with some 40 instructions each, 140 us. Split: 51 MB read twice, the second time in part from
    # L2, and written once: 154 MB, 36 us, and a launch.
    predicted_gain=3.7,
)

IN_REGISTERS = InRegisters(
    "in_registers",
    "a group lies in the registers of a block, and is read once",
    below="split",
    # 103 MB, 24.5 us, and no second launch; against 37.
    predicted_gain=1.5,
)

CLUSTERED = Clustered(
    "clustered",
    "the blocks of a cluster share a group, so that larger ones are read once and whole pixels lie under a block",
    below="in_registers",
    # Groups of 8 channels are 16 bytes of a pixel, half of a sector, which two blocks read and write: 50 us and more.
    # Whole pixels: 24.5 us, and pauses of 6.5 us between blocks, of which those beside them hide the most.
    predicted_gain=1.5,
)


# --- problems to measure and to test


PROBLEMS = (
    GroupNormProblem(32, 64, 112, 112, 32, relu=True),
    GroupNormProblem(32, 256, 56, 56, 32),
    GroupNormProblem(32, 512, 7, 7, 32, relu=True),
    GroupNormProblem(1, 320, 64, 64, 32, activation="silu(x)"),
    GroupNormProblem(8, 64, 256, 256, 64),
    GroupNormProblem(32, 64, 56, 56, 1),
)
"""The norms of a ResNet with groups, of a diffusion model's U-Net, of style transfer (one channel a group), and of a
network with one group."""

SMALL_PROBLEMS = (
    GroupNormProblem(2, 32, 5, 7, 4),
    GroupNormProblem(2, 16, 3, 3, 16, relu=True),
    GroupNormProblem(1, 24, 5, 4, 8, bias=False),
    GroupNormProblem(2, 36, 4, 4, 1, weight=False, bias=False, epsilon=1e-3),
    GroupNormProblem(3, 5, 1, 1, 1),
    GroupNormProblem(1, 16, 40, 40, 2),
)
"""Small problems that between them have groups wider and narrower than a pack, and of which neither divides the other;
and more than one split."""


# --- the reference


def random_inputs(problem: GroupNormProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Images of normal deviates, each channel with a mean and a spread of its own."""
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    each = (p.batch, p.channels, 1, 1)
    x = normal(p.batch, p.channels, p.height, p.width) * (1 + normal(*each).abs()) + normal(*each)
    tensors = {"x": stored_images(p, x)}
    if p.weight:
        tensors["weight"] = (1 + 0.3 * normal(p.channels)).to(STORAGE[p.dtype])
    if p.bias:
        tensors["bias"] = (0.3 * normal(p.channels)).to(STORAGE[p.dtype])
    return tensors


def empty_output(problem: GroupNormProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.batch, p.channels, p.height, p.width), device)


def exact(problem: GroupNormProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The images in float64."""
    return peer(problem, {name: tensor.double() for name, tensor in inputs.items()})


def peer(problem: GroupNormProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    y = torch.group_norm(
        inputs["x"], problem.groups, inputs.get("weight"), inputs.get("bias"), problem.epsilon
    )
    return activation.apply(problem, y)


# --- the operation


class GroupNorm(Operation[GroupNormProblem]):
    name = "group_norm"
    problem = GroupNormProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("group_norm", (NAIVE, SPLIT, IN_REGISTERS, CLUSTERED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: GroupNormProblem) -> tuple[str, ...]:
        return ("in_registers", "clustered", "split", "naive")


GROUP_NORM = GroupNorm()


# --- the PyTorch operator


def group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    epsilon: float = EPSILON,
    *,
    rung: str | None = None,
) -> torch.Tensor:
    """Each image's groups of channels with mean 0 and variance 1, times weight, plus bias: one of both a channel.

    x is [N, C, H, W], in either layout. With as many groups as channels it is instance normalisation. `rung` names one
    rung.
    """
    return OPERATOR(x, groups, weight, bias, epsilon, rung)


def _check(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    check_images("group_norm", x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != x.dtype or tensor.device != x.device or tensor.shape != x.shape[1:2]:
            raise UnsupportedError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; group_norm takes {x.dtype} "
                f"{list(x.shape[1:2])} on {x.device}, as x is"
            )


def _run(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
    rung: str | None = None,
) -> torch.Tensor:
    _check(x, weight, bias)
    batch, channels, height, width = x.shape
    problem = GroupNormProblem(
        batch,
        channels,
        height,
        width,
        groups,
        weight is not None,
        bias is not None,
        epsilon=epsilon,
        dtype=dtype_of("group_norm", x),
        layout=layout_of(x),
    )
    y = empty_output(problem, x.device)
    if problem.elements == 0:
        require_rung(GROUP_NORM, rung)
    else:
        constants = {"weight": weight, "bias": bias}
        given = {name: None if t is None else aligned(t.contiguous()) for name, t in constants.items()}
        prepare_rung(GROUP_NORM, problem, x.device, rung).run(
            {"x": pack_aligned(x, problem.layout), **given, "y": y}
        )
    return y


def _fake(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
    rung: str | None = None,
) -> torch.Tensor:
    _check(x, weight, bias)
    return empty_images_like(x, x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.groups, weight, _, ctx.epsilon, _ = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Takes the statistics again, which costs less than keeping them would, and leaves the rest to PyTorch."""
    x, weight = ctx.saved_tensors
    batch, channels, height, width = x.shape
    sizes = (batch, channels, height * width, ctx.groups)
    dense = x.contiguous()
    _, mean, scale = torch.ops.aten.native_group_norm(dense, weight, None, *sizes, ctx.epsilon)
    wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2], ctx.needs_input_grad[3]]
    found = torch.ops.aten.native_group_norm_backward(
        gradient.contiguous(), dense, mean, scale, weight, *sizes, wanted
    )
    of_x, of_weight, of_bias = (part if asked else None for part, asked in zip(found, wanted, strict=True))
    return of_x, None, of_weight, of_bias, None, None


OPERATOR = define(
    "group_norm(Tensor x, int groups, Tensor? weight, Tensor? bias, float epsilon, str? rung=None) -> Tensor",
    _run,
    _fake,
    setup=_setup,
    backward=_backward,
)
