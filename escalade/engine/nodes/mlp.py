"""Chains of small linear layers as one step: what lies between them never leaves the multiprocessor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
import torch.nn.functional as F

from escalade.engine.graph.graph import ATEN, Batch, Graph, Node, Reference, Shape
from escalade.engine.nodes.aten_call import AtenCall, name_of
from escalade.engine.nodes.base import Operator, Recognised, Recogniser, Tensors
from escalade.engine.nodes.gelu import Gelu
from escalade.engine.nodes.layer_norm import LayerNorm
from escalade.engine.nodes.linear import Linear
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.reduce import Reduce
from escalade.engine.nodes.reshape import Reshape
from escalade.ops.base.card import TWIN
from escalade.ops.expressions import IDENTITY, Expression
from escalade.ops.mlp import MLP
from escalade.ops.mlp.problem import MOST_FEATURES, Layer, MlpProblem, parse_layers

MOST_WEIGHT_BYTES = TWIN.shared_bytes
"""Bytes of the weights of all layers together in 16 bits at most: the shared memory of a block, where they stay while
the rows pass by."""
MOST_HIDDEN = 2048
"""Features of a row between two layers, which lie there too: in fp32 eight kibibytes a row, and a block has several."""
MOST_PRODUCTS = 2**26
"""Products of a chain that CUDA cores do in about the time in which tensor cores do its layers one by one: 8 us at the
8 T/s of `persistent` in fp16 on an H200."""
_NARROW = ("fp16", "bf16", "fp8")
_DIFFERENCE = Expression.parse("x - a")
_SQUARES = tuple(map(Expression.parse, ("square(x)", "x * x", "x ** 2")))
_SQUARED_DIFFERENCES = tuple(square.substitute({"x": _DIFFERENCE}) for square in _SQUARES)
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


_EXPRESSIONS = {name: IDENTITY if name == "none" else Expression.apply(name, "x") for name in _ACTIVATIONS}


class Mlp(Operator):
    """[LayerNorm →] linear [→ ReLU or GELU], two or more in a row; or how far the result is from the input."""

    name = "mlp"

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {"escalade::mlp": self._in_step}

    @property
    def folded(self) -> Mapping[str, Recogniser]:
        return {"escalade::mlp": self._of_constants}

    def _in_step(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        """The operator in a training step, where its parameters are values."""
        return self._recognise(node, call, graph) if graph.typed else None

    def _of_constants(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        known = self._recognise(node, call, graph)
        if known is None or any(
            name not in graph.constants for role, name in known.inputs.items() if role != "x"
        ):
            return None
        return known

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Node | None:
        x, parameters = call.value("x"), parameters_of(node)
        is_error = bool(call("error", False))
        # The error of 16-bit rows is fp32, and kernels are chosen by the type of the result.
        if x is None or call("rung") is not None or (is_error and graph.dtype_of(x) is not torch.float32):
            return None
        layers = parse_layers(call("layers"))
        names = MlpProblem(1, layers).sizes
        inputs = {"x": x, **dict(zip(names, parameters, strict=True))}
        return self.instead_of(node, inputs, layers=layers, output="error" if is_error else "y")

    def fuse(self, graph: Graph, dtype: str) -> None:
        """For any batch what tensor cores do, or nothing does better in that dtype."""
        fuse_mlp(graph, lambda layers, rows: dtype not in _NARROW or _is_for_tensor_cores(layers))

    def fuse_for_batch(self, graph: Graph, dtype: str) -> None:
        """In 16 bits layers by themselves have tensor cores; a chain without has to be little work."""
        fuse_mlp(
            graph,
            lambda layers, rows: (
                rows * sum(one.groups * one.weight_elements for one in layers) <= MOST_PRODUCTS
            ),
        )

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
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

    def lower(self, node: Node, forms: Forms) -> Lowered:
        layers = node.attributes["layers"]
        batch = math.prod(forms.value(node.inputs["x"]).shape) // layers[0].width_in
        return Lowered(MLP, MlpProblem(batch, layers, node.attributes["output"], forms.stored))

    def feature_constants(self, node: Node) -> tuple[str, ...]:
        """A chain must take the features as one group, and not be compared with them."""
        if node.attributes["layers"][0].groups != 1 or node.attributes["output"] != "y":
            return ()
        return tuple(role for role in ("norm_bias0", "norm_weight0", "weight0") if role in node.inputs)

    def stored_type(self, node: Node, storage: torch.dtype, is_output: bool) -> torch.dtype:
        if node.attributes["output"] == "error":
            return torch.float32
        return super().stored_type(node, storage, is_output)


def parameters_of(node: Node) -> list[str]:
    """Return the values that a call of one of the operators on chains takes as its list of parameters."""
    return [node.inputs[one.role] for one in node.attributes["arguments"]["parameters"]]


def fuse_mlp(graph: Graph, pays: Callable[[Sequence[Layer], int], bool]) -> None:
    """[LayerNorm →] linear [→ ReLU or GELU], two or more in a row, with reshapes between them, where that pays for
    layers and so many rows."""
    seen: set[str] = set()
    for node in graph:
        if (_is_norm(node) or Linear.matches(node)) and node.name not in seen:
            chain = list(_chain(graph, node))
            seen.update(each.name for link in chain for each in link.nodes)
            for part in _parts(graph, chain):
                layers = _layers(graph, part)
                rows, _ = _rows(part[0].linear.shape)
                if layers is not None and pays(layers, rows // layers[0].groups):
                    _join(graph, part)
                    graph.remove_dead_code()
    for node in graph:
        if Mlp.matches(node):
            _fuse_error(graph, node)
    graph.remove_dead_code()


@dataclass(frozen=True)
class _Link:
    """One layer of a chain, and the nodes that it is made of."""

    norm: Node | None
    linear: Node
    gelu: Node | None

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(node for node in (self.norm, self.linear, self.gelu) if node is not None)

    @property
    def activation(self) -> str | None:
        """What the layer ends with, by the name of `ops/mlp`; None if that has none for it."""
        applied = Linear().applied(self.linear) if self.gelu is None else Gelu().expression(self.gelu)
        return next((name for name, known in _EXPRESSIONS.items() if known == applied), None)


def _is_for_tensor_cores(layers: Sequence[Layer]) -> bool:
    problem = MlpProblem(1, tuple(layers), "y", "fp16")
    return MLP.ladder.rung("tensor_core").supports(problem) is None


def _chain(graph: Graph, node: Node | None) -> Iterator[_Link]:
    """The layers from this node on, each the only reader of the one in front."""
    while node is not None:
        norm = node if _is_norm(node) else None
        linear = _only_reader(graph, node) if norm else node
        if not Linear.matches(linear) or _is_image(linear.shape) or "residual" in linear.inputs:
            return
        if norm is not None and norm.shape[-1] != graph.shape_of(linear.inputs["x"])[-1]:
            return  # it normalises other groups of features
        behind = _only_reader(graph, linear)
        gelu = behind if Gelu.matches(behind) and Linear().applied(linear).is_identity else None
        link = _Link(norm, linear, gelu)
        if link.activation is None:
            return
        yield link
        node = behind if gelu is None else _only_reader(graph, gelu)


def _is_norm(node: Node) -> bool:
    """Whether it is a layer norm and nothing else."""
    return LayerNorm.matches(node) and not node.attributes["rms"] and LayerNorm().applied(node).is_identity


def _only_reader(graph: Graph, node: Node) -> Node | None:
    """The one reader of its result, perhaps reshaped."""
    reader = graph.only_user(node.name)
    while Reshape.matches(reader) and not _is_image(reader.shape):
        reader = graph.only_user(reader.name)
    return reader


def _is_image(shape: Shape) -> bool:
    """Whether its elements lie in another order than PyTorch's."""
    return len(shape) == 4


def _parts(graph: Graph, chain: Sequence[_Link]) -> Iterator[list[_Link]]:
    """The longest pieces from the front that fit, of two layers or more."""
    part: list[_Link] = []
    for link in chain:
        if not _fits(graph, [*part, link]):
            if len(part) > 1:
                yield part
            part = []
            if not _fits(graph, [link]):
                continue
        part = [*part, link]
    if len(part) > 1:
        yield part


def _fits(graph: Graph, part: Sequence[_Link]) -> bool:
    layers = _layers(graph, part)
    if layers is None or 2 * sum(layer.weight_elements for layer in layers) > MOST_WEIGHT_BYTES:
        return False
    hidden = [layer.width_out for layer in layers[:-1]]
    return (
        max(layers[0].width_in, layers[-1].width_out) <= MOST_FEATURES
        and max(hidden, default=0) <= MOST_HIDDEN
    )


def _layers(graph: Graph, part: Sequence[_Link]) -> tuple[Layer, ...] | None:
    """A row of the whole is the smallest piece that no layer mixes with another; None if there is no such thing."""
    rows = [_rows(link.linear.shape) for link in part]
    if len({batched for _, batched in rows}) > 1:
        return None
    common = math.gcd(*(count for count, _ in rows))
    layers = []
    for link, (count, _) in zip(part, rows, strict=True):
        outputs, features = graph.constants[link.linear.inputs["weight"]].shape
        epsilon = {} if link.norm is None else {"epsilon": link.norm.attributes["epsilon"]}
        layers.append(
            Layer(
                features, outputs, count // common, link.norm is not None, "bias" in link.linear.inputs,
                link.activation or "none", **epsilon,
            )
        )  # fmt: skip
    return tuple(layers)


def _rows(shape: Shape) -> tuple[int, bool]:
    """How many, and whether that is for each item of the batch."""
    sizes = [size.times if isinstance(size, Batch) else size for size in shape[:-1]]
    return math.prod(sizes), any(isinstance(size, Batch) for size in shape[:-1])


def _of_norm(graph: Graph, norm: Node) -> dict[str, str]:
    """The weight and the bias of a norm; where it has none, those that change nothing."""
    features = norm.shape[-1]
    assert isinstance(features, int)
    return {
        role: norm.inputs.get(role)
        or graph.add_constant(f"{norm.name}_{role}", torch.full((features,), fill))
        for role, fill in (("weight", 1.0), ("bias", 0.0))
    }


def _join(graph: Graph, part: Sequence[_Link]) -> None:
    """Puts one node in the place, and under the name, of the last node of the part."""
    layers = _layers(graph, part)
    assert layers is not None
    first = graph.nodes[part[0].nodes[0].name]  # as it is by now
    inputs = {"x": _unshaped(graph, first.inputs["x"])}
    for number, link in enumerate(part):
        if link.norm is not None:
            inputs |= {f"norm_{role}{number}": name for role, name in _of_norm(graph, link.norm).items()}
        inputs |= {
            f"{role}{number}": link.linear.inputs[role]
            for role in ("weight", "bias")
            if role in link.linear.inputs
        }
    sources = dict.fromkeys(node.source for link in part for node in link.nodes if node.source)
    last = part[-1].nodes[-1]
    joined = replace(Mlp.instead_of(last, inputs, layers=layers, output="y"), source=", ".join(sources))
    graph.nodes[last.name] = joined
    behind = graph.only_user(last.name)
    if Reshape.matches(behind) and not _is_image(behind.shape):
        graph.nodes[last.name] = replace(joined, shape=behind.shape)
        graph.remove(behind, instead=last.name)


def _unshaped(graph: Graph, value: str) -> str:
    """The value of which this is the same bytes."""
    while True:
        node = graph.nodes.get(value)
        if not Reshape.matches(node) or _is_image(graph.shape_of(node.inputs["x"])):
            return value
        value = node.inputs["x"]


def _fuse_error(graph: Graph, mlp: Node) -> None:
    """mean((y - x)²) of each row: how far the chain's result is from its input. It is fp32 in every plan."""
    squared = _squared_difference(graph, mlp)
    mean = graph.only_user(squared.name) if squared is not None else None
    if squared is None or mean is None or not _averages_rows(graph, mean, mlp):
        return
    if not all(Pointwise.matches(reader) for reader in graph.users().get(mean.name, [])):
        return  # others would take it for one of the plan's own type
    graph.nodes[mean.name] = replace(
        mlp.with_attributes(output="error"),
        name=mean.name,
        shape=mean.shape,
        dtype=mean.dtype,
        source=", ".join(dict.fromkeys(source for source in (mlp.source, mean.source) if source)),
    )


def _squared_difference(graph: Graph, mlp: Node) -> Node | None:
    """(y - x)² in whichever way it is written; None if it is something else, or somebody else reads y."""
    reader = _only_reader(graph, mlp)
    if reader is None or _is_image(reader.shape):
        return None
    sides = {_unshaped(graph, name) for name in reader.inputs.values()}
    if sides != {mlp.name, mlp.inputs["x"]} or any(
        graph.shape_of(name) != reader.shape for name in reader.inputs.values()
    ):
        return None
    if _is(reader, "mse_loss", reduction=0):
        return reader
    if _computes(reader, *_SQUARED_DIFFERENCES):
        return reader
    square = graph.only_user(reader.name) if _computes(reader, _DIFFERENCE) else None
    return square if _computes(square, *_SQUARES) else None


def _computes(node: Node | None, *expressions: Expression) -> TypeGuard[Node]:
    """Whether there is a pointwise node and it computes one of these."""
    return Pointwise.matches(node) and Pointwise().expression(node) in expressions


def _averages_rows(graph: Graph, mean: Node, mlp: Node) -> bool:
    """Whether the mean is over the last dimensions, which together are the features of a row."""
    if not (
        Reduce.matches(mean) and mean.attributes["kind"] == "mean" and Reduce().applied(mean).is_identity
    ):
        return False
    shape, axes = graph.shape_of(mean.inputs["x"]), mean.attributes["dims"]
    if not axes or axes != tuple(range(axes[0], len(shape))):
        return False
    sizes = shape[axes[0] :]
    layers = mlp.attributes["layers"]
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) == layers[0].width_in  # type: ignore[arg-type]


def _is(node: Node, *names: str, **arguments: object) -> bool:
    """Whether a node is PyTorch's operator of one of these names, with these arguments."""
    if node.op != ATEN or name_of(node.attributes["target"]) not in names:
        return False
    given = node.attributes["arguments"]
    defaults = {"reduction": 1, "dtype": None}
    return all(
        not isinstance(found := given.get(key, defaults.get(key)), Reference) and found == value
        for key, value in arguments.items()
    )
