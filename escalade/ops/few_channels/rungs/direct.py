"""Convolution on CUDA cores: runs of pixels in registers, loaded from global memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from escalade.device.program import Program
from escalade.device.recipe import Buffer, ConstantCopy, KernelCall, Recipe
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.few_channels.problem import FewChannelsProblem
from escalade.ops.few_channels.rungs import arguments
from escalade.ops.shared import activation

_CONSTANT_BYTES = 64 * 1024
_STATIC_SHARED_BYTES = 48 * 1024


@dataclass(frozen=True)
class DirectConfig(Config):
    run: int
    """Adjacent pixels per thread."""
    filters: int
    """Filters per thread."""
    weights: str = "shared"
    """Memory of the weights: `shared` or `constant`."""
    threads: int = 128


class Direct(Rung[FewChannelsProblem, DirectConfig]):
    def supports(self, problem: FewChannelsProblem) -> str | None:
        if not self.configs(problem):
            return f"{self.name} keeps a filter in {_STATIC_SHARED_BYTES} bytes, too few here; use `matrix_unroll`"
        return arguments.too_wide(self.name, problem)

    def configs(self, problem: FewChannelsProblem) -> tuple[DirectConfig, ...]:
        p = problem
        each = 4 * p.channels * p.taps
        shared = [
            DirectConfig(run, filters)
            for run, filters in ((8, 4), (16, 4), (8, 8), (4, 8), (16, 2), (16, 1))
            if filters < 2 * p.filters and filters * each <= _STATIC_SHARED_BYTES
        ]
        constant = [replace(config, weights="constant") for config in shared[:2]]
        fits = p.weight_elements * ELEMENT_BYTES[p.storage] <= _CONSTANT_BYTES
        return (*shared, *constant) if fits else tuple(shared)

    def recipe(self, problem: FewChannelsProblem, config: DirectConfig) -> Recipe:
        p = problem
        constant = config.weights == "constant"
        finished = p if p.pool == 1 else replace(p, relu=False, activation="")
        program = Program.of(
            "few_channels/direct.cu",
            constants=activation.constants_of(finished),
            problem=finished,
            config=config,
            constant_weights=p.weight_elements if constant else 0,
        )
        runs = p.batch * p.conv_height * ceil_div(p.conv_width, config.run)
        call = KernelCall(
            program,
            (blocks(runs, config.threads), ceil_div(p.filters, config.filters), 1),
            (config.threads, 1, 1),
            (*arguments.tensors(Buffer("y" if p.pool == 1 else "unfinished")), arguments.shape(p)),
            overlap=True,
        )
        copies = (
            (
                ConstantCopy(
                    program, "constant_weights", Buffer("weight"),
                    p.weight_elements * ELEMENT_BYTES[p.storage],
                ),
            )
            if constant
            else ()
        )  # fmt: skip
        if p.pool == 1:
            return Recipe((*copies, call))
        return Recipe((*copies, call, arguments.finish(p)), (arguments.unfinished(p),))


RUNGS: tuple[Rung[FewChannelsProblem], ...] = (
    Direct(
        "direct",
        "one run of pixels and a few filters per thread, with a sliding row of x in registers",
        None,
        None,
    ),
)
