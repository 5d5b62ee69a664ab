"""One thread per element of dy, which adds to its window of dx. Not deterministic."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, Workspace
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Rung, ThreadsConfig
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.shared import activation

_SUMS = "sums"
_FP32_BYTES = 4


@dataclass(frozen=True)
class Atomics(Rung[Conv2dInputGradientProblem, ThreadsConfig]):
    def supports(self, problem: Conv2dInputGradientProblem) -> str | None:
        if reason := problem.beyond_dx(self.name):
            return reason
        return (
            None if problem.dtype == "fp32" else f"{self.name} takes fp32, not {problem.dtype}; direct does"
        )

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[ThreadsConfig, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: Conv2dInputGradientProblem, config: ThreadsConfig) -> Recipe:
        f, threads = problem.forward, config.threads
        add = KernelCall(
            Program.of("conv2d_input_gradient/atomics.cu", problem=problem),
            (blocks(f.output_elements, threads), 1, 1),
            (threads, 1, 1),
            (Buffer("gradient"), Buffer("weight"), Buffer(_SUMS), arguments.shape(f)),
            overlap=True,
        )  # fmt: skip
        finish = KernelCall(
            Program.of(
                "conv2d_input_gradient/atomics_finish.cu", constants=activation.constants_of(f), problem=problem
            ),
            (blocks(problem.elements, threads), 1, 1),
            (threads, 1, 1),
            (
                Buffer(_SUMS), Buffer(problem.aux, optional=True), Buffer("bias", optional=True), Buffer("y"),
                arguments.shape(f),
            ),
            overlap=True,
        )  # fmt: skip
        return Recipe((add, finish), (Workspace(_SUMS, _FP32_BYTES * problem.elements, zeroed=True),))


ATOMICS = Atomics(
    "atomics",
    "one thread per element of dy adds to every element of dx in its window; not deterministic",
    None,
    None,
)
