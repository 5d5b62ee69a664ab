"""ONNX operators on shapes, and operators that move elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from escalade.models.onnx_import.operators import OnnxNode, as_tensor, given, operator, tensors_of

_END = 2**31
"""Ends of slices from here on mean the end of the dimension."""


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def axes_of(node: OnnxNode, inputs: Sequence[Any], rank: int) -> list[int] | None:
    """Return the axes, an attribute in older opsets and the second input in newer ones; None if there are none."""
    axes = node.host(inputs, 1, node.get("axes", None))
    return None if axes is None else [axis % rank if rank else 0 for axis in _listed(axes)]


@operator("Shape")
def _shape(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x = inputs[0]
    sizes = list(x.shape) if isinstance(x, torch.Tensor) else [len(x)] if isinstance(x, list) else []
    return sizes[node.get("start", 0) : node.get("end", None)]


@operator("Size")
def _size(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x = inputs[0]
    return x.numel() if isinstance(x, torch.Tensor) else len(_listed(x))


@operator("Reshape")
def _reshape(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x, shape = inputs[0], _listed(node.host(inputs, 1))
    if not isinstance(x, torch.Tensor):  # a number or a vector on the host
        node.require(len(shape) <= 1, "constants of few elements are reshaped to vectors only")
        return _listed(x) if shape else _listed(x)[0]
    if _keeps_batch(node, x, shape):
        shape = [x.shape[0], *shape[1:]]
    if not node.get("allowzero", 0):
        shape = [
            x.shape[index] if type(size) is int and not size else size for index, size in enumerate(shape)
        ]
    return x.reshape(shape)


def _keeps_batch(node: OnnxNode, x: torch.Tensor, shape: Sequence[Any]) -> bool:
    """Return True if a constant shape begins with the file's fixed batch size, and reshapes each item separately.

    The network then supports other batch sizes too, although the exporter has fixed the example's.
    """
    is_constant = all(type(size) is int for size in shape) and all(
        isinstance(size, int) for size in x.shape[1:]
    )
    if node.batch is None or not shape or not x.dim() or not is_constant:
        return False
    # `int`: while a network is traced, sizes that are multiples of the batch size may not be compared.
    item, rest = math.prod(map(int, x.shape[1:])), math.prod(size for size in shape[1:] if size != -1)
    is_whole = item == rest if -1 not in shape else rest > 0 and item % rest == 0
    return shape[0] == node.batch and 0 not in shape and is_whole


@operator("Flatten")
def _flatten(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x = inputs[0]
    axis = node.get("axis", 1)
    axis += x.dim() if axis < 0 else 0
    if axis == 0:
        return x.reshape(1, -1)
    behind = x.unsqueeze(-1) if axis == x.dim() else x.flatten(axis)
    return behind if axis == 1 else behind.flatten(0, axis - 1)


@operator("Transpose")
def _transpose(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x = inputs[0]
    return x.permute(node.get("perm", list(reversed(range(x.dim())))))


@operator("Squeeze")
def _squeeze(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x = inputs[0]
    if not isinstance(x, torch.Tensor):
        return x[0] if isinstance(x, list) else x
    axes = axes_of(node, inputs, x.dim())
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


@operator("Unsqueeze")
def _unsqueeze(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x = inputs[0]
    count = len(_listed(node.host(inputs, 1, node.get("axes", None))))
    if not isinstance(x, torch.Tensor):
        if isinstance(x, list) or count > 1:
            x = torch.tensor(x)
        else:
            return [x]
    for axis in sorted(axes_of(node, inputs, x.dim() + count) or ()):
        x = x.unsqueeze(axis)
    return x


@operator("Concat")
def _concat(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    if not any(isinstance(value, torch.Tensor) for value in inputs):
        return [*itertools.chain.from_iterable(map(_listed, inputs))]
    return torch.cat(tensors_of(inputs), node.attributes["axis"])


@operator("Split")
def _split(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x, axis = inputs[0], node.get("axis", 0)
    length = len(x) if isinstance(x, list) else x.shape[axis]
    sizes = node.host(inputs, 1, node.get("split", None))
    if sizes is None:
        parts = node.get("num_outputs", node.outputs)
        each = -(-length // parts)
        sizes = [*[each] * (parts - 1), length - each * (parts - 1)]
    if isinstance(x, list):
        ends = [0, *itertools.accumulate(sizes)]
        found: list[Any] = [x[begin:end] for begin, end in itertools.pairwise(ends)]
    else:
        found = list(torch.split(x, sizes, axis))
    return tuple(found) if node.outputs > 1 else found[0]


@operator("Slice")
def _slice(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x = inputs[0]
    begins, ends = _listed(node.host(inputs, 1)), _listed(node.host(inputs, 2))
    rank = x.dim() if isinstance(x, torch.Tensor) else 1
    axes = [axis % rank for axis in _listed(node.host(inputs, 3, list(range(len(begins)))))]
    steps = _listed(node.host(inputs, 4, [1] * len(begins)))
    parts = [slice(None)] * rank
    for begin, end, axis, step in zip(begins, ends, axes, steps, strict=True):
        if step < 0:
            full = begin >= _size_at(x, axis) - 1 and end < -_size_at(x, axis)
            node.require(full and step == -1, "negative steps are supported for whole dimensions only")
            x = list(reversed(x)) if isinstance(x, list) else x.flip(axis)
            continue
        parts[axis] = slice(begin, None if type(end) is int and end >= _END else end, step)
    return x[parts[0]] if isinstance(x, list) else x[tuple(parts)]


def _size_at(x: Any, axis: int) -> int:
    return len(x) if isinstance(x, list) else x.shape[axis]


@operator("Gather")
def _gather(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x, indices = inputs
    if isinstance(x, list):
        at = node.host(inputs, 1)
        return [x[index] for index in at] if isinstance(at, list) else x[at]
    axis = node.get("axis", 0) % x.dim()
    if isinstance(indices, int):
        return x.select(axis, indices)
    indices = as_tensor(indices, x).long()
    indices = torch.where(indices < 0, indices + x.shape[axis], indices)
    return (
        torch.index_select(x, axis, indices) if indices.dim() == 1 else x[(slice(None),) * axis + (indices,)]
    )


@operator("Expand")
def _expand(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    shape = _listed(node.host(inputs, 1))
    x = inputs[0] if isinstance(inputs[0], torch.Tensor) else torch.tensor(inputs[0])
    own = [1] * (len(shape) - x.dim()) + list(x.shape)
    wanted = [1] * (x.dim() - len(shape)) + shape
    return x.expand(
        [mine if type(size) is int and size == 1 else size for mine, size in zip(own, wanted, strict=True)]
    )


@operator("Tile")
def _tile(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    return inputs[0].repeat(_listed(node.host(inputs, 1)))


@operator("ConstantOfShape")
def _constant_of_shape(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    value = node.get("value", torch.zeros(1))
    shape = _listed(node.host(inputs, 0))
    if len(shape) <= 1 and not value.is_floating_point():
        return [value.item()] * shape[0] if shape else value.item()
    return torch.full(shape, value.item(), dtype=value.dtype)


@operator("Range")
def _range(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    begin, end, step = (node.host(inputs, position) for position in range(3))
    if all(isinstance(value, int) for value in (begin, end, step)):
        return list(range(begin, end, step))
    return torch.arange(begin, end, step)


_PAD_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


@operator("Pad")
def _pad(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x, pads = inputs[0], _listed(node.host(inputs, 1))
    axes = [axis % x.dim() for axis in _listed(node.host(inputs, 3, list(range(x.dim()))))]
    mode = _PAD_MODES.get(node.get("mode", "constant"))
    node.require(mode is not None, f"mode {node.get('mode', '')!r} is not supported")
    by_axis = dict(zip(axes, zip(pads[: len(axes)], pads[len(axes) :], strict=True), strict=True))
    amounts = [amount for axis in reversed(range(x.dim())) for amount in by_axis.get(axis, (0, 0))]
    if mode == "constant":
        value = node.host(inputs, 2, 0)
        return F.pad(x, amounts, value=value[0] if isinstance(value, list) else value)
    if x.dim() in (3, 4, 5) and not any(amounts[-4:]) and min(amounts) >= 0:
        return F.pad(x, amounts[:-4], mode=str(mode))
    for axis, (before, after) in by_axis.items():
        if before or after:
            indices = [
                _reflected(at, x.shape[axis], str(mode)) for at in range(-before, x.shape[axis] + after)
            ]
            x = x.index_select(axis, torch.tensor(indices, device=x.device))
    return x


def _reflected(at: int, size: int, mode: str) -> int:
    """Return the index that an index from outside of a dimension repeats."""
    if mode == "replicate":
        return min(max(at, 0), size - 1)
    if mode == "circular":
        return at % size
    period = max(2 * (size - 1), 1)
    return min(at % period, period - at % period) if size > 1 else 0


@operator("DepthToSpace")
def _depth_to_space(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x, block = inputs[0], node.attributes["blocksize"]
    if node.get("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, block)
    batch, channels, rows, columns = x.shape
    parts = x.reshape(batch, block, block, channels // block**2, rows, columns).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(batch, channels // block**2, rows * block, columns * block)


@operator("SpaceToDepth")
def _space_to_depth(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x, block = inputs[0], node.attributes["blocksize"]
    batch, channels, rows, columns = x.shape
    parts = x.reshape(batch, channels, rows // block, block, columns // block, block).permute(
        0, 3, 5, 1, 2, 4
    )
    return parts.reshape(batch, channels * block**2, rows // block, columns // block)


@operator("TopK")
def _top_k(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    (count,) = _listed(node.host(inputs, 1))
    largest, ordered = bool(node.get("largest", 1)), bool(node.get("sorted", 1))
    values, indices = torch.topk(inputs[0], count, node.get("axis", -1), largest, ordered)
    return (values, indices) if node.outputs > 1 else values


@operator("CumSum")
def _cumulative_sum(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    node.require_defaults(exclusive=0, reverse=0)
    (axis,) = _listed(node.host(inputs, 1))
    return torch.cumsum(inputs[0], axis)


@operator("GridSample")
def _grid_sample(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    mode = node.get("mode", "linear")
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    padding, corners = node.get("padding_mode", "zeros"), bool(node.get("align_corners", 0))
    return F.grid_sample(inputs[0], inputs[1], mode=mode, padding_mode=padding, align_corners=corners)


_RESIZE_MODES = {
    "nearest": {3: "nearest", 4: "nearest", 5: "nearest"},
    "linear": {3: "linear", 4: "bilinear", 5: "trilinear"},
    "cubic": {4: "bicubic"},
}


@operator("Resize")
def _resize(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    node.require_defaults(
        antialias=0, exclude_outside=0, keep_aspect_ratio_policy="stretch", cubic_coeff_a=-0.75
    )
    x = inputs[0]
    axes = [axis % x.dim() for axis in node.get("axes", list(range(x.dim())))]
    scales = node.host(inputs, 2) if given(inputs, 2) is not None else None
    sizes = node.host(inputs, 3) if given(inputs, 3) is not None else None
    if sizes:
        wanted = dict(zip(axes, sizes, strict=True))
        if type(wanted.get(0)) is int and wanted[0] == node.batch:  # fixed by the exporter
            wanted.pop(0, None)
        outer = all(wanted.get(axis, x.shape[axis]) == x.shape[axis] for axis in (0, 1))
        size, factors = [wanted.get(axis, x.shape[axis]) for axis in range(2, x.dim())], None
        ratios = [new / old for new, old in zip(size, x.shape[2:], strict=True)]
    else:
        by_axis = dict(zip(axes, scales or (), strict=True))
        outer = all(by_axis.get(axis, 1) == 1 for axis in (0, 1))
        size, ratios = None, [by_axis.get(axis, 1.0) for axis in range(2, x.dim())]
        factors = ratios
    node.require(outer, "batch and channels cannot be resized")
    mode, corners = _interpolation(node, x.dim(), ratios)
    return F.interpolate(x, size, factors, mode=mode, align_corners=corners)


def _interpolation(node: OnnxNode, rank: int, ratios: Sequence[float]) -> tuple[str, bool | None]:
    """Return PyTorch's mode and `align_corners` for a Resize node."""
    mode, where = node.get("mode", "nearest"), node.get("coordinate_transformation_mode", "half_pixel")
    found = _RESIZE_MODES.get(mode, {}).get(rank)
    if found is None:
        raise node.refusal(f"mode {mode!r} is not supported for {rank} dimensions")
    if mode != "nearest":
        node.require(
            where in ("half_pixel", "pytorch_half_pixel", "align_corners"),
            f"coordinate_transformation_mode={where!r} is not supported for mode {mode!r}",
        )
        return found, where == "align_corners"
    rounding = node.get("nearest_mode", "round_prefer_floor")
    if where == "asymmetric" and (
        rounding == "floor" or (rounding == "round_prefer_floor" and {*ratios} <= {1, 2})
    ):
        return "nearest", None
    # Half-pixel coordinates have no ties at whole ratios, where the two roundings would differ.
    whole = all(float(ratio).is_integer() for ratio in ratios)
    if where == "half_pixel" and (
        rounding == "round_prefer_ceil" or (rounding == "round_prefer_floor" and whole)
    ):
        return "nearest-exact", None
    raise node.refusal(
        f"coordinate_transformation_mode={where!r} with nearest_mode={rounding!r} and scales "
        f"{', '.join(f'{ratio:g}' for ratio in ratios)} is not supported"
    )
