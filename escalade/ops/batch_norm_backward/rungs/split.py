"""Sums that many blocks share, and a last launch over all elements: one element an access, or 16 bytes."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.ops.base.dtypes import full_vector, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.problem import traffic
from escalade.ops.base.rung import Config, Rung
from escalade.ops.batch_norm_backward.problem import BatchNormBackwardProblem
from escalade.ops.batch_norm_backward.rungs.naive import (
    BIAS_GRADIENT,
    WEIGHT_GRADIENT,
    apply_arguments,
    apply_constants,
    sums_arguments,
    sums_constants,
)
from escalade.ops.shared.channels import Rows, channels_innermost
from escalade.ops.shared.pointwise import PacksConfig

_MERGE_THREADS, _MERGE_CHANNELS, _MERGE_PACKS = 512, 8, 5
_LAUNCHES = 3
_START_US = 1.3
"""Microseconds from each launch to its first loads' arrival, besides its own: as measured where tensors are small."""
_PARTIAL = Buffer("partial")


@dataclass(frozen=True)
class SharedConfig(PacksConfig):
    resident: int = 2
    """Blocks that a multiprocessor has room for, and is given."""


@dataclass(frozen=True)
class Split(Rung[BatchNormBackwardProblem]):
    wide: bool
    """Whether an access has up to 16 bytes, several under way, or one element."""

    def supports(self, problem: BatchNormBackwardProblem) -> str | None:
        vector = full_vector(problem.dtype)
        if self.wide and not channels_innermost(problem) and problem.pixels < vector:
            return (
                f"a pack of {vector} elements may lie in two planes, not in more, and these have {problem.pixels}; "
                "the rung `split` takes any"
            )
        return None

    def configs(self, problem: BatchNormBackwardProblem) -> tuple[Config, ...]:
        """Offers what has 64 KiB of loads under way on each multiprocessor, then more and less."""
        if not self.wide:
            return (SharedConfig(256, 1, 8), SharedConfig(512, 1, 4))
        sizes = ((256, 4, 2), (512, 4, 1), (128, 4, 4), (256, 8, 1), (256, 2, 2))
        return tuple(SharedConfig(*size) for size in sizes)

    def estimate(self, problem: BatchNormBackwardProblem, config: Config) -> float:
        return _LAUNCHES * _START_US + self.card.microseconds(0, traffic(problem), _LAUNCHES)

    def recipe(self, problem: BatchNormBackwardProblem, config: Config) -> Recipe:
        assert isinstance(config, SharedConfig)
        by_rows = channels_innermost(problem)
        first, splits = (self._sum_rows if by_rows else self._sum_planes)(problem, config)
        merge = KernelCall(
            Program.of(
                "batch_norm_backward/split_merge.cu",
                "batch_norm_backward_split_merge",
                {"THREADS": _MERGE_THREADS, "CHANNELS": _MERGE_CHANNELS, "PACKS": _MERGE_PACKS},
            ),
            (blocks(problem.channels, _MERGE_CHANNELS), 1, 1),
            (_MERGE_THREADS, 1, 1),
            (_PARTIAL, Buffer("rstd"), WEIGHT_GRADIENT, BIAS_GRADIENT, problem.channels, splits),
            overlap=True,
        )
        last = (self._apply_rows if by_rows else self._apply_planes)(problem, config)
        return Recipe((first, merge, last), (Workspace(_PARTIAL.name, 2 * 4 * splits * problem.channels),))

    def _rows(self, problem: BatchNormBackwardProblem, config: SharedConfig) -> tuple[Rows, int]:
        """How rows lie under a block, and how many blocks there are one below the other."""
        rows = Rows.of(problem, config.threads) if self.wide else Rows.of(problem, config.threads, most=1)
        wanted = max(1, config.resident * self.card.multiprocessors // rows.across)
        return rows, min(wanted, blocks(problem.count, rows.height))

    def _sum_rows(self, problem: BatchNormBackwardProblem, config: SharedConfig) -> tuple[KernelCall, int]:
        """Channels innermost: the launch that adds up, and its shares of each sum."""
        rows, splits = self._rows(problem, config)
        constants = {
            **sums_constants(problem), "VECTOR": rows.vector, "PACKS": config.packs, "THREADS": config.threads,
            "RESIDENT": config.resident,
        }  # fmt: skip
        call = KernelCall(
            Program.of("batch_norm_backward/split_rows.cu", "batch_norm_backward_split_rows", constants),
            (splits, rows.across, 1),
            (config.threads, 1, 1),
            (*sums_arguments(), _PARTIAL, problem.channels, rows.width, Int64(problem.count)),
            overlap=True,
        )
        return call, splits

    def _apply_rows(self, problem: BatchNormBackwardProblem, config: SharedConfig) -> KernelCall:
        rows, down = self._rows(problem, config)
        constants = {
            **apply_constants(problem), "VECTOR": rows.vector, "PACKS": config.packs, "THREADS": config.threads,
            "RESIDENT": config.resident,
        }  # fmt: skip
        return KernelCall(
            Program.of(
                "batch_norm_backward/split_apply_rows.cu", "batch_norm_backward_split_apply_rows", constants
            ),
            (down, rows.across, 1),
            (config.threads, 1, 1),
            (*apply_arguments(problem), rows.width, Int64(problem.count)),
            overlap=True,
        )

    def _sum_planes(self, problem: BatchNormBackwardProblem, config: SharedConfig) -> tuple[KernelCall, int]:
        """Planes: the launch that adds up, and its shares of each sum."""
        vector = widest_vector(problem.dtype, problem.pixels) if self.wide else 1
        packs = problem.count // vector
        wanted = max(1, config.resident * self.card.multiprocessors // problem.channels)
        splits = min(wanted, blocks(packs, config.threads))
        constants = {
            **sums_constants(problem), "VECTOR": vector, "PACKS": config.packs, "THREADS": config.threads,
            "RESIDENT": config.resident,
        }  # fmt: skip
        call = KernelCall(
            Program.of("batch_norm_backward/split_planes.cu", "batch_norm_backward_split_planes", constants),
            (problem.channels * splits, 1, 1),
            (config.threads, 1, 1),
            (*sums_arguments(), _PARTIAL, problem.channels, problem.pixels, splits, Int64(packs)),
            overlap=True,
        )
        return call, splits

    def _apply_planes(self, problem: BatchNormBackwardProblem, config: SharedConfig) -> KernelCall:
        vector = full_vector(problem.dtype) if self.wide else 1
        each = (config.threads * packs for packs in range(config.packs, 1, -1))
        per_block = next(
            (one for one in each if problem.elements // (vector * one) >= self.card.filling), config.threads
        )
        constants = {
            **apply_constants(problem), "VECTOR": vector, "PACKS": per_block // config.threads,
            "THREADS": config.threads, "STRADDLING": problem.pixels % vector != 0,
        }  # fmt: skip
        return KernelCall(
            Program.of(
                "batch_norm_backward/split_apply_planes.cu",
                "batch_norm_backward_split_apply_planes",
                constants,
            ),
            (blocks(problem.elements // vector, per_block), 1, 1),
            (config.threads, 1, 1),
            (*apply_arguments(problem), problem.pixels, Int64(problem.elements)),
            overlap=True,
        )


# Predictions are for 64 channels, 56 x 56, batch 256, fp16, NHWC, behind a ReLU whose mask is found by x: 103 MB a
# tensor, five of them moved, 123 us at 4.2 TB/s. naive: a block a channel fetches 32 bytes for each 2, 64
# multiprocessors with 256 loads under way for 1 us: 12,544 turns, 6 ms. split: 2,048 threads with 2 bytes of each
# tensor under way are 8 KiB a multiprocessor, answered in 0.8 us, 1.4 TB/s: 370 us. vectorised: 64 KiB, the memory's
# pace and three launches, 130 us.
SPLIT = Split(
    "split", "rows lie side by side in a warp, many blocks share each sum, a second launch merges", "naive", 16.0,
    wide=False,
)  # fmt: skip
VECTORISED = Split(
    "vectorised", "up to 16 bytes an access, several rows under way in a thread", "split", 2.8, wide=True
)
