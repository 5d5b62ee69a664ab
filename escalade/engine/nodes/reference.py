"""What each node computes, by PyTorch: for constants, for plans without a GPU, and to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from escalade.engine.graph.aten import OperatorError, resolve
from escalade.engine.graph.graph import ATEN, Node, Reference, map_leaves
from escalade.errors import EscaladeError

Tensors = Mapping[str, torch.Tensor]


def compute(node: Node, inputs: Tensors) -> torch.Tensor:
    """The node's result in the type of its inputs, with the sizes that the graph has for it."""
    with _in_a_sentence(node.op):
        result = _COMPUTE[node.op](node, inputs)
    if tuple(result.shape) != node.shape:
        raise OperatorError(
            f"{node.source or node.name} gives {list(result.shape)}; the plan has room for {list(node.shape)}"
        )
    return result


def _finish(node: Node, y: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    if "residual" in inputs:
        y = y + inputs["residual"]
    return torch.relu(y) if node.attributes["relu"] else y


def _conv2d(node: Node, inputs: Tensors) -> torch.Tensor:
    a = node.attributes
    y = F.conv2d(
        inputs["x"],
        inputs["weight"],
        None if a.get("fp8") else inputs.get("bias"),
        a["stride"],
        a["padding"],
        a["dilation"],
        a["groups"],
    )
    if "shortcut" in inputs:
        y = y + F.conv2d(inputs["shortcut"], inputs["shortcut_weight"], stride=a["shortcut_stride"])
    return _finish_scaled(node, y, inputs) if a.get("fp8") else _finish(node, y, inputs)


def _finish_scaled(node: Node, y: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    """In FP8 every number is a multiple of a unit of its own."""
    y = y * inputs["scale"].view(-1, 1, 1) + inputs["bias"].view(-1, 1, 1)
    if "residual" in inputs:
        y = y + inputs["residual"] * inputs["scales"][0]
    return (torch.relu(y) if node.attributes["relu"] else y) * inputs["scales"][1]


def _stem(node: Node, inputs: Tensors) -> torch.Tensor:
    a = node.attributes
    x = _normalise(node, inputs) if "scale" in inputs else inputs["x"]
    y = F.conv2d(x, inputs["weight"], inputs["bias"], a["stride"], a["padding"])
    y = torch.relu(y) if a["relu"] else y
    return F.max_pool2d(y, *a["pool"]) if a["pool"] else y


def _normalise(node: Node, inputs: Tensors) -> torch.Tensor:
    scale, shift = (inputs[role].view(1, -1, 1, 1) for role in ("scale", "shift"))
    return inputs["x"] * scale + shift


def _batch_norm(node: Node, inputs: Tensors) -> torch.Tensor:
    y = F.batch_norm(
        inputs["x"], inputs["mean"], inputs["variance"], inputs["weight"], inputs["bias"],
        eps=node.attributes["epsilon"],
    )  # fmt: skip
    return _finish(node, y, inputs)


def _relu(node: Node, inputs: Tensors) -> torch.Tensor:
    limit = node.attributes["limit"]
    return torch.relu(inputs["x"]) if limit is None else inputs["x"].clamp(0, limit)


def _add(node: Node, inputs: Tensors) -> torch.Tensor:
    return _finish(node, inputs["x"], inputs)


def _max_pool2d(node: Node, inputs: Tensors) -> torch.Tensor:
    a = node.attributes
    return F.max_pool2d(inputs["x"], a["kernel"], a["stride"], a["padding"], ceil_mode=a["ceil_mode"])


def _linear(node: Node, inputs: Tensors) -> torch.Tensor:
    x = inputs["x"].mean((2, 3)) if node.attributes.get("pooled") else inputs["x"]
    return _finish(node, F.linear(x, inputs["weight"], inputs.get("bias")), inputs)


def _layer_norm(node: Node, inputs: Tensors) -> torch.Tensor:
    x = inputs["x"]
    return F.layer_norm(x, x.shape[-1:], inputs["weight"], inputs["bias"], node.attributes["epsilon"])


def _gelu(node: Node, inputs: Tensors) -> torch.Tensor:
    return F.gelu(inputs["x"], approximate=node.attributes["approximate"])


def _mlp(node: Node, inputs: Tensors) -> torch.Tensor:
    """Each layer over groups of its features; the parameters are numbered by layer."""
    layers = node.attributes["layers"]
    rows = inputs["x"].reshape(-1, layers[0].width_in)
    y = rows
    for number, layer in enumerate(layers):
        y = y.reshape(-1, layer.features)
        if layer.norm:
            weight, bias = (inputs[f"{role}{number}"] for role in ("norm_weight", "norm_bias"))
            y = F.layer_norm(y, (layer.features,), weight, bias, layer.epsilon)
        y = _ACTIVATIONS[layer.activation](
            F.linear(y, inputs[f"weight{number}"], inputs.get(f"bias{number}"))
        )
    if node.attributes["output"] == "error":
        y = (y.reshape(rows.shape) - rows).square().mean(1)
    return y.reshape(node.shape)  # type: ignore[arg-type]


def _few_channels(node: Node, inputs: Tensors) -> torch.Tensor:
    a = node.attributes
    y = F.conv2d(inputs["x"], inputs["weight"], inputs.get("bias"), padding=a["padding"])
    y = torch.relu(y) if a["relu"] else y
    return F.max_pool2d(y, a["pool"], ceil_mode=a["ceil_mode"]) if a["pool"] > 1 else y


def _reshape(node: Node, inputs: Tensors) -> torch.Tensor:
    x = inputs["x"]
    if node.attributes.get("order") == "nhwc":
        x = x.permute(0, 2, 3, 1)
    return x.reshape(node.shape)  # type: ignore[arg-type]


def _convert(node: Node, inputs: Tensors) -> torch.Tensor:
    """Types and layouts are the caller's business; what is left is normalising and padding."""
    x = _normalise(node, inputs) if "scale" in inputs else inputs["x"]
    more = node.shape[1] - x.shape[1]  # type: ignore[operator]
    return F.pad(x, (0, 0, 0, 0, 0, more)) if more else x


def aten(node: Node, inputs: Tensors) -> torch.Tensor:
    """PyTorch's own operator, with tensors in the places of their references."""
    results = results_of(node.attributes["target"], node.attributes["arguments"], inputs)
    return results[node.attributes.get("result", 0)]


def results_of(target: str, arguments: Mapping[str, Any], inputs: Tensors) -> Sequence[torch.Tensor]:
    """All that an operator gives; inputs by the roles that its arguments refer to."""
    home = next((tensor.device for tensor in inputs.values()), None)

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.device):  # a plan's values are where the plan is
            return value if home is None else home
        return inputs[value.role] if isinstance(value, Reference) else value

    operator = resolve(target)
    bound = map_leaves(leaf, arguments)
    if operator._schema.is_mutable:  # in a graph every result is a new value
        first = operator._schema.arguments[0].name
        bound[first] = bound[first].clone()
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for argument in operator._schema.arguments:
        if argument.name not in bound:
            continue
        if argument.kwarg_only or len(positional) < operator._schema.arguments.index(argument):
            named[argument.name] = bound[argument.name]
        else:
            positional.append(bound[argument.name])
    with _in_a_sentence(target):
        result = operator(*positional, **named)
    return (result,) if isinstance(result, torch.Tensor) else result


@contextmanager
def _in_a_sentence(what: str) -> Iterator[None]:
    """What PyTorch has against a call; that memory has run out is for others to say."""
    try:
        yield
    except (EscaladeError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OperatorError(f"PyTorch does not do {what} on these tensors: {reason}") from error


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

_COMPUTE: dict[str, Callable[[Node, Tensors], torch.Tensor]] = {
    "conv2d": _conv2d,
    "stem": _stem,
    "few_channels": _few_channels,
    "normalise": _normalise,
    "batch_norm": _batch_norm,
    "relu": _relu,
    "add": _add,
    "max_pool2d": _max_pool2d,
    "adaptive_avg_pool2d": lambda node, inputs: F.adaptive_avg_pool2d(inputs["x"], node.attributes["output"]),
    "linear": _linear,
    "layer_norm": _layer_norm,
    "gelu": _gelu,
    "mlp": _mlp,
    "reshape": _reshape,
    "convert": _convert,
    "quantise": lambda node, inputs: inputs["x"] * inputs["factor"],
    "softmax": lambda node, inputs: torch.softmax(inputs["x"], -1),
    ATEN: aten,
}
