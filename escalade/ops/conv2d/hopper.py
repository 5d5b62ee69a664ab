"""The implicit GEMM with Hopper's own units, in NHWC: copies by TMA, products by wgmma."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Im2colMap, KernelCall, Recipe, TiledMap
from escalade.ops.conv2d import arguments
from escalade.ops.conv2d.gemm import blocks
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rung import Conv2dRung
from escalade.ops.elements import SMS
from escalade.ops.ladder import Config, Rung

SLAB = 64
"""Channels of a stage: 128 bytes, what the swizzle spans."""
MOST_PIXELS = 256
"""Of a tile."""
CORNERS = range(-128, 128)
"""Where a tensor map of four dimensions may have the corners of its windows, relative to the image."""
MOST_TAPS = 256
"""Along a side: a tap's offset has eight bits."""
STRIDES = (1, 2)

PRODUCT_RATE = 2048
"""Multiplications and additions of a multiprocessor in a cycle, dense fp16."""
COPY_RATE = 39.0
"""Bytes that a multiprocessor gets from L2 in a cycle: 9 TB/s of 132 at 1.75 GHz."""
TILE_CYCLES = 2000.0
"""To fill the ring and to store: nothing is multiplied unless another block of the multiprocessor does."""


@dataclass(frozen=True)
class WgmmaConfig(Config):
    pixels: int
    """Of a tile."""
    filters: int
    warpgroups: int
    """That multiply."""
    stages: int
    blocks_per_sm: int
    producer_warps: int = 0
    """Of a block besides, that start the copies: none, one, or four that leave their registers to the others."""

    @property
    def threads(self) -> int:
        return self.warpgroups * 128 + self.producer_warps * 32

    @property
    def shared_bytes(self) -> int:
        """The stages and two barriers each."""
        return self.stages * ((self.pixels + self.filters) * SLAB * 2 + 16)

    def tiles(self, problem: Conv2dProblem) -> int:
        return blocks(problem.output_pixels, self.pixels) * (problem.filters // self.filters)

    def cost(self, problem: Conv2dProblem) -> float:
        """Cycles, as far as tensor cores, L2 and the ends of tiles decide."""
        products = self.pixels * self.filters * SLAB / PRODUCT_RATE
        copies = (self.pixels + self.filters) * SLAB * 2 / COPY_RATE
        slabs = problem.taps * problem.channels // SLAB
        tile = slabs * max(products, copies) + TILE_CYCLES / self.blocks_per_sm
        return blocks(self.tiles(problem), SMS) * tile


ONE_ROLE = (
    WgmmaConfig(256, 128, 2, 4, 1),
    WgmmaConfig(128, 128, 2, 3, 2),
    WgmmaConfig(256, 64, 2, 5, 1),
    WgmmaConfig(128, 64, 1, 4, 2),
    WgmmaConfig(64, 64, 1, 4, 3),
)
TWO_ROLES = (
    WgmmaConfig(256, 128, 2, 4, 1, producer_warps=4),
    WgmmaConfig(128, 128, 2, 3, 2, producer_warps=1),
    WgmmaConfig(256, 64, 2, 5, 1, producer_warps=1),
    WgmmaConfig(128, 64, 1, 4, 2, producer_warps=1),
    WgmmaConfig(64, 64, 1, 4, 3, producer_warps=1),
)


def _unsupported(rung: str, problem: Conv2dProblem) -> str | None:
    p = problem
    if p.groups != 1:
        return f"{rung} takes groups=1, not {p.groups}"
    if p.layout != "nhwc":
        return f"{rung} takes layout nhwc, not {p.layout}"
    if p.dtype not in ("fp16", "bf16"):
        return f"{rung} takes fp16 and bf16, not {p.dtype}"
    if p.dilation != (1, 1):
        return f"{rung} takes dilation 1, not {p.dilation}; fused_epilogue takes any"
    if any(stride not in STRIDES for stride in p.stride):
        return f"{rung} takes strides of 1 and 2, not {p.stride}; fused_epilogue takes any"
    if p.channels % SLAB or p.filters % SLAB:
        return f"{rung} takes multiples of {SLAB} channels and filters, not {p.channels} and {p.filters}"
    if max(p.filter_height, p.filter_width) > MOST_TAPS or not all(
        corner in CORNERS for corner in (*_lower(p), *_upper(p))
    ):
        return (
            f"{rung} leaves windows to the copy engine, whose corners lie within {CORNERS[0]} and {CORNERS[-1]} of "
            f"the image; padding {p.padding} and filters of {p.filter_height}x{p.filter_width} are beyond"
        )
    if p.output_pixels >= 2**31 - MOST_PIXELS:
        return f"{rung} counts output pixels in 32 bits; {p.output_pixels} are too many"
    return None


def _lower(p: Conv2dProblem) -> tuple[int, int]:
    """The first window's corner (w, h), relative to the image's."""
    return -p.padding[1], -p.padding[0]


def _upper(p: Conv2dProblem) -> tuple[int, int]:
    """The last window's corner, relative to the image's last pixel."""
    return p.padding[1] - (p.filter_width - 1), p.padding[0] - (p.filter_height - 1)


@dataclass(frozen=True)
class Hopper(Conv2dRung):
    candidates: tuple[WgmmaConfig, ...]

    @property
    def architectures(self) -> tuple[str, ...]:
        return ("sm_90a",)

    def limits(self, problem: Conv2dProblem) -> str | None:
        return _unsupported(self.name, problem)

    def configs(self, problem: Conv2dProblem) -> tuple[Config, ...]:
        fitting = (config for config in self.candidates if problem.filters % config.filters == 0)
        return tuple(sorted(fitting, key=lambda config: config.cost(problem)))

    def recipe(self, problem: Conv2dProblem, config: Config) -> Recipe:
        assert isinstance(config, WgmmaConfig)
        p = problem
        constants: dict[str, Constant] = {
            "Element": arguments.element(p),
            "BF16": p.dtype == "bf16",
            "TILE_M": config.pixels,
            "TILE_N": config.filters,
            "WARPGROUPS": config.warpgroups,
            "STAGES": config.stages,
            "BLOCKS_PER_SM": config.blocks_per_sm,
            "PRODUCER_WARPS": config.producer_warps,
            **arguments.epilogue_constants(p),
        }
        pixels = Im2colMap(
            Buffer("x"), p.dtype, (p.channels, p.width, p.height, p.batch), _lower(p), _upper(p), SLAB,
            config.pixels, (p.stride[1], p.stride[0]),
        )  # fmt: skip
        weights = TiledMap(
            Buffer("weight"), p.dtype, (p.taps * p.channels, p.filters), (SLAB, config.filters)
        )
        call = KernelCall(
            Program.of("conv2d/hopper.cu", "conv2d_hopper", constants),
            (config.tiles(p), 1, 1),
            (config.threads, 1, 1),
            (
                pixels,
                weights,
                Buffer("bias", optional=True),
                Buffer("residual", optional=True),
                Buffer("y"),
                arguments.shape(p),
            ),
            shared_bytes=config.shared_bytes,
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 128to128_28_k3 at batch 256, 59 GFLOP.
RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Hopper(
        "tma_wgmma",
        "Hopper's own units: the copy engine gathers windows (im2col) and weights into a ring of stages, whole "
        "warpgroups multiply from there (wgmma), and sums go straight from registers to y",
        below="fused_epilogue",
        # mma.sync stops at 415 TFLOP/s (143 us), about 62% of wgmma's 700. A tile of 256x128 has 85 operations a
        # byte, so 9 TB/s of copies do for 770; of 18 slabs a tile, filling the ring and storing cost 4 to 6 more:
        # 700 * 18 / 24 = 525 TFLOP/s (113 us).
        predicted_gain=1.25,
        candidates=ONE_ROLE,
    ),
    Hopper(
        "producer_consumer",
        "a warp of its own starts the copies, and the others only multiply; where sums fill the registers, a whole "
        "warpgroup that leaves its own to the others",
        below="tma_wgmma",
        # Copies start as soon as a stage is free instead of when the first warpgroup comes by, and no warpgroup waits
        # for the other: 1.5 of the 24 slabs' time that a tile takes, 560 against 525 TFLOP/s.
        predicted_gain=1.07,
        candidates=TWO_ROLES,
    ),
)
