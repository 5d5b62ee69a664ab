"""Sixteen bytes of a row a thread, for windows side by side in NCHW."""

from __future__ import annotations

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.dtypes import full_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.max_pool2d_backward.problem import MaxPool2dBackwardProblem
from escalade.ops.max_pool2d_backward.rungs.arguments import constants
from escalade.ops.shared import pooling, windowed

MOST_ROWS = 8
"""Rows of a window: the code has no loop over them."""


def _threads(problem: MaxPool2dBackwardProblem) -> int:
    f = problem.forward
    return f.batch * f.channels * ceil_div(f.height, f.stride[0]) * (f.width // full_vector(f.dtype))


class Rows(Rung[MaxPool2dBackwardProblem]):
    def supports(self, problem: MaxPool2dBackwardProblem) -> str | None:
        f, vector = problem.forward, full_vector(problem.dtype)
        if f.layout != "nchw":
            return f"{self.name} takes layout nchw, not {f.layout}"
        overlap = any(kernel > stride for kernel, stride in zip(f.kernel, f.stride, strict=True))
        if f.padding != (0, 0) or f.ceil_mode or overlap:
            return f"{self.name} takes windows side by side, that lie inside the image"
        if f.dilation != (1, 1) or f.stride[0] > MOST_ROWS:
            return f"{self.name} takes windows without gaps, and strides of up to {MOST_ROWS} rows"
        if f.width % vector or vector % f.stride[1]:
            return f"{self.name} takes {vector} columns at a time, which strides divide and images are multiples of"
        if _threads(problem) >= 2**31:
            return f"{self.name} counts threads in 32 bits; there are too many for {problem.name}"
        return None

    def configs(self, problem: MaxPool2dBackwardProblem) -> tuple[Config, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: MaxPool2dBackwardProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        f = problem.forward
        width = {"VECTOR": full_vector(f.dtype)}
        call = KernelCall(
            Program.of(
                "max_pool2d_backward/rows.cu", "max_pool2d_backward_rows",
                windowed.constants(f) | constants(problem) | width,
            ),
            (blocks(_threads(problem), config.threads), 1, 1),
            (config.threads, 1, 1),
            (
                Buffer("gradient"), Buffer("x", optional=True), Buffer("places", optional=True), Buffer("y"),
                pooling.shape(f),
            ),
            overlap=True,
        )  # fmt: skip
        return Recipe((call,))


# Predictions for 256 channels of 32 x 32, 2 x 2 windows with stride 2, batch 256, fp16: 302 MB, 71 us; 185 MB, 43 us by
# stored places.
ROWS = Rows(
    "rows",
    "16 bytes of a row a thread, for windows side by side in NCHW",
    below=("gathered", "stored"),
    # 67 million threads of 150 instructions (350 us) against 50 us: a tenth more than the rate of memory.
    predicted_gain=7.0,
)
