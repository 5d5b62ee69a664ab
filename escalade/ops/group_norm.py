"""Group normalization of images."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from math import gcd, isqrt, lcm
from typing import Any, ClassVar

import torch

from escalade.device.architecture import WITH_WGMMA
from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.card import RESERVED_SHARED, Card
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, STORAGE, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import kernel_call, launch
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors, in_float64
from escalade.ops.base.pitch import check_pitches
from escalade.ops.base.rung import Config, Rung, ThreadsConfig, ThreadsRung
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.shared import activation
from escalade.ops.shared.channels import SIZES
from escalade.ops.shared.images import (
    LAYOUTS,
    Images,
    check_problem,
    empty_images,
    empty_images_like,
    form_of,
    require_32_bits,
    shape_of,
    stored_images,
)
from escalade.ops.shared.rows import check_dtypes

# --- the problem


EPSILON = 1e-5


@dataclass(frozen=True)
class GroupNormProblem(Images, Named):
    """y = activated((x - mean) / sqrt(variance + epsilon) * weight + bias), the last three optional.

    Mean and variance are over the pixels and channels of one group of one image; one channel per group is instance
    normalization. weight and bias have one number per channel, all in one dtype; sums are fp32. y may alias x. With
    `wide` weight and bias are fp32, and y has the dtype `output`, as in mixed training. With `statistics` the fp32
    buffers `mean` and `rstd` (reciprocal standard deviation), [batch][groups], are results too.
    """

    NAME: ClassVar = NamePattern(
        "group normalization",
        SIZES
        + "_g{groups}{weight?_weight}{bias?_bias}{wide?_wide}[_to{output:fp32|fp16|bf16}]{statistics?_statistics}"
        "[_eps{epsilon}]{relu?_relu}" + activation.IN_NAME,
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
    """Elements from pixel to pixel in NHWC if the buffer is a slice of a larger one; 0 if dense."""
    wide: bool = False
    output: str = ""
    """Dtype of y; empty if it is that of x."""
    statistics: bool = False

    def __post_init__(self) -> None:
        check_problem("group_norm", self, DTYPES, LAYOUTS)
        check_dtypes("group_norm", output=self.output)
        require_32_bits("group_norm", max(self.channels, self.x_pitch, self.y_pitch) * self.pixels)
        if self.groups < 1 or self.channels % self.groups:
            raise UnsupportedError(
                f"{self.groups} groups of {self.channels} channels: the number of groups must divide that of channels"
            )
        if self.batch * self.groups >= 2**30:
            raise UnsupportedError(
                f"{self.batch} images of {self.groups} groups: group_norm supports fewer than 2^30; split the batch"
            )
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise UnsupportedError(f"epsilon is {self.epsilon}: it must be finite and at least 0")
        activation.normalize(self)
        check_pitches(self, x=self.channels, y=self.channels)

    @property
    def result(self) -> str:
        """Dtype of y."""
        return self.output or self.dtype

    @property
    def parameters(self) -> str:
        """Dtype of weight and bias."""
        return "fp32" if self.wide else self.dtype

    @property
    def group_channels(self) -> int:
        return self.channels // self.groups

    @property
    def row(self) -> int:
        """Elements of a group of one image, which are contiguous in NCHW."""
        return self.group_channels * self.pixels

    @property
    def flops(self) -> int:
        """Per element: sum, difference, square and its sum, product; one more each for weight and bias."""
        return (5 + self.weight + self.bias) * self.elements

    @property
    def bytes(self) -> int:
        constants = (self.weight + self.bias) * self.channels * ELEMENT_BYTES[self.parameters]
        statistics = 8 * self.batch * self.groups * self.statistics
        return (
            self.elements * (ELEMENT_BYTES[self.dtype] + ELEMENT_BYTES[self.result]) + constants + statistics
        )

    @property
    def rounding(self) -> float:
        """Two sums over a group, a square root and a division."""
        return 2.0**-24 * (4 + math.sqrt(1 + self.row / 6))


# --- rungs


MOST_VALUES = 32
"""Most values per thread: each of 1,024 threads has 64 registers."""
MOST_BF16_VALUES = 24
"""The same for bf16 with 1,024 threads: unpacking takes a few registers more than in fp16."""
_THREADS = (128, 256, 512, 1024)
_STATIC_SHARED = 48 * 1024
_PAIR_BYTES = 8  # of a mean and its sum of squares
_SEGMENT_BYTES = 64
"""Bytes of a pixel per CTA if there are enough CTAs: two sectors."""
_MERGED = 4096
"""Most pairs that a CTA of the second launch merges: a few per thread."""
_SHARE_OF_MERGE = 8
"""Least bytes of a CTA's share per byte of moments that it merges."""
_RESIDENT_THREADS = 1024  # per SM, with some 64 registers each
_EXCHANGE_US = 0.8
"""Exchange of moments in a cluster: 64 groups of 4096 take 3.2 us in 128 CTAs of 64 clusters, and 2.4 in 64 CTAs."""
_BLOCK_BYTES_PER_US = 48e3
"""Bytes that one CTA reads and writes: 8 groups of 8 x 4096 in fp16 take 6.2 us in 8 CTAs, and 3.6 in 64."""
_PAUSE_US = 4.5
"""Microseconds from a CTA's last loads to its first stores, and from its end to the next one's loads. CTAs that start
together stay in step and hide nothing. From 16 waves of 8 MB on an H200: 134 µs with CTAs of 1,024 threads, 119 with
clusters of CTAs of 128."""
_STAGED_REGISTERS = {"fp32": 48, "fp16": 64, "bf16": 64}
_STAGED_INSTRUCTIONS, _LATENCY = 24, 6
"""Instructions per element of `staged`, and clocks between two instructions of one thread."""
_ENOUGH_BYTES = 48 * 1024
"""Bytes in flight per SM that DRAM's latency times bandwidth needs."""
_MOST_BLOCKS = 32  # CTAs per SM
_LEAST_COPY_BYTES = 4  # of cp.async
_STREAMED_THREADS = 1280  # per SM, with some 48 registers each
_STREAMED = 1.12
"""Time of `streamed` relative to a copy of the problem's bytes."""
_L2_SHARE = 0.5
"""Fraction of L2 that holds data until it is reread; results and copies for the other L2 partition use the rest."""
_FIRST = 0.4
"""Fraction of a pause that a single wave costs."""


@dataclass(frozen=True)
class Span:
    """The channels of a CTA: whole groups in whole packs."""

    vector: int
    packs: int
    groups: int
    across: int
    """CTAs that cover all channels."""
    group_channels: int

    @staticmethod
    def every(problem: GroupNormProblem) -> tuple[Span, ...]:
        """Return all spans, the narrowest first."""
        vector = _width(problem, problem.channels)
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
        """Return True if `threads` cover the width and their partial results fit shared memory."""
        pairs = threads * (self.vector // self.unit) + self.groups
        return self.packs <= threads and pairs * _PAIR_BYTES <= _STATIC_SHARED


def _width(problem: GroupNormProblem, length: int) -> int:
    """Return the elements per access, 16 bytes of the wider dtype, which divide a length."""
    return min(widest_vector(dtype, length) for dtype in (problem.dtype, problem.result))


def _seen(problem: GroupNormProblem) -> GroupNormProblem:
    """Return the problem as kernels see it. A group in NCHW is contiguous: an NHWC image whose pixels are packs, with
    one group of `vector` channels."""
    if problem.layout == "nhwc":
        return problem
    vector = _width(problem, problem.row)
    return replace(
        problem, batch=problem.batch * problem.groups, channels=vector, height=problem.row // vector, width=1,
        groups=1, layout="nhwc",
    )  # fmt: skip


def _program(source: str, problem: GroupNormProblem, config: Config, **scope: Any) -> Program:
    planes = problem.layout == "nchw" and (problem.weight or problem.bias)
    return Program.of(
        f"group_norm/{source}.cu", constants=activation.constants(problem.relu, problem.activation, problem.result),
        problem=problem, config=config, planes=planes, **scope,
    )  # fmt: skip


def _pitches(problem: GroupNormProblem) -> tuple[int, int]:
    """Return the elements from pixel to pixel of x and y."""
    return problem.x_pitch or problem.channels, problem.y_pitch or problem.channels


_X, _Y = Buffer("x"), Buffer("y")
_CHANNELWISE = (Buffer("weight", optional=True), Buffer("bias", optional=True))
_STATISTICS = (Buffer("mean", optional=True), Buffer("rstd", optional=True))


@dataclass(frozen=True)
class Naive(ThreadsRung[GroupNormProblem]):
    threads = (256, 128, 512)

    def recipe(self, problem: GroupNormProblem, config: ThreadsConfig) -> Recipe:
        p = _seen(problem)
        return launch(
            _program("naive", problem, config),
            p.batch * p.groups,
            config.threads,
            _X, *_CHANNELWISE, _Y, p.groups, p.group_channels, p.pixels, *_pitches(p), float(p.epsilon), *_STATISTICS,
        )  # fmt: skip


@dataclass(frozen=True)
class SpanConfig(Config):
    threads: int
    packs: int
    """Pixels in flight per thread."""
    groups: int
    """Groups per CTA."""


@dataclass(frozen=True)
class SplitConfig(SpanConfig):
    splits: int
    """Approximate number of CTAs that share the pixels of an image."""


@dataclass(frozen=True)
class Split(Rung[GroupNormProblem, SplitConfig]):
    """Moments of shares of an image in one launch, normalization in a second."""

    def supports(self, problem: GroupNormProblem) -> str | None:
        if self._spans(problem):
            return None
        return f"groups of {problem.group_channels} channels are wider than a CTA of {_THREADS[-1]} threads"

    def _spans(self, problem: GroupNormProblem) -> list[tuple[Span, int]]:
        """Return the widest span for each number of threads, the fewest threads first."""
        found = []
        for threads in _THREADS[1:]:
            fitting = [span for span in Span.every(_seen(problem)) if span.fits(threads)]
            if fitting:
                found.append((fitting[-1], threads))
        return found

    def configs(self, problem: GroupNormProblem) -> tuple[SplitConfig, ...]:
        """Prefer as many shares as keep the card busy; from memory, more and smaller ones, as far as their moments
        stay few: 67 MB take 56 us with 64 shares of an image and 59 with 22."""
        offered, p = [], _seen(problem)
        image_bytes = p.pixels * p.channels * ELEMENT_BYTES[p.dtype]
        few = isqrt(image_bytes // (_SHARE_OF_MERGE * _PAIR_BYTES * p.groups))
        least = few if p.batch * image_bytes > self.card.l2_bytes else 1
        for span, threads in self._spans(problem):
            for busy in (self.card.busy_blocks, self.card.busy_blocks // 2, 2 * self.card.busy_blocks):
                wanted = ceil_div(busy, max(1, p.batch) * span.across)
                most = ceil_div(p.pixels, 4 * (threads // span.packs))
                for shares in (max(wanted, least), wanted):
                    splits = max(1, min(shares, most, _MERGED // span.groups))
                    offered += [SplitConfig(threads, packs, span.groups, splits) for packs in (4, 2)]
        return tuple(dict.fromkeys(offered))

    def estimate(self, problem: GroupNormProblem, config: SplitConfig) -> float:
        """Both launches read x, and a bit more: 268 MB take 112 to 116 µs on an H200."""
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
            p, weight=False, bias=False, relu=False, activation="", wide=False, output="", statistics=False
        )  # one program for all epilogues
        moments = KernelCall(
            _program("split_moments", plain, config, span=span),
            grid,
            block,
            (_X, partial, p.pixels, x_pitch, splits, per_split),
            overlap=True,
        )
        normalize = KernelCall(
            _program("split_normalise", problem, config, span=span),
            grid,
            block,
            (
                _X,
                partial,
                *_CHANNELWISE,
                _Y,
                p.pixels,
                x_pitch,
                y_pitch,
                splits,
                per_split,
                float(p.epsilon),
                *_STATISTICS,
            ),
            overlap=True,
        )
        workspace = Workspace("partial", _PAIR_BYTES * p.batch * splits * p.groups)
        return Recipe((moments, normalize), (workspace,))


@dataclass(frozen=True)
class InRegisters(Rung[GroupNormProblem, SpanConfig]):
    """A CTA holds all pixels of its groups in registers."""

    def supports(self, problem: GroupNormProblem) -> str | None:
        if self._offered(problem):
            return None
        return (
            f"groups of {problem.group_channels} channels of {problem.pixels} pixels exceed the registers of a CTA; "
            "use the rung `split`"
        )

    def configs(self, problem: GroupNormProblem) -> tuple[SpanConfig, ...]:
        return self._offered(problem)

    def _offered(self, problem: GroupNormProblem) -> tuple[SpanConfig, ...]:
        """Prefer the widest segments of a pixel that leave enough CTAs, each with the fewest threads."""
        offered: list[tuple[bool, int, SpanConfig]] = []
        p = _seen(problem)
        for span in Span.every(p):
            bytes = span.packs * span.vector * ELEMENT_BYTES[p.dtype]
            if offered and bytes > _SEGMENT_BYTES:
                break
            few = p.batch * span.across < 2 * self.card.multiprocessors
            for threads in _THREADS:
                packs = ceil_div(p.pixels, max(1, threads // span.packs))
                most = MOST_BF16_VALUES if p.dtype == "bf16" and threads == _THREADS[-1] else MOST_VALUES
                if span.fits(threads) and packs * span.vector <= most:
                    offered.append((few, bytes if few else -bytes, SpanConfig(threads, packs, span.groups)))
        return tuple(config for _, _, config in sorted(offered, key=lambda one: one[:2]))

    def estimate(self, problem: GroupNormProblem, config: SpanConfig) -> float:
        p = _seen(problem)
        return _held_us(self.card, p, _span(p, config), p.batch, config.threads) - _EXCHANGE_US

    def recipe(self, problem: GroupNormProblem, config: SpanConfig) -> Recipe:
        p = _seen(problem)
        span = _span(p, config)
        return launch(
            _program("in_registers", problem, config, span=span),
            (p.batch, span.across),
            config.threads,
            _X, *_CHANNELWISE, _Y, p.pixels, *_pitches(p), float(p.epsilon), *_STATISTICS,
        )  # fmt: skip


@dataclass(frozen=True)
class StagedConfig(SpanConfig):
    steps: int
    """Pixels per thread."""


@dataclass(frozen=True)
class Staged(Rung[GroupNormProblem, StagedConfig]):
    """Persistent CTAs keep all pixels of their groups in shared memory, and copy those of the next image meanwhile."""

    def supports(self, problem: GroupNormProblem) -> str | None:
        if problem.layout != "nchw":
            return f"{self.name} supports layout nchw, not {problem.layout}"
        if self.configs(problem):
            return None
        return (
            f"groups of {problem.group_channels} channels of {problem.pixels} pixels exceed half of a CTA's shared "
            "memory, or are not packs of 4 bytes; use the rung `split`"
        )

    def configs(self, problem: GroupNormProblem) -> tuple[StagedConfig, ...]:
        p = _seen(problem)
        if p.channels * ELEMENT_BYTES[p.dtype] < _LEAST_COPY_BYTES:
            return ()
        every = (StagedConfig(threads, 4, 1, ceil_div(p.pixels, threads)) for threads in _THREADS)
        most = self.card.shared_bytes - RESERVED_SHARED
        fitting = [config for config in every if self._shared_bytes(p, config) <= most]
        return tuple(sorted(fitting, key=lambda config: self.estimate(problem, config)))

    def _shared_bytes(self, p: GroupNormProblem, config: StagedConfig) -> int:
        """Return the bytes of both buffers, and of the moments that threads merge."""
        span = _span(p, config)
        merged = _PAIR_BYTES * (config.threads * (span.vector // span.unit) + span.groups)
        return 2 * config.steps * config.threads * span.vector * ELEMENT_BYTES[p.dtype] + merged

    def _resident(self, p: GroupNormProblem, config: StagedConfig) -> int:
        """Return the CTAs per SM."""
        by_shared = self.card.multiprocessor_shared_bytes // (self._shared_bytes(p, config) + RESERVED_SHARED)
        by_registers = self.card.registers // (config.threads * _STAGED_REGISTERS[p.dtype])
        return max(1, min(by_shared, by_registers, _MOST_BLOCKS))

    def estimate(self, problem: GroupNormProblem, config: StagedConfig) -> float:
        """Estimate the bytes, slower while few are in flight or few threads compute, for the CTA with the most rows."""
        p, card = _seen(problem), self.card
        resident = self._resident(p, config)
        in_flight = resident * p.pixels * p.channels * ELEMENT_BYTES[p.dtype]
        moved = card.transfer_us(p.bytes) * max(1.0, _ENOUGH_BYTES / in_flight)
        lanes = min(128, resident * config.threads / _LATENCY) * card.multiprocessors * card.rates.clock
        turns = p.batch / (resident * card.multiprocessors)
        tail = math.ceil(turns) / turns if turns > 1 else 1.0
        pause = _PAUSE_US * _FIRST * (2 if turns <= 1 else 1)
        return card.rates.launch_us + max(moved, p.elements * _STAGED_INSTRUCTIONS / lanes) * tail + pause

    def recipe(self, problem: GroupNormProblem, config: StagedConfig) -> Recipe:
        p = _seen(problem)
        span, resident = _span(p, config), self._resident(p, config)
        return launch(
            _program("staged", problem, config, span=span, blocks_per_sm=resident),
            (max(1, min(p.batch, resident * self.card.multiprocessors)), span.across),
            config.threads,
            _X, *_CHANNELWISE, _Y, p.batch, p.pixels, *_pitches(p), float(p.epsilon), *_STATISTICS,
            shared_bytes=2 * config.steps * config.threads * span.vector * ELEMENT_BYTES[p.dtype],
        )  # fmt: skip


@dataclass(frozen=True)
class ClusterConfig(SpanConfig):
    blocks: int
    """CTAs per cluster, which share the pixels of an image."""


@dataclass(frozen=True)
class Clustered(Rung[GroupNormProblem, ClusterConfig]):
    """The CTAs of a cluster hold all pixels of their groups in registers."""

    architectures = WITH_WGMMA

    def supports(self, problem: GroupNormProblem) -> str | None:
        if self.configs(problem):
            return None
        return (
            f"groups of {problem.group_channels} channels of {problem.pixels} pixels exceed the registers of a "
            "cluster; use the rung `split`"
        )

    def configs(self, problem: GroupNormProblem) -> tuple[ClusterConfig, ...]:
        """Offer the fewest CTAs for each span and number of threads."""
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
        return launch(
            _program("clustered", problem, config, span=span),
            (p.batch * config.blocks, span.across),
            config.threads,
            _X, *_CHANNELWISE, _Y, p.pixels, *_pitches(p), ceil_div(p.pixels, config.blocks), float(p.epsilon),
            *_STATISTICS,
            cluster=(config.blocks, 1, 1),
        )  # fmt: skip


@dataclass(frozen=True)
class Streamed(Rung[GroupNormProblem, SpanConfig]):
    """Alternate: moments of a row (a group of an image in NCHW), and results of an earlier row that L2 still holds."""

    def supports(self, problem: GroupNormProblem) -> str | None:
        if problem.layout != "nchw":
            return f"{self.name} supports layout nchw, not {problem.layout}"
        if 2 * self._shares(problem, SpanConfig(128, 1, 1)) * _seen(problem).batch >= 2**31:
            return f"{self.name} counts shares in 32 bits; {problem.name} has more"
        return None

    def configs(self, problem: GroupNormProblem) -> tuple[SpanConfig, ...]:
        return SpanConfig(256, 4, 1), SpanConfig(256, 2, 1), SpanConfig(512, 4, 1)

    def estimate(self, problem: GroupNormProblem, config: SpanConfig) -> float:
        """DRAM moves each element twice if the rows between moments and results fit L2, and three times otherwise."""
        row_bytes = problem.row * ELEMENT_BYTES[problem.dtype]
        fits = (self._lag(problem, config) + 1) * row_bytes <= _L2_SHARE * self.card.l2_bytes
        moved = _STREAMED * problem.bytes if fits else 2 * problem.bytes
        seen, shares = _seen(problem), self._shares(problem, config)
        moved *= (
            shares * config.packs * config.threads / max(1, seen.pixels)
        )  # part of the last share is idle
        return self.card.microseconds(0, moved) + 2 * _PAUSE_US

    def recipe(self, problem: GroupNormProblem, config: SpanConfig) -> Recipe:
        p = _seen(problem)
        shares = self._shares(problem, config)
        call = kernel_call(
            _program(
                "streamed", problem, config, span=_span(p, config), blocks_per_sm=self._blocks(config),
            ),
            min(self._resident(config), 2 * p.batch * shares),
            config.threads,
            _X, *_CHANNELWISE, _Y, Buffer("counters"), Buffer("partial"), Buffer("ready"), p.batch, p.pixels,
            shares, self._lag(problem, config), float(p.epsilon), *_STATISTICS,
        )  # fmt: skip
        workspaces = (
            Workspace("counters", 4 * (1 + 3 * p.batch), zeroed=True),
            Workspace("partial", _PAIR_BYTES * p.batch * shares),
            Workspace("ready", _PAIR_BYTES * p.batch),
        )
        return Recipe((call,), workspaces)

    def _shares(self, problem: GroupNormProblem, config: SpanConfig) -> int:
        """Return the tickets per row."""
        return ceil_div(_seen(problem).pixels, config.packs * config.threads)

    def _blocks(self, config: SpanConfig) -> int:
        return max(1, _STREAMED_THREADS // config.threads)

    def _resident(self, config: SpanConfig) -> int:
        return self._blocks(config) * self.card.multiprocessors

    def _lag(self, problem: GroupNormProblem, config: SpanConfig) -> int:
        """Return the distance in rows at which no CTA has to wait: all CTAs of that earlier row have finished."""
        in_turn = 2 * self._shares(problem, config)
        return min(_seen(problem).batch, 1 + ceil_div(self._resident(config), in_turn))


def _span(problem: GroupNormProblem, config: SpanConfig) -> Span:
    return next(span for span in Span.every(problem) if span.groups == config.groups)


def _held_us(card: Card, problem: GroupNormProblem, span: Span, blocks: int, threads: int) -> float:
    """Estimate the bytes plus a pause per wave of CTAs."""
    turns = blocks * span.across * threads / (card.multiprocessors * _RESIDENT_THREADS)
    by_one = problem.bytes / (blocks * span.across * _BLOCK_BYTES_PER_US)
    return (
        card.rates.launch_us
        + max(card.transfer_us(_narrow(problem, span) * problem.bytes), by_one)
        + _PAUSE_US * (_FIRST + max(0.0, turns - 1))
    )


def _narrow(problem: GroupNormProblem, span: Span) -> float:
    """Return the slowdown where CTAs cover narrow segments of pixels: five times with 16 bytes on an H200."""
    bytes = span.packs * span.vector * ELEMENT_BYTES[problem.dtype]
    return max(1.0, _SEGMENT_BYTES / bytes) if problem.channels > span.packs * span.vector else 1.0


STAGED = Staged(
    "staged",
    "persistent CTAs keep a group in shared memory, and copy the next one meanwhile",
    below="split",
    # Each element is read once, and no wave of CTAs waits for another: 24.5 us against 37.
    predicted_gain=1.5,
)

STREAMED = Streamed(
    "streamed",
    "persistent CTAs write the results of a row while L2 still holds it, and read the next rows meanwhile",
    below="split",
    # Of rows that exceed the registers of a cluster: 2 passes over DRAM instead of 3.
    predicted_gain=1.4,
)

# Predictions are for 256 channels in 32 groups, 56 x 56, batch 32, fp16: 51 MB in, 51 MB out.
NAIVE = Naive("naive", "one CTA per group and image, in three passes of single elements", None, None)

SPLIT = Split(
    "split",
    "16-byte loads; CTAs share an image, and a second launch merges their moments and normalizes",
    below="naive",
    # naive: 25 k elements per CTA in three passes, each load 16 bytes of a sector and two divisions, 75 M loads and
    # stores of 2 bytes with some 40 instructions each, 140 us. Split: 51 MB read twice, the second time in part from
    # L2, and written once: 154 MB, 36 us, and a launch.
    predicted_gain=3.7,
)

IN_REGISTERS = InRegisters(
    "in_registers",
    "a CTA holds a group in registers, and reads it once",
    below="split",
    # 103 MB, 24.5 us, and no second launch; against 37.
    predicted_gain=1.5,
)

CLUSTERED = Clustered(
    "clustered",
    "the CTAs of a cluster share a group, so that larger ones are read once and a CTA covers whole pixels",
    below="in_registers",
    # Groups of 8 channels are 16 bytes of a pixel, half of a sector, which two CTAs read and write: 50 us and more.
    # Whole pixels: 24.5 us, and pauses of 6.5 us between CTAs, most of which their neighbors hide.
    predicted_gain=1.5,
)


# --- the reference


def random_inputs(problem: GroupNormProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Standard normal images, each channel with its own mean and spread."""
    p = problem
    each = (p.batch, p.channels, 1, 1)
    x = draw.normal(p.batch, p.channels, p.height, p.width) * (1 + draw.normal(*each).abs()) + draw.normal(
        *each
    )
    tensors = {"x": stored_images(p, x)}
    if p.weight:
        tensors["weight"] = (1 + 0.3 * draw.normal(p.channels)).to(STORAGE[p.parameters])
    if p.bias:
        tensors["bias"] = (0.3 * draw.normal(p.channels)).to(STORAGE[p.parameters])
    return tensors


def empty_output(problem: GroupNormProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(replace(p, dtype=p.result), (p.batch, p.channels, p.height, p.width), device)


def peer(problem: GroupNormProblem, inputs: Tensors) -> torch.Tensor:
    x = inputs["x"]
    if (problem.wide or problem.output) and x.dtype is not torch.float64:
        wide = {name: tensor.float() for name, tensor in inputs.items()}
        return peer(replace(problem, dtype="fp32", wide=False, output=""), wide).to(STORAGE[problem.result])
    y = torch.group_norm(x, problem.groups, inputs.get("weight"), inputs.get("bias"), problem.epsilon)
    return activation.apply(problem, y)


def statistics(problem: GroupNormProblem, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return mean and reciprocal standard deviation of each group of each image, in the dtype of x."""
    groups = x.reshape(problem.batch, problem.groups, -1)
    variance = groups.var(-1, correction=0)
    return {"mean": groups.mean(-1), "rstd": (variance + problem.epsilon).rsqrt()}


# --- the operation


class GroupNormOperation(Operation[GroupNormProblem]):
    name = "group_norm"
    problem = GroupNormProblem
    in_pytorch = Reference(random_inputs, empty_output, in_float64(peer), peer)
    ladder = Ladder("group_norm", (NAIVE, SPLIT, IN_REGISTERS, CLUSTERED, STAGED, STREAMED))
    problems = (
        GroupNormProblem(32, 64, 112, 112, 32, relu=True),
        GroupNormProblem(32, 256, 56, 56, 32),
        GroupNormProblem(32, 512, 7, 7, 32, relu=True),
        GroupNormProblem(1, 320, 64, 64, 32, activation="silu(x)"),
        GroupNormProblem(8, 64, 256, 256, 64),
        GroupNormProblem(32, 64, 56, 56, 1),
    )
    """The norms of a ResNet with groups, of a diffusion model's U-Net, of style transfer (one channel per group), and
    of a network with one group."""
    small_problems = (
        GroupNormProblem(2, 32, 5, 7, 4),
        GroupNormProblem(2, 16, 3, 3, 16, relu=True),
        GroupNormProblem(1, 24, 5, 4, 8, bias=False),
        GroupNormProblem(2, 36, 4, 4, 1, weight=False, bias=False, epsilon=1e-3),
        GroupNormProblem(3, 5, 1, 1, 1),
        GroupNormProblem(1, 16, 40, 40, 2),
        GroupNormProblem(2, 24, 5, 4, 4, wide=True, statistics=True, activation="silu(x)"),
        GroupNormProblem(2, 8, 40, 33, 4, wide=True, output="fp32", statistics=True),
        GroupNormProblem(3, 16, 3, 5, 16, wide=True, output="fp16", statistics=True, relu=True),
    )
    """Small problems: groups wider and narrower than a pack, groups and packs that do not divide each other, more than
    one split, statistics as results, and results in another dtype than x."""
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("in_registers", "clustered", "split", "naive")
    """`staged` and `streamed` are left to the tuner. With acquire-release tickets, `streamed` took twice as long as
    `clustered` on an H200 (260 us against 150 for 32 instances of 32 channels of 256 x 256 pixels)."""

    def extra_outputs(self, problem: GroupNormProblem, device: torch.device) -> dict[str, torch.Tensor]:
        names = ("mean", "rstd") if problem.statistics else ()
        return {name: torch.empty(problem.batch, problem.groups, device=device) for name in names}

    def extra_references(self, problem: GroupNormProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        return statistics(problem, inputs["x"].double()) if problem.statistics else {}


GROUP_NORM = GroupNormOperation()


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
    """Normalize each image's groups of channels to mean 0 and variance 1, times weight, plus bias (one per channel).

    x is [N, C, H, W], in either layout. One channel per group is instance normalization. `rung` names a rung of the
    ladder.
    """
    return OPERATOR(x, groups, weight, bias, epsilon, rung)


def _plan(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
    rung: str | None = None,
) -> CallPlan:
    given, (dtype, layout) = (weight is not None, bias is not None), form_of(x)
    return CallPlan(
        GROUP_NORM,
        lambda: empty_images_like(x, x.shape),
        lambda: GroupNormProblem(*shape_of(x), groups, *given, epsilon=epsilon, dtype=dtype, layout=layout),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.groups, weight, _, ctx.epsilon, _ = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Recompute the statistics, which is cheaper than saving them, and leave the rest to PyTorch."""
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


OPERATOR = define_planned(
    "group_norm", _plan, "x: N C H W, weight: C, bias: C", setup=_setup, backward=_backward
)
