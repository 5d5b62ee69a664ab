"""Implicit GEMM in NHWC by TMA im2col copies and wgmma, and the base class of the rungs that do so."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache

from escalade.device.architecture import WITH_WGMMA
from escalade.device.program import Program, Type
from escalade.device.recipe import Buffer, Recipe
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import element
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.launch import kernel_call
from escalade.ops.base.rung import C, Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.preparation import COPY_BYTES, copied_channels, prepare_for_copies
from escalade.ops.conv2d.rungs.rung import Conv2dRung
from escalade.ops.conv2d.rungs.wgmma_conv import ROW_BYTES, Windows
from escalade.ops.shared import activation

K_TILE_RATE = 32
"""Pixels times filters per cycle and SM for one k-tile (128 bytes of k), in any dtype."""
PROMOTE_K_TILES = {"fp8": (2, 1)}
"""Choices of k-tiles summed in the tensor cores before promotion to fp32 registers, where accumulators have fewer bits
than fp32. FP8 keeps about 14: fp16 results that round to within 2.0e-4 are off by 2.4e-4 with one k-tile, 2.9e-4 with
two and 4.0e-4 with four. Results in FP8 round to within 3e-2, so that they need no promotion."""


@lru_cache(1024)
def k_tiles_of(problem: Conv2dProblem) -> int:
    """Return the k-tiles per output tile."""
    shortcut = Windows.of_shortcut(problem).k_tiles if problem.shortcut_channels else 0
    return Windows.of(problem).k_tiles + shortcut


@dataclass(frozen=True)
class HopperRung(Conv2dRung[C]):
    dtypes: tuple[str, ...] = ("fp16", "bf16", "tf32", "fp8")
    layouts: tuple[str, ...] = ("nhwc",)

    architectures = WITH_WGMMA
    truncates = True
    supports_shortcut = True

    def limits(self, problem: Conv2dProblem) -> str | None:
        p = problem
        copied = COPY_BYTES // p.element_bytes
        if p.is_quantized and p.channels % copied:
            return f"{self.name} takes multiples of {copied} channels in {p.dtype}, not {p.channels}"
        if p.shortcut_channels % copied:
            return f"{self.name} copies {copied} channels at once; the shortcut's {p.shortcut_channels} are no multiple"
        reason = Windows.of(p).unsupported(self.name)
        if reason is None and p.shortcut_channels:
            reason = Windows.of_shortcut(p).unsupported(self.name)
        return reason

    @abstractmethod
    def clocks(self, problem: Conv2dProblem, config: C) -> float: ...

    def estimate(self, problem: Conv2dProblem, config: C) -> float:
        """Add the launch that pads channels, if TMA cannot copy them as they are."""
        p, channels = problem, copied_channels(problem)
        main = self.card.microseconds(self.clocks(p, config), p.traffic)
        if channels == p.channels:
            return main
        return main + self.card.microseconds(
            0, p.images * p.height * p.width * (p.channels + channels) * p.element_bytes
        )


TILE_CYCLES = 2000.0
"""Cycles to fill the pipeline and to store, hidden only by another CTA on the SM."""
MOST_REGISTERS = 255
HANDED_OVER = 232
OTHER_REGISTERS = 48
"""Registers per thread besides the accumulators."""


@dataclass(frozen=True)
class WgmmaConfig(Config):
    pixels: int
    """Output pixels per tile."""
    filters: int
    warpgroups: int
    """Consumer warpgroups."""
    stages: int
    blocks_per_sm: int
    producer_warps: int = 0
    """Producer warps: none, one, or four that release their registers to the consumers."""

    @property
    def threads(self) -> int:
        return self.warpgroups * 128 + self.producer_warps * 32

    @property
    def shared_bytes(self) -> int:
        return self.stages * ((self.pixels + self.filters) * ROW_BYTES + 16)

    def tiles(self, problem: Conv2dProblem) -> int:
        return ceil_div(problem.output_pixels, self.pixels) * ceil_div(problem.filters, self.filters)

    def valid(self, problem: Conv2dProblem, card: Card) -> bool:
        """Return True if registers hold the accumulators, twice if they are promoted, and not most of the filters are
        missing."""
        sums = self.pixels * self.filters // (self.warpgroups * 128)
        if problem.dtype in PROMOTE_K_TILES:
            sums *= 2
        registers = min(MOST_REGISTERS, card.registers // (self.threads * self.blocks_per_sm))
        if self.producer_warps == 4:
            registers = HANDED_OVER
        return sums + OTHER_REGISTERS <= registers and (
            self.filters == 64 or self.filters < 2 * problem.filters
        )

    def cost(self, problem: Conv2dProblem, card: Card) -> float:
        """Estimate the cycles from tensor cores, L2 and tile ends."""
        products = self.pixels * self.filters / K_TILE_RATE
        copies = (self.pixels + self.filters) * ROW_BYTES / card.rates.copies.tma_tile
        tile = k_tiles_of(problem) * max(products, copies) + TILE_CYCLES / self.blocks_per_sm
        return ceil_div(self.tiles(problem), card.multiprocessors) * tile


ONE_ROLE = (
    WgmmaConfig(256, 128, 2, 4, 1),
    WgmmaConfig(128, 128, 2, 3, 2),
    WgmmaConfig(128, 128, 2, 6, 1),
    WgmmaConfig(256, 64, 2, 5, 1),
    WgmmaConfig(128, 64, 1, 4, 2),
    WgmmaConfig(64, 64, 1, 4, 3),
)
TWO_ROLES = (
    WgmmaConfig(256, 128, 2, 4, 1, producer_warps=4),
    WgmmaConfig(128, 128, 2, 3, 2, producer_warps=1),
    WgmmaConfig(128, 128, 2, 6, 1, producer_warps=4),
    WgmmaConfig(256, 64, 2, 5, 1, producer_warps=1),
    WgmmaConfig(128, 64, 1, 4, 2, producer_warps=1),
    WgmmaConfig(64, 64, 1, 4, 3, producer_warps=1),
)


@dataclass(frozen=True)
class Wgmma(HopperRung[WgmmaConfig]):
    candidates: tuple[WgmmaConfig, ...] = ()

    def configs(self, problem: Conv2dProblem) -> tuple[WgmmaConfig, ...]:
        valid = (config for config in self.candidates if config.valid(problem, self.card))
        return tuple(sorted(valid, key=lambda config: config.cost(problem, self.card)))

    def clocks(self, problem: Conv2dProblem, config: WgmmaConfig) -> float:
        return config.cost(problem, self.card)

    def recipe(self, problem: Conv2dProblem, config: WgmmaConfig) -> Recipe:
        p, prepared = problem, prepare_for_copies(problem)
        output = element(p.stored)
        windows = Windows.of(prepared.shape)
        maps = (
            windows.pixel_map(prepared.x, config.pixels),
            windows.weight_map(prepared.weight, p.filters, config.filters),
        )
        shortcut_maps = maps  # unused without a shortcut
        if p.shortcut_channels:
            shortcut = Windows.of_shortcut(p)
            shortcut_maps = (
                shortcut.pixel_map(Buffer("shortcut"), config.pixels),
                shortcut.weight_map(prepared.shortcut_weight, p.filters, config.filters),
            )
        call = kernel_call(
            Program.of(
                "conv2d/sm90_wgmma.cu",
                constants=activation.constants_of(p),
                problem=p,
                output=output,
                bias=Type("float") if p.dtype == "fp8" else output,
                config=config,
                promote_slabs=min(PROMOTE_K_TILES.get(p.dtype, (0,))),
            ),
            config.tiles(p),
            config.threads,
            *maps,
            *shortcut_maps,
            Buffer("bias", optional=True),
            Buffer("scale", optional=True),
            Buffer("scales", optional=True),
            Buffer("residual", optional=True),
            Buffer("y"),
            arguments.shape(prepared.shape),
            arguments.shortcut_shape(p),
            shared_bytes=config.shared_bytes,
        )
        return Recipe((*prepared.steps, call), prepared.workspaces)


# Predictions for 128to128_28_k3 at batch 256, 59 GFLOP.
RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Wgmma(
        "tma_wgmma",
        "TMA copies windows (im2col) and weights into a ring of stages, warpgroups multiply from shared memory "
        "(wgmma), and results are stored directly from registers",
        below="fused_epilogue",
        # mma.sync reaches 415 TFLOP/s (143 us), about 62% of wgmma's 700. A tile of 256x128 has 85 operations per byte,
        # so 9 TB/s of copies suffice for 770; with 18 k-tiles per tile, filling the pipeline and storing cost another 4
        # to 6: 700 * 18 / 24 = 525 TFLOP/s (113 us).
        predicted_gain=1.25,
        candidates=ONE_ROLE,
    ),
    Wgmma(
        "producer_consumer",
        "a producer warp issues the copies, and the others only multiply; where accumulators fill the registers, a "
        "producer warpgroup that releases its own",
        below="tma_wgmma",
        # Copies start as soon as a stage is free, not when the first warpgroup gets there, and no warpgroup waits for
        # the other. That saves 1.5 of the 24 k-tile times of a tile: 560 against 525 TFLOP/s.
        predicted_gain=1.07,
        candidates=TWO_ROLES,
    ),
)
