"""Mean and variance of each channel of a batch: the rungs of batch_statistics."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Addresses, Buffer, Int64, Ints, KernelCall, Recipe, Workspace
from escalade.ops.base.dtypes import ELEMENT_BYTES, VECTOR_BYTES, widest_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.batch_statistics.problem import BatchStatisticsProblem
from escalade.ops.shared import channels
from escalade.ops.shared.channels import Rows, channels_innermost
from escalade.ops.shared.pointwise import PacksConfig

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
class BlockAChannel(Rung[BatchStatisticsProblem]):
    """A kernel of `kernels/batch_statistics` with one block a channel, for every problem."""

    source: str

    def supports(self, problem: BatchStatisticsProblem) -> str | None:
        return None

    def configs(self, problem: BatchStatisticsProblem) -> tuple[Config, ...]:
        """Offers powers of two."""
        return tuple(ThreadsConfig(threads) for threads in (256, 512, 1024))

    def recipe(self, problem: BatchStatisticsProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
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
class Split(Rung[BatchStatisticsProblem]):
    """Many blocks a channel, and a second launch that merges what they found."""

    def supports(self, problem: BatchStatisticsProblem) -> str | None:
        return None

    def configs(self, problem: BatchStatisticsProblem) -> tuple[Config, ...]:
        sizes = ((256, 4), (256, 2), (256, 8), (512, 4), (128, 4))
        filling = self.card.filling
        wanted = (filling, filling // 2, 2 * filling)
        every = [SplitConfig(threads, packs, count) for count in wanted for threads, packs in sizes]
        # Where a pack is less than 16 bytes it takes more of them, and more threads, to keep the memory busy.
        whole = _vector_bytes(problem) == VECTOR_BYTES
        default = SplitConfig(512, 4, filling // 2) if whole else SplitConfig(256, 8, 2 * filling)
        return (default, *(config for config in every if config != default))

    def tolerance(self, problem: BatchStatisticsProblem, peer_error: float) -> float:
        return _of_merged_moments(super().tolerance(problem, peer_error))

    def recipe(self, problem: BatchStatisticsProblem, config: Config) -> Recipe:
        assert isinstance(config, SplitConfig)
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
    rows = Rows.of(problem, config.threads)
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
