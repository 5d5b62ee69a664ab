"""Layer normalisation of rows that lie side by side."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import KernelCall, Recipe
from escalade.ops.base.rung import Config, Rung
from escalade.ops.layer_norm.problem import LayerNormProblem
from escalade.ops.layer_norm.rungs.per_row import arguments, constants
from escalade.ops.shared import columns


@dataclass(frozen=True)
class Columns(Rung[LayerNormProblem]):
    def supports(self, problem: LayerNormProblem) -> str | None:
        return columns.refusal(self.name, problem.rows, problem.features, problem.inner)

    def configs(self, problem: LayerNormProblem) -> tuple[Config, ...]:
        p = problem
        return columns.configs(p.rows, p.features, p.inner, p.dtype, self.card)

    def recipe(self, problem: LayerNormProblem, config: Config) -> Recipe:
        assert isinstance(config, columns.ColumnsConfig)
        p = problem
        call = KernelCall(
            Program.of(
                "layer_norm/columns.cu",
                "layer_norm_columns",
                {**constants(p), **config.constants(p.features)},
            ),
            (config.grid(p.rows), 1, 1),
            (32 * config.parts, 1, 1),
            (*arguments(p), p.inner),
            overlap=True,
        )
        return Recipe((call,))


# Predictions are for 64 channels of 64 x 64 pixels, batch 64, fp16: 34 MB in, 34 MB out, 16 us at the rate of a copy.
COLUMNS = Columns(
    "columns",
    "neighbouring rows a lane, whose features the warps of a block share and hold in registers: read once",
    below=None,
    predicted_gain=None,
)
