"""Gradients of a small multilayer perceptron: the problem, and its reference in PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import ELEMENT_BYTES, STORAGE
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Tensors
from escalade.ops.mlp import problem as forward
from escalade.ops.mlp.problem import LAYERS_CODEC, Layer, MlpProblem


@dataclass(frozen=True)
class MlpBackwardProblem(Named):
    """Gradients of every parameter, and optionally of x, from x, the parameters and the gradient of y.

    Buffers are those of MlpProblem, and `grad_y` [batch][outputs] in `dtype`. The result is one flat y in fp32: the
    gradients of the parameters, summed over all rows, in the order of `sizes`, followed by that of x [batch][features].
    The forward pass is recomputed, not stored; sums, norms and activations are fp32.
    """

    NAME: ClassVar = NamePattern("mlp_backward", "{layers}_b{batch}{input_gradient?_dx}", layers=LAYERS_CODEC)

    batch: int
    layers: tuple[Layer, ...]
    input_gradient: bool = False
    dtype: str = "fp32"
    layout: str = "flat"

    def __post_init__(self) -> None:
        assert self.forward.batch == self.batch  # raises for chains that mlp does not support

    @cached_property
    def forward(self) -> MlpProblem:
        return MlpProblem(self.batch, self.layers, "y", self.dtype, self.layout)

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
        """Offset in y of each parameter's gradient, in elements."""
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
        """FLOPs of three products per layer: forward, weight gradient and input gradient.

        Omitted are the last forward product if no activation follows, and the first input gradient unless requested.
        """
        each = [2 * self.batch * layer.groups * layer.weight_elements for layer in self.layers]
        last_forward = 0 if self.layers[-1].activation != "none" else each[-1]
        return 3 * sum(each) - last_forward - (0 if self.input_gradient else each[0])

    @property
    def bytes(self) -> int:
        read = self.batch * (self.features + self.outputs) + self.parameter_elements
        return read * ELEMENT_BYTES[self.dtype] + 4 * self.result_elements

    @property
    def norm_gain(self) -> float:
        """Growth of errors in norms, which divide by a deviation: with few features it can be far below one."""
        return math.prod(1 + 8 / layer.features for layer in self.layers if layer.norm)

    @property
    def rounding(self) -> float:
        """Error of the running fp32 sums along the chain and over the rows."""
        chain = sum(2 + (layer.features + layer.outputs) / 6 for layer in self.layers)
        rows = self.batch * max(layer.groups for layer in self.layers)
        return 2.0**-24 * self.norm_gain * math.sqrt(chain + rows / 6)


# --- the reference


def random_inputs(problem: MlpBackwardProblem, draw: Draw) -> dict[str, torch.Tensor]:
    inputs = dict(forward.random_inputs(problem.forward, draw))
    inputs["grad_y"] = draw.next.stored(problem, problem.batch, problem.outputs)
    return inputs


def empty_output(problem: MlpBackwardProblem, device: torch.device) -> torch.Tensor:
    return torch.empty(problem.result_elements, dtype=torch.float32, device=device)


def compute(problem: MlpBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """Return the gradients by autograd in the dtype of the inputs, concatenated in at least fp32."""
    wanted = [*problem.sizes, *(("x",) if problem.input_gradient else ())]
    with torch.enable_grad():
        leaves = {
            name: tensor.detach().requires_grad_(name in wanted)
            for name, tensor in inputs.items()
            if name != "grad_y"
        }
        y = forward.compute(problem.forward, leaves)
        gradients = torch.autograd.grad(y, [leaves[name] for name in wanted], inputs["grad_y"])
    wide = torch.promote_types(inputs["x"].dtype, torch.float32)
    return torch.cat([gradient.to(wide).flatten() for gradient in gradients])


def peer(problem: MlpBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """Return PyTorch's result in the problem's dtype. Some CPUs accumulate 16-bit products in 16 bits: there it is
    fp32, rounded at the end."""
    if inputs["x"].is_cuda:
        return compute(problem, inputs)
    wide = compute(problem, {name: tensor.float() for name, tensor in inputs.items()})
    return wide.to(STORAGE[problem.dtype]).float()
