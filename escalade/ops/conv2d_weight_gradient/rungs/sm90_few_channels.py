"""Weight gradients with few channels (the first layer of a network) by TMA and wgmma, in NHWC."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, TiledMap, Workspace
from escalade.ops.base.card import RESERVED_SHARED, Card
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.rung import Config
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs import parts
from escalade.ops.conv2d_weight_gradient.rungs.rung import (
    BOX,
    MULTIPLE,
    PRODUCT_RATE,
    STAGE_CYCLES,
    HopperRung,
)

PACKED = "packed"
MOST_CHANNELS = 8
"""Largest number of channels per packed pixel, over its rows."""
MOST_TAPS = 8
"""Widest filter in taps: the packed pixels per box."""
PIXEL_BYTES = 16
RUN = 16
"""Adjacent output pixels per product."""
ROW_BYTES = RUN * BOX * 2
"""Bytes per row of a k-tile."""
MOST_ROWS = 8
_LEAST_STAGES, _MOST_STAGES = 3, 8
_MOST_BOXES = 4
"""Largest number of boxes per warpgroup: 256 columns, 128 accumulator registers."""
_PACK_THREADS, _PACK_ROUNDS = 256, 4
MEASURED = 1.4
"""Measured / modeled time of the product on an H200: 53 us in all for 3to256_32_k3s1."""


@dataclass(frozen=True)
class Packing:
    """The image as packed by sm90_few_channels_pack.cu: every pixel has `group` adjacent rows of x."""

    group: int
    row_step: int
    """Rows of x per packed row."""
    row_pitch: int
    """Packed rows per output row."""
    boxes: int
    """Groups of filter rows."""
    rows: int
    columns: int
    batch: int

    @staticmethod
    def of(f: Conv2dProblem) -> Packing:
        group = MOST_CHANNELS
        while group * f.channels > MOST_CHANNELS:
            group //= 2
        step = math.gcd(f.stride[0], group)  # no window starts at the rows between
        pitch, boxes = f.stride[0] // step, ceil_div(f.filter_height, group)
        return Packing(
            group, step, pitch, boxes,
            rows=(f.output_height - 1) * pitch + (boxes - 1) * (group // step) + 1,
            columns=(f.output_width - 1) * f.stride[1] + MOST_TAPS,
            batch=f.batch,
        )  # fmt: skip

    @property
    def row_jump(self) -> int:
        """Packed rows per group of filter rows."""
        return self.group // self.row_step

    @property
    def pixels(self) -> int:
        return self.batch * self.rows * self.columns

    @property
    def bytes(self) -> int:
        return PIXEL_BYTES * self.pixels


@dataclass(frozen=True)
class FewChannelsConfig(Config):
    warpgroups_m: int
    """Consumer warpgroups along the filters, 64 each."""
    warpgroups_n: int
    boxes: int
    """64-column boxes per warpgroup."""
    rows: int
    """Output rows per k-tile; all k-tiles are full."""
    stages: int
    part_slabs: int = 1
    """k-tiles per CTA."""

    @property
    def warpgroups(self) -> int:
        return self.warpgroups_m * self.warpgroups_n

    @property
    def blocks_per_sm(self) -> int:
        return 2 if self.warpgroups == 1 and self.boxes <= 2 else 1

    def x_rows(self, packing: Packing) -> int:
        """Return the packed rows per k-tile."""
        last_box = self.warpgroups_n * self.boxes - 1
        return (self.rows - 1) * packing.row_pitch + last_box * packing.row_jump + 1

    def stage_bytes(self, packing: Packing) -> int:
        return (self.x_rows(packing) + self.warpgroups_m * self.rows) * ROW_BYTES

    def tiles(self, f: Conv2dProblem, packing: Packing) -> int:
        return ceil_div(f.filters, self.warpgroups_m * BOX) * ceil_div(
            packing.boxes, self.warpgroups_n * self.boxes
        )

    def work(self, problem: Conv2dWeightGradientProblem, card: Card) -> parts.SplitWork:
        f, packing = problem.forward, Packing.of(problem.forward)
        products = self.rows * RUN * self.warpgroups * BOX * self.boxes * BOX / PRODUCT_RATE
        cycles = max(products, self.stage_bytes(packing) / card.rates.copies.tma_gradient) + STAGE_CYCLES
        k_tiles = f.batch * (f.output_height // self.rows) * ceil_div(f.output_width, RUN)
        per_sm = self.blocks_per_sm
        slots, tiles = card.multiprocessors * per_sm, self.tiles(f, packing)
        return parts.SplitWork(tiles, k_tiles, cycles * per_sm, slots, problem.part_elements, card)


def _shapes(f: Conv2dProblem, boxes: int) -> list[tuple[int, int, int]]:
    """Return warpgroups along filters and columns, and boxes per warpgroup, for `boxes` in all."""
    few = min(boxes, _MOST_BOXES)
    found = [(1, 1, few)]
    if boxes > 1:
        found.append((1, 2, min(ceil_div(boxes, 2), _MOST_BOXES)))
    if f.filters > BOX:
        found.append((2, 1, few))
    return found


@dataclass(frozen=True)
class FewChannels(HopperRung[FewChannelsConfig]):
    def limits(self, problem: Conv2dWeightGradientProblem) -> str | None:
        f = problem.forward
        if f.channels > MOST_CHANNELS:
            return f"{self.name} takes up to {MOST_CHANNELS} channels, not {f.channels}; wgmma takes more"
        if f.filters % MULTIPLE:
            return f"{self.name} takes multiples of {MULTIPLE} filters, not {f.filters}; direct takes any"
        if f.filter_width > MOST_TAPS or f.dilation != (1, 1):
            return (
                f"{self.name} takes filters up to {MOST_TAPS} pixels wide without dilation, not {f.filter_width} "
                f"with dilation {f.dilation}; direct takes any"
            )
        if Packing.of(f).pixels >= 2**31:
            return f"{self.name} counts packed pixels in 32 bits, not {Packing.of(f).pixels}"
        return None

    def configs(self, problem: Conv2dWeightGradientProblem) -> tuple[FewChannelsConfig, ...]:
        f, packing = problem.forward, Packing.of(problem.forward)
        found = []
        for shape in _shapes(f, packing.boxes):
            for rows in range(1, MOST_ROWS + 1):
                config = FewChannelsConfig(*shape, rows, _LEAST_STAGES)
                available = self.card.multiprocessor_shared_bytes // config.blocks_per_sm - RESERVED_SHARED
                stages = min(_MOST_STAGES, available // (config.stage_bytes(packing) + 16))
                if f.output_height % rows == 0 and stages >= _LEAST_STAGES:
                    found.append(
                        replace(config, stages=stages, part_slabs=config.work(problem, self.card).best())
                    )
        # If all are memory-bound, the one with the least work.
        return tuple(
            sorted(
                found,
                key=lambda one: (
                    self.estimate(problem, one),
                    one.work(problem, self.card).cost(one.part_slabs),
                ),
            )
        )

    def estimate(self, problem: Conv2dWeightGradientProblem, config: FewChannelsConfig) -> float:
        f, packed = problem.forward, Packing.of(problem.forward).bytes
        packing = self.card.microseconds(0, f.element_bytes * f.input_elements + packed)
        moved = f.element_bytes * f.output_elements + packed
        return packing + MEASURED * self.card.microseconds(
            config.work(problem, self.card).cost(config.part_slabs), moved, launches=2
        )

    def recipe(self, problem: Conv2dWeightGradientProblem, config: FewChannelsConfig) -> Recipe:
        f, packing, work = problem.forward, Packing.of(problem.forward), config.work(problem, self.card)
        pack = KernelCall(
            Program.of(
                "conv2d_weight_gradient/sm90_few_channels_pack.cu",
                forward=f,
                packing=packing,
                threads=_PACK_THREADS,
                rounds=_PACK_ROUNDS,
            ),
            (blocks(packing.pixels, _PACK_THREADS * _PACK_ROUNDS), 1, 1),
            (_PACK_THREADS, 1, 1),
            (Buffer("x"), Buffer(PACKED), arguments.shape(f), packing.rows, packing.columns),
            overlap=True,
        )
        gradients = TiledMap(
            Buffer("gradient"), f.dtype, (f.filters, f.output_width, f.output_height, f.batch),
            (BOX, RUN, config.rows, 1),
        )  # fmt: skip
        row_bytes = PIXEL_BYTES * packing.columns
        windows = TiledMap(  # overlapping windows
            Buffer(PACKED), f.dtype, (BOX, f.output_width, packing.rows, f.batch),
            (BOX, RUN, config.x_rows(packing), 1),
            strides=(PIXEL_BYTES * f.stride[1], row_bytes, row_bytes * packing.rows),
        )  # fmt: skip
        count = ceil_div(work.pieces, config.part_slabs)
        product = KernelCall(
            Program.of(
                "conv2d_weight_gradient/sm90_few_channels.cu",
                problem=problem,
                forward=f,
                packing=packing,
                config=config,
            ),
            (work.tiles, count, 1),
            ((config.warpgroups + 1) * 128, 1, 1),
            (gradients, windows, Buffer(parts.PARTS), arguments.shape(f), config.part_slabs),
            shared_bytes=config.stages * (config.stage_bytes(packing) + 16),
            overlap=True,
        )
        split_k = parts.recipe(problem, product, count)
        return Recipe((pack, *split_k.steps), (Workspace(PACKED, packing.bytes), *split_k.workspaces))


# Prediction for 3to64_224_k7s2 at batch 256 in fp16, 60 GFLOP.
FEW_CHANNELS = FewChannels(
    "few_channels",
    "up to 8 channels: x is packed so that eight taps of one or more filter rows are contiguous, 64 columns of a "
    "product that TMA reads from overlapping windows; rows of a k-tile share copies",
    below="direct",
    # direct: 30 G products of 88 instructions, 4 warps per cycle and SM, are 90 ms. Packing moves 77 and 108 MB: 44 us.
    # The product has 256 columns for 147, 105 GFLOP: 150 us at 700 TFLOP/s, 165 with partial k-tiles at borders
    # (memory: 411 + 108 MB, 124 us; L2: 38 KB for 1024 cycles of products). 3 us for 132 parts, 3 for launches.
    predicted_gain=420.0,
)
