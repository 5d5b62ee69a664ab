"""fp32's accuracy from fp16 products on Hopper, in NHWC: numbers are cut into halves in registers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from escalade.device.program import Constant, Program, Type
from escalade.device.recipe import Buffer, Int64, Ints, KernelCall, Recipe, TiledMap, Workspace
from escalade.ops import machine
from escalade.ops.conv2d import arguments
from escalade.ops.conv2d.gemm import blocks
from escalade.ops.conv2d.hopper_windows import ROW_BYTES, Windows
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rung import Conv2dRung
from escalade.ops.elements import SMS
from escalade.ops.ladder import Config, Rung

SLAB = ROW_BYTES // 4
"""Channels of a stage: a row of x, or of both halves of the weights."""
COPIED = 4
"""Channels come in multiples of what 16 bytes hold; others are filled up."""
PACKING_THREADS = 256
PRODUCTS = 3
"""Of halves, for one."""
PRODUCT_RATE = 1600
"""Multiplications and additions of a multiprocessor in a cycle, dense fp16: the hardware's 2048 within its power."""
SHARED_RATE = 128.0
"""Bytes that a multiprocessor reads from or writes to shared memory in a cycle."""
COPY_RATE = 45.0
"""Bytes that a multiprocessor gets from L2 in a cycle."""
SLAB_CYCLES = 450.0
"""From one slab of a warpgroup to the next at best: to cut it in halves and to add it up."""
TILE_CYCLES = 2500.0
"""To store a tile, and to fill the ring in front of the first."""


@dataclass(frozen=True)
class SplitConfig(Config):
    warpgroups: int
    """That multiply, with 64 pixels of a tile each."""
    filters: int
    """Of a tile."""
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
        """Of a thread that copies and of one that multiplies."""
        return {1: (32, 224), 2: (40, 232), 3: (32, 160)}[self.warpgroups]

    @property
    def stage_bytes(self) -> int:
        return (self.pixels + self.filters) * ROW_BYTES

    @property
    def shared_bytes(self) -> int:
        """The stages and two barriers each."""
        return self.stages * (self.stage_bytes + 16)

    def tiles(self, problem: Conv2dProblem) -> int:
        return blocks(problem.output_pixels, self.pixels) * blocks(problem.filters, self.filters)

    def work(self, problem: Conv2dProblem) -> Ints:
        """`Work` of kernels/conv2d/hopper_split.cu."""
        p = problem
        return Ints((p.output_pixels, self.tiles(p), blocks(p.filters, self.filters), slabs(p)))

    def cost(self, problem: Conv2dProblem) -> float:
        """Cycles, as far as tensor cores, shared memory, L2, and what a warpgroup does besides multiplying decide."""
        products = PRODUCTS * self.pixels * self.filters * SLAB / PRODUCT_RATE
        columns = PRODUCTS * self.warpgroups * self.filters * SLAB * 2  # read anew by every warpgroup
        shared = (columns + self.pixels * ROW_BYTES + self.stage_bytes) / SHARED_RATE
        rounds = blocks(self.tiles(problem), SMS)
        together = min(self.blocks_per_sm, rounds)
        slab = max(products, shared, self.stage_bytes / COPY_RATE, SLAB_CYCLES / together)
        return rounds * (slabs(problem) * slab + TILE_CYCLES / together)


CONFIGS = (
    SplitConfig(2, 128, 6, 1),
    SplitConfig(3, 64, 6, 1),
    SplitConfig(2, 64, 8, 1),
    SplitConfig(1, 128, 4, 2),
    SplitConfig(1, 64, 6, 2),
)


def slabs(problem: Conv2dProblem) -> int:
    """That a sum goes through."""
    return problem.taps * blocks(problem.channels, SLAB) + blocks(problem.shortcut_channels, SLAB)


def _filled_up(channels: int) -> int:
    return blocks(channels, COPIED) * COPIED


@dataclass(frozen=True)
class _Image:
    """What the copy engine reads: the tensor itself, or a copy with more channels."""

    windows: Windows
    buffer: Buffer
    steps: tuple[KernelCall, ...] = ()
    workspaces: tuple[Workspace, ...] = ()


def _image(windows: Windows, name: str) -> _Image:
    channels = _filled_up(windows.channels)
    if channels == windows.channels:
        return _Image(windows, Buffer(name))
    pixels = windows.batch * windows.image[0] * windows.image[1]
    element = Type("float")
    constants: dict[str, Constant] = {
        "Source": element,
        "Target": element,
        "CHANNELS_ALIGNED": False,
        "ROUNDED": False,
    }
    call = KernelCall(
        Program.of("conv2d/convert.cu", "conv2d_convert", constants),
        (blocks(pixels * channels // 4, 256), 1, 1),
        (256, 1, 1),
        (Buffer(name), Buffer(f"filled_{name}"), Int64(pixels), windows.channels, channels),
        overlap=True,
    )
    return _Image(
        replace(windows, channels=channels),
        Buffer(f"filled_{name}"),
        (call,),
        (Workspace(f"filled_{name}", pixels * channels * 4),),
    )


def _split_weights(problem: Conv2dProblem) -> KernelCall:
    p = problem
    return KernelCall(
        Program.of("conv2d/split_weights.cu", "conv2d_split_weights", {"THREADS": PACKING_THREADS}),
        (p.filters, 1, 1),
        (PACKING_THREADS, 1, 1),
        (
            Buffer("weight"), Buffer("shortcut_weight", optional=True), Buffer("split_weight"),
            Buffer("weight_scales"), p.channels, p.taps, p.shortcut_channels,
        ),
        weights_only=True,
        overlap=True,
    )  # fmt: skip


@dataclass(frozen=True)
class HopperSplit(Conv2dRung):
    @property
    def takes_shortcut(self) -> bool:
        return True

    @property
    def architectures(self) -> tuple[str, ...]:
        return ("sm_90a",)

    def limits(self, problem: Conv2dProblem) -> str | None:
        p = problem
        if p.groups != 1:
            return f"{self.name} takes groups=1, not {p.groups}"
        if p.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {p.layout}"
        if p.dtype != "fp32":
            return f"{self.name} is for the accuracy of fp32; it does not take {p.dtype}"
        if p.shortcut_channels and (sentence := Windows.of_shortcut(p).unsupported(self.name)):
            return sentence
        return Windows.of(p).unsupported(self.name)

    def configs(self, problem: Conv2dProblem) -> tuple[Config, ...]:
        return tuple(sorted(CONFIGS, key=lambda config: config.cost(problem)))

    def estimate(self, problem: Conv2dProblem, config: Config) -> float:
        assert isinstance(config, SplitConfig)
        return machine.microseconds(config.cost(problem), problem.bytes, launches=2)

    def recipe(self, problem: Conv2dProblem, config: Config) -> Recipe:
        assert isinstance(config, SplitConfig)
        p = problem
        image = _image(Windows.of(p), "x")
        shortcut = _image(Windows.of_shortcut(p), "shortcut") if p.shortcut_channels else image
        pixels = image.windows.pixel_map(image.buffer, config.pixels)
        shortcut_pixels = shortcut.windows.pixel_map(shortcut.buffer, config.pixels)
        weights = _weight_map(p, config)
        constants: dict[str, Constant] = {
            "TILE_N": config.filters,
            "WARPGROUPS": config.warpgroups,
            "STAGES": config.stages,
            "BLOCKS_PER_SM": config.blocks_per_sm,
            "COPY_REGISTERS": config.registers[0],
            "PRODUCT_REGISTERS": config.registers[1],
            "FILTERS_ALIGNED": p.filters % config.filters == 0,
            "FILTERS_EVEN": p.filters % 2 == 0,
            "HAS_SHORTCUT": p.shortcut_channels > 0,
            **arguments.epilogue_constants(p),
        }
        program = Program.of("conv2d/hopper_split.cu", "conv2d_hopper_split", constants)
        attempts = tuple(
            KernelCall(
                program,
                (min(config.tiles(p), SMS * config.blocks_per_sm), 1, 1),
                (config.threads, 1, 1),
                (
                    pixels, shortcut_pixels, weights, Buffer("weight_scales"), Buffer("bias", optional=True),
                    Buffer("residual", optional=True), Buffer("y"), Buffer("magnitudes"), attempt,
                    config.work(p), arguments.shape(p), arguments.shortcut_shape(p),
                ),
                shared_bytes=config.shared_bytes,
                overlap=True,
            )
            for attempt in (0, 1)
        )  # fmt: skip
        images = dict.fromkeys((image, shortcut))
        return Recipe(
            (_split_weights(p), *(step for one in images for step in one.steps), *attempts),
            (
                Workspace("split_weight", p.filters * slabs(p) * ROW_BYTES),
                Workspace("weight_scales", blocks(p.filters, 2) * 16),
                Workspace("magnitudes", 8, zeroed=True),
                *(workspace for one in images for workspace in one.workspaces),
            ),
        )

    def tolerance(self, problem: Conv2dProblem, peer_error: float) -> float:
        """Halves have 22 bits between them; of a few products, all may be off by as much as that allows."""
        return max(super().tolerance(problem, peer_error), 2.0**-21)


def _weight_map(problem: Conv2dProblem, config: SplitConfig) -> TiledMap:
    """A slab of both halves of `config.filters` filters."""
    return TiledMap(
        Buffer("split_weight"),
        "fp16",
        (slabs(problem) * 2 * SLAB, problem.filters),
        (2 * SLAB, config.filters),
    )


# Predictions for 128to128_28_k3 at batch 256, 59 GFLOP.
RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    HopperSplit(
        "wgmma_split",
        "fp32 accuracy from fp16 halves on Hopper's own units: the copy engine brings x as it is, registers cut it "
        "into halves, three wgmma for one product, 32 channels at a time added up in fp32; a second launch redoes the "
        "work with another power of two where numbers are huge or tiny; an infinity becomes NaN",
        below="tensor_core_split",
        # Three products at 85% of 700 TFLOP/s make 200 TFLOP/s (295 us) against 59.6 (994 us).
        predicted_gain=3.4,
    ),
)
