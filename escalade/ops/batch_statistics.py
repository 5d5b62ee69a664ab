"""Mean and variance of a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from escalade.device.program import Program
from escalade.device.recipe import Addresses, Buffer, Int64, Ints, KernelCall, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require_at_least
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, VECTOR_BYTES, widest_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import kernel_call, launch
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.rung import Rung, ThreadsConfig, ThreadsRung
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.shared import channels
from escalade.ops.shared.channels import SIZES, ChannelTile, channels_innermost, check_channelwise
from escalade.ops.shared.images import (
    LAYOUTS,
    Images,
    form_of,
    shape_of,
    stored_images,
)
from escalade.ops.shared.pointwise import PacksConfig

# --- the problem


@dataclass(frozen=True)
class BatchStatisticsProblem(Images, Named):
    """y[0] = mean and y[1] = biased variance of x over images and pixels, in fp32 per channel.

    Training adds fp32 vectors of one number per channel. With `epsilon`: `mean` and `rstd` (1 / sqrt(variance +
    epsilon)), for the backward pass. With `momentum`: `moved_mean` and `moved_variance`, the inputs `running_mean` and
    `running_variance` updated with the batch's (unbiased variance), which they may alias.
    """

    NAME: ClassVar = NamePattern("statistics", SIZES + "[_eps{epsilon}][_m{momentum}]")

    dtype: str = "fp32"
    layout: str = "nchw"
    epsilon: float | None = None
    momentum: float | None = None

    def __post_init__(self) -> None:
        require_at_least(1, {"batch": self.batch})
        check_channelwise("batch_statistics", self)
        if self.epsilon is not None and not 0 <= self.epsilon < math.inf:
            raise UnsupportedError(f"epsilon is {self.epsilon}: it must be finite and at least 0")
        if self.momentum is not None and not 0 <= self.momentum <= 1:
            raise UnsupportedError(f"momentum is {self.momentum}: it must be from 0 to 1")

    @property
    def count(self) -> int:
        """Elements per channel."""
        return self.batch * self.pixels

    @property
    def for_training(self) -> tuple[str, ...]:
        """Buffers of the results for training."""
        saved = ("mean", "rstd") if self.epsilon is not None else ()
        return saved + (("moved_mean", "moved_variance") if self.momentum is not None else ())

    @property
    def flops(self) -> int:
        """Two passes: an addition; then a subtraction, a multiplication and an addition."""
        return 4 * self.elements

    @property
    def bytes(self) -> int:
        return self.elements * ELEMENT_BYTES[self.dtype] + 8 * self.channels

    @property
    def rounding(self) -> float:
        """256 parallel running sums and a tree of eight levels, each a random walk; then division, root and division.

        A few channels have few results, so their root mean square varies by half of itself.
        """
        return 1.5 * 2.0**-24 * math.sqrt(3 + (self.count / 256 + 8) / 6)


# --- rungs


_MERGE_THREADS, _MERGE_CHANNELS, _MERGE_PACKS = 512, 8, 9
_QUOTIENT = 2.0**-22  # relative error of the card's approximate division: 2 ulp


RESULTS = Addresses(
    tuple(
        Buffer(name, optional=True)
        for name in (
            "mean",
            "rstd",
            "running_mean",
            "running_variance",
            "moved_mean",
            "moved_variance",
            "variance",
        )
    )
)


def numbers(problem: BatchStatisticsProblem) -> tuple[float, float]:
    """Return epsilon and momentum; a value that is absent is not read."""
    return float(problem.epsilon or 0), float(problem.momentum or 0)


@dataclass(frozen=True)
class SplitConfig(PacksConfig):
    blocks: int = 1
    """Approximate number of CTAs that share the batch."""


@dataclass(frozen=True)
class BlockPerChannel(ThreadsRung[BatchStatisticsProblem]):
    """The kernel `batch_statistics/name.cu` with one CTA per channel, for every problem."""

    threads = (256, 512, 1024)

    def recipe(self, problem: BatchStatisticsProblem, config: ThreadsConfig) -> Recipe:
        p = problem
        return launch(
            channels.program(f"batch_statistics/{self.name}.cu", p, config=config),
            p.channels,
            config.threads,
            Buffer("x"), Buffer("y"), RESULTS, p.channels, p.pixels, Int64(p.count), *numbers(p),
        )  # fmt: skip


def _of_merged_moments(tolerance: float) -> float:
    """Allow for means that move by fractions of a distance, where the fractions are approximate quotients.

    For few elements the rounding of a plain sum is smaller than that.
    """
    return max(tolerance, 2 * _QUOTIENT)


@dataclass(frozen=True)
class OnePass(BlockPerChannel):
    """Moments are merged, not summed."""

    def tolerance(self, problem: BatchStatisticsProblem, peer_error: float) -> float:
        return _of_merged_moments(super().tolerance(problem, peer_error))


@dataclass(frozen=True)
class Split(Rung[BatchStatisticsProblem, SplitConfig]):
    """Many CTAs per channel, and a second launch that merges their moments."""

    def configs(self, problem: BatchStatisticsProblem) -> tuple[SplitConfig, ...]:
        sizes = ((256, 4), (256, 2), (256, 8), (512, 4), (128, 4))
        busy = self.card.busy_blocks
        wanted = (busy, busy // 2, 2 * busy)
        every = [SplitConfig(threads, packs, count) for count in wanted for threads, packs in sizes]
        # Packs of less than 16 bytes need more loads and threads to saturate DRAM.
        whole = _vector_bytes(problem) == VECTOR_BYTES
        default = SplitConfig(512, 4, busy // 2) if whole else SplitConfig(256, 8, 2 * busy)
        return (default, *(config for config in every if config != default))

    def tolerance(self, problem: BatchStatisticsProblem, peer_error: float) -> float:
        return _of_merged_moments(super().tolerance(problem, peer_error))

    def recipe(self, problem: BatchStatisticsProblem, config: SplitConfig) -> Recipe:
        split = _rows if channels_innermost(problem) else _planes
        first, splits, unit = split(problem, config)
        merge, partial = merge_moments(problem, splits, unit, Buffer("y"))
        return Recipe((first, merge), (partial,))


def merge_moments(
    problem: BatchStatisticsProblem, splits: int, unit: int, y: Buffer
) -> tuple[KernelCall, Workspace]:
    """Return the launch that merges the moments of all splits, and their workspace.

    `unit` elements of a channel at a time are dealt round-robin to the splits.
    """
    call = kernel_call(
        Program.of(
            "batch_statistics/split_merge.cu",
            threads=_MERGE_THREADS, channels=_MERGE_CHANNELS, packs=_MERGE_PACKS,
        ),
        blocks(problem.channels, _MERGE_CHANNELS),
        _MERGE_THREADS,
        Buffer("partial"), y, RESULTS, problem.channels, splits, _shares(problem.count, unit, splits),
        *numbers(problem),
    )  # fmt: skip
    return call, Workspace("partial", 2 * 4 * splits * problem.channels)


def _shares(count: int, unit: int, splits: int) -> Ints:
    """Return `Shares` of split_merge.cu: `count` elements in units dealt round-robin to the splits."""
    units = ceil_div(count, unit)
    each, longer = divmod(units, splits)
    return Ints((each * unit, unit, longer, (units - 1) % splits, units * unit - count))


def _vector_bytes(problem: BatchStatisticsProblem) -> int:
    length = problem.channels if channels_innermost(problem) else problem.pixels
    return widest_vector(problem.dtype, length) * ELEMENT_BYTES[problem.dtype]


def _rows(problem: BatchStatisticsProblem, config: SplitConfig) -> tuple[KernelCall, int, int]:
    """Deal tiles of rows of channels round-robin to the splits.

    Returns the launch, the splits, and the elements per channel of one tile.
    """
    rows = ChannelTile.of(problem, config.threads)
    most = blocks(problem.count, rows.height * config.packs)
    splits = min(most, max(1, config.blocks // rows.across))
    call = kernel_call(
        channels.program("batch_statistics/split_rows.cu", problem, config=config, vector=rows.vector),
        (splits, rows.across),
        config.threads,
        Buffer("x"), Buffer("partial"), problem.channels, rows.width, splits, Int64(problem.count),
    )  # fmt: skip
    return call, splits, rows.height


def _planes(problem: BatchStatisticsProblem, config: SplitConfig) -> tuple[KernelCall, int, int]:
    """Give each split a run of a channel's packs, image after image."""
    vector = widest_vector(problem.dtype, problem.pixels)
    packs = problem.count // vector
    most = blocks(packs, config.threads * config.packs)
    wanted = min(most, max(1, config.blocks // problem.channels))
    per_split = blocks(packs, wanted)
    splits = blocks(packs, per_split)
    call = kernel_call(
        channels.program("batch_statistics/split_planes.cu", problem, config=config, vector=vector),
        problem.channels * splits,
        config.threads,
        Buffer("x"), Buffer("partial"), problem.channels, problem.pixels, splits, Int64(packs), Int64(per_split),
    )  # fmt: skip
    return call, splits, per_split * vector


# Predictions are for 64 channels, 56 x 56, batch 256, fp16, NCHW: 103 MB, 24 us at 4.24 TB/s. One CTA per channel: 64
# SMs with 8 warps each, some 4 loads of 64 bytes per warp in flight for 0.6 us, 0.22 TB/s: 940 us for two passes, half
# of it for one. Split: DRAM bound, two launches and the merge's latency, 30 us. In NHWC the gain should be much larger,
# since one CTA per channel fetches 32 bytes for each 2.
RUNGS: tuple[Rung[BatchStatisticsProblem], ...] = (
    BlockPerChannel(
        "naive", "one CTA per channel, one pass for the mean and one for the variance", None, None
    ),
    OnePass("one_pass", "mean and variance in one pass (Welford), lanes merge by shuffles", "naive", 2.0),
    Split(
        "split",
        "CTAs share a channel, up to 16 bytes per access, and a second launch merges",
        "one_pass",
        15.0,
    ),
)


# --- the reference


def random_inputs(problem: BatchStatisticsProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Channels with different means and deviations."""
    p = problem
    means = draw.normal(p.channels).mul_(3)
    deviations = draw.uniform(p.channels).add_(0.5)
    x = draw.normal(p.batch, p.channels, p.height, p.width)
    inputs = {"x": stored_images(p, x.mul_(deviations.view(1, -1, 1, 1)).add_(means.view(1, -1, 1, 1)))}
    return inputs | running_statistics(p, draw)


def running_statistics(problem: BatchStatisticsProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Return random running statistics if the problem moves them."""
    if problem.momentum is None:
        return {}
    mean = draw.normal(problem.channels)
    variance = draw.uniform(problem.channels).add_(0.5)
    return {"running_mean": mean, "running_variance": variance}


def empty_output(problem: BatchStatisticsProblem, device: torch.device) -> torch.Tensor:
    return torch.empty((2, problem.channels), dtype=torch.float32, device=device)


def _statistics(x: torch.Tensor) -> torch.Tensor:
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    return torch.stack((mean, variance))


def peer(problem: BatchStatisticsProblem, inputs: Tensors) -> torch.Tensor:
    """Statistics as PyTorch's batch_norm computes them in training: sums in fp32 for every dtype."""
    x = inputs["x"]
    if not x.is_cuda:
        return _statistics(x.float())
    epsilon = 1e-5
    mean, inverse_deviation = torch.batch_norm_stats(x, epsilon)
    return torch.stack((mean, inverse_deviation.pow(-2) - epsilon))


def exact(problem: BatchStatisticsProblem, inputs: Tensors) -> torch.Tensor:
    return _statistics(inputs["x"].double())


def for_training(problem: BatchStatisticsProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
    """Return the results for training, in float64."""
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


class BatchStatisticsOperation(Operation[BatchStatisticsProblem]):
    name = "batch_statistics"
    problem = BatchStatisticsProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("batch_statistics", RUNGS)
    problems = (
        BatchStatisticsProblem(32, 64, 112, 112),
        BatchStatisticsProblem(256, 64, 112, 112),
        BatchStatisticsProblem(32, 64, 56, 56),
        BatchStatisticsProblem(256, 64, 56, 56),
        BatchStatisticsProblem(32, 512, 7, 7),
        BatchStatisticsProblem(256, 512, 7, 7),
    )
    small_problems = (
        BatchStatisticsProblem(2, 8, 6, 6),
        BatchStatisticsProblem(3, 16, 7, 7, epsilon=1e-3, momentum=0.25),
        BatchStatisticsProblem(1, 3, 5, 9),
        BatchStatisticsProblem(2, 24, 9, 4, epsilon=1e-5),  # 3 packs per row: idle threads
        BatchStatisticsProblem(5, 40, 1, 1),  # alike in both layouts
        BatchStatisticsProblem(1, 4, 1, 1),  # one element per channel: a variance of 0
        BatchStatisticsProblem(1, 2056, 2, 2),  # wider than a CTA
        BatchStatisticsProblem(2, 16, 64, 64, momentum=0.1),  # several splits
    )
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: BatchStatisticsProblem) -> tuple[str, ...]:
        return ("split",)

    def extra_outputs(self, problem: BatchStatisticsProblem, device: torch.device) -> dict[str, torch.Tensor]:
        return {name: torch.empty(problem.channels, device=device) for name in problem.for_training}

    def extra_references(self, problem: BatchStatisticsProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        return for_training(problem, inputs)


BATCH_STATISTICS = BatchStatisticsOperation()


# --- the PyTorch operator


def batch_statistics(x: torch.Tensor, *, rung: str | None = None) -> torch.Tensor:
    """Mean and biased variance of each channel of x [N, C, H, W], as [2, C] in float32. Deterministic."""
    return OPERATOR(x, rung)


def _plan(x: torch.Tensor, rung: str | None = None) -> CallPlan:
    return CallPlan(
        BATCH_STATISTICS,
        lambda: x.new_empty((2, x.shape[1]), dtype=torch.float32),
        lambda: BatchStatisticsProblem(*shape_of(x), *form_of(x)),
    )


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[0], output)


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    """d mean / dx = 1/n, d variance / dx = 2 (x - mean) / n."""
    x, y = ctx.saved_tensors
    mean, of_mean, of_variance = (each.view(1, -1, 1, 1) for each in (y[0], gradient[0], gradient[1]))
    count = x.shape[0] * x.shape[2] * x.shape[3]
    return ((of_mean + 2 * (x - mean) * of_variance) / count).to(x.dtype), None


OPERATOR = define_planned("batch_statistics", _plan, "x: N C H W", setup=_setup, backward=_backward)
