"""Read an ONNX file as a PyTorch module, and make inputs for it from the shapes that it declares."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from escalade.errors import UnsupportedError
from escalade.models.onnx_import import elementwise
from escalade.models.onnx_import import layers as layers  # registers its operators, as shapes does
from escalade.models.onnx_import import shapes as shapes
from escalade.models.onnx_import.operators import OPERATORS, OnnxNode
from escalade.terminal_text import first_line, printable

SUFFIX = ".onnx"
OPSETS = (13, 23)
"""Oldest and newest opset that is read."""
_DOMAINS = ("", "ai.onnx")
_HOST_ELEMENTS = 64
"""Constants with up to this many elements are also kept as Python values."""
_IMAGE_SIDE = 224
"""Rows and columns of example images whose size is dynamic."""


@dataclass(frozen=True)
class OnnxModel:
    """A network from an ONNX file, with inputs like those it was exported with."""

    module: nn.Module
    example: tuple[torch.Tensor, ...]


def read_onnx(path: str | os.PathLike[str]) -> OnnxModel:
    """Read an ONNX file: its network as a module, and example inputs of batch size 1 where the batch is open."""
    file = pathlib.Path(path)
    if not file.is_file():
        raise UnsupportedError(f"there is no file {printable(file)}")
    try:
        import onnx
    except ImportError as error:
        raise UnsupportedError(
            f"reading {printable(file.name)} needs the package onnx; install it with pip install 'escalade[onnx]'"
        ) from error
    try:
        model = onnx.load(os.fspath(file))
    except Exception as error:  # protobuf and onnx raise exceptions of many types
        raise UnsupportedError(
            f"{printable(file)} is not an ONNX file, or is damaged: {first_line(error)}"
        ) from error
    return _Reader(model, printable(file.name)).read()


class OnnxLayer(nn.Module):
    """Computes one ONNX node."""

    def __init__(self, node: OnnxNode) -> None:
        super().__init__()
        self.node = node

    def forward(self, *inputs: Any) -> Any:
        return OPERATORS[self.node.op](self.node, inputs)

    def extra_repr(self) -> str:
        return self.node.op


class _Reader:
    """Turns one ONNX model into a module: an fx graph of layers over weights with the file's names."""

    def __init__(self, model: Any, title: str) -> None:
        import onnx

        self._onnx: Any = onnx
        self._title = title
        self._graph = self._inlined(model).graph
        self._root = nn.Module()
        self._root.add_module("nodes", nn.Module())
        self._fx = fx.Graph()
        self._values: dict[str, Any] = {}
        """Values by ONNX name: nodes of the fx graph, and numbers and lists on the host."""
        self._constants: dict[str, torch.Tensor] = {}
        self._weights: dict[str, fx.Node] = {}
        self._batch: int | None = None
        self._statistics = {
            name
            for node in self._graph.node
            if node.op_type == "BatchNormalization"
            for name in node.input[3:]
        }

    def read(self) -> OnnxModel:
        for tensor in self._graph.initializer:
            self._constants[tensor.name] = self._tensor(tensor)
        inputs = [each for each in self._graph.input if each.name not in self._constants]
        example = tuple(map(self._example, inputs))
        self._batch = self._fixed_batch(inputs)
        for each in inputs:
            self._values[each.name] = self._fx.placeholder(_identifier(each.name))
        for number, node in enumerate(self._graph.node):
            self._add(node, number)
        outputs = [self._value(each.name) for each in self._graph.output]
        for each, value in zip(self._graph.output, outputs, strict=True):
            if not isinstance(value, fx.Node):
                raise UnsupportedError(f"{self._title}: its output {each.name!r} is a constant or a shape")
        self._fx.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
        module = fx.GraphModule(self._root, self._fx, "OnnxNetwork").eval()
        return OnnxModel(module, example)

    def _inlined(self, model: Any) -> Any:
        """Check opsets and operators, with the functions of the file replaced by their nodes."""
        if model.functions:
            from onnx import inliner

            model = inliner.inline_local_functions(model)
        versions = {each.domain: each.version for each in model.opset_import if each.domain in _DOMAINS}
        version = max(versions.values(), default=0)
        least, most = OPSETS
        if not least <= version <= most:
            raise UnsupportedError(
                f"{self._title} uses opset {version}; supported are opsets {least} to {most}: export the model again, "
                "as with torch.onnx.export(..., opset_version=18)"
            )
        unknown = {
            (f"{node.domain}." if node.domain not in _DOMAINS else "") + node.op_type
            for node in model.graph.node
            if node.domain not in _DOMAINS or node.op_type not in (*OPERATORS, "Constant")
        }
        if unknown:
            raise UnsupportedError(
                f"{self._title} has ONNX operators that are not supported: {', '.join(sorted(unknown))}. Export the "
                "PyTorch model with torch.export instead, or compile the model itself"
            )
        return model

    def _add(self, node: Any, number: int) -> None:
        attributes = {each.name: self._attribute(each) for each in node.attribute}
        if node.op_type == "Constant":
            (value,) = attributes.values()
            self._constants[node.output[0]] = (
                value if isinstance(value, torch.Tensor) else torch.tensor(value)
            )
            return
        if node.op_type == "Identity" and node.input[0] in self._constants:
            self._constants[node.output[0]] = self._constants[node.input[0]]
            self._weights_alias(node.output[0], node.input[0])
            return
        used = [position for position, name in enumerate(node.output) if name]
        name = node.name or node.output[0] or f"{node.op_type}_{number}"
        constants = {
            position: self._constants[each].tolist()
            for position, each in enumerate(node.input)
            if each in self._constants and self._constants[each].numel() <= _HOST_ELEMENTS
        }
        types = {
            position: self._constants[each].dtype
            for position, each in enumerate(node.input)
            if each in self._constants
        }
        onnx_node = OnnxNode(
            node.op_type, name, attributes, constants, types, used[-1] + 1 if used else 1, self._batch
        )
        target = self._register(OnnxLayer(onnx_node), name)
        result = self._fx.call_module(target, tuple(self._value(each) for each in node.input))
        if onnx_node.outputs == 1:
            self._values[node.output[0]] = result
            return
        for position in used:
            self._values[node.output[position]] = self._fx.call_function(_item, (result, position))

    def _register(self, layer: OnnxLayer, name: str) -> str:
        nodes = self._root.get_submodule("nodes")
        key = plain = _identifier(name.strip("/"))
        count = 1
        while hasattr(nodes, key):
            count += 1
            key = f"{plain}_{count}"
        nodes.add_module(key, layer)
        return f"nodes.{key}"

    def _value(self, name: str) -> Any:
        """Return an operand: an fx node, a value on the host, or None for an absent input."""
        if not name:
            return None
        if name in self._values:
            return self._values[name]
        if name not in self._constants:
            raise UnsupportedError(f"{self._title} is damaged: nothing computes {name!r}")
        tensor = self._constants[name]
        is_shape = not tensor.is_floating_point() and tensor.dim() <= 1 and tensor.numel() <= _HOST_ELEMENTS
        if is_shape or not tensor.dim():
            return tensor.tolist()
        if name not in self._weights:
            self._weights[name] = self._fx.get_attr(self._add_weight(name, tensor))
        return self._weights[name]

    def _weights_alias(self, name: str, source: str) -> None:
        value = self._value(source)
        if isinstance(value, fx.Node):
            self._weights[name] = value

    def _add_weight(self, name: str, tensor: torch.Tensor) -> str:
        """Register a weight under its dotted name in the file, which is that in the exported model's state dict."""
        *path, last = [part or "_" for part in _printable_name(name).split(".")]
        parent = self._root
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = getattr(parent, part)
            if type(parent) is not nn.Module:
                break
        if type(parent) is not nn.Module or hasattr(parent, last) or path[:1] == ["nodes"]:
            parent, path, last = self._root, [], f"weight_{len(self._weights)}_{_identifier(name)}"
        if tensor.is_floating_point() and name not in self._statistics:
            parent.register_parameter(last, nn.Parameter(tensor))
        else:
            parent.register_buffer(last, tensor)
        return ".".join((*path, last))

    def _tensor(self, tensor: Any) -> torch.Tensor:
        if elementwise.dtype_of(tensor.data_type) is None:
            raise UnsupportedError(
                f"{self._title}: the constant {tensor.name!r} has element type "
                f"{self._onnx.TensorProto.DataType.Name(tensor.data_type)}, which is not supported"
            )
        array = self._onnx.numpy_helper.to_array(tensor)
        if array.dtype.name == "bfloat16":  # NumPy has no such type of its own, and PyTorch does not take it
            return torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16)
        return torch.from_numpy(array.copy())

    def _attribute(self, attribute: Any) -> Any:
        value = self._onnx.helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        if isinstance(value, self._onnx.TensorProto):
            return self._tensor(value)
        if attribute.type in (self._onnx.AttributeProto.FLOATS, self._onnx.AttributeProto.INTS):
            return list(value)
        return value

    @staticmethod
    def _fixed_batch(inputs: Sequence[Any]) -> int | None:
        """Return the batch size that the file fixes: the first size of all inputs of several dimensions."""
        shapes = [list(each.type.tensor_type.shape.dim) for each in inputs]
        firsts = {
            shape[0].dim_value if shape[0].HasField("dim_value") else None for shape in shapes if shape[1:]
        }
        return firsts.pop() if len(firsts) == 1 else None

    def _example(self, value: Any) -> torch.Tensor:
        kind = value.type.tensor_type
        dtype = elementwise.dtype_of(kind.elem_type)
        if dtype is None or not kind.HasField("shape"):
            raise UnsupportedError(
                f"{self._title}: its input {value.name!r} is not a tensor with a declared rank"
            )
        sizes = [each.dim_value if each.HasField("dim_value") else None for each in kind.shape.dim]
        shape = [_default_size(size, position, len(sizes)) for position, size in enumerate(sizes)]
        if None in shape:
            raise UnsupportedError(
                f"{self._title} leaves sizes of its input {value.name!r} open: {_shown(kind.shape.dim)}; only the "
                "batch and the rows and columns of images may be. Fix the others when the model is exported"
            )
        generator = torch.Generator().manual_seed(0)
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype)  # type: ignore[arg-type]
        return torch.randn(shape, generator=generator, device="cpu").to(dtype)  # type: ignore[arg-type]


def _default_size(size: int | None, position: int, rank: int) -> int | None:
    if size is not None:
        return size
    return 1 if position == 0 else _IMAGE_SIDE if rank == 4 and position >= 2 else None


def _shown(dimensions: Sequence[Any]) -> str:
    names = (
        str(each.dim_value) if each.HasField("dim_value") else each.dim_param or "?" for each in dimensions
    )
    return f"({', '.join(map(printable, names))})"


def _item(values: Any, position: int) -> Any:
    return values[position]


def _identifier(name: str) -> str:
    plain = re.sub(r"\W+", "_", name, flags=re.ASCII)
    return plain if plain and not plain[0].isdigit() else f"_{plain}"


def _printable_name(name: str) -> str:
    return re.sub(r"[^\w.]+", "_", name, flags=re.ASCII)
