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
from escalade.ops.base.accuracy import tf32_tolerance
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


def unsupported(
    rung: str, dtypes: tuple[str, ...], problem: Conv2dProblem, groups: bool = False
) -> str | None:
    """Return why a tensor-core rung for NHWC does not support the problem; `groups` if it supports several."""
    if problem.groups != 1 and not groups:
        return f"{rung} takes groups=1, not {problem.groups}"
    if problem.layout != "nhwc":
        return f"{rung} takes layout nhwc, not {problem.layout}"
    if problem.dtype not in dtypes:
        return f"{rung} takes {', '.join(dtypes)}, not {problem.dtype}"
    return unsupported_reach(problem, 256, 4)


def product_tolerance(problem: Conv2dProblem, tolerance: float) -> float:
    """Return the tolerance for tensor-core products: in TF32 at least its own error."""
    products = problem.output_elements * problem.group_channels * problem.taps
    return tf32_tolerance(problem.dtype, products, tolerance)


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
    half_storage: bool = False

    def limits(self, problem: Conv2dProblem) -> str | None:
        return unsupported(self.name, ("tf32",) if self.half_storage else ("fp16", "bf16", "tf32"), problem)

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

    def tolerance(self, problem: Conv2dProblem, peer_error: float) -> float:
        """fp16 has as many mantissa bits as TF32, so half storage has TF32's error within its range (6e-5 to 65504)."""
        return product_tolerance(problem, super().tolerance(problem, peer_error))

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
        half_storage=True,
    ),
)
