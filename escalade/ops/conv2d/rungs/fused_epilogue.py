"""Implicit GEMM by mma.sync in NHWC with a fused epilogue, in all dtypes and with fp32 accuracy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from escalade.device.architecture import WITH_FP8
from escalade.device.program import Macro, Program
from escalade.device.recipe import (
    Buffer,
    KernelCall,
    Recipe,
    ReleaseDependents,
    WeightsReady,
    Workspace,
)
from escalade.ops.base.rung import Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.mma_config import MmaConfig, Operands, best_first
from escalade.ops.conv2d.rungs.preparation import prepare
from escalade.ops.conv2d.rungs.rung import Conv2dRung, unsupported_reach
from escalade.ops.shared import activation

FUSED_CONFIGS = (
    MmaConfig(256, 128, 64, 4, 2, 4, 1),
    MmaConfig(256, 128, 64, 4, 2, 4, 1, through_l1=True),
    MmaConfig(256, 128, 128, 4, 2, 3, 1),
    MmaConfig(256, 128, 128, 4, 2, 4, 1),
    MmaConfig(128, 256, 64, 2, 4, 4, 1),
    MmaConfig(128, 256, 128, 2, 4, 3, 1),
    MmaConfig(128, 128, 128, 2, 2, 3, 2),
    MmaConfig(128, 128, 64, 2, 2, 4, 2),
    MmaConfig(128, 128, 64, 2, 2, 4, 2, through_l1=True),
    MmaConfig(256, 64, 64, 4, 1, 4, 2),
    MmaConfig(256, 64, 64, 4, 1, 3, 2, through_l1=True),
    MmaConfig(128, 64, 128, 2, 2, 3, 2),
    MmaConfig(128, 64, 64, 2, 2, 4, 3),
    MmaConfig(128, 64, 64, 2, 2, 4, 3, through_l1=True),
    MmaConfig(64, 128, 128, 2, 2, 3, 3),
    MmaConfig(128, 64, 128, 4, 2, 4, 2),
    MmaConfig(64, 64, 128, 2, 2, 4, 3),
    MmaConfig(64, 64, 128, 2, 4, 4, 2),
    MmaConfig(64, 64, 64, 2, 2, 5, 4),
    MmaConfig(64, 32, 128, 2, 2, 4, 4),
    MmaConfig(64, 32, 128, 4, 2, 4, 2),
    MmaConfig(32, 64, 128, 1, 4, 4, 4),
    MmaConfig(32, 64, 128, 2, 4, 4, 2),
    MmaConfig(32, 32, 128, 2, 2, 5, 4),
    MmaConfig(128, 32, 64, 4, 1, 4, 4),
    MmaConfig(128, 16, 128, 4, 1, 4, 4),
)

SPLIT_CONFIGS = (
    MmaConfig(128, 64, 128, 2, 2, 3, 2),
    MmaConfig(128, 128, 128, 2, 4, 3, 1),
    MmaConfig(64, 64, 128, 2, 2, 4, 3),
    MmaConfig(64, 32, 128, 2, 2, 4, 4),
    MmaConfig(128, 16, 128, 4, 1, 4, 4),
)


FP8_UNIT = 16
"""FP8 needs multiples of 16 bytes of channels and filters."""


@dataclass(frozen=True, kw_only=True)
class FusedEpilogue(Conv2dRung[MmaConfig]):
    candidates: tuple[MmaConfig, ...]
    layouts: tuple[str, ...] = ("nhwc",)
    products: int = 1
    """3 if operands are split into two TF32 parts each, for fp32 accuracy."""
    split_rounding = 2.0**-21  # two parts have 22 bits; of a few products, all may have the maximum error
    takes_groups = True
    supports_shortcut = True

    def refusal(self, problem: Conv2dProblem) -> str | None:
        here = self.card.architecture
        if problem.dtype == "fp8" and here is not None and here not in WITH_FP8:
            return f"{self.name} supports fp8 on {', '.join(WITH_FP8)}; this GPU is {here}"
        return super().refusal(problem)

    pitched_buffers = ("x", "y")

    def limits(self, problem: Conv2dProblem) -> str | None:
        if problem.x_pitch and Operands.stored(problem).padded:
            return f"{self.name} pads {problem.channels} channels by a copy, which needs a dense x"
        if problem.shortcut_channels and self.products > 1:
            # The second set of accumulators leaves no registers for it.
            return f"{self.name} supports no shortcut; this one has {problem.shortcut_channels} channels"
        if problem.dtype == "fp8" and (problem.channels % FP8_UNIT or problem.filters % FP8_UNIT):
            return (
                f"{self.name} takes multiples of {FP8_UNIT} channels and filters in fp8, not {problem.channels} and "
                f"{problem.filters}"
            )
        if problem.groups != 1 and (problem.dtype == "fp8" or problem.shortcut_channels):
            return f"{self.name} takes groups=1 in fp8 and with a shortcut, not {problem.groups}"
        p, copied = problem, Operands.stored(problem).copy_bytes // problem.element_bytes
        if p.shortcut_channels % copied:
            return f"{self.name} copies {copied} channels at once; the shortcut's {p.shortcut_channels} are no multiple"
        if p.shortcut_channels:
            shortcut = replace(
                p, channels=p.shortcut_channels, height=p.shortcut_size[0], width=p.shortcut_size[1],
                filter_height=1, filter_width=1, stride=(p.shortcut_stride,) * 2, padding=(0, 0), dilation=(1, 1),
            )  # fmt: skip
            if reason := unsupported_reach(shortcut, 256, 4):
                return reason
        return unsupported_reach(problem, 256, 4)

    def configs(self, problem: Conv2dProblem) -> tuple[MmaConfig, ...]:
        return best_first(self.candidates, Operands.stored(problem), self.card, may_split=True)

    def clocks(self, problem: Conv2dProblem, config: MmaConfig) -> float:
        return config.cost(Operands.stored(problem), self.card, self.products)

    def estimate(self, problem: Conv2dProblem, config: MmaConfig) -> float:
        """Add the launch that pads channels, if copies do not divide them."""
        operands = Operands.stored(problem)
        main = self.card.microseconds(self.clocks(problem, config), problem.traffic)
        if not operands.padded:
            return main
        pixels = problem.batch * problem.height * problem.width
        moved = pixels * (problem.channels + problem.groups * operands.channels) * operands.element_bytes
        return main + self.card.microseconds(0, moved)

    def recipe(self, problem: Conv2dProblem, config: MmaConfig) -> Recipe:
        operands = Operands.stored(problem)
        prepared = prepare(operands)
        tiles = config.grid(problem)[0]
        switches = operands.switches(config)
        if problem.x_pitch:
            switches["X_PITCH"] = Macro(str(problem.x_pitch))
        program = Program.of(
            "conv2d/fused_epilogue.cu",
            constants=switches | activation.constants_of(problem),
            problem=problem,
            operands=operands,
            config=config,
            products=self.products,
        )
        product = KernelCall(
            program,
            config.grid(problem),
            (config.threads, 1, 1),
            (
                prepared.x,
                prepared.weight,
                Buffer("shortcut", optional=True),
                Buffer("shortcut_weight", optional=True),
                Buffer("bias", optional=True),
                Buffer("scale", optional=True),
                Buffer("scales", optional=True),
                Buffer("residual", optional=True),
                Buffer("y"),
                Buffer("parts", optional=True),
                Buffer("tickets", optional=True),
                arguments.group_shape(prepared.shape),
                arguments.shortcut_shape(problem),
                WeightsReady((prepared.weight.name, "shortcut_weight")),
                ReleaseDependents(),
            ),
            shared_bytes=config.shared_bytes,
            overlap=True,
        )
        split_k: tuple[Workspace, ...] = ()
        if config.splits > 1:
            split_k = (
                Workspace("parts", config.splits * tiles * config.tile_m * config.tile_n * 4),
                Workspace("tickets", tiles * 4, zeroed=True),
            )
        return Recipe((*prepared.steps, product), (*prepared.workspaces, *split_k))


# Predictions for 128to128_28_k3 at batch 256, 59 GFLOP.
RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    FusedEpilogue(
        "fused_epilogue",
        "fused bias, residual and ReLU, staged for 16-byte stores; three to five stages, larger tiles, and fragments "
        "loaded one step ahead",
        below="tensor_core",
        # 430 TFLOP/s against 290; the fused epilogue saves another 0.05 ms.
        predicted_gain=1.5,
        candidates=FUSED_CONFIGS,
        dtypes=("fp16", "bf16", "tf32", "fp8"),
    ),
    FusedEpilogue(
        "tensor_core_split",
        "fp32 accuracy on tensor cores: operands split into two TF32 parts, three products, accumulated in fp32; an "
        "infinity becomes NaN",
        below="implicit_gemm",
        # A third of TF32's 200 TFLOP/s against 42.
        predicted_gain=1.5,
        candidates=SPLIT_CONFIGS,
        dtypes=("fp32",),
        products=3,
    ),
)
