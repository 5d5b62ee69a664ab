"""Small multilayer perceptron, a chain of layers applied to each row: the problem, and its reference in PyTorch."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import match_name, require, require_at_least
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, STORAGE
from escalade.ops.base.naming import Codec, Named, NamePattern
from escalade.ops.base.operation import Tensors
from escalade.ops.base.switches import precision
from escalade.ops.calling.library import require_alike

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh")
OUTPUTS = ("y", "error")
EPSILON = 1e-5
MOST_FEATURES = 16384
"""Largest row width anywhere in the chain."""

_LETTERS = {"": "none", "r": "relu", "g": "gelu", "t": "gelu_tanh"}
_SPELLED = {activation: letter for letter, activation in _LETTERS.items()}
_LAYER = re.compile(
    r"((?P<groups>\d+)x)?(?P<features>\d+)(?P<norm>n(?P<epsilon>\d+e-\d+)?)?-(?P<outputs>\d+)(?P<bias>b)?(?P<act>[rgt])?"
)


@dataclass(frozen=True)
class Layer:
    """y = activation(norm(x) weight^T + bias), applied to each of `groups` equal parts of a row with the same weights.

    `norm` is LayerNorm over the features of a group, with its own weight and bias.
    """

    features: int
    """Input features per group."""
    outputs: int
    """Output features per group."""
    groups: int = 1
    norm: bool = False
    bias: bool = True
    activation: str = "none"
    epsilon: float = EPSILON

    def __post_init__(self) -> None:
        require("mlp", "activation", self.activation, ACTIVATIONS)
        require_at_least(1, {"features": self.features, "outputs": self.outputs, "groups": self.groups})

    @property
    def width_in(self) -> int:
        return self.groups * self.features

    @property
    def width_out(self) -> int:
        return self.groups * self.outputs

    @property
    def weight_elements(self) -> int:
        return self.features * self.outputs

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of its tensors, in operator order."""
        norm = ("norm_weight", "norm_bias") if self.norm else ()
        return (*norm, "weight", *(("bias",) if self.bias else ()))

    def size(self, parameter: str) -> tuple[int, ...]:
        if parameter == "weight":
            return (self.outputs, self.features)
        return (self.outputs,) if parameter == "bias" else (self.features,)

    def __str__(self) -> str:
        groups = f"{self.groups}x" if self.groups > 1 else ""
        epsilon = "" if self.epsilon == EPSILON else f"{self.epsilon:.0e}".replace("e-0", "e-")
        norm = f"n{epsilon}" if self.norm else ""
        bias = "b" if self.bias else ""
        return f"{groups}{self.features}{norm}-{self.outputs}{bias}{_SPELLED[self.activation]}"


def spell_layers(layers: Sequence[Layer]) -> str:
    return "_".join(map(str, layers))


@lru_cache(maxsize=1024)  # the operator receives its layers as a string in every call
def parse_layers(text: str) -> tuple[Layer, ...]:
    return tuple(_parse_layer(part) for part in text.split("_"))


def _parse_layer(text: str) -> Layer:
    found = match_name(_LAYER, text, "layer of mlp; the form is 5x64n-64bg, 320-32 and the like")
    return Layer(
        int(found["features"]),
        int(found["outputs"]),
        int(found["groups"] or 1),
        found["norm"] is not None,
        found["bias"] is not None,
        _LETTERS[found["act"] or ""],
        float(found["epsilon"]) if found["epsilon"] else EPSILON,
    )


LAYERS_CODEC = Codec(".+?", parse_layers, spell_layers)


@dataclass(frozen=True)
class MlpProblem(Named):
    """y = last layer(… first layer(x)), for every row of x.

    x is [batch][features]; the tensors of layer i are buffers `norm_weight<i>`, `norm_bias<i>` [features of a group],
    `weight<i>` [outputs][features] and `bias<i>` [outputs], all stored as `dtype`. Sums, norms and activations are
    fp32. With output `error`, y [batch] in fp32 is the mean squared difference between each row and its reconstruction,
    which is not written.
    """

    NAME: ClassVar = NamePattern("mlp", "{layers}_b{batch}[_{output:error}]", layers=LAYERS_CODEC)

    batch: int
    layers: tuple[Layer, ...]
    output: str = "y"
    dtype: str = "fp32"
    layout: str = "flat"

    def __post_init__(self) -> None:
        require("mlp", "dtype", self.dtype, DTYPES)
        require("mlp", "output", self.output, OUTPUTS)
        require("mlp", "layout", self.layout, ("flat",))
        require_at_least(1, {"batch": self.batch, "layers": len(self.layers)})
        for one, other in itertools.pairwise(self.layers):
            if one.width_out != other.width_in:
                raise UnsupportedError(
                    f"layer {one} has {one.width_out} outputs, but layer {other} takes {other.width_in} features"
                )
        if self.output == "error" and self.layers[-1].width_out != self.features:
            raise UnsupportedError(
                f"output 'error' needs as many outputs as features; this chain has {self.outputs} and {self.features}"
            )
        widest = max(max(layer.width_in, layer.width_out) for layer in self.layers)
        if widest > MOST_FEATURES:
            raise UnsupportedError(f"{widest} features: mlp takes up to {MOST_FEATURES} in any layer")

    @property
    def features(self) -> int:
        """Input features per row."""
        return self.layers[0].width_in

    @property
    def outputs(self) -> int:
        """Output features per row, before the error is computed."""
        return self.layers[-1].width_out

    @cached_property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Parameter sizes by buffer name, in operator order."""
        return {
            f"{parameter}{number}": layer.size(parameter)
            for number, layer in enumerate(self.layers)
            for parameter in layer.parameters
        }

    @property
    def parameter_elements(self) -> int:
        return sum(math.prod(size) for size in self.sizes.values())

    @property
    def flops(self) -> int:
        return 2 * self.batch * sum(layer.groups * layer.weight_elements for layer in self.layers)

    @property
    def bytes(self) -> int:
        result = self.batch * (4 if self.output == "error" else self.outputs * ELEMENT_BYTES[self.dtype])
        return ELEMENT_BYTES[self.dtype] * (self.batch * self.features + self.parameter_elements) + result

    @property
    def rounding(self) -> float:
        """Error of the running fp32 sums of all layers, as in `Conv2dProblem.rounding`."""
        return 2.0**-24 * math.sqrt(sum(1 + layer.features / 6 for layer in self.layers))


def spelled(layers: Sequence[Layer] | str) -> str:
    """Return the layers as a string, as the operator takes them."""
    if isinstance(layers, str):
        return layers
    sequence: Any = layers
    if not isinstance(sequence, Sequence) or not all(isinstance(each, Layer) for each in sequence):
        raise UnsupportedError(
            f"layers {layers!r}: pass a sequence of Layer, or a string such as 5x64n-64bg_320-32"
        )
    return _spelled(tuple(layers))


@lru_cache(maxsize=1024)
def _spelled(layers: tuple[Layer, ...]) -> str:
    text = spell_layers(layers)
    if parse_layers(text) != layers:
        raise UnsupportedError(f"layers {text}: epsilon must have a single digit, as in 1e-5")
    return text


# --- problems


AUTOENCODER = parse_layers("5x64n-64bg_320-32_32n-32bg_32-320_5x64-64b")
"""The spectral autoencoder of 5 frames of 64 bands."""


# --- the reference


Round = Callable[[torch.Tensor], torch.Tensor]

ACTIVATE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def check_parameters(row: Any, layers: str, x: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
    """Raise unless x and the parameters are those of a problem of one row."""
    if x.shape[-1] != row.features:
        raise UnsupportedError(f"x has rows of {x.shape[-1]}, but {layers} takes {row.features}")
    if len(parameters) != len(row.sizes):
        raise UnsupportedError(
            f"{len(parameters)} parameters, but {layers} takes {len(row.sizes)}: {', '.join(row.sizes)}"
        )
    named = dict(zip(row.sizes, parameters, strict=True))
    require_alike(x, dict(named))
    for name, size in row.sizes.items():
        if named[name].shape != size:
            raise UnsupportedError(
                f"{name} has shape {tuple(named[name].shape)}; for {layers} it must be {size}"
            )


def random_inputs(problem: MlpProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Return normal deviates, weights scaled to keep every layer's result of order one."""

    def normal(size: tuple[int, ...], scale: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        return draw.normal(*size, scale=scale).add_(mean).to(STORAGE[problem.dtype])

    inputs = {"x": normal((problem.batch, problem.features))}
    for number, layer in enumerate(problem.layers):
        spread = {"weight": layer.features**-0.5, "bias": 0.5, "norm_weight": 0.2, "norm_bias": 0.2}
        for parameter in layer.parameters:
            mean = 1.0 if parameter == "norm_weight" else 0.0
            inputs[f"{parameter}{number}"] = normal(layer.size(parameter), spread[parameter], mean)
    return inputs


def empty_output(problem: MlpProblem, device: torch.device) -> torch.Tensor:
    if problem.output == "error":
        return torch.empty(problem.batch, dtype=torch.float32, device=device)
    return torch.empty((problem.batch, problem.outputs), dtype=STORAGE[problem.dtype], device=device)


def compute(problem: MlpProblem, inputs: Tensors, rounded: Round = lambda x: x) -> torch.Tensor:
    """Return the chain in the dtype of the inputs; `rounded` is applied to every intermediate result."""
    y = inputs["x"]
    for number, layer in enumerate(problem.layers):
        y = _layer(layer, number, y.reshape(-1, layer.features), inputs, rounded)
    return y.reshape(problem.batch, -1)


def _layer(layer: Layer, number: int, x: torch.Tensor, inputs: Tensors, rounded: Round) -> torch.Tensor:
    if layer.norm:
        scale, shift = inputs[f"norm_weight{number}"], inputs[f"norm_bias{number}"]
        x = rounded(F.layer_norm(x, (layer.features,), scale, shift, layer.epsilon))
    y = rounded(F.linear(x, inputs[f"weight{number}"], inputs.get(f"bias{number}")))
    return y if layer.activation == "none" else rounded(ACTIVATE[layer.activation](y))


def _finish(problem: MlpProblem, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (y - x).square().mean(1) if problem.output == "error" else y


def exact(problem: MlpProblem, inputs: Tensors) -> torch.Tensor:
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    return _finish(problem, wide["x"], compute(problem, wide))


def peer(problem: MlpProblem, inputs: Tensors) -> torch.Tensor:
    """Return PyTorch's result in the problem's dtype, one operator at a time, with fp32 accumulation as on a GPU.

    Some CPUs accumulate 16-bit products in 16 bits, so the CPU rounds fp32 results. The error is computed in fp32.
    """
    if inputs["x"].is_cuda:
        with precision(problem.dtype):
            y = compute(problem, inputs)
    else:
        wide = {name: tensor.float() for name, tensor in inputs.items()}
        y = compute(problem, wide, lambda result: result.to(STORAGE[problem.dtype]).float())
    if problem.output == "error":
        return _finish(problem, inputs["x"].float(), y.float())
    return y.to(STORAGE[problem.dtype])
