"""The weights' gradient with Hopper's own units, in NHWC: copies by TMA, products by wgmma, parts of the pixels."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, TiledMap
from escalade.ops.base.card import MOST_SHARED, SMS
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d import arguments
from escalade.ops.conv2d.hopper_windows import ROW_BYTES, Windows
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d_weight_gradient import parts
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem

BOX = 64
"""Filters or channels of a row in shared memory: 128 bytes, what the swizzle spans."""
SLAB = 64
"""Pixels of a stage of `wgmma`."""
IMAGES = 16
"""Images of a product of `window`."""
PRODUCT_RATE = 2048
"""Multiplications and additions of a multiprocessor in a cycle."""
COPY_RATE = 45.0
"""Bytes that a multiprocessor gets from L2 in a cycle."""
MULTIPLE = 8
"""A divisor of channels and filters: rows of tensors are multiples of 16 bytes."""


def refused(rung: str, f: Conv2dProblem) -> str | None:
    """What no rung here takes, whatever the sizes."""
    if f.dtype not in ("fp16", "bf16"):
        return f"{rung} takes fp16 and bf16, not {f.dtype}"
    if f.layout != "nhwc":
        return f"{rung} takes layout nhwc, not {f.layout}"
    if f.groups != 1:
        return f"{rung} takes groups=1, not {f.groups}; direct takes any"
    return None


def narrow(rung: str, f: Conv2dProblem) -> str | None:
    """Rows of tensors that TMA does not take."""
    if f.channels % MULTIPLE or f.filters % MULTIPLE:
        return f"{rung} takes multiples of {MULTIPLE} channels and filters, not {f.channels} and {f.filters}"
    return None


@dataclass(frozen=True)
class HopperRung(Rung[Conv2dWeightGradientProblem]):
    """A rung with Hopper's own units, in fp16 and bf16, nhwc, without groups."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return ("sm_90a",)

    def supports(self, problem: Conv2dWeightGradientProblem) -> str | None:
        return refused(self.name, problem.forward) or self.limits(problem.forward)

    @abstractmethod
    def limits(self, forward: Conv2dProblem) -> str | None:
        """What is beyond the rung, like `supports`, among what `refused` lets pass."""


# --- any filter


@dataclass(frozen=True)
class WgmmaConfig(Config):
    filters: int
    """Filters of a tile."""
    columns: int
    """Columns of a tile: channels of one tap after another."""
    warpgroups: int
    """Warpgroups that multiply."""
    stages: int
    blocks_per_sm: int
    part_slabs: int = 1
    """Slabs of 64 pixels that a block adds up."""

    @property
    def stage_bytes(self) -> int:
        return (self.filters + self.columns) * SLAB * 2

    def tiles(self, f: Conv2dProblem) -> int:
        return ceil_div(f.filters, self.filters) * ceil_div(_column_boxes(f) * BOX, self.columns)

    def cost(self, problem: Conv2dWeightGradientProblem) -> float:
        """The cycles that it takes."""
        return self.work(problem).cost(self.part_slabs)

    def work(self, problem: Conv2dWeightGradientProblem) -> parts.Work:
        products = self.filters * self.columns * SLAB / PRODUCT_RATE
        cycles = max(products, self.stage_bytes / COPY_RATE) * self.blocks_per_sm
        f = problem.forward
        return parts.Work(self.tiles(f), _slabs(f), cycles, SMS * self.blocks_per_sm, problem.part_elements)


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
    return f.taps * ceil_div(f.channels, BOX)


def _slabs(f: Conv2dProblem) -> int:
    return ceil_div(f.output_pixels, SLAB)


@dataclass(frozen=True)
class Wgmma(HopperRung):
    def limits(self, forward: Conv2dProblem) -> str | None:
        return narrow(self.name, forward) or Windows.of(forward).unsupported(self.name)

    def configs(self, problem: Conv2dWeightGradientProblem) -> tuple[Config, ...]:
        divided = (replace(tile, part_slabs=tile.work(problem).best()) for tile in TILES)
        # Where memory bounds them all, the one that copies least.
        return tuple(
            sorted(divided, key=lambda config: (self.estimate(problem, config), config.cost(problem)))
        )

    def estimate(self, problem: Conv2dWeightGradientProblem, config: Config) -> float:
        assert isinstance(config, WgmmaConfig)
        return config.work(problem).microseconds(problem, config.part_slabs)

    def recipe(self, problem: Conv2dWeightGradientProblem, config: Config) -> Recipe:
        assert isinstance(config, WgmmaConfig)
        f = problem.forward
        gradients = TiledMap(Buffer("gradient"), f.dtype, (f.filters, f.output_pixels), (BOX, SLAB))
        pixels = Windows.of(f).pixel_map(Buffer("x"), SLAB)
        count = ceil_div(_slabs(f), config.part_slabs)
        product = KernelCall(
            Program.of(
                "conv2d_weight_gradient/wgmma.cu",
                "conv2d_weight_gradient_wgmma",
                {
                    **parts.constants(problem),
                    "BF16": f.dtype == "bf16",
                    "TILE_M": config.filters,
                    "TILE_N": config.columns,
                    "WARPGROUPS": config.warpgroups,
                    "STAGES": config.stages,
                    "BLOCKS_PER_SM": config.blocks_per_sm,
                },
            ),
            (config.tiles(f), count, 1),
            ((config.warpgroups + 1) * 128, 1, 1),
            (gradients, pixels, Buffer(parts.PARTS), arguments.shape(f), config.part_slabs),
            shared_bytes=config.stages * (config.stage_bytes + 16),
            overlap=True,
        )
        return parts.recipe(problem, product, count)


# --- filters of 3x3


MOST_ROWS = 8
MOST_STAGES = 16
STAGE_CYCLES = 60.0
"""Cycles to wait for a stage and to release it."""


@dataclass(frozen=True)
class WindowConfig(Config):
    rows: int
    """Output rows of a strip: all strips are whole."""
    stages: int
    part_columns: int
    """Columns of strips that a block adds up."""


def _stage_bytes(f: Conv2dProblem, rows: int) -> int:
    """Bytes of the rows of as many columns of x as the stride has, and of one of gradients."""
    stride = f.stride[0]
    return (stride * ((rows - 1) * stride + 3) + rows) * IMAGES * ROW_BYTES


def _strip_columns(f: Conv2dProblem, rows: int) -> int:
    return ceil_div(f.batch, IMAGES) * (f.output_height // rows) * f.output_width


def _window_work(problem: Conv2dWeightGradientProblem, rows: int) -> parts.Work:
    f = problem.forward
    products = rows * IMAGES * BOX * 9 * BOX / PRODUCT_RATE
    cycles = max(products, _stage_bytes(f, rows) / COPY_RATE) + STAGE_CYCLES
    tiles = ceil_div(f.filters, BOX) * ceil_div(f.channels, BOX)
    return parts.Work(tiles, _strip_columns(f, rows), cycles, SMS, problem.part_elements)


@dataclass(frozen=True)
class Window(HopperRung):
    def limits(self, forward: Conv2dProblem) -> str | None:
        f = forward
        sentence = narrow(self.name, f)
        if sentence:
            return sentence
        if (f.filter_height, f.filter_width) != (3, 3) or f.dilation != (1, 1):
            return (
                f"{self.name} takes filters of 3x3 without dilation, not {f.filter_height}x{f.filter_width} with "
                f"dilation {f.dilation}; wgmma takes any"
            )
        if f.stride not in ((1, 1), (2, 2)):
            return f"{self.name} takes strides of 1 or 2 for both sides, not {f.stride}; wgmma takes others"
        return None

    def configs(self, problem: Conv2dWeightGradientProblem) -> tuple[Config, ...]:
        f = problem.forward
        found = []
        for rows in range(1, MOST_ROWS + 1):
            stages = min(MOST_STAGES, MOST_SHARED // (_stage_bytes(f, rows) + 16))
            if f.output_height % rows or stages < 2 + ceil_div(
                3, f.stride[0]
            ):  # on their way, and being read
                continue
            found.append(WindowConfig(rows, stages, _window_work(problem, rows).best()))
        return tuple(sorted(found, key=lambda config: (self.estimate(problem, config), -config.rows)))

    def estimate(self, problem: Conv2dWeightGradientProblem, config: Config) -> float:
        assert isinstance(config, WindowConfig)
        return _window_work(problem, config.rows).microseconds(problem, config.part_columns)

    def recipe(self, problem: Conv2dWeightGradientProblem, config: Config) -> Recipe:
        assert isinstance(config, WindowConfig)
        f, stride = problem.forward, problem.forward.stride[0]

        def images(name: str, channels: int, height: int, width: int, rows: int, columns: int) -> TiledMap:
            """Images lie next to each other, then rows, then columns."""
            pixel = 2 * channels
            return TiledMap(
                Buffer(name), f.dtype, (channels, f.batch, height, width), (BOX, IMAGES, rows, columns),
                strides=(pixel * width * height, pixel * width, pixel),
            )  # fmt: skip

        count = ceil_div(_strip_columns(f, config.rows), config.part_columns)
        product = KernelCall(
            Program.of(
                "conv2d_weight_gradient/window.cu",
                "conv2d_weight_gradient_window",
                {
                    **parts.constants(problem),
                    "BF16": f.dtype == "bf16",
                    "ROWS": config.rows,
                    "STRIDE": stride,
                    "STAGES": config.stages,
                },
            ),
            (_window_work(problem, config.rows).tiles, count, 1),
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


# Predictions for 64to64_56_k3s1 at batch 256 in fp16, 59 GFLOP.
WGMMA = Wgmma(
    "wgmma",
    "Hopper's own units: TMA gathers windows (im2col) and gradients into a ring of stages, and wgmma sums "
    "over pixels with both operands as they lie in memory; parts of the pixels are added up by a second launch",
    below="direct",
    # direct issues two loads a product, 32 lanes a cycle of each multiprocessor: 30 G products in 8 ms. A tile of
    # 64x192 takes 32 KB a slab from L2, 650 cycles of copies at 50 bytes for 384 of products: 59% of 700 TFLOP/s, 143
    # us, and 5 more for the parts.
    predicted_gain=54.0,
)
WINDOW = Window(
    "window",
    "filters of 3x3: x is copied once for all nine taps, column by column; a product is over 16 images at one pixel",
    below="wgmma",
    # 18 bytes a cycle of copies instead of 85: tensor cores bound it at 700 TFLOP/s, on 128 of 132 multiprocessors,
    # with 2 us to fill the rings and 6 for the parts: 87 + 8 us against 148.
    predicted_gain=1.55,
)
