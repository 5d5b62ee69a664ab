"""Stem by wgmma, with the staged row itself as the pixel operand."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from escalade.device.architecture import WITH_WGMMA
from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.card import RESERVED_SHARED, Card
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config, Rung
from escalade.ops.shared import activation
from escalade.ops.stem.problem import StemProblem
from escalade.ops.stem.rungs import arguments
from escalade.ops.stem.rungs.packed import pack, unsupported
from escalade.ops.stem.rungs.tiles import PIXEL_BYTES, POOLS, STAGING_CLOCKS, Tiling, filter_steps


@dataclass(frozen=True)
class WarpgroupConfig(Config):
    """Config of a warpgroup of 64 filters."""

    rows: int
    """Rows of y per tile."""
    columns: int
    """Convolution columns per tile: N of a wgmma."""
    blocks_per_sm: int
    """Target occupancy, which limits registers per thread."""

    def tiling(self, problem: StemProblem) -> Tiling:
        return Tiling(problem, self.rows, self.columns)

    def shared_bytes(self, problem: StemProblem) -> int:
        """Windows of a wgmma are 16 bytes apart and 32 long. compute-sanitizer assumes that they do not overlap; with
        padding for that after the last row, it has nothing to report."""
        return self.tiling(problem).staged_pixels * PIXEL_BYTES + 16 * (self.columns - 1)

    def cost(self, problem: StemProblem, card: Card) -> float:
        """Estimate the clocks: columns / 2 per step, at least 24; only other CTAs hide what follows a row."""
        tiling = self.tiling(problem)
        rows = tiling.conv_rows(self.rows)
        busy = rows * filter_steps(problem) * max(self.columns / 2, 24.0) + tiling.staged_pixels / 8
        alone = busy + rows * (150 + 2.5 * self.columns) + STAGING_CLOCKS
        sharing = min(self.blocks_per_sm, card.resident_blocks(self.shared_bytes(problem)))
        groups = problem.filters // 64
        return groups * tiling.clocks(busy, alone, sharing, card)


WARPGROUP_COLUMNS = (32, 64, 112, 128)
"""Supported N of a wgmma (kernels/common/hopper.cuh)."""


def warpgroup_configs(problem: StemProblem, card: Card) -> tuple[WarpgroupConfig, ...]:
    found = []
    for rows, columns in product((1, 2, 4, 7, 8, 14), WARPGROUP_COLUMNS):
        registers = 8 * blocks(4 * filter_steps(problem) + columns // 2 + columns // 8 + 40, 8)
        config = WarpgroupConfig(rows, columns, min(8, card.registers // (128 * registers)))
        if config.shared_bytes(problem) <= card.shared_bytes - RESERVED_SHARED:
            found.append(config)
    return tuple(sorted(found, key=lambda config: config.cost(problem, card))[:12])


class Warpgroup(Rung[StemProblem, WarpgroupConfig]):
    @property
    def architectures(self) -> tuple[str, ...]:
        return WITH_WGMMA

    def supports(self, problem: StemProblem) -> str | None:
        refusal = unsupported(self.name, problem)
        if refusal:
            return refusal
        if problem.filters % 64:
            return (
                f"{self.name} takes 64 or 128 filters, not {problem.filters}; `pooled` takes multiples of 16"
            )
        if problem.stride[1] != 2:
            return f"{self.name} takes stride 2 along rows, not {problem.stride[1]}; `pooled` takes any"
        if filter_steps(problem) > 16:
            return (
                f"{self.name} keeps the weights in registers; {problem.filter_height} filter rows do not fit"
            )
        if problem.pool not in POOLS:
            return f"{self.name} pools 3x3 with stride 2 and padding 1, or 2x2 with stride 2; `tensor_core` pools any"
        if not warpgroup_configs(problem, self.card):
            return f"{self.name} keeps a tile in shared memory; the smallest does not fit at stride {problem.stride}"
        return None

    def configs(self, problem: StemProblem) -> tuple[WarpgroupConfig, ...]:
        return warpgroup_configs(problem, self.card)

    def recipe(self, problem: StemProblem, config: WarpgroupConfig) -> Recipe:
        tiling = config.tiling(problem)
        packing, packed = pack(problem, 1, pixel_a_lane=False)
        call = KernelCall(
            Program.of(
                "stem/sm90_warpgroup.cu",
                constants=activation.constants_of(problem),
                problem=problem,
                tiling=tiling,
                config=config,
            ),
            (tiling.tiles, problem.filters // 64, 1),
            (128, 1, 1),
            (
                *arguments.tensors(Buffer("packed"), Buffer("y")),
                arguments.shape(problem, tiling.row_tiles, tiling.column_tiles),
            ),
            shared_bytes=config.shared_bytes(problem),
            overlap=True,
        )
        return Recipe((packing, call), (packed,))


# Predictions for 3to64_224_k7s2 at batch 256 with 3x3 pooling, fp16 from fp32 images: 60 GFLOP, 92 with the padding to
# 4 channels and 8 taps; the image is 154 MB, the convolution's result 411 MB, y 103 MB.
RUNGS: tuple[Rung[StemProblem], ...] = (
    Warpgroup(
        "warpgroup",
        "by wgmma with the staged row itself as the pixel operand: overlapping windows, 16 bytes apart",
        below=("tensor_core", "pooled"),
        # 98 GFLOP at 700 TFLOP/s, 0.14 ms, against 0.25.
        predicted_gain=1.75,
    ),
)
