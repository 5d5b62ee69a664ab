"""Convolution as a matrix product on CUDA cores: with the im2col matrix in memory, or only in shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, Workspace
from escalade.ops.base.card import Card
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.rung import Conv2dRung, unsupported_reach
from escalade.ops.shared import activation


@dataclass(frozen=True)
class Im2colConfig(Config):
    workspace_mib: int = 2048
    """Limit for the unrolled matrix and the product; the batch is processed in chunks that fit."""


@dataclass(frozen=True)
class Im2colGemm(Conv2dRung[Im2colConfig]):
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")
    layouts: tuple[str, ...] = ("nchw",)

    def configs(self, problem: Conv2dProblem) -> tuple[Im2colConfig, ...]:
        return tuple(Im2colConfig(size) for size in (2048, 256, 32))

    def recipe(self, problem: Conv2dProblem, config: Im2colConfig) -> Recipe:
        p = problem
        depth, image_pixels = p.channels * p.taps, p.output_height * p.output_width
        image_bytes = image_pixels * (depth * p.element_bytes + p.filters * 4)
        chunk = min(p.batch, max(1, config.workspace_mib * 2**20 // image_bytes))
        steps: list[KernelCall] = []
        for first in range(0, p.batch, chunk):
            steps += _im2col_steps(replace(p, batch=min(chunk, p.batch - first)), first)
        pixels = chunk * image_pixels
        return Recipe(
            tuple(steps),
            (
                Workspace("columns", pixels * depth * p.element_bytes),
                Workspace("product", pixels * p.filters * 4),
            ),
        )


def _im2col_steps(chunk: Conv2dProblem, first_image: int) -> list[KernelCall]:
    """Return the three launches for `chunk`, which starts at image `first_image`."""
    p = chunk
    depth = p.channels * p.taps
    image_bytes = p.channels * p.height * p.width * p.element_bytes
    offset = first_image * p.filters * p.output_height * p.output_width * p.element_bytes
    im2col = KernelCall(
        Program.of("conv2d/gemm_im2col.cu", problem=p),
        (ceil_div(p.output_pixels * p.channels, 256), 1, 1),
        (256, 1, 1),
        (Buffer("x", first_image * image_bytes), Buffer("columns"), arguments.shape(p)),
    )
    gemm = KernelCall(
        Program.of("conv2d/gemm.cu", problem=p),
        (ceil_div(p.filters, 64) * ceil_div(p.output_pixels, 64), 1, 1),
        (256, 1, 1),
        (Buffer("weight"), Buffer("columns"), Buffer("product"), p.filters, p.output_pixels, depth),
    )
    permute = KernelCall(
        Program.of("conv2d/gemm_permute.cu", constants=activation.constants_of(p), problem=p),
        (ceil_div(p.output_elements, 256), 1, 1),
        (256, 1, 1),
        (
            Buffer("product"),
            Buffer("bias", optional=True),
            Buffer("residual", offset, optional=True),
            Buffer("y", offset),
            arguments.shape(p),
        ),
    )
    return [im2col, gemm, permute]


MULTIPLY_ADDS = 88
"""Multiply-adds per clock and SM: ladders measured 42 of 60 TFLOP/s, where the hardware has 128."""


@dataclass(frozen=True)
class ImplicitGemmConfig(Config):
    tile_m: int
    """Output pixels per CTA."""
    tile_n: int
    """Filters per CTA."""
    tile_k: int
    thread_m: int
    thread_n: int
    stages: int
    """Stages of the copy pipeline."""
    blocks_per_sm: int
    """Target occupancy, which limits registers per thread."""

    @property
    def threads(self) -> int:
        return self.tile_m // self.thread_m * (self.tile_n // self.thread_n)

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.tile_k * (self.tile_m + 4 + self.tile_n + 4) * 4

    @property
    def efficiency(self) -> float:
        """Multiply-adds per float read from shared memory, relative to 8x8 per thread."""
        return min(1.0, self.thread_m * self.thread_n / (self.thread_m + self.thread_n) / 4)

    def valid(self, problem: Conv2dProblem) -> bool:
        rows_at_once = self.threads // self.tile_k
        gathers = (
            self.tile_m % rows_at_once == 0
            if problem.layout == "nhwc"
            else self.threads % self.tile_m == 0 and self.tile_k % (self.threads // self.tile_m) == 0
        )
        taps_bytes = 16 * problem.taps if problem.layout == "nchw" else 16
        return gathers and self.tile_n % rows_at_once == 0 and self.shared_bytes + taps_bytes <= 48 * 1024

    def cost(self, problem: Conv2dProblem, card: Card) -> float:
        """Multiply-adds of the busiest SM, weighted by its rate."""
        count = ceil_div(problem.output_pixels, self.tile_m) * ceil_div(problem.filters, self.tile_n)
        rounds = ceil_div(count, card.multiprocessors)
        warps = min(rounds, self.blocks_per_sm) * self.threads // 32
        return rounds * self.tile_m * self.tile_n / (self.efficiency * min(1.0, 0.2 + warps / 20))


IMPLICIT_CONFIGS = (
    ImplicitGemmConfig(128, 128, 8, 8, 8, 4, 2),
    ImplicitGemmConfig(128, 128, 8, 8, 8, 3, 2),
    ImplicitGemmConfig(128, 128, 16, 8, 8, 2, 2),
    ImplicitGemmConfig(128, 256, 8, 8, 16, 3, 1),
    ImplicitGemmConfig(256, 128, 8, 16, 8, 3, 1),
    ImplicitGemmConfig(128, 64, 8, 8, 8, 4, 4),
    ImplicitGemmConfig(128, 64, 16, 8, 8, 3, 3),
    ImplicitGemmConfig(64, 64, 8, 8, 8, 4, 7),
    ImplicitGemmConfig(64, 64, 16, 8, 8, 4, 5),
    ImplicitGemmConfig(64, 64, 16, 4, 4, 4, 3),
    ImplicitGemmConfig(128, 32, 8, 8, 4, 4, 5),
    ImplicitGemmConfig(32, 32, 16, 4, 4, 4, 8),
    ImplicitGemmConfig(128, 16, 16, 4, 4, 3, 6),
)


@dataclass(frozen=True)
class ImplicitGemm(Conv2dRung[ImplicitGemmConfig]):
    dtypes: tuple[str, ...] = ("fp32",)

    def limits(self, problem: Conv2dProblem) -> str | None:
        if not self.configs(problem):
            return f"{self.name} keeps a table of taps in shared memory; {problem.taps} taps do not fit"
        return unsupported_reach(problem, max(c.tile_m for c in IMPLICIT_CONFIGS), 1)

    def configs(self, problem: Conv2dProblem) -> tuple[ImplicitGemmConfig, ...]:
        valid = (config for config in IMPLICIT_CONFIGS if config.valid(problem))
        return tuple(sorted(valid, key=lambda config: config.cost(problem, self.card)))

    def clocks(self, problem: Conv2dProblem, config: ImplicitGemmConfig) -> float:
        return config.cost(problem, self.card) * problem.depth / MULTIPLY_ADDS

    def least(self, problem: Conv2dProblem) -> float:
        return problem.flops / self.card.rates.fp32

    def recipe(self, problem: Conv2dProblem, config: ImplicitGemmConfig) -> Recipe:
        p, nhwc = problem, problem.layout == "nhwc"
        call = KernelCall(
            Program.of(
                "conv2d/implicit_gemm.cu",
                constants=activation.constants_of(p),
                problem=p,
                config=config,
                nhwc=nhwc,
                output_aligned=(p.filters if nhwc else p.output_height * p.output_width) % 4 == 0,
            ),
            (ceil_div(p.output_pixels, config.tile_m) * ceil_div(p.filters, config.tile_n), 1, 1),
            (config.threads, 1, 1),
            (*arguments.tensors(), arguments.shape(p)),
            overlap=True,
        )
        return Recipe((call,))


RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Im2colGemm(
        "im2col_gemm",
        "the convolution unrolled into a matrix in memory, a textbook matrix product, and a permutation: three kernels",
        below=None,
        predicted_gain=None,
    ),
    ImplicitGemm(
        "implicit_gemm",
        "all three fused: the im2col matrix exists only as tiles in shared memory, and each thread accumulates 8x8 "
        "outputs in registers while the next tiles are copied",
        below="im2col_gemm",
        # 128to128_28_k3 at batch 256: im2col writes and reads 0.9 GB twice (0.6 ms), and the textbook product runs at
        # about 15 TFLOP/s (4 ms); this one should reach 42 (1.4 ms).
        predicted_gain=3.3,
    ),
)
