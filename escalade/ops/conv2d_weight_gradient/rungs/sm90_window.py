"""Weight gradients of 3x3 filters: columns of x are copied once for all nine taps, with split-K over pixels."""

from __future__ import annotations

from dataclasses import dataclass, replace

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, TiledMap
from escalade.ops.base.card import HOPPER_SHARED, Card
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.wgmma_conv import ROW_BYTES
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs import parts
from escalade.ops.conv2d_weight_gradient.rungs.rung import (
    BOX,
    PRODUCT_RATE,
    STAGE_CYCLES,
    STEP_PIXELS,
    HopperRung,
)

IMAGES = STEP_PIXELS
"""Images per product, each at the same pixel."""
MOST_ROWS = 8
MOST_STAGES = 16


@dataclass(frozen=True)
class WindowConfig(Config):
    rows: int
    """Output rows per strip; all strips are full."""
    stages: int
    part_columns: int
    """Columns of strips per CTA."""


def _stage_bytes(f: Conv2dProblem, rows: int) -> int:
    """Bytes of `stride` columns of x, and one column of gradients."""
    stride = f.stride[0]
    return (stride * ((rows - 1) * stride + 3) + rows) * IMAGES * ROW_BYTES


def _strip_columns(f: Conv2dProblem, rows: int) -> int:
    return ceil_div(f.batch, IMAGES) * (f.output_height // rows) * f.output_width


def _window_work(problem: Conv2dWeightGradientProblem, rows: int, card: Card) -> parts.SplitWork:
    f = problem.forward
    products = rows * IMAGES * BOX * 9 * BOX / PRODUCT_RATE
    cycles = max(products, _stage_bytes(f, rows) / card.rates.copies.tma_gradient) + STAGE_CYCLES
    tiles = ceil_div(f.filters, BOX) * ceil_div(f.channels, BOX)
    return parts.SplitWork(
        tiles, _strip_columns(f, rows), cycles, card.multiprocessors, problem.part_elements, card
    )


@dataclass(frozen=True)
class Window(HopperRung[WindowConfig]):
    def limits(self, problem: Conv2dWeightGradientProblem) -> str | None:
        f = problem.forward
        if reason := self.narrow(f):
            return reason
        if (f.filter_height, f.filter_width) != (3, 3) or f.dilation != (1, 1):
            return (
                f"{self.name} takes filters of 3x3 without dilation, not {f.filter_height}x{f.filter_width} with "
                f"dilation {f.dilation}; wgmma takes any"
            )
        if f.stride not in ((1, 1), (2, 2)):
            return f"{self.name} takes strides of 1 or 2 for both sides, not {f.stride}; wgmma takes others"
        return None

    def configs(self, problem: Conv2dWeightGradientProblem) -> tuple[WindowConfig, ...]:
        f = problem.forward
        found = []
        for rows in range(1, MOST_ROWS + 1):
            stages = min(MOST_STAGES, HOPPER_SHARED // (_stage_bytes(f, rows) + 16))
            if f.output_height % rows or stages < 2 + ceil_div(3, f.stride[0]):  # in flight, and being read
                continue
            found.append(WindowConfig(rows, stages, _window_work(problem, rows, self.card).best()))
        return tuple(sorted(found, key=lambda config: (self.estimate(problem, config), -config.rows)))

    def estimate(self, problem: Conv2dWeightGradientProblem, config: WindowConfig) -> float:
        return _window_work(problem, config.rows, self.card).microseconds(problem, config.part_columns)

    def shortened(self, problem: Conv2dWeightGradientProblem, config: WindowConfig, products: int) -> Config:
        """Return a config with these strips whose parts add up at most `products` products: a column has one per
        row."""
        most = max(1, products // config.rows)
        if config.part_columns <= most:
            return config
        return replace(config, part_columns=_window_work(problem, config.rows, self.card).best(most))

    def recipe(self, problem: Conv2dWeightGradientProblem, config: WindowConfig) -> Recipe:
        f, stride = problem.forward, problem.forward.stride[0]

        def images(name: str, channels: int, height: int, width: int, rows: int, columns: int) -> TiledMap:
            """Map with images innermost, then rows, then columns."""
            pixel = 2 * channels
            return TiledMap(
                Buffer(name), f.dtype, (channels, f.batch, height, width), (BOX, IMAGES, rows, columns),
                strides=(pixel * width * height, pixel * width, pixel),
            )  # fmt: skip

        count = ceil_div(_strip_columns(f, config.rows), config.part_columns)
        product = KernelCall(
            Program.of(
                "conv2d_weight_gradient/sm90_window.cu",
                problem=problem,
                forward=f,
                config=config,
                stride=stride,
            ),
            (_window_work(problem, config.rows, self.card).tiles, count, 1),
            (512, 1, 1),
            (
                images("gradient", f.filters, f.output_height, f.output_width, config.rows, 1),
                images("x", f.channels, f.height, f.width, (config.rows - 1) * stride + 3, stride),
                Buffer(parts.PARTS),
                arguments.shape(f),
                config.part_columns,
            ),
            shared_bytes=config.stages * (_stage_bytes(f, config.rows) + 16),
            overlap=True,
        )
        return parts.recipe(problem, product, count)


# Prediction for 64to64_56_k3s1 at batch 256 in fp16, 59 GFLOP.
WINDOW = Window(
    "window",
    "3x3 filters: x is copied once for all nine taps, column by column; a product sums over 16 images at one pixel",
    below="wgmma",
    # 18 bytes of copies per cycle instead of 85: bound by the tensor cores at 700 TFLOP/s on 128 of 132 SMs, plus 2 us
    # to fill the pipelines and 6 for the parts: 87 + 8 us against 148.
    predicted_gain=1.55,
)
