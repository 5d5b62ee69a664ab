"""The statistics of a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from escalade.device.program import Constant, Program
from escalade.device.recipe import Addresses, Buffer, Int64, Ints, KernelCall, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require_at_least
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, VECTOR_BYTES, dtype_of, widest_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.rung import Rung, ThreadsConfig
from escalade.ops.calling.executables import prepare_rung
from escalade.ops.calling.library import define
from escalade.ops.shared import channels
from escalade.ops.shared.channels import SIZES, ChannelTile, channels_innermost, check_channelwise
from escalade.ops.shared.images import LAYOUTS, Images, check_images, layout_of, pack_aligned, stored_images
from escalade.ops.shared.pointwise import PacksConfig

# --- the problem


@dataclass(frozen=True)
class BatchStatisticsProblem(Images, Named):
    """y[0] = mean and y[1] = variance (biased) of x over images and pixels, in fp32 for each channel.

    What training wants besides, each fp32 and one a channel: with `epsilon`, `mean` alone and `rstd`, one over the root
    of variance + epsilon, which a backward pass takes; with `momentum`, `moved_mean` and `moved_variance`: the inputs
    `running_mean` and `running_variance` moved towards the batch's (the variance unbiased), and they may be those.
    """

    NAME: ClassVar = NamePattern(
        "statistics",
        SIZES + "[_eps{epsilon}][_m{momentum}]",
    )

    dtype: str = "fp32"
    layout: str = "nchw"
    epsilon: float | None = None
    momentum: float | None = None

    def __post_init__(self) -> None:
        require_at_least(1, {"batch": self.batch})
        check_channelwise("batch_statistics", self)
        if self.epsilon is not None and not 0 <= self.epsilon < math.inf:
            raise UnsupportedError(f"epsilon of {self.epsilon}: it is a finite number of at least 0")
        if self.momentum is not None and not 0 <= self.momentum <= 1:
            raise UnsupportedError(f"momentum of {self.momentum}: it is a share, from 0 to 1")

    @property
    def count(self) -> int:
        """Elements a channel."""
        return self.batch * self.pixels

    @property
    def for_training(self) -> tuple[str, ...]:
        """The buffers of what training wants besides."""
        saved = ("mean", "rstd") if self.epsilon is not None else ()
        return saved + (("moved_mean", "moved_variance") if self.momentum is not None else ())

    @property
    def flops(self) -> int:
        """Operations of two passes: a sum; a difference, a product and a sum."""
        return 4 * self.elements

    @property
    def bytes(self) -> int:
        return self.elements * ELEMENT_BYTES[self.dtype] + 8 * self.channels

    @property
    def rounding(self) -> float:
        """256 running sums side by side, each a random walk of its rounding errors."""
        return 2.0**-24 * math.sqrt(1 + self.count / 256 / 6)


# --- rungs, statistics: mean and variance of each channel of a batch: the rungs of batch_statistics


_MERGE_THREADS, _MERGE_CHANNELS, _MERGE_PACKS = 512, 8, 9
_QUOTIENT = 2.0**-22
"""How far the card's approximate quotient may be off, relative to it: 2 units in the last place."""


RESULTS = Addresses(
    tuple(
        Buffer(name, optional=True)
        for name in ("mean", "rstd", "running_mean", "running_variance", "moved_mean", "moved_variance")
    )
)


def numbers(problem: BatchStatisticsProblem) -> tuple[float, float]:
    """Epsilon and momentum; where they are not there, nobody looks at them."""
    return float(problem.epsilon or 0), float(problem.momentum or 0)


@dataclass(frozen=True)
class SplitConfig(PacksConfig):
    blocks: int = 1
    """The number of blocks, about, that the batch is split over."""


@dataclass(frozen=True)
class BlockAChannel(Rung[BatchStatisticsProblem, ThreadsConfig]):
    """A kernel of `kernels/batch_statistics` with one block a channel, for every problem."""

    source: str

    def supports(self, problem: BatchStatisticsProblem) -> str | None:
        return None

    def configs(self, problem: BatchStatisticsProblem) -> tuple[ThreadsConfig, ...]:
        """Offers powers of two."""
        return tuple(ThreadsConfig(threads) for threads in (256, 512, 1024))

    def recipe(self, problem: BatchStatisticsProblem, config: ThreadsConfig) -> Recipe:
        constants = {**channels.constants(problem), "THREADS": config.threads}
        call = KernelCall(
            Program.of(f"batch_statistics/{self.source}.cu", f"batch_statistics_{self.source}", constants),
            (problem.channels, 1, 1),
            (config.threads, 1, 1),
            (
                Buffer("x"), Buffer("y"), RESULTS, problem.channels, problem.pixels, Int64(problem.count),
                *numbers(problem),
            ),
            overlap=True,
        )  # fmt: skip
        return Recipe((call,))


def _of_merged_moments(tolerance: float) -> float:
    """Means that are moved by shares of a distance, and the shares are approximate quotients.

    Of few elements the plain rounding of a sum is smaller than that.
    """
    return max(tolerance, 2 * _QUOTIENT)


@dataclass(frozen=True)
class OnePass(BlockAChannel):
    """Moments are kept and merged, not summed."""

    def tolerance(self, problem: BatchStatisticsProblem, peer_error: float) -> float:
        return _of_merged_moments(super().tolerance(problem, peer_error))


@dataclass(frozen=True)
class Split(Rung[BatchStatisticsProblem, SplitConfig]):
    """Many blocks a channel, and a second launch that merges what they found."""

    def supports(self, problem: BatchStatisticsProblem) -> str | None:
        return None

    def configs(self, problem: BatchStatisticsProblem) -> tuple[SplitConfig, ...]:
        sizes = ((256, 4), (256, 2), (256, 8), (512, 4), (128, 4))
        filling = self.card.busy_blocks
        wanted = (filling, filling // 2, 2 * filling)
        every = [SplitConfig(threads, packs, count) for count in wanted for threads, packs in sizes]
        # Where a pack is less than 16 bytes it takes more of them, and more threads, to keep the memory busy.
        whole = _vector_bytes(problem) == VECTOR_BYTES
        default = SplitConfig(512, 4, filling // 2) if whole else SplitConfig(256, 8, 2 * filling)
        return (default, *(config for config in every if config != default))

    def tolerance(self, problem: BatchStatisticsProblem, peer_error: float) -> float:
        return _of_merged_moments(super().tolerance(problem, peer_error))

    def recipe(self, problem: BatchStatisticsProblem, config: SplitConfig) -> Recipe:
        constants = {**channels.constants(problem), "THREADS": config.threads, "PACKS": config.packs}
        split = _rows if channels_innermost(problem) else _planes
        first, splits, unit = split(problem, config, constants)
        merge = KernelCall(
            Program.of(
                "batch_statistics/split_merge.cu",
                "batch_statistics_split_merge",
                {"THREADS": _MERGE_THREADS, "CHANNELS": _MERGE_CHANNELS, "PACKS": _MERGE_PACKS},
            ),
            (blocks(problem.channels, _MERGE_CHANNELS), 1, 1),
            (_MERGE_THREADS, 1, 1),
            (
                Buffer("partial"), Buffer("y"), RESULTS, problem.channels, splits,
                _shares(problem.count, unit, splits), *numbers(problem),
            ),
            overlap=True,
        )  # fmt: skip
        return Recipe((first, merge), (Workspace("partial", 2 * 4 * splits * problem.channels),))


def _shares(count: int, unit: int, splits: int) -> Ints:
    """`Shares` of split_merge.cu: so many elements in units that go round the splits."""
    units = ceil_div(count, unit)
    each, longer = divmod(units, splits)
    return Ints((each * unit, unit, longer, (units - 1) % splits, units * unit - count))


def _vector_bytes(problem: BatchStatisticsProblem) -> int:
    length = problem.channels if channels_innermost(problem) else problem.pixels
    return widest_vector(problem.dtype, length) * ELEMENT_BYTES[problem.dtype]


def _rows(
    problem: BatchStatisticsProblem, config: SplitConfig, constants: dict[str, Constant]
) -> tuple[KernelCall, int, int]:
    """Channels innermost: blocks' worth of rows go round the splits.

    The launch, the splits, and the elements a channel of what goes round.
    """
    rows = ChannelTile.of(problem, config.threads)
    most = blocks(problem.count, rows.height * config.packs)
    splits = min(most, max(1, config.blocks // rows.across))
    call = KernelCall(
        Program.of(
            "batch_statistics/split_rows.cu", "batch_statistics_split_rows", {**constants, "VECTOR": rows.vector}
        ),
        (splits, rows.across, 1),
        (config.threads, 1, 1),
        (
            Buffer("x"), Buffer("partial"), problem.channels, rows.width, splits,
            Int64(problem.count),
        ),
        overlap=True,
    )  # fmt: skip
    return call, splits, rows.height


def _planes(
    problem: BatchStatisticsProblem, config: SplitConfig, constants: dict[str, Constant]
) -> tuple[KernelCall, int, int]:
    """Planes: a split is a run of a channel's packs, image after image."""
    vector = widest_vector(problem.dtype, problem.pixels)
    packs = problem.count // vector
    most = blocks(packs, config.threads * config.packs)
    wanted = min(most, max(1, config.blocks // problem.channels))
    per_split = blocks(packs, wanted)
    splits = blocks(packs, per_split)
    call = KernelCall(
        Program.of(
            "batch_statistics/split_planes.cu", "batch_statistics_split_planes", {**constants, "VECTOR": vector}
        ),
        (problem.channels * splits, 1, 1),
        (config.threads, 1, 1),
        (
            Buffer("x"), Buffer("partial"), problem.channels, problem.pixels, splits,
            Int64(packs), Int64(per_split),
        ),
        overlap=True,
    )  # fmt: skip
    return call, splits, per_split * vector


# Predictions are for 64 channels, 56 x 56, batch 256, fp16, NCHW: 103 MB, 24 us at 4.24 TB/s. A block a channel: 64 SMs
# with 8 warps each, some 4 loads of 64 bytes of a warp under way for 0.6 us, 0.22 TB/s: 940 us for two passes, half of
# it for one. Split: the memory's pace, two launches and the merge's latency, 30 us. In NHWC the gain should be larger
# by far: there a block a channel fetches 32 bytes for each 2.
RUNGS: tuple[Rung[BatchStatisticsProblem], ...] = (
    BlockAChannel("naive", "a block a channel, one pass for the mean and one for the variance", None, None, "naive"),
    OnePass("one_pass", "mean and variance in one pass (Welford), lanes merge by shuffles", "naive", 2.0,
            "one_pass"),
    Split("split", "a channel is split over blocks, up to 16 bytes an access, and a second launch merges", "one_pass",
          15.0),
)  # fmt: skip


# --- problems to measure and to test


PROBLEMS = (
    BatchStatisticsProblem(32, 64, 112, 112),
    BatchStatisticsProblem(256, 64, 112, 112),
    BatchStatisticsProblem(32, 64, 56, 56),
    BatchStatisticsProblem(256, 64, 56, 56),
    BatchStatisticsProblem(32, 512, 7, 7),
    BatchStatisticsProblem(256, 512, 7, 7),
)

SMALL_PROBLEMS = (
    BatchStatisticsProblem(2, 8, 6, 6),
    BatchStatisticsProblem(3, 16, 7, 7, epsilon=1e-3, momentum=0.25),
    BatchStatisticsProblem(1, 3, 5, 9),
    BatchStatisticsProblem(2, 24, 9, 4, epsilon=1e-5),  # 3 packs a row: threads left over
    BatchStatisticsProblem(5, 40, 1, 1),  # alike in both layouts
    BatchStatisticsProblem(1, 4, 1, 1),  # one element a channel: a variance of 0
    BatchStatisticsProblem(1, 2056, 2, 2),  # wider than a block
    BatchStatisticsProblem(2, 16, 64, 64, momentum=0.1),  # several splits
)


# --- the reference


def random_inputs(
    problem: BatchStatisticsProblem, device: torch.device, seed: int
) -> dict[str, torch.Tensor]:
    """Channels that differ in mean and deviation."""
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)
    means = torch.randn(p.channels, generator=generator, device=device).mul_(3)
    deviations = torch.rand(p.channels, generator=generator, device=device).add_(0.5)
    x = torch.randn((p.batch, p.channels, p.height, p.width), generator=generator, device=device)
    inputs = {"x": stored_images(p, x.mul_(deviations.view(1, -1, 1, 1)).add_(means.view(1, -1, 1, 1)))}
    if p.momentum is not None:
        inputs["running_mean"] = torch.randn(p.channels, generator=generator, device=device)
        inputs["running_variance"] = torch.rand(p.channels, generator=generator, device=device).add_(0.5)
    return inputs


def empty_output(problem: BatchStatisticsProblem, device: torch.device) -> torch.Tensor:
    return torch.empty((2, problem.channels), dtype=torch.float32, device=device)


def _statistics(x: torch.Tensor) -> torch.Tensor:
    """Means and variances by PyTorch, in the dtype of x."""
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    return torch.stack((mean, variance))


def peer(problem: BatchStatisticsProblem, inputs: Tensors) -> torch.Tensor:
    """Means and variances as PyTorch's own batch_norm finds them while it trains: sums in fp32, whatever x is stored
    as."""
    x = inputs["x"]
    if not x.is_cuda:
        return _statistics(x.float())
    epsilon = 1e-5
    mean, inverse_deviation = torch.batch_norm_stats(x, epsilon)
    return torch.stack((mean, inverse_deviation.pow(-2) - epsilon))


def exact(problem: BatchStatisticsProblem, inputs: Tensors) -> torch.Tensor:
    """The result in float64."""
    return _statistics(inputs["x"].double())


def for_training(problem: BatchStatisticsProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
    """What training wants besides, in float64."""
    mean, variance = exact(problem, inputs)
    found = {}
    if problem.epsilon is not None:
        found = {"mean": mean, "rstd": (variance + problem.epsilon).rsqrt()}
    if problem.momentum is not None:
        unbiased = variance * problem.count / (problem.count - 1)
        for name, towards in (("mean", mean), ("variance", unbiased)):
            found[f"moved_{name}"] = torch.lerp(inputs[f"running_{name}"].double(), towards, problem.momentum)
    return found


# --- the operation


class BatchStatistics(Operation[BatchStatisticsProblem]):
    name = "batch_statistics"
    problem = BatchStatisticsProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("batch_statistics", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: BatchStatisticsProblem) -> tuple[str, ...]:
        return ("split",)

    def extra_outputs(self, problem: BatchStatisticsProblem, device: torch.device) -> dict[str, torch.Tensor]:
        return {name: torch.empty(problem.channels, device=device) for name in problem.for_training}

    def extra_references(self, problem: BatchStatisticsProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        return for_training(problem, inputs)


BATCH_STATISTICS = BatchStatistics()


# --- the PyTorch operator


def batch_statistics(x: torch.Tensor, *, rung: str | None = None) -> torch.Tensor:
    """[2, C] in float32: mean and biased variance of each channel of x [N, C, H, W]. The same bits in every run."""
    return OPERATOR(x, rung)


def run_statistics(x: torch.Tensor, rung: str | None = None) -> torch.Tensor:
    check_images("batch_statistics", x)
    batch, channels, height, width = x.shape
    problem = BatchStatisticsProblem(
        batch, channels, height, width, dtype_of("batch_statistics", x), layout_of(x)
    )
    y = empty_output(problem, x.device)
    prepare_rung(BATCH_STATISTICS, problem, x.device, rung).run(
        {"x": pack_aligned(x, problem.layout), "y": y}
    )
    return y


def fake_statistics(x: torch.Tensor, rung: str | None = None) -> torch.Tensor:
    check_images("batch_statistics", x)
    return x.new_empty((2, x.shape[1]), dtype=torch.float32)


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[0], output)


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    """d mean / dx = 1/n, d variance / dx = 2 (x - mean) / n."""
    x, y = ctx.saved_tensors
    mean, of_mean, of_variance = (each.view(1, -1, 1, 1) for each in (y[0], gradient[0], gradient[1]))
    count = x.shape[0] * x.shape[2] * x.shape[3]
    return ((of_mean + 2 * (x - mean) * of_variance) / count).to(x.dtype), None


OPERATOR = define(
    "batch_statistics(Tensor x, str? rung=None) -> Tensor",
    run_statistics, fake_statistics, setup=_setup, backward=_backward,
)  # fmt: skip
