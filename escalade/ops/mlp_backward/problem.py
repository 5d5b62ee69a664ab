"""The gradients of a small multilayer perceptron as a problem."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

from escalade.ops.base.checks import match_name
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.mlp.problem import Layer, MlpProblem, parse_layers, spell_layers

_NAME = re.compile(r"(?P<layers>.+?)_b(?P<batch>\d+)(?P<input>_dx)?")


@dataclass(frozen=True)
class MlpBackwardProblem:
    """The gradients of every parameter, and of x if asked for, from x, the parameters and the gradient of y.

    Buffers are those of MlpProblem, and `grad_y` [batch][outputs] in `dtype`. The result is one flat y in fp32: the
    gradients of the parameters, summed over all rows, one after another in the order of `sizes`; behind them that of x
    [batch][features]. The forward pass is done again rather than stored; sums, norms and activations are fp32.
    """

    batch: int
    layers: tuple[Layer, ...]
    input_gradient: bool = False
    dtype: str = "fp32"
    layout: str = "flat"

    def __post_init__(self) -> None:
        assert self.forward.batch == self.batch  # made here, so that what mlp refuses is refused at once

    @staticmethod
    def parse(name: str, dtype: str = "fp32") -> MlpBackwardProblem:
        """The problem of a name such as `5x64n-64bg_320-32_b512_dx`."""
        found = match_name(
            _NAME,
            name,
            "mlp_backward; the form is 5x64n-64bg_320-32_b512: layers and _b batch as in mlp, then _dx for the "
            "gradient of x",
        )
        return MlpBackwardProblem(
            int(found["batch"]), parse_layers(found["layers"]), found["input"] is not None, dtype
        )

    @cached_property
    def forward(self) -> MlpProblem:
        """What it is the gradient of."""
        return MlpProblem(self.batch, self.layers, "y", self.dtype, self.layout)

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (the dtype stands apart)."""
        return f"{spell_layers(self.layers)}_b{self.batch}{'_dx' if self.input_gradient else ''}"

    @property
    def features(self) -> int:
        return self.forward.features

    @property
    def outputs(self) -> int:
        return self.forward.outputs

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        return self.forward.sizes

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where in y the gradient of each parameter begins, in elements."""
        found, at = {}, 0
        for name, size in self.sizes.items():
            found[name] = at
            at += math.prod(size)
        return found

    @cached_property
    def parameter_elements(self) -> int:
        return self.forward.parameter_elements

    @property
    def result_elements(self) -> int:
        return self.parameter_elements + (self.batch * self.features if self.input_gradient else 0)

    @property
    def flops(self) -> int:
        """Operations of three products a layer: forwards, the weights' gradient, and the input's.

        Left out are the last product forwards, if no activation follows, and the first input's, if nobody asks.
        """
        each = [2 * self.batch * layer.groups * layer.weight_elements for layer in self.layers]
        last_forward = 0 if self.layers[-1].activation != "none" else each[-1]
        return 3 * sum(each) - last_forward - (0 if self.input_gradient else each[0])

    @property
    def bytes(self) -> int:
        read = self.batch * (self.features + self.outputs) + self.parameter_elements
        return read * ELEMENT_BYTES[self.dtype] + 4 * self.result_elements

    @property
    def rounding(self) -> float:
        """Sums of n independent terms, each addition off by up to 2^-24 of it: random walks, down the chain and over
        the rows. A norm divides by a deviation, which is far below one now and then where it is that of few features.
        """
        chain = sum(2 + (layer.features + layer.outputs) / 6 for layer in self.layers)
        rows = self.batch * max(layer.groups for layer in self.layers)
        norms = math.prod(1 + 8 / layer.features for layer in self.layers if layer.norm)
        return 2.0**-24 * norms * math.sqrt(chain + rows / 6)
