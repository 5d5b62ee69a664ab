"""Stem by mma.sync: the image staged in shared memory, weights in registers; pooling fused or separate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, ReleaseDependents
from escalade.ops.base.card import MIN_SHARED, Card
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config, Rung
from escalade.ops.shared import activation
from escalade.ops.stem.problem import StemProblem
from escalade.ops.stem.rungs import arguments
from escalade.ops.stem.rungs.packed import pack, unsupported
from escalade.ops.stem.rungs.tiles import PIXEL_BYTES, POOLS, STAGING_CLOCKS, Tiling, filter_steps


@dataclass(frozen=True)
class WarpConfig(Config):
    """Config of warps with 16 or 32 filters, each with a band of rows."""

    bands: int
    band_rows: int
    """Rows of y per band."""
    column_blocks: int
    """8-column blocks of the convolution per warp at once."""
    segments: int
    """Segments of a warp's columns per tile width."""
    blocks_per_sm: int
    """Target occupancy, which limits registers per thread."""

    def tiling(self, problem: StemProblem) -> Tiling:
        return Tiling(problem, self.bands * self.band_rows, self.segments * self.column_blocks * 8)

    def warps(self, problem: StemProblem) -> int:
        return self.bands * problem.filters // (16 * warp_blocks(problem))

    def shared_bytes(self, problem: StemProblem) -> int:
        tiling = self.tiling(problem)
        edges = self.warps(problem) * tiling.conv_rows(self.band_rows) * 8 * warp_blocks(problem) * 4
        return tiling.staged_pixels * PIXEL_BYTES + (edges if self.segments > 1 else 0)

    def cost(self, problem: StemProblem, card: Card) -> float:
        """Estimate the clocks: an SM starts one mma every 1.65 clocks at best, a single warp every 12."""
        tiling = self.tiling(problem)
        warp_products = (
            tiling.conv_rows(self.band_rows)
            * self.segments
            * self.column_blocks
            * warp_blocks(problem)
            * filter_steps(problem)
        )
        rows = tiling.conv_rows(self.band_rows) * self.segments
        busy = 1.65 * warp_products * self.warps(problem) + tiling.staged_pixels / 8
        alone = max(12.0 * warp_products, busy) + rows * (100 + 30 * self.column_blocks) + STAGING_CLOCKS
        sharing = min(self.blocks_per_sm, card.resident_blocks(self.shared_bytes(problem)))
        return tiling.clocks(busy, alone, sharing, card)


def warp_blocks(problem: StemProblem) -> int:
    """Return the 16-filter blocks per warp, whose weights take 4 registers per step and block."""
    return 2 if problem.filters % 32 == 0 and filter_steps(problem) <= 16 else 1


def warp_configs(problem: StemProblem, card: Card) -> tuple[WarpConfig, ...]:
    """Return the valid configs, best first."""
    filter_warps = problem.filters // (16 * warp_blocks(problem))
    found = []
    for bands, band_rows, column_blocks, segments in product((1, 2, 4), (1, 2, 4, 7), (2, 4, 7), (1, 2, 4)):
        registers = 8 * blocks((4 * filter_steps(problem) + 5 * column_blocks) * warp_blocks(problem) + 64, 8)
        warps = filter_warps * bands
        if warps > 8 or (warps < 4 and bands < 4) or registers > (256 if segments > 1 else 240):
            continue  # the last few registers suffice only if the loop over segments is kept
        if segments > 1 and (segments - 1) * column_blocks * 8 >= problem.conv_width:
            continue
        config = WarpConfig(
            bands, band_rows, column_blocks, segments, max(1, card.registers // (32 * registers * warps))
        )
        if config.shared_bytes(problem) <= MIN_SHARED:
            found.append(config)
    return tuple(sorted(found, key=lambda config: config.cost(problem, card))[:12])


@dataclass(frozen=True)
class TensorCore(Rung[StemProblem, WarpConfig]):
    pools: bool = False
    """True to pool in registers instead of by a separate launch."""

    def supports(self, problem: StemProblem) -> str | None:
        refusal = unsupported(self.name, problem)
        if refusal:
            return refusal
        if self.pools and problem.pool is None:
            return f"{self.name} needs a pool; `tensor_core` takes problems without"
        if self.pools and problem.pool not in POOLS:
            return f"{self.name} pools 3x3 with stride 2 and padding 1, or 2x2 with stride 2; `tensor_core` pools any"
        if not warp_configs(self._part(problem), self.card):
            return f"{self.name} keeps a tile in shared memory; the smallest does not fit at stride {problem.stride}"
        return None

    def configs(self, problem: StemProblem) -> tuple[WarpConfig, ...]:
        return warp_configs(self._part(problem), self.card)

    def recipe(self, problem: StemProblem, config: WarpConfig) -> Recipe:
        part = self._part(problem)
        tiling = config.tiling(part)
        packing, packed = pack(problem, warp_blocks(part), pixel_a_lane=True)
        target = Buffer("y" if part == problem else "unpooled")
        convolution = KernelCall(
            Program.of(
                "stem/tensor_core.cu",
                constants=activation.constants_of(part),
                problem=part,
                tiling=tiling,
                config=config,
                filter_warps=config.warps(part) // config.bands,
                warp_blocks=warp_blocks(part),
            ),
            (tiling.tiles, 1, 1),
            (config.warps(part) * 32, 1, 1),
            (
                *arguments.tensors(Buffer("packed"), target),
                arguments.shape(part, tiling.row_tiles, tiling.column_tiles),
                ReleaseDependents(),
            ),
            shared_bytes=config.shared_bytes(part),
            overlap=True,
        )
        if part == problem:
            return Recipe((packing, convolution), (packed,))
        return arguments.then_pool(problem, (packing, convolution), (packed,))

    def _part(self, problem: StemProblem) -> StemProblem:
        """Return the part of the problem that the convolution's kernel computes."""
        if self.pools or problem.pool is None:
            return problem
        return replace(problem, pool=None, output="")


# Predictions for 3to64_224_k7s2 at batch 256 with 3x3 pooling, fp16 from fp32 images: 60 GFLOP, 92 with the padding to
# 4 channels and 8 taps; the image is 154 MB, the convolution's result 411 MB, y 103 MB.
RUNGS: tuple[Rung[StemProblem], ...] = (
    TensorCore(
        "tensor_core",
        "filters x pixels by mma.sync: weights in registers, the image staged once in shared memory as pixels of four "
        "16-bit channels; fused bias and ReLU, then pooling",
        below="separate",
        # 0.23 ms of products (92 GFLOP at 400 TFLOP/s) and 0.12 ms of pooling (514 MB) against 30 G multiply-adds with
        # two loads each, about 4 ms.
        predicted_gain=11.0,
    ),
    TensorCore(
        "pooled",
        "pooled in registers: a lane has two columns of each window and its neighbor the third, row by row",
        below="tensor_core",
        # Saves the pooling launch, 0.12 ms; 7% of the rows are computed twice: 0.25 against 0.35 ms.
        predicted_gain=1.4,
        pools=True,
    ),
)
