"""fp32's accuracy from fp16 products on Hopper, in NHWC: numbers are cut into halves in registers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from escalade.device.program import Constant, Program, Type
from escalade.device.recipe import Buffer, Int64, Ints, KernelCall, Recipe, TiledMap, Workspace
from escalade.ops.base.card import Card
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.epilogue import UNPLACED
from escalade.ops.conv2d.rungs.job import Job, JobRung
from escalade.ops.conv2d.rungs.tma_windows import ROW_BYTES, Windows, shortcut_shape

SLAB = ROW_BYTES // 4
"""Channels of a stage: a row of x, or of both halves of the weights."""
COPIED = 4
"""Channels come in multiples of what 16 bytes hold; others are filled up."""
PACKING_THREADS = 256
PRODUCTS = 3
"""Products of halves that make one product."""
PRODUCT_RATE = 1600
"""Multiplications and additions of a multiprocessor in a cycle, dense fp16: the hardware's 2048 within its power."""
SHARED_RATE = 128.0
"""Bytes that a multiprocessor reads from or writes to shared memory in a cycle."""
SLAB_CYCLES = 450.0
"""Cycles from one slab of a warpgroup to the next at best: to cut it in halves and to add it up."""
TILE_CYCLES = 2500.0
"""Cycles to store a tile, and to fill the ring in front of the first."""


@dataclass(frozen=True)
class SplitConfig(Config):
    warpgroups: int
    """Warpgroups that multiply, with 64 pixels of a tile each."""
    filters: int
    """Filters of a tile."""
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
        """Registers of a thread that copies and of one that multiplies."""
        return {1: (32, 224), 2: (40, 232), 3: (32, 160)}[self.warpgroups]

    @property
    def stage_bytes(self) -> int:
        return (self.pixels + self.filters) * ROW_BYTES

    @property
    def shared_bytes(self) -> int:
        """Bytes of the stages and two barriers each."""
        return self.stages * (self.stage_bytes + 16)

    def tiles(self, job: Job) -> int:
        return ceil_div(job.windows.pixels, self.pixels) * ceil_div(job.filters, self.filters)

    def work(self, job: Job) -> Ints:
        """`Work` of kernels/conv2d/sm90_split.cu."""
        return Ints((job.windows.pixels, self.tiles(job), ceil_div(job.filters, self.filters), slabs(job)))

    def cost(self, job: Job, card: Card) -> float:
        """Cycles, as far as tensor cores, shared memory, L2, and what a warpgroup does besides multiplying decide."""
        products = PRODUCTS * self.pixels * self.filters * SLAB / PRODUCT_RATE
        columns = PRODUCTS * self.warpgroups * self.filters * SLAB * 2  # read anew by every warpgroup
        shared = (columns + self.pixels * ROW_BYTES + self.stage_bytes) / SHARED_RATE
        rounds = ceil_div(self.tiles(job), card.multiprocessors)
        together = min(self.blocks_per_sm, rounds)
        slab = max(
            products, shared, self.stage_bytes / card.rates.copies.tma_gradient, SLAB_CYCLES / together
        )
        return rounds * (slabs(job) * slab + TILE_CYCLES / together)


CONFIGS = (
    SplitConfig(2, 128, 6, 1),
    SplitConfig(3, 64, 6, 1),
    SplitConfig(2, 64, 8, 1),
    SplitConfig(1, 128, 4, 2),
    SplitConfig(1, 64, 6, 2),
)


def slabs(job: Job) -> int:
    """Slabs that a sum goes through."""
    return job.taps * ceil_div(job.windows.channels, SLAB) + ceil_div(job.shortcut_channels, SLAB)


def _filled_up(channels: int) -> int:
    return ceil_div(channels, COPIED) * COPIED


@dataclass(frozen=True)
class _Image:
    """What TMA reads: the tensor itself, or a copy with more channels."""

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
    element = Type("float")
    constants: dict[str, Constant] = {
        "Source": element,
        "Target": element,
        "CHANNELS_ALIGNED": False,
        "ROUNDED": False,
        "FACTOR": 1.0,
    }
    call = KernelCall(
        Program.of("conv2d/convert.cu", "conv2d_convert", constants),
        (ceil_div(pixels * channels // 4, 256), 1, 1),
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


def _split_weights(job: Job) -> KernelCall:
    return KernelCall(
        Program.of("conv2d/sm90_split_weights.cu", "conv2d_sm90_split_weights", {"THREADS": PACKING_THREADS}),
        (job.filters, 1, 1),
        (PACKING_THREADS, 1, 1),
        (
            Buffer("weight"), Buffer("shortcut_weight", optional=True), Buffer("split_weight"),
            Buffer("weight_scales"), job.windows.channels, job.taps, job.shortcut_channels,
        ),
        weights_only=True,
        overlap=True,
    )  # fmt: skip


@dataclass(frozen=True)
class WgmmaSplit(JobRung[SplitConfig]):
    launches: ClassVar[int] = 2

    @property
    def scales_together(self) -> bool:
        return True

    @property
    def takes_shortcut(self) -> bool:
        return True

    @property
    def takes_apart(self) -> tuple[str, ...]:
        return ("y",)

    def job_limits(self, job: Job) -> str | None:
        if job.y_pitch and job.epilogue.residual:
            return f"{self.name} reads a residual as y lies, dense"
        if job.windows.dtype != "fp32":
            return f"{self.name} is for the accuracy of fp32; it does not take {job.windows.dtype}"
        if job.shortcut and (sentence := job.shortcut.unsupported(self.name)):
            return sentence
        return job.windows.unsupported(self.name)

    def job_configs(self, job: Job) -> tuple[SplitConfig, ...]:
        return tuple(sorted(CONFIGS, key=lambda config: config.cost(job, self.card)))

    def job_clocks(self, job: Job, config: SplitConfig) -> float:
        return config.cost(job, self.card)

    def job_recipe(self, job: Job, config: SplitConfig) -> Recipe:
        image = _image(job.windows, "x")
        shortcut = _image(job.shortcut, "shortcut") if job.shortcut else image
        pixels = image.windows.pixel_map(image.buffer, config.pixels)
        shortcut_pixels = shortcut.windows.pixel_map(shortcut.buffer, config.pixels)
        weights = _weight_map(job, config)
        constants: dict[str, Constant] = {
            "TILE_N": config.filters,
            "WARPGROUPS": config.warpgroups,
            "STAGES": config.stages,
            "BLOCKS_PER_SM": config.blocks_per_sm,
            "COPY_REGISTERS": config.registers[0],
            "PRODUCT_REGISTERS": config.registers[1],
            "FILTERS_ALIGNED": job.filters % config.filters == 0,
            "FILTERS_EVEN": job.filters % 2 == 0,
            "HAS_SHORTCUT": job.shortcut is not None,
            "PLACED": job.placement != UNPLACED,
            "PITCHED": job.y_pitch > 0,
            "SAMPLED": job.any_magnitude,
            **job.epilogue.flags,
        }
        program = Program.of("conv2d/sm90_split.cu", "conv2d_sm90_split", constants)
        attempts = tuple(
            KernelCall(
                program,
                (min(config.tiles(job), self.card.multiprocessors * config.blocks_per_sm), 1, 1),
                (config.threads, 1, 1),
                (
                    pixels, shortcut_pixels, weights, Buffer("weight_scales"), Buffer("bias", optional=True),
                    Buffer("residual", optional=True), Buffer("y"), Buffer("magnitudes"), attempt,
                    image.buffer, Int64(image.elements // COPIED),
                    config.work(job), job.windows.shape(job.filters), shortcut_shape(job.shortcut), job.placement,
                    job.y_pitch,
                ),
                shared_bytes=config.shared_bytes,
                overlap=True,
            )
            for attempt in (0, 1)
        )  # fmt: skip
        images = dict.fromkeys((image, shortcut))
        return Recipe(
            (_split_weights(job), *(step for one in images for step in one.steps), *attempts),
            (
                Workspace("split_weight", job.filters * slabs(job) * ROW_BYTES),
                Workspace("weight_scales", ceil_div(job.filters, 2) * 16),
                Workspace("magnitudes", 8, zeroed=True),
                *(workspace for one in images for workspace in one.workspaces),
            ),
        )

    def tolerance(self, problem: Conv2dProblem, peer_error: float) -> float:
        """Halves have 22 bits between them; of a few products, all may be off by as much as that allows."""
        return max(super().tolerance(problem, peer_error), 2.0**-21)


def _weight_map(job: Job, config: SplitConfig) -> TiledMap:
    """A slab of both halves of `config.filters` filters."""
    return TiledMap(
        Buffer("split_weight"),
        "fp16",
        (slabs(job) * 2 * SLAB, job.filters),
        (2 * SLAB, config.filters),
    )


# Predictions for 128to128_28_k3 at batch 256, 59 GFLOP.
RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    WgmmaSplit(
        "wgmma_split",
        "fp32 accuracy from fp16 halves on Hopper's own units: TMA brings x as it is, registers cut it "
        "into halves, three wgmma for one product, 32 channels at a time added up in fp32; a second launch redoes the "
        "work with another power of two where numbers are huge or tiny; an infinity becomes NaN",
        below="tensor_core_split",
        # Three products at 85% of 700 TFLOP/s make 200 TFLOP/s (295 us) against 59.6 (994 us).
        predicted_gain=3.4,
    ),
)
