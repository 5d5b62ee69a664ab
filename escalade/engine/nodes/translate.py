"""Which of PyTorch's operators Escalade knows, and what they are in a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from escalade.engine.graph.graph import ATEN, Graph, Node, Reference

Translation = Node | str | None
"""The known node, the value that the result is the same as, or None: PyTorch does it."""


def translate(node: Node, target: torch._ops.OpOverload, graph: Graph) -> Node | str:
    """The node in Escalade's terms if it has them; as it is otherwise. A string: it gives an existing value."""
    name = _name(target.name())
    name = (
        name[:-1] if name.endswith("_") and name[:-1] in _TRANSLATORS else name
    )  # relu_ is relu of a new value
    translator = _TRANSLATORS.get(name)
    if translator is None:
        return node
    return translator(node, _Call(node), graph) or node


def translate_layers(graph: Graph) -> None:
    """Layers whose weights are constants by now, though the model computes them; products with a constant too."""
    for node in graph:
        translator = _LAYERS.get(_name(node.attributes["target"])) if node.op == ATEN else None
        if translator is not None:
            known = translator(node, _Call(node), graph)
            assert not isinstance(known, str)  # a layer is never one of its inputs
            graph.nodes[node.name] = known or node


def _name(target: str) -> str:
    return target.removeprefix("aten::").split(".")[0]


class _Call:
    """The arguments of an operator by name; tensors as the names of their values."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._arguments = node.attributes["arguments"]

    def __call__(self, name: str, default: Any = None) -> Any:
        value = self._arguments.get(name, default)
        return default if value is None else value

    def value(self, name: str) -> str | None:
        found = self._arguments.get(name)
        return self._node.inputs[found.role] if isinstance(found, Reference) else None

    def pair(self, name: str, default: int | Sequence[int]) -> tuple[int, int]:
        value = self(name, default)
        if not isinstance(value, int) and not value:
            value = default  # which is what an empty list means
        values = (value,) if isinstance(value, int) else tuple(value)
        return (values[0], values[-1])


def _made(node: Node, op: str, inputs: dict[str, str | None], **attributes: Any) -> Node:
    given = {role: name for role, name in inputs.items() if name is not None}
    return replace(node, op=op, inputs=given, attributes=attributes)


def _conv2d(node: Node, call: _Call, graph: Graph) -> Translation:
    if len(node.shape) != 4:
        return None
    if call("transposed", False):
        return None
    inputs = {"x": call.value("input"), "weight": call.value("weight"), "bias": call.value("bias")}
    if inputs["weight"] not in graph.constants or (inputs["bias"] or inputs["weight"]) not in graph.constants:
        return None  # kernels pack their weights once
    padding = call("padding", 0)
    if isinstance(padding, str):
        weight = graph.constants[inputs["weight"]]
        dilation = call.pair("dilation", 1)
        reach = [dilation[d] * (weight.shape[2 + d] - 1) for d in (0, 1)]
        if padding == "same" and any(r % 2 for r in reach):
            return None  # more on one side than on the other
        pads = (reach[0] // 2, reach[1] // 2) if padding == "same" else (0, 0)
    else:
        pads = call.pair("padding", 0)
    return _made(
        node, "conv2d", inputs,
        stride=call.pair("stride", 1), padding=pads, dilation=call.pair("dilation", 1),
        groups=call("groups", 1), relu=False,
    )  # fmt: skip


def _batch_norm(node: Node, call: _Call, graph: Graph) -> Translation:
    if call("training", False) or call("train", False):
        return None
    names = {
        "x": "input",
        "weight": "weight",
        "bias": "bias",
        "mean": "running_mean",
        "variance": "running_var",
    }
    inputs = {role: call.value(name) for role, name in names.items()}
    if inputs["mean"] is None or inputs["variance"] is None:
        return None  # normalised by its own batch
    if any(name not in graph.constants for role, name in inputs.items() if role != "x" and name is not None):
        return None
    mean = graph.constants[inputs["mean"]]
    for role, fill in (("weight", torch.ones_like), ("bias", torch.zeros_like)):
        if inputs[role] is None:
            inputs[role] = graph.add_constant(f"{node.name}_{role}", fill(mean))
    return _made(node, "batch_norm", inputs, epsilon=call("eps"), relu=False)


def _relu(node: Node, call: _Call, graph: Graph) -> Translation:
    return _made(node, "relu", {"x": call.value("self")}, limit=None)


def _relu6(node: Node, call: _Call, graph: Graph) -> Translation:
    return _made(node, "relu", {"x": call.value("self")}, limit=6.0)


def _hardtanh(node: Node, call: _Call, graph: Graph) -> Translation:
    low, high = call("min_val", -1), call("max_val", 1)
    if low != 0 or not high > 0:
        return None
    return _made(node, "relu", {"x": call.value("self")}, limit=float(high))


def _add(node: Node, call: _Call, graph: Graph) -> Translation:
    x, other = call.value("self"), call.value("other")
    if x is None or other is None or call("alpha", 1) != 1:
        return None
    for value in (x, other):
        if graph.shape_of(value) != node.shape:
            return None
        if graph.dtype_of(value).is_floating_point != node.is_floating:
            return None
    return _made(node, "add", {"x": x, "residual": other}, relu=False)


def _max_pool2d(node: Node, call: _Call, graph: Graph) -> Translation:
    if len(node.shape) != 4 or call.pair("dilation", 1) != (1, 1):
        return None
    kernel = call.pair("kernel_size", 1)
    return _made(
        node, "max_pool2d", {"x": call.value("self")},
        kernel=kernel, stride=call.pair("stride", kernel), padding=call.pair("padding", 0),
        ceil_mode=bool(call("ceil_mode", False)),
    )  # fmt: skip


def _adaptive_avg_pool2d(node: Node, call: _Call, graph: Graph) -> Translation:
    if len(node.shape) != 4:
        return None
    return _made(node, "adaptive_avg_pool2d", {"x": call.value("self")}, output=node.shape[2:])


def _avg_pool2d(node: Node, call: _Call, graph: Graph) -> Translation:
    """Windows that cover the image without overlap are what the adaptive pool does."""
    if len(node.shape) != 4 or call.pair("padding", 0) != (0, 0) or call("divisor_override") is not None:
        return None
    kernel = call.pair("kernel_size", 1)
    x = call.value("self")
    assert x is not None
    size = graph.shape_of(x)[2:]
    if call.pair("stride", kernel) != kernel or any(s % k for s, k in zip(size, kernel, strict=True)):  # type: ignore[operator]
        return None
    return _made(node, "adaptive_avg_pool2d", {"x": x}, output=node.shape[2:])


def _mean(node: Node, call: _Call, graph: Graph) -> Translation:
    x = call.value("self")
    dims = call("dim", ())
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    if (
        x is None
        or len(graph.shape_of(x)) != 4
        or {d % 4 for d in dims} != {2, 3}
        or call("dtype") is not None
    ):
        return None
    shape = graph.shape_of(x)
    pooled = _made(node, "adaptive_avg_pool2d", {"x": x}, output=(1, 1))
    pooled = replace(pooled, shape=(*shape[:2], 1, 1))
    if call("keepdim", False):
        return pooled
    pooled = replace(pooled, name=graph.fresh(f"{node.name}_pool"))
    graph.append(pooled)
    return _made(node, "reshape", {"x": pooled.name})


def _linear(node: Node, call: _Call, graph: Graph) -> Translation:
    inputs = {"x": call.value("input"), "weight": call.value("weight"), "bias": call.value("bias")}
    if inputs["weight"] not in graph.constants or (inputs["bias"] or inputs["weight"]) not in graph.constants:
        return None
    return _made(node, "linear", inputs, relu=False)


def _matmul(node: Node, call: _Call, graph: Graph) -> Translation:
    """x @ matrix is a linear layer whose weight is the matrix transposed."""
    x, matrix = call.value("self"), call.value("other") or call.value("mat2")
    return _product(node, x, matrix, None, graph)


def _addmm(node: Node, call: _Call, graph: Graph) -> Translation:
    bias = call.value("self")
    if call("beta", 1) != 1 or call("alpha", 1) != 1 or bias not in graph.constants:
        return None
    if graph.shape_of(bias) != node.shape[-1:]:
        return None
    return _product(node, call.value("mat1"), call.value("mat2"), bias, graph)


def _product(node: Node, x: str | None, matrix: str | None, bias: str | None, graph: Graph) -> Translation:
    if x is None or x in graph.constants or matrix not in graph.constants:
        return None
    weight = graph.constants[matrix]
    if not node.is_floating or weight.dim() != 2 or len(graph.shape_of(x)) < 2:
        return None
    name = graph.add_constant(f"{node.name}_weight", weight.t().contiguous())
    return _made(node, "linear", {"x": x, "weight": name, "bias": bias}, relu=False)


def _layer_norm(node: Node, call: _Call, graph: Graph) -> Translation:
    """Over the last dimension; without a weight or a bias it gets those that change nothing."""
    sizes = call("normalized_shape", ())
    if len(sizes) != 1 or not isinstance(sizes[0], int) or node.attributes.get("result", 0) != 0:
        return None
    inputs = {"x": call.value("input"), "weight": call.value("weight"), "bias": call.value("bias")}
    if any(name not in graph.constants for role, name in inputs.items() if role != "x" and name is not None):
        return None
    for role, fill in (("weight", torch.ones), ("bias", torch.zeros)):
        if inputs[role] is None:
            inputs[role] = graph.add_constant(f"{node.name}_{role}", fill(sizes))
    return _made(node, "layer_norm", inputs, epsilon=call("eps", 1e-5))


def _gelu(node: Node, call: _Call, graph: Graph) -> Translation:
    return _made(node, "gelu", {"x": call.value("self")}, approximate=call("approximate", "none"))


def _reshape(node: Node, call: _Call, graph: Graph) -> Translation:
    x = call.value("self") or call.value("input")
    assert x is not None
    if call("dtype") is not None:
        return None  # the same bytes as numbers of another type
    if graph.shape_of(x) == node.shape:
        return x
    return _made(node, "reshape", {"x": x})


def _softmax(node: Node, call: _Call, graph: Graph) -> Translation:
    if call("dim") not in (-1, len(node.shape) - 1) or call("dtype") is not None:
        return None
    return _made(node, "softmax", {"x": call.value("self")})


def _same(node: Node, call: _Call, graph: Graph) -> Translation:
    x = call.value("self") or call.value("input")
    return x if x is not None and graph.shape_of(x) == node.shape else None


def _broadcast(node: Node, call: _Call, graph: Graph) -> Translation:
    """One of several tensors, which may have the common size already."""
    x = node.inputs[call("tensors")[node.attributes["result"]].role]
    return x if graph.shape_of(x) == node.shape else None


def _dropout(node: Node, call: _Call, graph: Graph) -> Translation:
    return None if call("train", call("training", False)) else _same(node, call, graph)


def _to(node: Node, call: _Call, graph: Graph) -> Translation:
    """From one floating type to another is nothing: the plan has one of its own."""
    x = call.value("self")
    if x is None or not node.is_floating:
        return None
    return x if x not in graph.constants and graph.dtype_of(x).is_floating_point else None


_TRANSLATORS: dict[str, Callable[[Node, _Call, Graph], Translation]] = {
    "conv2d": _conv2d,
    "convolution": _conv2d,
    "batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "relu": _relu,
    "relu6": _relu6,
    "hardtanh": _hardtanh,
    "add": _add,
    "max_pool2d": _max_pool2d,
    "adaptive_avg_pool2d": _adaptive_avg_pool2d,
    "_adaptive_avg_pool2d": _adaptive_avg_pool2d,
    "avg_pool2d": _avg_pool2d,
    "mean": _mean,
    "linear": _linear,
    "layer_norm": _layer_norm,
    "native_layer_norm": _layer_norm,
    "gelu": _gelu,
    "flatten": _reshape,
    "view": _reshape,
    "reshape": _reshape,
    "squeeze": _reshape,
    "unsqueeze": _reshape,
    "_unsafe_view": _reshape,
    "softmax": _softmax,
    "_softmax": _softmax,
    "dropout": _dropout,
    "dropout2d": _dropout,
    "feature_dropout": _dropout,
    "native_dropout": _dropout,
    "contiguous": _same,
    "clone": _same,
    "detach": _same,
    "alias": _same,
    "lift_fresh_copy": _same,
    "expand": _same,
    "expand_as": _same,
    "broadcast_tensors": _broadcast,
    "to": _to,
    "_to_copy": _to,
}
_LAYERS = {
    **{
        name: _TRANSLATORS[name]
        for name in ("conv2d", "convolution", "batch_norm", "linear", "layer_norm", "native_layer_norm")
    },
    "matmul": _matmul,  # not before: the model's own matrix would be kept beside the transposed one
    "mm": _matmul,
    "addmm": _addmm,
}
