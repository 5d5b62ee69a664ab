"""NHWC inside: where a network's values have to change their order, and where they need not after all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
import torch.nn.functional as F

from escalade.engine.graph.forms import NAMES, STORAGE
from escalade.engine.graph.graph import Graph, Input, Node, Shape
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.base import Layouts
from escalade.engine.nodes.convert import Convert, is_converted
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.passes.shuffles import MOST_PADDED
from escalade.ops.base.dtypes import VECTOR_BYTES
from escalade.ops.expressions import IDENTITY

MANY_NODES = 12
"""Nodes of a network beside which one more, of a microsecond, is little."""


def reorder_flattened(graph: Graph) -> None:
    """Linear layers behind a flattened image in NHWC take the pixels in the order they lie in: their weights are
    reordered."""
    users, lies = graph.users(), _lying(graph)
    for node in graph:
        if not operator_of(node).is_view or not _flattens_image(graph, node) or node.name in graph.outputs:
            continue
        if lies.get(node.inputs["x"]) != "nhwc":
            continue
        layers = users.get(node.name, [])
        if not layers or not all(_reorderable(layer, node.name) for layer in layers):
            continue
        channels, height, width = graph.shape_of(node.inputs["x"])[1:]
        for layer in layers:
            inputs = {}
            for role in operator_of(layer).feature_constants(layer):
                given = graph.constants[layer.inputs[role]]
                moved = given.reshape(-1, channels, height, width).permute(0, 2, 3, 1).reshape(given.shape)  # type: ignore[arg-type]
                inputs[role] = graph.add_constant(f"{layer.name}_{role}", moved.contiguous())
            graph.nodes[layer.name] = graph.nodes[layer.name].with_inputs(**inputs)
        graph.nodes[node.name] = node.with_attributes(order="nhwc")


def _reorderable(layer: Node, value: str) -> bool:
    return bool(operator_of(layer).feature_constants(layer)) and layer.inputs["x"] == value


def _flattens_image(graph: Graph, node: Node) -> bool:
    before, after = graph.shape_of(node.inputs["x"]), node.shape
    return len(before) == 4 and len(after) == 2 and before[0] == after[0] and before[2:] != (1, 1)


def _lying(graph: Graph) -> dict[str, str]:
    """How images lie where each is left as it comes and as its maker writes it."""
    lies = {given.name: graph.images for given in graph.inputs if _is_image(given.shape, given.dtype)}
    for node in graph:
        if _is_image(node.shape, node.dtype):
            given = {role: lies[name] for role, name in node.inputs.items() if name in lies}
            lies[node.name] = node.attributes.get("layout", operator_of(node).layouts(node, given).written)
    return lies


def leave_products(graph: Graph) -> None:
    """1×1 convolutions of an image as it comes, with nothing behind them that wants NHWC, stay in PyTorch's order: two
    conversions cost more than what kernels gain. What they apply is a step of its own."""
    for given in graph.inputs:
        readers = graph.users().get(given.name, [])
        if len(given.shape) != 4 or len(readers) != 1 or given.name in graph.outputs:
            continue
        (node,) = readers
        operator = operator_of(node)
        if not operator.is_product_of_planes(node, graph) or _leads_to_nhwc(graph, node):
            continue
        applied = operator.applied(node)
        plain = operator.applying(node, IDENTITY).with_attributes(layout="nchw")
        if applied.is_identity:
            graph.nodes[node.name] = plain
            continue
        product = replace(plain, name=graph.fresh(f"{node.name}_product"))
        graph.insert_before(node.name, product)
        graph.nodes[node.name] = Pointwise.instead_of(node, {"x": product.name}, expression=applied.text)


def convert_inputs(graph: Graph, pad_channels: bool) -> None:
    """Images are converted once, in front of the first operation that wants them in NHWC, or of layers in front of it
    that take either. Layers with nothing of the kind behind them read images as they come.

    With `pad_channels` those that only convolutions read get zero channels up to what a kernel loads at once.
    """
    for given in graph.inputs:
        readers = graph.users().get(given.name, [])
        if len(given.shape) != 4 or not getattr(torch, given.dtype).is_floating_point or not readers:
            continue
        normalise = next((node for node in readers if operator_of(node).is_image_scaling), None)
        inputs = {"x": given.name}
        name = graph.fresh(f"{given.name}_nhwc")
        as_it_comes = {
            node.name for node in readers if operator_of(node).takes_image_as_it_comes(node, given)
        }
        if normalise is not None:
            inputs |= {"scale": normalise.inputs["scale"], "shift": normalise.inputs["shift"]}
            graph.remove(normalise, instead=given.name)
            readers = graph.users().get(given.name, [])
        readers = [node for node in readers if node.name not in as_it_comes]
        if normalise is None:
            readers = [node for node in readers if _belongs_in_nhwc(graph, node, given.name)]
        is_returned = normalise is not None and given.name in graph.outputs  # once it is normalised
        if not readers and not is_returned:
            continue
        channels = given.shape[1]
        assert isinstance(channels, int)
        padded = channels
        if pad_channels and readers and all(_pads(graph, node, given.name) for node in readers):
            padded = 4 if channels <= 4 else -(-channels // 8) * 8
        if padded == channels and normalise is None:  # it lies there already for those who take either
            either = [node for node in graph.users()[given.name] if node.name not in as_it_comes]
            readers = [node for node in either if node in readers or _takes_nhwc(node, given.name)]
        shape = (given.shape[0], padded, *given.shape[2:])
        node = Convert.node(name, inputs, {"layout": "nhwc"}, shape)
        for reader in readers:
            if padded != channels:
                _pad_weight(graph, reader, padded - channels)
            current = graph.nodes[reader.name]
            changed = {role: name if value == given.name else value for role, value in current.inputs.items()}
            graph.nodes[reader.name] = replace(current, inputs=changed)
        graph.outputs = tuple(name if output == given.name else output for output in graph.outputs)
        if readers:
            graph.insert_before(readers[0].name, node)
        else:
            graph.append(node)


def _belongs_in_nhwc(graph: Graph, node: Node, value: str) -> bool:
    """Whether a reader of an image wants it in NHWC, or is a layer that takes either with one behind it that does."""
    if _wants_nhwc(node, value):
        return True
    if operator_of(node).expression(node) is not None or not _takes_nhwc(node, value):
        return False
    return _leads_to_nhwc(graph, node)


def _leads_to_nhwc(graph: Graph, node: Node) -> bool:
    """Whether something behind a node, through all that takes images as they lie, wants them in NHWC."""
    users = graph.users()
    seen, ahead = {node.name}, [node.name]
    while ahead:
        name = ahead.pop()
        for reader in users.get(name, []):
            shape = graph.shape_of(name)
            if len(shape) == 4 and not _is_same_in_both(shape) and _wants_nhwc(reader, name):
                return True
            if reader.name not in seen and _layouts(reader, name, "nchw").written == "nchw":
                seen.add(reader.name)
                ahead.append(reader.name)
    return False


def _wants_nhwc(node: Node, value: str) -> bool:
    return _layouts(node, value, "nchw").read == "nhwc"


def _takes_nhwc(node: Node, value: str) -> bool:
    """Whether a node reads a value in NHWC without converting it, and gives an image that lies so too."""
    return _layouts(node, value, "nhwc") == Layouts("nhwc", "nhwc")


def _layouts(node: Node, value: str, layout: str) -> Layouts:
    given = {role: layout for role, name in node.inputs.items() if name == value}
    return operator_of(node).layouts(node, given)


def _pads(graph: Graph, node: Node, value: str) -> bool:
    return (
        operator_of(node).pads_channels(node)
        and [role for role, name in node.inputs.items() if name == value] == ["x"]
        and value not in graph.outputs
    )


def _pad_weight(graph: Graph, node: Node, channels: int) -> None:
    weight = graph.constants[node.inputs["weight"]]
    padded = F.pad(weight, (0, 0, 0, 0, 0, channels))
    name = graph.add_constant(f"{node.name}_weight", padded)
    graph.nodes[node.name] = graph.nodes[node.name].with_inputs(weight=name)


def assign_layouts(
    graph: Graph,
    given_as: Mapping[str, str] = MappingProxyType({}),
    returned: Mapping[str, str] | None = MappingProxyType({}),
) -> None:
    """Says of every image how it lies, and converts those that a reader wants otherwise. Inputs and outputs are in
    PyTorch's order, or in the one that `given_as` and `returned` have for them; without `returned` outputs stay as they
    lie."""
    lies = {
        given.name: given_as.get(given.name, "nchw")
        for given in graph.inputs
        if _is_image(given.shape, given.dtype)
    }
    inputs = {given.name: given for given in graph.inputs}
    converted: dict[tuple[str, str], str] = {}

    def lying(name: str, layout: str, before: str | None) -> str:
        """The value in this layout."""
        if lies[name] == layout or _is_same_in_both(graph.shape_of(name)):
            return name
        if (name, layout) not in converted:
            made = _converted(graph, name, layout, before)
            converted[name, layout], lies[made] = made, layout
        return converted[name, layout]

    for node in graph:
        operator = operator_of(node)
        given = {role: lies[name] for role, name in node.inputs.items() if name in lies}
        counted = {
            role: layout
            for role, layout in given.items()
            if not _is_same_in_both(graph.shape_of(node.inputs[role]))
        }
        wanted = operator.layouts(node, counted or given)
        if wanted.read is not None:
            changed = {
                role: lying(node.inputs[role], wanted.read, node.name)
                for role in given
                if not _is_read_as_it_comes(node, inputs.get(node.inputs[role]))
            }
            graph.nodes[node.name] = node.with_inputs(**changed)
        if _is_image(node.shape, node.dtype):
            written = "nchw" if node.dtype == "float64" else wanted.written  # which no kernel converts
            lies[node.name] = node.attributes.get("layout", written)
            if lies[node.name] != operator.layout(node):
                graph.nodes[node.name] = graph.nodes[node.name].with_attributes(layout=lies[node.name])
    if returned is None:
        return
    made = {
        name: name if lies.get(name, layout) == layout else _returned(graph, name, layout, dtype)
        for name, dtype in dict(zip(graph.outputs, graph.output_types, strict=True)).items()
        for layout in [returned.get(name, "nchw")]
    }
    graph.outputs = tuple(map(made.__getitem__, graph.outputs))


def scale_returned(graph: Graph) -> None:
    """A factor and a term for each channel of what is converted to PyTorch's order are the conversion's."""
    for maker, convert in _converted_back(graph):
        values = [name for name in maker.inputs.values() if name not in graph.constants]
        is_map = len(values) == 1 and graph.shape_of(values[0]) == maker.shape and values[0] in graph.nodes
        found = operator_of(maker).channel_scale(maker, graph, 1) if is_map else None
        if found is None or not graph.nodes[values[0]].is_floating or "scale" in convert.inputs:
            continue
        constants = {
            role: graph.add_constant(f"{convert.name}_{role}", tensor.float().contiguous())
            for role, tensor in zip(("scale", "shift"), found, strict=True)
        }
        graph.nodes[convert.name] = convert.with_inputs(x=values[0], **constants)
        del graph.nodes[maker.name]


def _converted_back(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """What is made for nobody but a conversion of a result to PyTorch's order, with that."""
    for name in graph.outputs:
        convert = graph.nodes.get(name)
        if convert is None or not Convert.matches(convert) or convert.attributes["layout"] != "nchw":
            continue
        maker = graph.nodes.get(convert.inputs["x"])
        if maker is not None and graph.only_user(maker.name) is convert:
            yield maker, convert


def pad_returned(graph: Graph, dtype: str) -> None:
    """What a layer makes for nobody but a conversion to PyTorch's order gets channels up to what one access takes: both
    do single elements otherwise. The conversion leaves them out."""
    multiple = VECTOR_BYTES // STORAGE[dtype].itemsize
    for maker, _ in _converted_back(graph):
        channels = maker.shape[1]
        assert isinstance(channels, int)
        padded = -(-channels // multiple) * multiple
        if channels < padded <= MOST_PADDED * channels:
            order = (*range(channels), *[None] * (padded - channels))
            made = operator_of(maker).writing_channels(maker, order, graph)
            graph.nodes[maker.name] = made or maker


def _returned(graph: Graph, name: str, layout: str, dtype: str) -> str:
    """An output in this order, written in the type that the model returns if a kernel can write it."""
    if _is_same_in_both(graph.shape_of(name)):
        return name
    return _converted(graph, name, layout, None, dtype if getattr(torch, dtype) in NAMES else "float32")


def type_returned(graph: Graph, dtype: str) -> None:
    """What is no image, and in another type than the model returns, is converted by a kernel of the plan's where that
    is one of many: that each call does so takes the host as long as all else, and gives the interpreter's lock away."""
    if sum(not operator_of(node).is_view for node in graph) < MANY_NODES:
        return
    made = {}
    for name, returned in dict(zip(graph.outputs, graph.output_types, strict=True)).items():
        node, wanted = graph.nodes.get(name), getattr(torch, returned)
        if node is None or Aten.matches(node) or not node.is_floating:
            continue
        operator = operator_of(node)
        stored = operator.stored_type(node, STORAGE[dtype], True)
        if operator.layout(node) == "flat" and stored is not wanted and is_converted(stored, wanted):
            made[name] = graph.fresh(f"{name}_{returned}")
            graph.append(Convert.node(made[name], {"x": name}, {"layout": "flat"}, node.shape, returned))
    graph.outputs = tuple(made.get(name, name) for name in graph.outputs)


def _is_image(shape: Shape, dtype: str) -> bool:
    return len(shape) == 4 and getattr(torch, dtype).is_floating_point


def _is_same_in_both(shape: Shape) -> bool:
    """Whether an image has one pixel or one channel: then its bytes are the same in both layouts."""
    return shape[1] == 1 or shape[2:] == (1, 1)


def _is_read_as_it_comes(node: Node, given: Input | None) -> bool:
    return given is not None and operator_of(node).takes_image_as_it_comes(node, given)


def _converted(graph: Graph, value: str, layout: str, before: str | None, dtype: str = "float32") -> str:
    shape = graph.shape_of(value)
    if graph.typed:
        dtype = str(graph.dtype_of(value)).removeprefix("torch.")
    name = graph.fresh(f"{value}_{layout}")
    node = Convert.node(name, {"x": value}, {"layout": layout}, shape, dtype)
    if before is None:
        graph.append(node)
    else:
        graph.insert_before(before, node)
    return name
