"""Depthwise convolution on tensor cores: planes of pixels times band matrices of each channel's filter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from escalade.device.architecture import WITH_WGMMA
from escalade.device.program import Program
from escalade.device.recipe import Buffer, Recipe, TiledMap, WeightsReady
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import VECTOR_BYTES
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.launch import launch
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.depthwise import Tiles, overlapped
from escalade.ops.conv2d.rungs.rung import Conv2dRung, fitting_blocks
from escalade.ops.shared import activation

OUTPUTS, DEPTH = 8, 16
"""Adjacent outputs and inputs per MMA."""
STRIPS = 16
"""Strips per MMA."""
BOX = 256
"""Largest side of a TMA box."""
CHANNELS = (16, 32, 64)
"""Channels per CTA: the swizzle span in bytes is twice that."""
TOGETHER = 4
"""Channels per warp, which are stored together."""
ROWS = (1, 2, 4)
"""Rows per strip."""
WARPS = 8
MOST_BANDS = 64
"""Largest number of registers for band matrices."""
MOST_BLOCKS = 3
"""Largest number of CTAs per SM."""
MOST_CONFIGS = 8

# Clocks of an SM.
PRODUCT_CLOCKS = 2.0
READ_CLOCKS = 4.5
"""Clocks per ldmatrix of 512 bytes: 4, and the rest of its latency."""
TURN_CLOCKS = 10.0
"""Clocks to transpose 256 inputs into planes."""
STORE_CLOCKS = 4.0
"""Clocks to stage 128 outputs of a channel in shared memory, with bank conflicts."""
START = 1500.0
"""Clocks from the start of a CTA to its first products."""
BESIDE = 0.2
"""Share of the shorter of memory and SM time that is not hidden."""
ALONE = 0.5
"""Share of a tile's other passes that is not hidden if the SM has no other CTA."""
BARRIERS = 600.0
"""Clocks per tile that a CTA spends at barriers."""
LINE = 128
"""Bytes of shared memory copied per clock."""


@dataclass(frozen=True)
class DepthwiseMmaConfig(Config):
    channels: int
    """Channels per CTA."""
    rows: int
    """Output rows per strip."""
    images: int
    """Images per tile: several if they are small."""
    tile_rows: int
    tile_columns: int
    blocks_per_sm: int


@dataclass(frozen=True)
class _Tiling(Tiles):
    """Sizes derived from a problem and a config; the kernel computes the same."""

    problem: Conv2dProblem
    config: DepthwiseMmaConfig
    card: Card

    @cached_property
    def warps(self) -> int:
        parts = self.config.channels // TOGETHER
        return max(parts, WARPS)

    @cached_property
    def window(self) -> tuple[int, int]:
        c = self.config
        return c.tile_rows + self.problem.reach[0], c.tile_columns + DEPTH - OUTPUTS

    @cached_property
    def shared_bytes(self) -> int:
        p, c = self.problem, self.config
        height, width = self.window
        pixel = c.channels * p.element_bytes
        stage = ceil_div(c.images * height * width * pixel, 1024) * 1024
        outputs = ceil_div(c.images * c.tile_rows * c.tile_columns * pixel, 1024) * 1024
        octets = width // 8
        gap = 0 if c.rows * octets % 2 else 1
        plane = (c.images * (height * octets + height // c.rows * gap) | 1) * 16
        taps = c.channels * (4 + p.filter_height * (p.filter_width + 1) * p.element_bytes)
        return stage + outputs + c.channels * plane + ceil_div(taps, 8) * 8 + 8

    @property
    def registers(self) -> int:
        """Estimated registers per thread: bands, accumulators of open rows, and the rest."""
        p, c = self.problem, self.config
        return TOGETHER * (2 * p.filter_height + 4 * min(c.rows, p.reach[0] + 1)) + 24

    @property
    def clocks(self) -> float:
        """Estimated clocks of the busiest SM, from shared memory, issue slots, tensor cores and copies."""
        p, c = self.problem, self.config
        blocks = ceil_div(self.channel_blocks * self.workers, self.card.multiprocessors)
        resident = min(blocks, c.blocks_per_sm)
        strips = c.images * c.tile_rows // c.rows * c.tile_columns // OUTPUTS
        groups = ceil_div(strips, STRIPS) * c.channels
        input_rows = c.rows + p.reach[0]
        window = c.images * self.window[0] * self.window[1] * c.channels
        outputs = c.images * c.tile_rows * c.tile_columns * c.channels
        shared = (
            groups * (input_rows * READ_CLOCKS + c.rows * STORE_CLOCKS)
            + window / 256 * TURN_CLOCKS
            + 2 * (window + outputs) / LINE
        )
        functions = 10 if p.activation else 4
        issued = groups * (input_rows + c.rows * (p.filter_height + 4 * functions)) / 4 + window / 256 * 3
        products = groups * c.rows * p.filter_height * PRODUCT_CLOCKS
        copied = 2 * (window + outputs) / self.card.rates.copies.loads
        parts = sorted((shared, issued, products, copied))
        tile = parts[3] + 0.3 * parts[2] + (ALONE * sum(parts[:3]) + BARRIERS) / resident
        return START + blocks * self.rounds * tile


def _cuts(total: int) -> list[int]:
    return sorted({ceil_div(total, parts) for parts in range(1, total + 1)})


def _candidates(p: Conv2dProblem, card: Card) -> Iterator[DepthwiseMmaConfig]:
    for channels in CHANNELS:
        if channels > CHANNELS[0] and ceil_div(p.channels, channels) * channels * 7 > p.channels * 8:
            continue
        for rows in ROWS:
            for across in _cuts(ceil_div(p.output_width, OUTPUTS)):
                for down in _cuts(ceil_div(p.output_height, rows)):
                    whole = across * OUTPUTS >= p.output_width and down * rows >= p.output_height
                    most = min(p.batch, max(1, 64 // (across * down))) if whole else 1
                    for images in {1, most, max(1, most // 2)}:
                        config = DepthwiseMmaConfig(channels, rows, images, down * rows, across * OUTPUTS, 1)
                        tiling = _Tiling(p, config, card)
                        if max(tiling.window) > BOX or tiling.shared_bytes > card.shared_bytes:
                            continue
                        blocks = fitting_blocks(
                            card, tiling.warps * 32, tiling.registers, tiling.shared_bytes
                        )
                        if blocks:
                            yield replace(config, blocks_per_sm=min(blocks, MOST_BLOCKS))


@lru_cache(4096)
def _best_first(p: Conv2dProblem, card: Card) -> tuple[DepthwiseMmaConfig, ...]:
    found = sorted(
        set(_candidates(p, card)), key=lambda config: (_Tiling(p, config, card).clocks, str(config))
    )
    return tuple(found[:MOST_CONFIGS])


@dataclass(frozen=True)
class DepthwiseMma(Conv2dRung[DepthwiseMmaConfig]):
    dtypes: tuple[str, ...] = ("fp16", "bf16")
    layouts: tuple[str, ...] = ("nhwc",)
    takes_groups = True
    supports_residual = False
    architectures = WITH_WGMMA
    pitched_buffers = ("x", "y")

    def limits(self, problem: Conv2dProblem) -> str | None:
        p, name = problem, self.name
        if p.groups != p.channels or p.filters != p.channels:
            return f"{name} takes one filter per channel; depthwise takes several"
        unit = VECTOR_BYTES // p.element_bytes
        if p.channels % unit:
            return f"{name} takes multiples of {unit} channels, not {p.channels}; depthwise takes any"
        if p.stride != (1, 1):
            return f"{name} takes stride 1, not {p.stride}; depthwise_tile takes any"
        if OUTPUTS + p.reach[1] > DEPTH or 2 * TOGETHER * p.filter_height > MOST_BANDS:
            return (
                f"{name} takes filters of up to {MOST_BANDS // TOGETHER // 2} rows that cover up to "
                f"{DEPTH - OUTPUTS + 1} columns, not {p.filter_height} and {p.reach[1] + 1}"
            )
        if not _best_first(p.dense, self.card):
            return (
                f"{name} keeps windows in shared memory; they do not fit into {self.card.shared_bytes} bytes"
            )
        return None

    def configs(self, problem: Conv2dProblem) -> tuple[DepthwiseMmaConfig, ...]:
        return _best_first(problem.dense, self.card)

    def clocks(self, problem: Conv2dProblem, config: DepthwiseMmaConfig) -> float:
        return _Tiling(problem, config, self.card).clocks

    def estimate(self, problem: Conv2dProblem, config: DepthwiseMmaConfig) -> float:
        return overlapped(self.card, self.clocks(problem, config), problem.traffic, BESIDE)

    def recipe(self, problem: Conv2dProblem, config: DepthwiseMmaConfig) -> Recipe:
        p, tiling = problem, _Tiling(problem, config, self.card)
        threads = tiling.warps * 32
        x_size, y_size = (p.height, p.width), (p.output_height, p.output_width)
        return launch(
            Program.of(
                "conv2d/depthwise_mma.cu",
                constants=activation.constants_of(p),
                problem=p,
                tiling=tiling,
                config=config,
                together=TOGETHER,
                threads=threads,
            ),
            tiling.channel_blocks * tiling.workers,
            threads,
            _map(p, "x", x_size, p.x_pitch, config, tiling.window),
            _map(p, "y", y_size, p.y_pitch, config, (config.tile_rows, config.tile_columns)),
            Buffer("weight"),
            Buffer("bias", optional=True),
            tiling.tiles,
            WeightsReady(("weight", "bias")),
            shared_bytes=tiling.shared_bytes,
        )


def _map(
    p: Conv2dProblem,
    buffer: str,
    size: tuple[int, int],
    pitch: int,
    config: DepthwiseMmaConfig,
    box: tuple[int, int],
) -> TiledMap:
    """Return the map of a tile's pixels in x or y."""
    pixel = (pitch or p.channels) * p.element_bytes
    return TiledMap(
        Buffer(buffer), p.dtype, (p.channels, size[1], size[0], p.batch),
        (config.channels, box[1], box[0], config.images), swizzle=config.channels * p.element_bytes,
        strides=(pixel, size[1] * pixel, size[0] * size[1] * pixel),
    )  # fmt: skip


# Prediction for 96to96_56_k7s1g96 at batch 32 in fp16 (ConvNeXt), 0.9 GFLOP and 39 MB.
RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    DepthwiseMma(
        "depthwise_mma",
        "each channel's filter as band matrices for tensor cores, over planes of pixels transposed by ldmatrix",
        below="depthwise_tile",
        # 49 multiply-adds and 17 other instructions per output are 22 us on CUDA cores. Here shared memory takes 0.24
        # clocks per output, 10 us, plus launch and copies: 15 us.
        predicted_gain=1.6,
    ),
)
