"""Layout assignment: NHWC inside a network, with as few conversions as possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
import torch.nn.functional as F

from escalade.engine.graph.forms import NAMES, STORAGE
from escalade.engine.graph.graph import Graph, Node, Shape, dtype_name
from escalade.engine.nodes import layout_of, operator_of, reads_raw_image, stored_type
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.base import Layouts, activation_of, with_activation
from escalade.engine.nodes.conv2d import Conv2d, has_one_input
from escalade.engine.nodes.convert import Convert, Normalize, is_converted
from escalade.engine.nodes.linear import Linear
from escalade.engine.nodes.mlp import Mlp
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.passes.channel_order import writing_channels
from escalade.engine.passes.channel_scale import channel_scale
from escalade.engine.passes.shuffles import MAX_PADDING_FACTOR
from escalade.ops.base.dtypes import VECTOR_BYTES
from escalade.ops.expressions import IDENTITY

MANY_NODES = 12  # from this many nodes on, one more kernel of about 1 us is negligible


def keep_nchw_products(graph: Graph) -> None:
    """Keep a 1×1 convolution of an input in NCHW if nothing after it prefers NHWC, with its epilogue as its own step.

    Two conversions cost more than the faster kernel gains.
    """
    for entry in graph.inputs:
        readers = graph.users().get(entry.name, [])
        if len(entry.shape) != 4 or len(readers) != 1 or entry.name in graph.outputs:
            continue
        (node,) = readers
        if not _is_matrix_product(node, graph) or _leads_to_nhwc(graph, node):
            continue
        applied = activation_of(node)
        plain = with_activation(node, IDENTITY).with_attributes(layout="nchw")
        if applied.is_identity:
            graph.nodes[node.name] = plain
            continue
        product = graph.add(replace(plain, name=f"{node.name}_product"), before=node.name)
        graph.nodes[node.name] = Pointwise.instead_of(node, {"x": product}, expression=applied.text)


def _is_matrix_product(node: Node, graph: Graph) -> bool:
    """Return True for a 1×1 convolution that PyTorch computes in NCHW as a matrix times the planes of x."""
    if not Conv2d.matches(node) or not has_one_input(node):
        return False
    a, window = node.attributes, tuple(graph.constants[node.inputs["weight"]].shape[2:])
    is_1x1 = (window, a["stride"], a["dilation"], a["padding"]) == ((1, 1), (1, 1), (1, 1), (0, 0))
    return is_1x1 and a["groups"] == 1 and graph.shape_of(node.inputs["x"])[2:] != (1, 1)


def convert_inputs(graph: Graph, pad_channels: bool) -> None:
    """Convert input images to NHWC once, before the first node that prefers it, or layout-agnostic layers before that.

    Layers that lead to no such node read images as they are. With `pad_channels`, images that only convolutions read
    are padded with zero channels to a full vector load.
    """
    for entry in graph.inputs:
        readers = graph.users().get(entry.name, [])
        if len(entry.shape) != 4 or not getattr(torch, entry.dtype).is_floating_point or not readers:
            continue
        normalization = next((node for node in readers if Normalize.matches(node)), None)
        inputs = {"x": entry.name}
        name = graph.fresh(f"{entry.name}_nhwc")
        raw = {node.name for node in readers if reads_raw_image(node, entry)}
        if normalization is not None:
            inputs |= {"scale": normalization.inputs["scale"], "shift": normalization.inputs["shift"]}
            graph.remove(normalization, instead=entry.name)
            readers = graph.users().get(entry.name, [])
        readers = [node for node in readers if node.name not in raw]
        if normalization is None:
            readers = [node for node in readers if _prefers_nhwc(graph, node, entry.name)]
        is_returned = normalization is not None and entry.name in graph.outputs  # after normalization
        if not readers and not is_returned:
            continue
        channels = entry.shape[1]
        assert isinstance(channels, int)
        padded = channels
        if pad_channels and readers and all(_can_pad(graph, node, entry.name) for node in readers):
            padded = 4 if channels <= 4 else -(-channels // 8) * 8
        if padded == channels and normalization is None:  # layout-agnostic readers use the conversion too
            either = [node for node in graph.users()[entry.name] if node.name not in raw]
            readers = [node for node in either if node in readers or _takes_nhwc(node, entry.name)]
        shape = (entry.shape[0], padded, *entry.shape[2:])
        node = Convert.node(name, inputs, {"layout": "nhwc"}, shape)
        for reader in readers:
            if padded != channels:
                _pad_weight(graph, reader, padded - channels)
            current = graph.nodes[reader.name]
            changed = {role: name if value == entry.name else value for role, value in current.inputs.items()}
            graph.nodes[reader.name] = replace(current, inputs=changed)
        graph.outputs = tuple(name if output == entry.name else output for output in graph.outputs)
        if readers:
            graph.insert_before(readers[0].name, node)
        else:
            graph.append(node)


def _prefers_nhwc(graph: Graph, node: Node, value: str) -> bool:
    """Return True if a node prefers an image in NHWC, or is a layout-agnostic layer that leads to such a node."""
    if _wants_nhwc(node, value):
        return True
    if operator_of(node).expression(node) is not None or not _takes_nhwc(node, value):
        return False
    return _leads_to_nhwc(graph, node)


def _leads_to_nhwc(graph: Graph, node: Node) -> bool:
    """Return True if a node after this one, through layout-agnostic nodes only, prefers NHWC."""
    users = graph.users()
    seen, pending = {node.name}, [node.name]
    while pending:
        name = pending.pop()
        for reader in users.get(name, []):
            shape = graph.shape_of(name)
            if len(shape) == 4 and not _is_layout_free(shape) and _wants_nhwc(reader, name):
                return True
            if reader.name not in seen and _layouts(reader, name, "nchw").written == "nchw":
                seen.add(reader.name)
                pending.append(reader.name)
    return False


def _wants_nhwc(node: Node, value: str) -> bool:
    return _layouts(node, value, "nchw").read == "nhwc"


def _takes_nhwc(node: Node, value: str) -> bool:
    """Return True if a node can read a value in NHWC and then writes NHWC."""
    return _layouts(node, value, "nhwc") == Layouts("nhwc", "nhwc")


def _layouts(node: Node, value: str, layout: str) -> Layouts:
    return operator_of(node).layouts(node, dict.fromkeys(node.roles_of(value), layout))


def _can_pad(graph: Graph, node: Node, value: str) -> bool:
    """Return True if a node reads `value` only as the image of an ungrouped convolution."""
    if not Conv2d.matches(node) or node.attributes["groups"] != 1 or value in graph.outputs:
        return False
    return node.roles_of(value) == ["x"]


def _pad_weight(graph: Graph, node: Node, channels: int) -> None:
    weight = graph.constants[node.inputs["weight"]]
    padded = F.pad(weight, (0, 0, 0, 0, 0, channels))
    name = graph.add_constant(f"{node.name}_weight", padded)
    graph.nodes[node.name] = graph.nodes[node.name].with_inputs(weight=name)


def assign_layouts(
    graph: Graph,
    input_layouts: Mapping[str, str] = MappingProxyType({}),
    output_layouts: Mapping[str, str] | None = MappingProxyType({}),
) -> None:
    """Assign a layout to every image, and add conversions for readers that need another one.

    Inputs and outputs are NCHW unless `input_layouts` and `output_layouts` specify otherwise. With `output_layouts`
    None, outputs are left as they are.
    """
    layouts = {
        entry.name: input_layouts.get(entry.name, "nchw")
        for entry in graph.inputs
        if _is_image(entry.shape, entry.dtype)
    }
    inputs = {entry.name: entry for entry in graph.inputs}
    converted: dict[tuple[str, str], str] = {}

    def in_layout(name: str, layout: str, before: str | None) -> str:
        """Return the value in this layout, converted before node `before` if needed."""
        if layouts[name] == layout or _is_layout_free(graph.shape_of(name)):
            return name
        if (name, layout) not in converted:
            made = _add_conversion(graph, name, layout, before)
            converted[name, layout], layouts[made] = made, layout
        return converted[name, layout]

    for node in graph:
        operand_layouts = {role: layouts[name] for role, name in node.inputs.items() if name in layouts}
        layout_bound = {
            role: layout
            for role, layout in operand_layouts.items()
            if not _is_layout_free(graph.shape_of(node.inputs[role]))
        }
        preferred = operator_of(node).layouts(node, layout_bound or operand_layouts)
        if preferred.read is not None:
            changed = {
                role: in_layout(node.inputs[role], preferred.read, node.name)
                for role in operand_layouts
                if not (node.inputs[role] in inputs and reads_raw_image(node, inputs[node.inputs[role]]))
            }
            graph.nodes[node.name] = node.with_inputs(**changed)
        if _is_image(node.shape, node.dtype):
            written = "nchw" if node.dtype == "float64" else preferred.written  # no kernel converts float64
            layouts[node.name] = node.attributes.get("layout", written)
            if layouts[node.name] != layout_of(node):
                graph.nodes[node.name] = graph.nodes[node.name].with_attributes(layout=layouts[node.name])
    if output_layouts is None:
        return
    made = {
        name: name if layouts.get(name, layout) == layout else _convert_output(graph, name, layout, dtype)
        for name, dtype in dict(zip(graph.outputs, graph.output_types, strict=True)).items()
        for layout in [output_layouts.get(name, "nchw")]
    }
    graph.outputs = tuple(map(made.__getitem__, graph.outputs))


def fold_output_scales(graph: Graph) -> None:
    """Fold a scale and shift per channel into the conversion of an output to NCHW."""
    for producer, convert in _output_conversions(graph):
        values = [name for name in producer.inputs.values() if name not in graph.constants]
        is_map = len(values) == 1 and graph.shape_of(values[0]) == producer.shape and values[0] in graph.nodes
        scale = channel_scale(producer, graph, 1) if is_map else None
        if scale is None or not graph.nodes[values[0]].is_floating or "scale" in convert.inputs:
            continue
        vectors = dict(zip(("scale", "shift"), (one.float().contiguous() for one in scale), strict=True))
        constants = graph.add_constants(convert.name, vectors)
        graph.nodes[convert.name] = convert.with_inputs(x=values[0], **constants)
        del graph.nodes[producer.name]


def _output_conversions(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Yield each conversion of an output to NCHW whose operand has no other reader, with the operand's node."""
    for name in graph.outputs:
        convert = graph.nodes.get(name)
        if convert is None or not Convert.matches(convert) or convert.attributes["layout"] != "nchw":
            continue
        producer = graph.nodes.get(convert.inputs["x"])
        if producer is not None and graph.only_user(producer.name) is convert:
            yield producer, convert


def pad_outputs(graph: Graph, dtype: str) -> None:
    """Pad the channels of images that are only converted to NCHW outputs to full vector accesses.

    Otherwise both the layer and the conversion access single elements. The conversion drops the padding.
    """
    vector_elements = VECTOR_BYTES // STORAGE[dtype].itemsize
    for producer, _ in _output_conversions(graph):
        channels = producer.shape[1]
        assert isinstance(channels, int)
        padded = -(-channels // vector_elements) * vector_elements
        if channels < padded <= MAX_PADDING_FACTOR * channels:
            order = (*range(channels), *[None] * (padded - channels))
            made = writing_channels(producer, order, graph)
            graph.nodes[producer.name] = made or producer


def _convert_output(graph: Graph, name: str, layout: str, dtype: str) -> str:
    """Convert an output to a layout, and to the dtype that the model returns if a kernel can write it."""
    if _is_layout_free(graph.shape_of(name)):
        return name
    return _add_conversion(graph, name, layout, None, dtype if getattr(torch, dtype) in NAMES else "float32")


def convert_output_dtypes(graph: Graph, dtype: str) -> None:
    """Convert outputs that are not images to the model's dtypes by a kernel, in plans with many kernels.

    A conversion outside of the plan costs the host as much as the rest of a call, and releases the GIL.
    """
    if sum(not operator_of(node).is_view for node in graph) < MANY_NODES:
        return
    made = {}
    for name, output_type in dict(zip(graph.outputs, graph.output_types, strict=True)).items():
        node, wanted = graph.nodes.get(name), getattr(torch, output_type)
        if node is None or Aten.matches(node) or not node.is_floating:
            continue
        stored = stored_type(node, STORAGE[dtype], True)
        if layout_of(node) == "flat" and stored is not wanted and is_converted(stored, wanted):
            made[name] = graph.add(
                Convert.node(
                    f"{name}_{output_type}", {"x": name}, {"layout": "flat"}, node.shape, output_type
                )
            )
    graph.outputs = tuple(made.get(name, name) for name in graph.outputs)


def _is_image(shape: Shape, dtype: str) -> bool:
    return len(shape) == 4 and getattr(torch, dtype).is_floating_point


def _is_layout_free(shape: Shape) -> bool:
    """Return True for images of one pixel or one channel, whose bytes are the same in both layouts."""
    return shape[1] == 1 or shape[2:] == (1, 1)


def _add_conversion(graph: Graph, value: str, layout: str, before: str | None, dtype: str = "float32") -> str:
    shape = graph.shape_of(value)
    if graph.typed:
        dtype = dtype_name(graph.dtype_of(value))
    return graph.add(
        Convert.node(f"{value}_{layout}", {"x": value}, {"layout": layout}, shape, dtype), before
    )


def reorder_flattened(graph: Graph) -> None:
    """Reorder the weights of all layers that read a flattened NHWC image, if each of them can be reordered."""
    users, layouts = graph.users(), natural_layouts(graph)
    for node in graph:
        if not operator_of(node).is_view or not _flattens_image(graph, node) or node.name in graph.outputs:
            continue
        if layouts.get(node.inputs["x"]) != "nhwc":
            continue
        layers = users.get(node.name, [])
        if not layers or not all(feature_constants(one) and one.inputs["x"] == node.name for one in layers):
            continue
        channels, height, width = graph.shape_of(node.inputs["x"])[1:]
        for layer in layers:
            reordered = {}
            for role in feature_constants(layer):
                weight = graph.constants[layer.inputs[role]]
                images = weight.reshape(-1, channels, height, width)  # type: ignore[arg-type]
                reordered[role] = images.permute(0, 2, 3, 1).reshape(weight.shape).contiguous()
            constants = graph.add_constants(layer.name, reordered)
            graph.nodes[layer.name] = graph.nodes[layer.name].with_inputs(**constants)
        graph.nodes[node.name] = node.with_attributes(order="nhwc")


def feature_constants(layer: Node) -> tuple[str, ...]:
    """Return the roles of all constants with one column per feature of x; empty if these cannot be reordered."""
    if Linear.matches(layer):
        return ("weight",)
    # A chain must read the features as one group, and not be compared with them.
    if (
        not Mlp.matches(layer)
        or layer.attributes["layers"][0].groups != 1
        or layer.attributes["output"] != "y"
    ):
        return ()
    return tuple(role for role in ("norm_bias0", "norm_weight0", "weight0") if role in layer.inputs)


def _flattens_image(graph: Graph, node: Node) -> bool:
    before, after = graph.shape_of(node.inputs["x"]), node.shape
    return len(before) == 4 and len(after) == 2 and before[0] == after[0] and before[2:] != (1, 1)


def natural_layouts(graph: Graph) -> dict[str, str]:
    """Return the layout in which each image is produced, without conversions."""
    layouts = {
        entry.name: graph.images
        for entry in graph.inputs
        if len(entry.shape) == 4 and graph.dtype_of(entry.name).is_floating_point
    }
    for node in graph:
        if len(node.shape) == 4 and node.is_floating:
            operand_layouts = {role: layouts[name] for role, name in node.inputs.items() if name in layouts}
            written = operator_of(node).layouts(node, operand_layouts).written
            layouts[node.name] = node.attributes.get("layout", written)
    return layouts
