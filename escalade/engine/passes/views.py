"""Views moved or replaced so that layers read images in NHWC: permutations, sequences, pools over channels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TypeGuard

from escalade.engine.graph.graph import Batch, Graph, Node, Shape, dtype_name, product
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.batch_norm import BatchNorm
from escalade.engine.nodes.conv2d import Conv2d
from escalade.engine.nodes.linear import Linear
from escalade.engine.nodes.norms import LayerNorm, LogSoftmax, Softmax
from escalade.engine.nodes.pointwise import Pointwise, broadcast
from escalade.engine.nodes.pools import AvgPool2d, MaxPool2d
from escalade.engine.nodes.rearrange import Pad2d
from escalade.engine.nodes.reduce import Reduce, are_adjacent
from escalade.engine.nodes.signature import Attributes
from escalade.engine.nodes.views import (
    CHANNELS_FIRST,
    CHANNELS_LAST,
    FRAMES_ORDER,
    SEQUENCE_RANK,
    VOLUME_RANK,
    Concatenate,
    Permute,
    Reshape,
    Slice,
    image_shape,
)
from escalade.engine.nodes.volumes import FrameImages
from escalade.engine.passes.layout import natural_layouts


def sink_permutes(graph: Graph) -> None:
    """Replace f(permute(x)) by permute(g(x)) where an operator has such a g.

    A block that permutes to channels-last for a norm and two linear layers, and back, then has no permutation left, and
    its linear layers become 1×1 convolutions, with their fusions. A reshape that keeps the channels of an image apart
    from its pixels is one of the pixels of NHWC, permuted: rows of channels, as attention reads them, are then a view.
    """
    layouts = natural_layouts(graph)
    for node in graph:
        if Permute.matches(node):
            compose_permute(graph, node)
        elif Reshape.matches(node):
            _sink_into_reshape(graph, node, layouts)
        elif Reduce.matches(node):
            _reduce_unpermuted(graph, node)
        else:
            _sink(graph, node)
    graph.remove_dead_code()


def _sink_into_reshape(graph: Graph, node: Node, layouts: Mapping[str, str]) -> None:
    """Replace a reshape of a permuted value, or of an image stored in NHWC, by a permutation of a reshape."""
    source, shape = node.inputs["x"], graph.shape_of(node.inputs["x"])
    permute = graph.nodes.get(source)
    is_image = layouts.get(source) == "nhwc" and shape[1] != 1 and shape[2:] != (1, 1)
    if Permute.matches(permute):
        order, value = permute.attributes["order"], permute.inputs["x"]
    elif is_image and node.is_floating and "order" not in node.attributes and _image_of(graph, node) is None:
        order, value = CHANNELS_FIRST, ""
    else:
        return
    split = _reshaped_before_permute(shape, node.shape, order)
    if split is None:
        return
    inner, back = split
    if not value:
        if back == CHANNELS_FIRST or node.name in graph.outputs:  # an image again, or converted in any case
            return
        rows = Permute.node(f"{node.name}_pixels", {"x": source}, {"order": CHANNELS_LAST},
                            tuple(shape[dim] for dim in CHANNELS_LAST), node.dtype)  # fmt: skip
        value = graph.add(rows, before=node.name)
    if inner != graph.shape_of(value):
        view = Reshape.node(f"{node.name}_rows", {"x": value}, {}, inner, node.dtype)
        value = graph.add(view, before=node.name)
    if back == tuple(range(len(back))):
        graph.nodes[node.name] = Reshape.instead_of(node, {"x": value})
    else:
        graph.nodes[node.name] = Permute.instead_of(node, {"x": value}, order=back)
        compose_permute(graph, graph.nodes[node.name])


def _reshaped_before_permute(
    permuted: Shape, result: Shape, order: tuple[int, ...]
) -> tuple[Shape, tuple[int, ...]] | None:
    """Return a shape and an order with reshape(permute(x, order), result) = permute(reshape(x, shape), order).

    None if the reshape merges dimensions that are not adjacent in x.
    """
    groups = _common_groups(permuted, result)
    if groups is None:
        return None
    large = [dim for dim in sorted(order) if permuted[order.index(dim)] != 1]
    """Dimensions of x with more than one element."""
    placed = []
    for before, after in groups:
        at = [large.index(order[dim]) for dim in before if permuted[dim] != 1]
        if at != list(range(at[0], at[0] + len(at))):
            return None
        placed.append((at[0], after))
    inner = [dim for _, after in sorted(placed) for dim in after]
    """Dimensions of the result, in the order of x."""
    return tuple(result[dim] for dim in inner), tuple(map(inner.index, range(len(result))))


def _common_groups(before: Shape, after: Shape) -> list[tuple[range, range]] | None:
    """Return the smallest groups of adjacent dimensions that a reshape makes of each other; None if sizes differ.

    Each has a dimension of more than one element on both sides.
    """
    groups: list[tuple[range, range]] = []
    i = k = 0
    while i < len(before) or k < len(after):
        ends = [(m, n) for m in range(i + 1, len(before) + 1) for n in range(k + 1, len(after) + 1)]
        matching = (
            end
            for end in sorted(ends, key=sum)
            if _elements(before[i : end[0]]) == _elements(after[k : end[1]]) != _ONE
        )
        m, n = next(matching, (len(before), len(after)))
        if (m, n) == (len(before), len(after)) and _elements(before[i:]) == _elements(after[k:]) == _ONE:
            if not groups:
                return None
            first, last = groups.pop()  # dimensions of one element at the end belong to the last group
            i, k = first.start, last.start
        elif _elements(before[i:m]) != _elements(after[k:n]):
            return None
        groups.append((range(i, m), range(k, n)))
        i, k = m, n
    return groups


def _elements(sizes: Shape) -> tuple[int, int]:
    """Return the number of elements per item of a batch, and how many of the sizes depend on the batch."""
    batched = sum(isinstance(size, Batch) for size in sizes)
    return math.prod(size.times if isinstance(size, Batch) else size for size in sizes), batched


_ONE = _elements(())


def compose_permute(graph: Graph, node: Node) -> None:
    """Merge a permutation with a preceding one; remove both if they cancel."""
    before = graph.nodes.get(node.inputs["x"])
    if not Permute.matches(before):
        return
    first, second = before.attributes["order"], node.attributes["order"]
    order = tuple(first[dim] for dim in second)
    if order == tuple(range(len(order))):
        graph.remove(node, instead=before.inputs["x"])
    else:
        both = node.with_inputs(x=before.inputs["x"]).with_attributes(order=order)
        graph.nodes[node.name] = both


def _sink(graph: Graph, node: Node) -> None:
    values = {role: name for role, name in node.inputs.items() if name not in graph.constants}
    permutes = [graph.nodes.get(name) for name in values.values()]
    matching = [permute for permute in permutes if Permute.matches(permute)]
    if not matching or len(matching) != len(permutes):
        return
    orders = {permute.attributes["order"] for permute in matching}
    if len(orders) > 1:
        return
    (order,) = orders
    moved = _before_permute(node, order, graph)
    if moved is None:
        return
    sources = {name: graph.nodes[name].inputs["x"] for name in values.values()}
    inputs = {role: sources.get(name, name) for role, name in moved.inputs.items()}
    name = graph.add(replace(moved, name=f"{node.name}_unpermuted", inputs=inputs), before=node.name)
    graph.nodes[node.name] = Permute.instead_of(node, {"x": name}, order=order)


def _reduce_unpermuted(graph: Graph, node: Node) -> None:
    """Reduce what was permuted as it was before, if the other dimensions keep their order."""
    permute = graph.nodes.get(node.inputs["x"])
    if not Permute.matches(permute) or len(permute.shape) == _IMAGE_RANK:  # images have layouts
        return
    order, a = permute.attributes["order"], node.attributes
    kept = [source for dim, source in enumerate(order) if dim not in a["dims"]]
    dims = tuple(sorted(order[dim] for dim in a["dims"]))
    moved = node.with_inputs(x=permute.inputs["x"]).with_attributes(dims=dims)
    if not dims or not are_adjacent(moved, len(order)) or (kept != sorted(kept) and not a["keepdim"]):
        return
    if a["keepdim"]:
        shape = tuple(node.shape[order.index(dim)] for dim in range(len(order)))
        reduced = graph.add(replace(moved, name=f"{node.name}_unpermuted", shape=shape), before=node.name)
        moved = Permute.instead_of(node, {"x": reduced}, order=order)
    graph.nodes[node.name] = moved


def _before_permute(node: Node, order: tuple[int, ...], graph: Graph) -> Node | None:
    """Return the node g with permute(g(x)) = node(permute(x)), still reading the permuted values; None without one."""
    if len(node.shape) != len(order):
        return None
    shape = tuple(size for _, size in sorted(zip(order, node.shape, strict=True), key=lambda pair: pair[0]))
    moved = replace(node, shape=shape)
    if operator_of(node).expression(node) is not None:
        return moved.with_inputs(**_unpermuted_constants(node, order, graph))
    if order != CHANNELS_LAST:
        return None
    # Rows of channels are the pixels of an image.
    if Linear.matches(node):
        weight = graph.constants[node.inputs["weight"]][:, :, None, None]
        return Conv2d.instead_of(
            moved, {**node.inputs, "weight": graph.add_constant(f"{node.name}_weight", weight)},
            stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, relu=node.attributes["relu"],
        )  # fmt: skip
    takes_channels = any(kind.matches(node) for kind in (Softmax, LogSoftmax, LayerNorm))
    is_rows = takes_channels and not node.attributes.get("of_channels")
    return moved.with_attributes(of_channels=True) if is_rows else None


def _unpermuted_constants(node: Node, order: tuple[int, ...], graph: Graph) -> dict[str, str]:
    moved = {}
    for role, name in node.inputs.items():
        if name in graph.constants:
            constant = graph.constants[name]
            whole = constant.view(*[1] * (len(order) - constant.dim()), *constant.shape)
            moved[role] = whole.permute([order.index(dim) for dim in range(len(order))]).contiguous()
    return graph.add_constants(node.name, moved)


def keep_sequences_as_images(graph: Graph) -> None:
    """Apply nodes between two 1-D or 3-D layers to images, so that the views in between cancel."""
    for node in graph:
        if Reshape.matches(node):
            _view_image_directly(graph, node)
        elif len(node.shape) in (SEQUENCE_RANK, VOLUME_RANK) and (
            node.is_floating or Pointwise.matches(node)
        ):
            _apply_to_image(graph, node)
    graph.remove_dead_code()


class _ImageView(StrEnum):
    """View of a sequence or volume as an image."""

    row = "row"
    """A sequence is one row of pixels."""
    depth = "depth"
    """The rows of the image are the frames of a volume."""
    frames = "frames"
    """Each frame of a volume is an image."""

    def image_shape(self, shape: Shape) -> Shape:
        if self is _ImageView.row:
            return image_shape(shape)
        if self is _ImageView.depth:
            return (*shape[:3], product(shape[3:]))
        return (product((shape[0], shape[2])), shape[1], *shape[3:])

    def on(self, graph: Graph, node: Node, image: str) -> Node:
        """Return the view of an image that takes the place of a node."""
        if self is not _ImageView.frames:
            return Reshape.instead_of(node, {"x": image})
        shape = tuple(node.shape[dim] for dim in FRAMES_ORDER)
        frames = Reshape.node(f"{node.name}_frames", {"x": image}, {}, shape, node.dtype)
        return Permute.instead_of(node, {"x": graph.add(frames, before=node.name)}, order=FRAMES_ORDER)


def _view_image_directly(graph: Graph, node: Node) -> None:
    """Turn a view of an image's sequence into a view of the image."""
    found = _image(graph, node.inputs["x"])
    if found is None or found[1] is _ImageView.frames:
        return
    image, _ = found
    if graph.shape_of(image) == node.shape:
        graph.remove(node, instead=image)
    else:
        graph.nodes[node.name] = node.with_inputs(x=image)


def _apply_to_image(graph: Graph, node: Node) -> None:
    values = [name for name in node.inputs.values() if name not in graph.constants]
    images = {name: _image(graph, name) for name in values}
    are_volumes = len(node.shape) == VOLUME_RANK
    if (graph.typed or are_volumes) and any(found is not None for found in images.values()):
        images = {name: found or _row(graph, node, name) for name, found in images.items()}
    kinds = {None if found is None else found[1] for found in images.values()}
    (kind,) = kinds if len(kinds) == 1 else (None,)
    attributes = None if kind is None else _image_attributes(node, kind)
    if kind is None or attributes is None:
        return
    inputs = {}
    for role, name in node.inputs.items():
        found = images.get(name)
        value = found[0] if found is not None else _image_constant(graph, node, name, kind)
        if value is None:
            return
        inputs[role] = value
    shape = kind.image_shape(node.shape)
    if (
        operator_of(node).expression(node) is not None
        and broadcast(map(graph.shape_of, inputs.values())) != shape
    ):
        return  # an operand is broadcast along one of the dimensions that the image merges
    on_image = replace(node, name=f"{node.name}_image", inputs=inputs, attributes=attributes, shape=shape)
    image = graph.add(on_image, before=node.name)
    graph.nodes[node.name] = kind.on(graph, node, image)


def _row(graph: Graph, node: Node, name: str) -> tuple[str, _ImageView] | None:
    """Return a sequence or volume as an image: a value that PyTorch computes meets those of images."""
    shape = graph.shape_of(name)
    kind = {SEQUENCE_RANK: _ImageView.row, VOLUME_RANK: _ImageView.depth}.get(len(shape))
    is_joined = kind is _ImageView.depth and Concatenate.matches(node)
    is_supported = operator_of(node).expression(node) is not None or is_joined
    if kind is None or not is_supported or set(graph.shape_of(name)[1:]) == {1}:
        return None
    viewed = Reshape.node(
        graph.fresh(f"{name}_row"), {"x": name}, {}, kind.image_shape(shape), dtype_name(graph.dtype_of(name))
    )
    return graph.add(viewed, before=node.name), kind


def _image_constant(graph: Graph, node: Node, name: str, kind: _ImageView) -> str | None:
    """Return a constant that is broadcast to a sequence or volume as one for images; None if there is none."""
    constant = graph.constants[name]
    if kind is _ImageView.row:
        return graph.add_constant(f"{name}_row", constant.unsqueeze(-2)) if constant.dim() > 1 else name
    if constant.numel() == 1 or operator_of(node).expression(node) is None:
        return name if constant.dim() <= 1 else graph.add_constant(f"{name}_image", constant.reshape(()))
    sizes = (1,) * (VOLUME_RANK - constant.dim()) + tuple(constant.shape)
    if constant.numel() != sizes[1]:
        return None
    return graph.add_constant(f"{name}_image", constant.reshape(-1, 1, 1))


def _image(graph: Graph, name: str) -> tuple[str, _ImageView] | None:
    """Return the image that a value is a sequence or volume of, and how."""
    node = graph.nodes.get(name)
    if Permute.matches(node) and node.attributes["order"] == FRAMES_ORDER:
        before, kinds = graph.nodes.get(node.inputs["x"]), [_ImageView.frames]
    else:
        before, kinds = node, [_ImageView.row] if node is None or len(node.shape) == 3 else [_ImageView.depth]
    if node is None or not Reshape.matches(before) or "order" in before.attributes:
        return None
    if len(node.shape) not in (SEQUENCE_RANK, VOLUME_RANK):
        return None
    image, (kind,) = before.inputs["x"], kinds
    return (image, kind) if graph.shape_of(image) == kind.image_shape(node.shape) else None


def _image_attributes(node: Node, kind: _ImageView) -> Attributes | None:
    """Return the attributes of a node that is applied to images; None if it cannot be."""
    a, operator = node.attributes, operator_of(node)
    if operator.expression(node) is not None or BatchNorm.matches(node):
        return a
    if kind is _ImageView.row:
        if Concatenate.matches(node) or Slice.matches(node):
            return {**a, "dimension": _image_dim(a["dimension"])}
        if Reduce.matches(node):
            return {**a, "dims": _image_dims(a["dims"])} if a["keepdim"] else None
    if kind is _ImageView.depth and (Concatenate.matches(node) or Slice.matches(node)):
        return a if a["dimension"] == 1 else None
    return a if operator.takes_any_rank and kind is not _ImageView.frames else None


def _image_dim(dim: int) -> int:
    return dim + (dim >= 2)


def _image_dims(dims: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions to reduce; several include the rows of the image, so that they are adjacent."""
    on_image = {_image_dim(dim) for dim in dims}
    return tuple(sorted(on_image | {2} if len(dims) > 1 and 3 in on_image else on_image))


def view_frames(graph: Graph) -> None:
    """View the frames of NDHWC volumes as images, which copies nothing, instead of permuting dimensions."""
    found = set(graph.nodes)
    for node in graph:
        x = graph.nodes.get(node.inputs.get("x", ""))
        if Permute.matches(node) and node.attributes["order"] == FRAMES_ORDER and _is_plain_view(x):
            _view_rows_of_frames(graph, node, x.inputs["x"])
        elif _is_plain_view(node) and len(node.shape) == _IMAGE_RANK and Permute.matches(x):
            if x.attributes["order"] == FRAMES_ORDER:
                _view_frames_of_rows(graph, node, x.inputs["x"])
        elif _is_plain_view(node) and _is_plain_view(x) and len(x.shape) == VOLUME_RANK:
            source = x.inputs["x"]
            if graph.shape_of(source) == node.shape:
                graph.remove(node, instead=source)
            else:
                graph.nodes[node.name] = node.with_inputs(x=source)
    graph.remove_dead_code()
    if set(graph.nodes) - found:
        keep_sequences_as_images(graph)  # that read volumes viewed in both ways


def _is_plain_view(node: Node | None) -> TypeGuard[Node]:
    return Reshape.matches(node) and "order" not in node.attributes


def _view_rows_of_frames(graph: Graph, node: Node, images: str) -> None:
    """Replace volumes permuted from images of frames by a view of those images."""
    if len(graph.shape_of(images)) != _IMAGE_RANK:
        return
    shape = _ImageView.depth.image_shape(node.shape)
    if graph.shape_of(images) != _ImageView.frames.image_shape(node.shape):
        return
    rows = FrameImages.as_rows(graph.fresh(f"{node.name}_rows"), images, shape, node.dtype)
    graph.nodes[node.name] = Reshape.instead_of(node, {"x": graph.add(rows, before=node.name)})


def _view_frames_of_rows(graph: Graph, node: Node, volumes: str) -> None:
    """Replace images of frames that were permuted from volumes by a view of those volumes."""
    shape = graph.shape_of(volumes)
    if node.shape != _ImageView.frames.image_shape(shape):
        return
    source, rows = graph.nodes.get(volumes), _ImageView.depth.image_shape(shape)
    if _is_plain_view(source) and graph.shape_of(source.inputs["x"]) == rows:
        name = source.inputs["x"]
    else:
        view = Reshape.node(graph.fresh(f"{node.name}_rows"), {"x": volumes}, {}, rows, node.dtype)
        name = graph.add(view, before=node.name)
    graph.nodes[node.name] = FrameImages.of_rows(node, name, shape[3:])  # type: ignore[arg-type]


_IMAGE_RANK = 4
_PAIRS = ("kernel", "stride", "padding", "dilation")
"""Attributes for rows and columns, which change places."""


def pool_channels_last(graph: Graph) -> None:
    """Let windows over channels slide along the rows of NHWC pixels.

    Models write such pools as [batch, 1, channels, pixels]. In NCHW that takes one conversion before
    and one after.
    """
    for node in graph:
        image = _image_of(graph, node)
        if image is None or not _is_nhwc(graph, image):
            continue
        chain = [node]
        while (reader := graph.only_user(chain[-1].name)) is not None:
            chain.append(reader)
            if not _is_windowed(reader):
                break
        windowed, last = chain[1:-1], chain[-1]
        if windowed and Reshape.matches(last):
            _transpose(graph, image, windowed, last, graph.shape_of(image)[2:])
    graph.remove_dead_code()


def _image_of(graph: Graph, node: Node) -> str | None:
    """Return the image whose channels and pixels a node views as rows and columns."""
    if not Reshape.matches(node) or len(node.shape) != 4 or node.shape[1] != 1:
        return None
    image = node.inputs["x"]
    shape = graph.shape_of(image)
    return image if len(shape) == 4 and (shape[0], shape[1]) == (node.shape[0], node.shape[2]) else None


def _is_nhwc(graph: Graph, name: str) -> bool:
    """Return True if a layer computes the value in NHWC, directly or followed by pointwise functions."""
    node = graph.nodes.get(name)
    if node is None:
        return False
    operator = operator_of(node)
    if operator.expression(node) is None:
        return operator.preferred_layout == "nhwc" and not Reshape.matches(node)
    return any(_is_nhwc(graph, value) for value in node.inputs.values())


def _is_windowed(node: Node) -> bool:
    """Return True if a node pads or pools rows only."""
    a = node.attributes
    if Pad2d.matches(node):
        return not any(a["pads"][2:])
    is_pool = AvgPool2d.matches(node) or MaxPool2d.matches(node)
    return is_pool and all(a[key][1] == (key != "padding") for key in _PAIRS if key in a)


def _transposed(node: Node) -> Node:
    a, (batch, channels, rows, columns) = node.attributes, node.shape
    changed = {key: (a[key][1], a[key][0]) for key in _PAIRS if key in a}
    if "pads" in a:
        changed["pads"] = (*a["pads"][2:], *a["pads"][:2])
    return replace(node.with_attributes(**changed), shape=(batch, channels, columns, rows))


def _transpose(graph: Graph, image: str, windowed: list[Node], last: Node, sides: Shape) -> None:
    batch, _, channels, _ = windowed[-1].shape
    before = graph.shape_of(image)[1]

    def view(kind: type[Permute | Reshape], value: str, shape: Shape, **attributes: Shape) -> str:
        made = kind.node(f"{value}_rows", {"x": value}, attributes, shape, last.dtype)
        return graph.add(made, before=last.name)

    pixels = windowed[-1].shape[3]
    value = view(Permute, image, (batch, *sides, before), order=CHANNELS_LAST)
    value = view(Reshape, value, (batch, 1, pixels, before))
    for node in windowed:
        moved = _transposed(node).with_inputs(x=value)
        value = graph.add(replace(moved, name=f"{node.name}_rows"), before=last.name)
    value = view(Reshape, value, (batch, *sides, channels))
    value = view(Permute, value, (batch, channels, *sides), order=CHANNELS_FIRST)
    while (reader := graph.only_user(last.name)) is not None and Reshape.matches(reader):
        graph.remove(last, instead=value)  # squeeze, then view: only the last shape counts
        last = graph.nodes[reader.name]
    if last.shape == graph.shape_of(value):
        graph.remove(last, instead=value)
    else:
        graph.nodes[last.name] = last.with_inputs(x=value)
