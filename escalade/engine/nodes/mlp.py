"""Chains of small layers in one launch: MLPs, their gradients, and the gates of squeeze-and-excite."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.base import FOLDED, AtenCall, Match, Operator, Tensors, match_aten
from escalade.engine.nodes.lowering import Forms, Lowered, problem_from
from escalade.ops.base.dtypes import NAMES
from escalade.ops.mlp import MLP
from escalade.ops.mlp.problem import MlpProblem, parse_layers
from escalade.ops.mlp_backward import MLP_BACKWARD, MlpBackwardProblem
from escalade.ops.mlp_backward import compute as compute_gradients
from escalade.ops.squeeze_excite import SQUEEZE_EXCITE, SqueezeExciteProblem, gates

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_GRADIENT = "grad_y"


class Mlp(Operator):
    """Two or more of [LayerNorm →] linear [→ ReLU or GELU]; or the mean squared error of their result to x."""

    name = "mlp"

    @match_aten("escalade::mlp")
    def _match_in_step(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match in a training step, where parameters are values."""
        return self._match(node, call, graph) if graph.typed else None

    @match_aten("escalade::mlp", phases=(FOLDED,))
    def _match_constants(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        known = self._match(node, call, graph)
        if known is None:
            return None
        parameters = [name for role, name in known.inputs.items() if role != "x"]
        return known if all(name in graph.constants for name in parameters) else None

    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Node | None:
        x, is_error = call.value("x"), bool(call("error", False))
        # The error of 16-bit rows is fp32, and kernels are chosen by the dtype of the result.
        if x is None or call("rung") is not None or (is_error and graph.dtype_of(x) is not torch.float32):
            return None
        layers = parse_layers(call("layers"))
        inputs = {"x": x, **dict(zip(MlpProblem(1, layers).sizes, _parameters(node), strict=True))}
        return self.instead_of(node, inputs, layers=layers, output="error" if is_error else "y")

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        layers = node.attributes["layers"]
        rows = inputs["x"].reshape(-1, layers[0].width_in)
        y = rows
        for number, layer in enumerate(layers):
            y = y.reshape(-1, layer.features)
            if layer.norm:
                weight, bias = (inputs[f"{role}{number}"] for role in ("norm_weight", "norm_bias"))
                y = F.layer_norm(y, (layer.features,), weight, bias, layer.epsilon)
            y = F.linear(y, inputs[f"weight{number}"], inputs.get(f"bias{number}"))
            y = ACTIVATIONS[layer.activation](y)
        if node.attributes["output"] == "error":
            y = (y.reshape(rows.shape) - rows).square().mean(1)
        return y.reshape(node.shape)  # type: ignore[arg-type]

    def lower(self, node: Node, forms: Forms) -> Lowered:
        batch = _row_count(node, forms)
        return Lowered(MLP, problem_from(MlpProblem, node, batch=batch, dtype=forms.stored))


def _parameters(node: Node) -> list[str]:
    """Return the values that a call of `mlp` or `mlp_backward` takes as its list of parameters."""
    return [node.inputs[one.role] for one in node.attributes["arguments"]["parameters"]]


def _row_count(node: Node, forms: Forms) -> int:
    return math.prod(forms.value(node.inputs["x"]).shape) // node.attributes["layers"][0].width_in


class MlpBackward(Operator):
    """Gradients of all parameters of `mlp` and, if requested, of its input, concatenated in fp32."""

    name = "mlp_backward"
    values = ("x", _GRADIENT)
    mixes_types = True

    @match_aten("escalade::mlp_backward")
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        x, gradient = call.value("x"), call.value(_GRADIENT)
        if not graph.typed or x is None or gradient is None or call("rung") is not None:
            return None
        layers = parse_layers(call("layers"))
        parameters = dict(zip(MlpBackwardProblem(1, layers).sizes, _parameters(node), strict=True))
        inputs = {"x": x, _GRADIENT: gradient, **parameters}
        input_gradient = bool(call("input_gradient", False))
        return self.instead_of(node, inputs, layers=layers, input_gradient=input_gradient)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        features = node.attributes["layers"][0].width_in
        rows = {role: inputs[role].reshape(-1, inputs[role].shape[-1]) for role in self.values}
        batch, dtype = rows["x"].numel() // features, NAMES[rows["x"].dtype]
        problem = problem_from(MlpBackwardProblem, node, batch=batch, dtype=dtype)
        return compute_gradients(problem, {**inputs, **rows})

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        """Return a problem if all inputs have one dtype; the result is fp32."""
        types = {forms.value(name).dtype for name in node.inputs.values()}
        if len(types) > 1:
            return None
        batch, dtype = _row_count(node, forms), NAMES[types.pop()]
        return Lowered(MLP_BACKWARD, problem_from(MlpBackwardProblem, node, batch=batch, dtype=dtype))


class SqueezeExcite(Operator):
    """A factor per channel of an image, from the means of all channels and two layers; created by a pass."""

    name = "squeeze_excite"

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        return gates(a["hidden"], a["gate"], inputs).reshape(node.shape)  # type: ignore[arg-type]

    def lower(self, node: Node, forms: Forms) -> Lowered:
        squeezed = forms.constant(node.inputs["weight"])[0]
        image = forms.value(node.inputs["x"]).shape
        return Lowered(SQUEEZE_EXCITE, gate_problem(node, image, squeezed, forms.stored))


def gate_problem(node: Node, image: tuple[int, ...], squeezed: int, dtype: str) -> SqueezeExciteProblem:
    batch, channels, height, width = image
    return problem_from(
        SqueezeExciteProblem, node,
        batch=batch, channels=channels, height=height, width=width, squeezed=squeezed, dtype=dtype,
        gate_bias="gate_bias" in node.inputs,
    )  # fmt: skip
