"""fp32 accuracy from fp16 wgmma in NHWC: operands are split into two halves in registers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Int64, Ints, KernelCall, Recipe, TiledMap, Workspace
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import element
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.epilogue import UNPLACED
from escalade.ops.conv2d.rungs.preparation import Conversion
from escalade.ops.conv2d.rungs.wgmma_conv import ROW_BYTES, WgmmaConv, WgmmaConvRung, Windows, shortcut_shape

K_TILE = ROW_BYTES // 4
"""Channels per k-tile: a row of x, or of both halves of the weights."""
COPIED = 4
"""TMA copies multiples of 4 channels (16 bytes); others are zero-padded."""
PACKING_THREADS = 256
PRODUCTS = 3
"""fp16 products per fp32 product."""
PRODUCT_RATE = 1600
"""Dense fp16 multiply-adds per cycle and SM: 2048, reduced by the power limit."""
SHARED_RATE = 128.0
"""Bytes of shared memory traffic per cycle and SM."""
K_TILE_CYCLES = 450.0
"""Least cycles per k-tile of a warpgroup, to split and accumulate it."""
TILE_CYCLES = 2500.0
"""Cycles to store a tile, and to fill the pipeline for the first."""


@dataclass(frozen=True)
class SplitConfig(Config):
    warpgroups: int
    """Consumer warpgroups, with 64 pixels of a tile each."""
    filters: int
    """Filters per tile."""
    stages: int
    blocks_per_sm: int

    @property
    def pixels(self) -> int:
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        return (self.warpgroups + 1) * 128

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per producer thread and per consumer thread."""
        return {1: (32, 224), 2: (40, 232), 3: (32, 160)}[self.warpgroups]

    @property
    def stage_bytes(self) -> int:
        return (self.pixels + self.filters) * ROW_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.stage_bytes + 16)

    def tiles(self, conv: WgmmaConv) -> int:
        return ceil_div(conv.windows.pixels, self.pixels) * ceil_div(conv.filters, self.filters)

    def work(self, conv: WgmmaConv) -> Ints:
        """`Work` of kernels/conv2d/sm90_split.cu."""
        return Ints(
            (conv.windows.pixels, self.tiles(conv), ceil_div(conv.filters, self.filters), k_tiles(conv))
        )

    def cost(self, conv: WgmmaConv, card: Card) -> float:
        """Estimate the cycles from tensor cores, shared memory, L2, and the other work of a warpgroup."""
        products = PRODUCTS * self.pixels * self.filters * K_TILE / PRODUCT_RATE
        columns = PRODUCTS * self.warpgroups * self.filters * K_TILE * 2  # read by every warpgroup
        shared = (columns + self.pixels * ROW_BYTES + self.stage_bytes) / SHARED_RATE
        rounds = ceil_div(self.tiles(conv), card.multiprocessors)
        together = min(self.blocks_per_sm, rounds)
        k_tile = max(
            products, shared, self.stage_bytes / card.rates.copies.tma_gradient, K_TILE_CYCLES / together
        )
        return rounds * (k_tiles(conv) * k_tile + TILE_CYCLES / together)


CONFIGS = (
    SplitConfig(2, 128, 6, 1),
    SplitConfig(3, 64, 6, 1),
    SplitConfig(2, 64, 8, 1),
    SplitConfig(1, 128, 4, 2),
    SplitConfig(1, 64, 6, 2),
)


def k_tiles(conv: WgmmaConv) -> int:
    """Return the k-tiles per output tile."""
    return conv.taps * ceil_div(conv.windows.channels, K_TILE) + ceil_div(conv.shortcut_channels, K_TILE)


def _filled_up(channels: int) -> int:
    return ceil_div(channels, COPIED) * COPIED


@dataclass(frozen=True)
class _Image:
    """Image that TMA reads: the tensor itself, or a copy with padded channels."""

    windows: Windows
    buffer: Buffer
    steps: tuple[KernelCall, ...] = ()
    workspaces: tuple[Workspace, ...] = ()

    @property
    def elements(self) -> int:
        w = self.windows
        return w.batch * w.image[0] * w.image[1] * w.channels


def _image(windows: Windows, name: str) -> _Image:
    channels = _filled_up(windows.channels)
    if channels == windows.channels:
        return _Image(windows, Buffer(name))
    pixels = windows.batch * windows.image[0] * windows.image[1]
    conversion = Conversion(
        name, pixels, windows.channels, channels, element("fp32"), element("fp32"), 4, prefix="filled"
    )
    return _Image(
        replace(windows, channels=channels),
        Buffer(conversion.name),
        (conversion.step,),
        (conversion.workspace,),
    )


def _split_weights(conv: WgmmaConv) -> KernelCall:
    return KernelCall(
        Program.of("conv2d/sm90_split_weights.cu", threads=PACKING_THREADS),
        (conv.filters, 1, 1),
        (PACKING_THREADS, 1, 1),
        (
            Buffer("weight"), Buffer("shortcut_weight", optional=True), Buffer("split_weight"),
            Buffer("weight_scales"), conv.windows.channels, conv.taps, conv.shortcut_channels,
        ),
        weights_only=True,
        overlap=True,
    )  # fmt: skip


@dataclass(frozen=True)
class WgmmaSplit(WgmmaConvRung[SplitConfig]):
    dtypes: tuple[str, ...] = ("fp32",)
    split_rounding = 2.0**-21  # two halves have 22 bits; of a few products, all may have the maximum error
    launches: ClassVar[int] = 2

    scales_across_batch = True
    supports_shortcut = True
    pitched_buffers = ("y",)

    def conv_limits(self, conv: WgmmaConv) -> str | None:
        if conv.shortcut and (reason := conv.shortcut.unsupported(self.name)):
            return reason
        return conv.windows.unsupported(self.name)

    def conv_configs(self, conv: WgmmaConv) -> tuple[SplitConfig, ...]:
        return tuple(sorted(CONFIGS, key=lambda config: config.cost(conv, self.card)))

    def conv_clocks(self, conv: WgmmaConv, config: SplitConfig) -> float:
        return config.cost(conv, self.card)

    def conv_recipe(self, conv: WgmmaConv, config: SplitConfig) -> Recipe:
        image = _image(conv.windows, "x")
        shortcut = _image(conv.shortcut, "shortcut") if conv.shortcut else image
        pixels = image.windows.pixel_map(image.buffer, config.pixels)
        shortcut_pixels = shortcut.windows.pixel_map(shortcut.buffer, config.pixels)
        weights = _weight_map(conv, config)
        program = Program.of(
            "conv2d/sm90_split.cu",
            constants=conv.epilogue.activation_constants,
            conv=conv,
            config=config,
            placed=conv.placement != UNPLACED,
        )
        attempts = tuple(
            KernelCall(
                program,
                (min(config.tiles(conv), self.card.multiprocessors * config.blocks_per_sm), 1, 1),
                (config.threads, 1, 1),
                (
                    pixels, shortcut_pixels, weights, Buffer("weight_scales"), Buffer("bias", optional=True),
                    Buffer("residual", optional=True), Buffer("y"), Buffer("magnitudes"), attempt,
                    image.buffer, Int64(image.elements // COPIED),
                    config.work(conv), conv.windows.shape(conv.filters), shortcut_shape(conv.shortcut), conv.placement,
                    conv.y_pitch,
                ),
                shared_bytes=config.shared_bytes,
                overlap=True,
            )
            for attempt in (0, 1)
        )  # fmt: skip
        images = dict.fromkeys((image, shortcut))
        return Recipe(
            (_split_weights(conv), *(step for one in images for step in one.steps), *attempts),
            (
                Workspace("split_weight", conv.filters * k_tiles(conv) * ROW_BYTES),
                Workspace("weight_scales", ceil_div(conv.filters, 2) * 16),
                Workspace("magnitudes", 8, zeroed=True),
                *(workspace for one in images for workspace in one.workspaces),
            ),
        )


def _weight_map(conv: WgmmaConv, config: SplitConfig) -> TiledMap:
    """Return the map of one k-tile of both halves of `config.filters` filters."""
    return TiledMap(
        Buffer("split_weight"),
        "fp16",
        (k_tiles(conv) * 2 * K_TILE, conv.filters),
        (2 * K_TILE, config.filters),
    )


# Predictions for 128to128_28_k3 at batch 256, 59 GFLOP.
RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    WgmmaSplit(
        "wgmma_split",
        "fp32 accuracy from fp16 wgmma: TMA loads x, registers split it into halves, three wgmma per product, "
        "accumulated in fp32 every 32 channels; a second launch rescales where values are huge or tiny; an infinity "
        "becomes NaN",
        below="tensor_core_split",
        # Three products at 85% of 700 TFLOP/s are 200 TFLOP/s (295 us) against 59.6 (994 us).
        predicted_gain=3.4,
    ),
)
