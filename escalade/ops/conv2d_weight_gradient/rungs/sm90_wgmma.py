"""Weight gradients for any filter by TMA (im2col) and wgmma, with split-K over pixels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, TiledMap
from escalade.ops.base.card import Card
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.wgmma_conv import Windows
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs import parts
from escalade.ops.conv2d_weight_gradient.rungs.rung import (
    BOX,
    MULTIPLE,
    PRODUCT_RATE,
    STEP_PIXELS,
    HopperRung,
)

K_TILE = 64
"""Pixels per k-tile."""
SHALLOW_ROWS, SHALLOW = 384, 1.2
"""Rows of filters and columns per stage from which a CTA has four stages, and the factor on the time of a copy then."""
TOGETHER = {1: 1.0, 2: 1.3, 3: 1.0}
"""Factor on the copy rate by CTAs per SM. Both fitted on 24 layers of ResNet-50 in fp16 at batch 64."""
ONES_BYTES = 256
"""Columns of ones, whose products with the gradients are the bias's."""


@dataclass(frozen=True)
class WgmmaConfig(Config):
    filters: int
    """Filters per tile."""
    columns: int
    """Columns per tile: the channels of one tap after another."""
    warpgroups: int
    """Consumer warpgroups."""
    stages: int
    blocks_per_sm: int
    part_slabs: int = 1
    """k-tiles per CTA."""

    @property
    def stage_bytes(self) -> int:
        return (self.filters + self.columns) * K_TILE * 2

    def tiles(self, f: Conv2dProblem) -> int:
        filters = self.filters if f.groups == 1 else groups_per_box(f) * f.group_filters
        return ceil_div(f.filters, filters) * ceil_div(_column_boxes(f) * BOX, self.columns)

    def work(self, problem: Conv2dWeightGradientProblem, card: Card, single: bool = True) -> parts.SplitWork:
        """Return the work of a `single` launch, or of one of several over halves of the same tensors."""
        products = self.filters * self.columns * K_TILE / PRODUCT_RATE
        copies = self.stage_bytes / card.rates.copies.tma_gradient
        if single:
            copies /= TOGETHER.get(self.blocks_per_sm, 1.0)
            copies *= SHALLOW if self.filters + self.columns >= SHALLOW_ROWS else 1.0
        cycles = max(products, copies) * self.blocks_per_sm
        f, slots = problem.forward, card.multiprocessors * self.blocks_per_sm
        elements = problem.part_elements
        return parts.SplitWork(self.tiles(f), _k_tiles(f), cycles, slots, elements, card, direct=True)


TILES = (
    WgmmaConfig(128, 256, 2, 4, 1),
    WgmmaConfig(256, 128, 2, 4, 1),
    WgmmaConfig(256, 192, 2, 4, 1),
    WgmmaConfig(128, 192, 2, 5, 1),
    WgmmaConfig(128, 128, 2, 6, 1),
    WgmmaConfig(64, 256, 2, 5, 1),
    WgmmaConfig(256, 64, 2, 5, 1),
    WgmmaConfig(64, 192, 1, 3, 2),
    WgmmaConfig(64, 128, 1, 4, 2),
    WgmmaConfig(128, 64, 2, 4, 2),
    WgmmaConfig(64, 64, 1, 4, 3),
)


def _column_boxes(f: Conv2dProblem) -> int:
    return f.taps * (ceil_div(f.channels, BOX) if f.groups == 1 else 1)


def groups_per_box(f: Conv2dProblem) -> int:
    """Return the most groups whose filters and channels fit a box and end where TMA can begin; 0 if none do."""
    most = min(f.groups, BOX // max(f.group_filters, f.group_channels))
    return next(
        (
            count
            for count in range(most, 0, -1)
            if count == f.groups
            or not (count * f.group_filters % MULTIPLE or count * f.group_channels % MULTIPLE)
        ),
        0,
    )


def _k_tiles(f: Conv2dProblem) -> int:
    return ceil_div(f.output_pixels, K_TILE)


@dataclass(frozen=True)
class Wgmma(HopperRung[WgmmaConfig]):
    single: bool = field(default=True, kw_only=True)
    """False for launches over halves of the same tensors."""
    takes_frames = True

    def limits(self, problem: Conv2dWeightGradientProblem) -> str | None:
        f = problem.forward
        return self.narrow(f) or Windows.of(f).unsupported(self.name)

    def tiles(self) -> tuple[WgmmaConfig, ...]:
        return TILES

    def configs(self, problem: Conv2dWeightGradientProblem) -> tuple[WgmmaConfig, ...]:
        divided = (
            replace(tile, part_slabs=tile.work(problem, self.card, self.single).best())
            for tile in self.tiles()
        )
        # If all are memory-bound, the one that copies least.
        return tuple(
            sorted(
                divided,
                key=lambda config: (
                    self.estimate(problem, config),
                    config.work(problem, self.card, self.single).cost(config.part_slabs),
                ),
            )
        )

    def estimate(self, problem: Conv2dWeightGradientProblem, config: WgmmaConfig) -> float:
        return config.work(problem, self.card, self.single).microseconds(problem, config.part_slabs)

    def shortened(self, problem: Conv2dWeightGradientProblem, config: WgmmaConfig, products: int) -> Config:
        """Return a config with this tile whose parts add up at most `products` products of `STEP_PIXELS`."""
        most = max(1, products * STEP_PIXELS // K_TILE)
        if config.part_slabs <= most:
            return config
        return replace(config, part_slabs=config.work(problem, self.card, self.single).best(most))

    def recipe(self, problem: Conv2dWeightGradientProblem, config: WgmmaConfig) -> Recipe:
        return self._recipe(problem, config, direct=config.part_slabs >= _k_tiles(problem.forward))

    def in_parts(self, problem: Conv2dWeightGradientProblem, config: WgmmaConfig) -> Recipe:
        return self._recipe(problem, config, direct=False)

    def _recipe(self, problem: Conv2dWeightGradientProblem, config: WgmmaConfig, direct: bool) -> Recipe:
        f = problem.forward
        gradients = TiledMap(Buffer("gradient"), f.dtype, (f.filters, f.output_pixels), (BOX, K_TILE))
        windows = Windows.of(f)
        pixels = windows.pixel_map(Buffer("x"), K_TILE)
        count = ceil_div(_k_tiles(f), config.part_slabs)
        product = KernelCall(
            Program.of(
                "conv2d_weight_gradient/sm90_wgmma.cu",
                problem=problem,
                forward=f,
                windows=windows,
                config=config,
                groups=groups_per_box(f) if f.groups > 1 else 1,
                direct=direct,
            ),
            (config.tiles(f), count, 1),
            ((config.warpgroups + 1) * 128, 1, 1),
            (gradients, pixels, *parts.targets(direct), arguments.shape(f), config.part_slabs),
            shared_bytes=config.stages * (config.stage_bytes + 16) + ONES_BYTES * problem.bias,
            overlap=True,
        )
        return parts.recipe(problem, product, count, direct)


# Predictions for 64to64_56_k3s1 at batch 256 in fp16, 59 GFLOP.
WGMMA = Wgmma(
    "wgmma",
    "TMA copies windows (im2col) and gradients into a ring of stages, and wgmma sums over pixels with both operands in "
    "their storage order; a second launch adds up partial sums",
    below="direct",
    # direct issues two loads per product, 32 lanes per cycle and SM: 30 G products in 8 ms. A tile of 64x192 copies 32
    # KB per k-tile from L2, 650 cycles at 50 bytes for 384 of products: 59% of 700 TFLOP/s, 143 us, plus 5 for the
    # parts.
    predicted_gain=54.0,
)


@dataclass(frozen=True)
class WgmmaGroups(Wgmma):
    """The same for groups of several channels: tiles of whole groups, of which the diagonal is stored."""

    takes_groups = True

    def limits(self, problem: Conv2dWeightGradientProblem) -> str | None:
        f = problem.forward
        if f.groups == 1:
            return f"{self.name} takes several groups; wgmma takes one"
        if f.groups == f.channels == f.filters:
            return f"{self.name} would compute 64 products for each of {f.name}; depthwise takes it"
        if not groups_per_box(f):
            return (
                f"{self.name} takes groups of which up to {BOX} channels and filters are a multiple of {MULTIPLE}, not "
                f"of {f.group_channels} channels and {f.group_filters} filters; direct takes any"
            )
        return super().limits(problem)

    def tiles(self) -> tuple[WgmmaConfig, ...]:
        return tuple(tile for tile in TILES if tile.filters == BOX)


# Predictions for 128to128_56_k3s1g32 at batch 64 in fp16, 0.9 GFLOP, 103 MB.
WGMMA_GROUPS = WgmmaGroups(
    "wgmma_groups",
    "wgmma with groups: a tile has the filters and channels of as many groups as fit 64, and stores the blocks of its "
    "diagonal",
    below="direct",
    # direct: 0.46 G products of 88 instructions, 4 warps per cycle and SM, 45 us per 10 M warps: 1.4 ms. Here 16 times
    # the products, 14.8 GFLOP, at 60% of 700 TFLOP/s: 35 us, plus 5 for the parts.
    predicted_gain=35.0,
)
