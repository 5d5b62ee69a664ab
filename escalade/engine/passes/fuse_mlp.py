"""Fusion of chains of small layers, whose rows in between stay in shared memory: MLPs and squeeze-and-excite gates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch

from escalade.engine.graph.forms import NAMES, STORAGE
from escalade.engine.graph.graph import Batch, Graph, Node, Reference, Shape, joint_source
from escalade.engine.nodes.base import activation_of
from escalade.engine.nodes.conv2d import Conv2d
from escalade.engine.nodes.elementwise import Gelu
from escalade.engine.nodes.linear import Linear
from escalade.engine.nodes.mlp import ACTIVATIONS, Mlp, SqueezeExcite, gate_problem
from escalade.engine.nodes.norms import LayerNorm
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.pools import AdaptiveAvgPool2d
from escalade.engine.nodes.reduce import Reduce
from escalade.engine.nodes.views import Reshape
from escalade.errors import UnsupportedError
from escalade.ops.base.card import TWIN
from escalade.ops.base.dtypes import QUANTIZED
from escalade.ops.expressions import IDENTITY, Expression
from escalade.ops.mlp import MLP
from escalade.ops.mlp.problem import MOST_FEATURES, Layer, MlpProblem
from escalade.ops.squeeze_excite import one_launch_pays

MAX_WEIGHT_BYTES = TWIN.shared_bytes  # of all layers in 16 bits: they stay in one CTA's shared memory
MAX_HIDDEN = 2048  # features between two layers, in the same shared memory: 8 KiB per row in fp32
# Products that CUDA cores compute in about the time in which tensor cores compute the layers one by one: 8 us at the
# 8 TFLOP/s of `persistent` in fp16 on an H200.
MAX_PRODUCTS = 2**26
_NARROW = ("fp16", "bf16", *QUANTIZED)
_DIFFERENCE = Expression.parse("x - a")
_SQUARES = tuple(map(Expression.parse, ("square(x)", "x * x", "x ** 2")))
_SQUARED_DIFFERENCES = tuple(square.substitute({"x": _DIFFERENCE}) for square in _SQUARES)
_EXPRESSIONS = {name: IDENTITY if name == "none" else Expression.apply(name, "x") for name in ACTIVATIONS}


def fuse_mlp(graph: Graph, dtype: str) -> None:
    """Fuse chains, at any batch size, that tensor cores compute, or for which the dtype has nothing faster."""
    _fuse_chains(graph, lambda layers, rows: dtype not in _NARROW or _is_for_tensor_cores(layers))


def fuse_small_mlp(graph: Graph) -> None:
    """Fuse chains that CUDA cores compute, at batch sizes with little work: separate layers use tensor cores."""

    def is_little_work(layers: Sequence[Layer], rows: int) -> bool:
        return rows * sum(layer.groups * layer.weight_elements for layer in layers) <= MAX_PRODUCTS

    _fuse_chains(graph, is_little_work)


def _fuse_chains(graph: Graph, is_worthwhile: Callable[[Sequence[Layer], int], bool]) -> None:
    """Fuse [LayerNorm →] linear [→ ReLU or GELU], two or more in a row with reshapes between them."""
    seen: set[str] = set()
    for node in graph:
        if (_is_norm(node) or Linear.matches(node)) and node.name not in seen:
            chain = list(_chain(graph, node))
            seen.update(each.name for link in chain for each in link.nodes)
            for part in _parts(graph, chain):
                layers = _layers(graph, part)
                rows, _ = _rows(part[0].linear.shape)
                if layers is not None and is_worthwhile(layers, rows // layers[0].groups):
                    _join(graph, part)
                    graph.remove_dead_code()
    for node in graph:
        if Mlp.matches(node):
            _fuse_error(graph, node)
    graph.remove_dead_code()


@dataclass(frozen=True)
class _Link:
    """One layer of a chain, and the nodes that it consists of."""

    norm: Node | None
    linear: Node
    gelu: Node | None

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(node for node in (self.norm, self.linear, self.gelu) if node is not None)

    @property
    def activation(self) -> str | None:
        """Name of the layer's activation in `ops/mlp`; None if the kernels have none for it."""
        applied = activation_of(self.linear) if self.gelu is None else Gelu().expression(self.gelu)
        return next((name for name, known in _EXPRESSIONS.items() if known == applied), None)


def _is_for_tensor_cores(layers: Sequence[Layer]) -> bool:
    problem = MlpProblem(1, tuple(layers), "y", "fp16")
    return MLP.ladder.rung("tensor_core").supports(problem) is None


def _chain(graph: Graph, node: Node | None) -> Iterator[_Link]:
    """Yield the layers from this node on, each the only reader of the previous one."""
    while node is not None:
        norm = node if _is_norm(node) else None
        linear = _only_reader(graph, node) if norm else node
        if not Linear.matches(linear) or _is_image(linear.shape) or "residual" in linear.inputs:
            return
        if norm is not None and norm.shape[-1] != graph.shape_of(linear.inputs["x"])[-1]:
            return  # it normalizes other groups of features
        reader = _only_reader(graph, linear)
        gelu = reader if Gelu.matches(reader) and activation_of(linear).is_identity else None
        link = _Link(norm, linear, gelu)
        if link.activation is None:
            return
        yield link
        node = reader if gelu is None else _only_reader(graph, gelu)


def _is_norm(node: Node) -> bool:
    return LayerNorm.matches(node) and not node.attributes["rms"] and activation_of(node).is_identity


def _only_reader(graph: Graph, node: Node) -> Node | None:
    """Return the only reader of a result, looking through reshapes."""
    reader = graph.only_user(node.name)
    while Reshape.matches(reader) and not _is_image(reader.shape):
        reader = graph.only_user(reader.name)
    return reader


def _is_image(shape: Shape) -> bool:
    """Return True if elements may be stored in another order than PyTorch's."""
    return len(shape) == 4


def _parts(graph: Graph, chain: Sequence[_Link]) -> Iterator[list[_Link]]:
    """Yield the longest parts that fit, from the front, of two or more layers."""
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
    if layers is None or 2 * sum(layer.weight_elements for layer in layers) > MAX_WEIGHT_BYTES:
        return False
    hidden = max((layer.width_out for layer in layers[:-1]), default=0)
    return max(layers[0].width_in, layers[-1].width_out) <= MOST_FEATURES and hidden <= MAX_HIDDEN


def _layers(graph: Graph, part: Sequence[_Link]) -> tuple[Layer, ...] | None:
    """Return the layers of a chain over rows that no layer mixes; None if there are no such rows."""
    rows = [_rows(link.linear.shape) for link in part]
    if len({is_batched for _, is_batched in rows}) > 1:
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
    """Return the number of rows, and True if that is per item of the batch."""
    sizes = [size.times if isinstance(size, Batch) else size for size in shape[:-1]]
    return math.prod(sizes), any(isinstance(size, Batch) for size in shape[:-1])


def _norm_constants(graph: Graph, norm: Node) -> dict[str, str]:
    """Return weight and bias of a norm, ones and zeros if it has none."""
    features = norm.shape[-1]
    assert isinstance(features, int)
    return {
        role: norm.inputs.get(role)
        or graph.add_constant(f"{norm.name}_{role}", torch.full((features,), fill))
        for role, fill in (("weight", 1.0), ("bias", 0.0))
    }


def _join(graph: Graph, part: Sequence[_Link]) -> None:
    """Replace the last node of a part by one node for all; the others become dead code."""
    layers = _layers(graph, part)
    assert layers is not None
    first = graph.nodes[part[0].nodes[0].name]  # in its current state
    inputs = {"x": _unshaped(graph, first.inputs["x"])}
    for number, link in enumerate(part):
        if link.norm is not None:
            norm = _norm_constants(graph, link.norm)
            inputs |= {f"norm_{role}{number}": name for role, name in norm.items()}
        own = link.linear.inputs
        inputs |= {f"{role}{number}": own[role] for role in ("weight", "bias") if role in own}
    source = joint_source(*(node for link in part for node in link.nodes))
    last = part[-1].nodes[-1]
    joined = replace(Mlp.instead_of(last, inputs, layers=layers, output="y"), source=source)
    graph.nodes[last.name] = joined
    reader = graph.only_user(last.name)
    if Reshape.matches(reader) and not _is_image(reader.shape):
        graph.nodes[last.name] = replace(joined, shape=reader.shape)
        graph.remove(reader, instead=last.name)


def _unshaped(graph: Graph, value: str) -> str:
    """Return the value that this one is a view of."""
    while True:
        node = graph.nodes.get(value)
        if not Reshape.matches(node) or _is_image(graph.shape_of(node.inputs["x"])):
            return value
        value = node.inputs["x"]


def _fuse_error(graph: Graph, mlp: Node) -> None:
    """Fuse mean((y - x)²) per row, the reconstruction error of an autoencoder. It is fp32 in every plan."""
    squared = _squared_difference(graph, mlp)
    mean = graph.only_user(squared.name) if squared is not None else None
    if squared is None or mean is None or not _averages_rows(graph, mean, mlp):
        return
    if not all(Pointwise.matches(reader) for reader in graph.users().get(mean.name, [])):
        return  # other kernels would read it in the plan's dtype
    graph.nodes[mean.name] = replace(
        mlp.with_attributes(output="error"),
        name=mean.name,
        shape=mean.shape,
        dtype=mean.dtype,
        source=joint_source(mlp, mean),
    )


def _squared_difference(graph: Graph, mlp: Node) -> Node | None:
    """Return the node that computes (y - x)², in any spelling, if nothing else reads y."""
    reader = _only_reader(graph, mlp)
    if reader is None or _is_image(reader.shape):
        return None
    operands = {_unshaped(graph, name) for name in reader.inputs.values()}
    if operands != {mlp.name, mlp.inputs["x"]}:
        return None
    if any(graph.shape_of(name) != reader.shape for name in reader.inputs.values()):
        return None
    if _is_squared_error(reader) or _computes(reader, *_SQUARED_DIFFERENCES):
        return reader
    square = graph.only_user(reader.name) if _computes(reader, _DIFFERENCE) else None
    return square if _computes(square, *_SQUARES) else None


def _is_squared_error(node: Node) -> bool:
    """Return True for `mse_loss` without reduction."""
    if node.calls != "mse_loss":
        return False
    reduction = node.attributes["arguments"].get("reduction", 1)
    return not isinstance(reduction, Reference) and reduction == 0


def _computes(node: Node | None, *expressions: Expression) -> TypeGuard[Node]:
    return Pointwise.matches(node) and Pointwise().expression(node) in expressions


def _averages_rows(graph: Graph, mean: Node, mlp: Node) -> bool:
    """Return True if a mean is over the last dimensions, which together are the features of a row."""
    if not Reduce.matches(mean) or mean.attributes["kind"] != "mean" or not activation_of(mean).is_identity:
        return False
    shape, dims = graph.shape_of(mean.inputs["x"]), mean.attributes["dims"]
    if not dims or dims != tuple(range(dims[0], len(shape))):
        return False
    sizes = shape[dims[0] :]
    width = mlp.attributes["layers"][0].width_in
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) == width  # type: ignore[arg-type]


def fuse_squeeze_excite(graph: Graph, dtype: str) -> None:
    """Fuse every gate for which one launch is faster than three."""
    for pool in list(graph):
        chain = _gate(graph, pool)
        fused = _fused_gate(graph, chain, dtype) if chain else None
        if fused is not None:
            graph.nodes[fused.name] = fused
            for node in chain[:-1]:
                del graph.nodes[node.name]


def _gate(graph: Graph, pool: Node) -> list[Node]:
    """Return the mean over an image, two layers and reshapes, each the only reader of the one before; empty if none."""
    chain = [pool] if AdaptiveAvgPool2d.is_nhwc_mean(pool) else []
    layers = 0
    while chain and layers < 2:
        reader = graph.only_user(chain[-1].name)
        if reader is None or not (_is_layer(graph, reader) or Reshape.matches(reader)):
            return []
        layers += not Reshape.matches(reader)
        chain.append(reader)
    return chain


def _fused_gate(graph: Graph, chain: Sequence[Node], dtype: str) -> Node | None:
    """Return one node for a gate; None if it changes the number of channels, or three launches are faster."""
    pool, squeeze, excite = (node for node in chain if not Reshape.matches(node))
    image = tuple(size for size in graph.shape_of(pool.inputs["x"]) if isinstance(size, int))
    down, up = (graph.constants[layer.inputs["weight"]].shape[:2] for layer in (squeeze, excite))
    rows = {layer.shape[0] for layer in (squeeze, excite)}
    if down[1] != image[1] or (up[0], up[1]) != (down[1], down[0]) or rows != {image[0]}:
        return None
    inputs: dict[str, str | None] = {"x": pool.inputs["x"]}
    for prefix, layer in (("", squeeze), ("gate_", excite)):
        inputs |= {f"{prefix}{role}": layer.inputs.get(role) for role in ("weight", "bias")}
    hidden, gate = (activation_of(layer).text for layer in (squeeze, excite))
    fused = SqueezeExcite.instead_of(excite, inputs, hidden=hidden, gate=gate)
    try:
        problem = gate_problem(fused, image, down[0], NAMES[STORAGE[dtype]])
    except UnsupportedError:  # its layers are too large
        return None
    return replace(fused, source=joint_source(pool, squeeze, excite)) if one_launch_pays(problem) else None


def _is_layer(graph: Graph, node: Node) -> bool:
    """Return True for a linear layer, or a 1×1 convolution of one pixel, over all channels."""
    a = node.attributes
    if node.inputs.keys() - {"x", "weight", "bias"} or a.get("quantized") or a.get("store"):
        return False
    if Linear.matches(node):
        return len(node.shape) == 2
    return (
        Conv2d.matches(node)
        and a["groups"] == 1
        and a["padding"] == (0, 0)
        and node.shape[2:] == (1, 1)
        and tuple(graph.constants[node.inputs["weight"]].shape[2:]) == (1, 1)
    )
