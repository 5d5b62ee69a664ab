"""Implicit GEMM by mma.sync in NHWC: plain, and with half storage."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import (
    Buffer,
    Int64,
    KernelCall,
    Recipe,
)
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.launch import kernel_call
from escalade.ops.base.rung import Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.mma_config import MmaConfig, Operands, best_first
from escalade.ops.conv2d.rungs.preparation import prepare
from escalade.ops.conv2d.rungs.rung import Conv2dRung, unsupported_reach
from escalade.ops.shared import activation

PLAIN_CONFIGS = (
    MmaConfig(128, 128, 64, 2, 2, 2, 2),
    MmaConfig(128, 64, 64, 2, 2, 2, 2),
    MmaConfig(64, 64, 64, 2, 2, 2, 4),
    MmaConfig(64, 64, 128, 2, 2, 2, 4),
    MmaConfig(64, 32, 64, 4, 1, 2, 4),
    MmaConfig(64, 16, 128, 4, 1, 2, 4),
)


def _epilogue(problem: Conv2dProblem) -> KernelCall:
    """Return the launch that finishes accumulators stored in y."""
    widest = 16 // problem.element_bytes
    vector = next(width for width in (widest, 4, 2, 1) if problem.filters % width == 0)
    return kernel_call(
        Program.of(
            "conv2d/tensor_core_epilogue.cu",
            constants=activation.constants_of(problem),
            problem=problem,
            vector=vector,
        ),
        ceil_div(problem.output_elements // vector, 256),
        256,
        Buffer("bias", optional=True),
        Buffer("residual", optional=True),
        Buffer("y"),
        problem.filters,
        Int64(problem.output_elements),
    )


@dataclass(frozen=True)
class TensorCore(Conv2dRung[MmaConfig]):
    dtypes: tuple[str, ...] = ("fp16", "bf16", "tf32")
    layouts: tuple[str, ...] = ("nhwc",)
    half_storage: bool = False
    """True to store TF32 operands as fp16, which has as many mantissa bits, so the same error, from 6e-5 to 65504."""
    split_rounding = 0.0  # fp32 is not supported

    def limits(self, problem: Conv2dProblem) -> str | None:
        return unsupported_reach(problem, 256, 4)

    def configs(self, problem: Conv2dProblem) -> tuple[MmaConfig, ...]:
        return best_first(PLAIN_CONFIGS, self._operands(problem), self.card, may_split=False)

    def recipe(self, problem: Conv2dProblem, config: MmaConfig) -> Recipe:
        operands = self._operands(problem)
        prepared = prepare(operands)
        product = KernelCall(
            Program.of("conv2d/tensor_core.cu", problem=problem, operands=operands, config=config),
            config.grid(problem),
            (config.threads, 1, 1),
            (prepared.x, prepared.weight, Buffer("y"), arguments.shape(prepared.shape)),
            shared_bytes=config.stages * (config.tile_m + config.tile_n) * config.row_bytes,
        )
        has_epilogue = problem.bias or problem.residual or problem.relu or problem.activation
        epilogue = (_epilogue(problem),) if has_epilogue else ()
        return Recipe((*prepared.steps, product, *epilogue), prepared.workspaces)

    def _operands(self, problem: Conv2dProblem) -> Operands:
        return Operands.halves(problem) if self.half_storage else Operands.stored(problem)


# Predictions for 128to128_28_k3 at batch 256, 59 GFLOP.
RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    TensorCore(
        "tensor_core",
        "the implicit GEMM by mma.sync: fp16, bf16 or TF32 products with fp32 sums, fed by ldmatrix from two swizzled "
        "buffers that cp.async fills; bias, residual and ReLU in a second kernel",
        below="implicit_gemm",
        # fp16 at 290 TFLOP/s (0.2 ms) against fp32 on CUDA cores at 42 (1.4 ms).
        predicted_gain=7.0,
    ),
    TensorCore(
        "half_storage",
        "fp32 tensors converted once to fp16 inside the pipeline: half the bytes and twice the rate of TF32 products; "
        "values beyond 65504 overflow",
        below="tensor_core",
        # 0.2 ms of products and 0.05 ms of conversion against TF32 at 140 TFLOP/s (0.42 ms).
        predicted_gain=1.7,
        dtypes=("tf32",),
        half_storage=True,
    ),
)
