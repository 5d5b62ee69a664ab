"""im2col in memory, then a matrix product on CUDA cores."""

from __future__ import annotations

from dataclasses import dataclass, replace

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, Workspace
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.rung import Conv2dRung
from escalade.ops.shared import activation


@dataclass(frozen=True)
class Im2colConfig(Config):
    workspace_mib: int = 2048
    """Limit for the unrolled matrix and the product; the batch is processed in chunks that fit."""


@dataclass(frozen=True)
class Im2colGemm(Conv2dRung[Im2colConfig]):
    def limits(self, problem: Conv2dProblem) -> str | None:
        if problem.groups != 1:
            return f"{self.name} takes groups=1, not {problem.groups}"
        if problem.layout != "nchw":
            return f"{self.name} takes layout nchw, not {problem.layout}"
        if problem.dtype == "tf32":
            return f"{self.name} multiplies on CUDA cores; it takes fp32, fp16 and bf16"
        return None

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


RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Im2colGemm(
        "im2col_gemm",
        "the convolution unrolled into a matrix in memory, a textbook matrix product, and a permutation: three kernels",
        below=None,
        predicted_gain=None,
    ),
)
