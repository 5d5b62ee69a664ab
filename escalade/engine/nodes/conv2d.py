"""The convolution of images with bias, residual and activation; and with a 1×1 shortcut convolution in the same sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from escalade.engine.graph.forms import TENSOR_CORE_DTYPES
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import (
    Layouts,
    Operator,
    Recognised,
    Recogniser,
    Tensors,
    activate,
    activation_of,
    finish,
    is_reordering,
    spread,
    with_channels,
)
from escalade.engine.nodes.lowering import FP8, FP32, NHWC, Forms, Lowered
from escalade.engine.nodes.max_pool2d import PLACES, MaxPool2d
from escalade.engine.nodes.pad2d import Pad2d
from escalade.engine.nodes.sequences import of_sequences
from escalade.engine.nodes.signature import (
    COUNT,
    FLAG,
    IMAGE,
    RESULT,
    Attributes,
    Role,
    Signature,
    SizeError,
    Sizes,
    pair,
    positive,
)
from escalade.ops.conv2d import CONV2D, Conv2dProblem
from escalade.ops.expressions import Expression
from escalade.ops.shared import prologue

_MOST_READ, _MOST_READ_FOR_ONE_PIXEL = 1.25, 2.0
"""How many times the channels that it needs a convolution may read, with weights of zero for the others, rather than
have them copied out. A filter of one pixel does less than its bytes take; larger ones are bound by their products."""


class Conv2d(Operator):
    """y = conv(x, weight) + bias [+ conv(shortcut, shortcut_weight)] [+ residual], then ReLU or another expression."""

    name = "conv2d"
    signature = Signature(
        {
            "x": IMAGE,
            "weight": Role((4, 4), constant=True),
            "bias": Role((1, 1), constant=True, optional=True),
        },
        {"stride": pair(1), "padding": pair(0), "dilation": pair(1), "groups": COUNT, "relu": FLAG},
    )
    takes_expressions = True
    values = (*Operator.values, "gate")

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return self.folded

    @property
    def folded(self) -> Mapping[str, Recogniser]:
        of_rows = of_sequences(self._recognise, "input", "weight")
        return {"conv2d": self._recognise, "convolution": self._recognise, "conv1d": of_rows}

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        if len(node.shape) != 4 or call("transposed", False):
            return None
        inputs = {"x": call.value("input"), "weight": call.value("weight"), "bias": call.value("bias")}
        weight, bias = inputs["weight"], inputs["bias"]
        if not graph.typed and not {weight, bias or weight} <= graph.constants.keys():
            return None  # kernels pack their weights once, except in a training step
        dilation = call.pair("dilation", 1)
        padding = call("padding", 0)
        pads = call.pair("padding", 0) if not isinstance(padding, str) else (0, 0)
        if padding == "same":
            assert weight is not None
            window = graph.shape_of(weight)[2:]
            rows, columns = (step * (size - 1) for step, size in zip(dilation, window, strict=True))  # type: ignore[operator]
            if rows % 2 or columns % 2:
                inputs["x"] = self._around(node, inputs["x"], rows, columns, graph)
            else:
                pads = (rows // 2, columns // 2)
        return self.instead_of(
            node, inputs,
            stride=call.pair("stride", 1), padding=pads, dilation=dilation, groups=call("groups", 1), relu=False,
        )  # fmt: skip

    def _around(self, node: Node, x: str | None, rows: int, columns: int, graph: Graph) -> str:
        """The image with so many rows and columns of zeros around it, of an odd number one more behind it."""
        assert x is not None
        batch, channels, height, width = graph.shape_of(x)
        pads = (rows // 2, rows - rows // 2, columns // 2, columns - columns // 2)
        shape = (batch, channels, height + rows, width + columns)  # type: ignore[operator]
        padded = Pad2d.node(
            graph.fresh(f"{node.name}_padded"),
            {"x": x},
            {"pads": pads, "mode": "constant", "value": 0.0},
            shape,
            node.dtype,
        )
        graph.append(padded)
        return padded.name

    def fuse(self, graph: Graph, dtype: str) -> None:
        if dtype in TENSOR_CORE_DTYPES:  # the kernels that can take two inputs
            fuse_shortcuts(graph)

    def takes_residual(self, node: Node) -> bool:
        return not node.attributes.get("fp8")  # once they are quantised, values have scales

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        inputs = prologue.apply(a.get("prologue", ""), inputs)
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
        y = _finish_scaled(node, y, inputs) if a.get("fp8") else finish(node, y, inputs)
        return F.max_pool2d(y, a["pool"]) if a.get("pool", (1, 1)) != (1, 1) else y

    def further(self, node: Node, inputs: Tensors) -> Tensors:
        """The places of the maxima that it takes."""
        a = node.attributes
        y = self.compute(node.with_attributes(pool=(1, 1)), inputs)
        pool = MaxPool2d.instead_of(
            node, {},
            kernel=a["pool"], stride=a["pool"], padding=(0, 0), ceil_mode=False, dilation=(1, 1), behind_relu=a["relu"],
        )  # fmt: skip
        return MaxPool2d().further(pool, {"x": y})

    def taking_maxima(self, node: Node, pool: Node, windows: tuple[int, int]) -> Node | None:
        a = node.attributes
        places = PLACES in pool.attributes
        if a.get("fp8") or "pool" in a or (places and pool.attributes["behind_relu"] != a["relu"]):
            return None
        return replace(node.with_attributes(pool=windows, places=places), name=pool.name, shape=pool.shape)

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        batch, _, *image = sizes["x"]
        filters, channels, *window = sizes["weight"]
        groups = attributes["groups"]
        if filters % groups:
            raise SizeError(f"{filters} filters are no multiple of {groups} groups")
        steps = (attributes[key] for key in ("stride", "padding", "dilation"))
        result = [
            (size + 2 * padding - dilation * (reach - 1) - 1) // stride + 1
            for size, reach, stride, padding, dilation in zip(image, window, *steps, strict=True)
        ]
        return {
            "x": (batch, channels * groups, *image),
            "bias": (filters,),
            RESULT: (batch, filters, *positive(result)),
        }

    def is_product_of_planes(self, node: Node, graph: Graph) -> bool:
        a, weight = node.attributes, graph.constants[node.inputs["weight"]]
        window = (tuple(weight.shape[2:]), a["stride"], a["dilation"])
        return (
            window == ((1, 1),) * 3 and a["padding"] == (0, 0) and a["groups"] == 1 and has_one_input(node)
            and graph.shape_of(node.inputs["x"])[2:] != (1, 1)
        )  # fmt: skip

    def left_to_pytorch(self, node: Node) -> str:
        if node.attributes.get("layout") != "nchw":
            return ""
        return "by itself and in PyTorch's order it is a product of matrices, and spares two conversions"

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        own = node.attributes.get("layout", "nhwc")
        return Layouts(own, own)

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        if self.left_to_pytorch(node):
            return None
        batch, channels, height, width = forms.value(node.inputs["x"]).shape
        filters, _, filter_height, filter_width = forms.sizes(node.inputs["weight"])
        a = node.attributes
        shortcut: dict[str, Any] = {}
        if "shortcut" in node.inputs:
            _, more_channels, *size = forms.value(node.inputs["shortcut"]).shape
            shortcut = {
                "shortcut_channels": more_channels,
                "shortcut_stride": a["shortcut_stride"],
                "shortcut_size": tuple(size),
            }
        problem = Conv2dProblem(
            batch, channels, height, width, filters, filter_height, filter_width, a["stride"], a["padding"],
            a["dilation"], a["groups"], "fp8" if a.get("fp8") else forms.dtype, "nhwc", "bias" in node.inputs,
            "residual" in node.inputs, output="fp16" if a.get("fp8") and not a["store"] else "", **activation_of(node),
            **shortcut, prologue=a.get("prologue", ""), pool=a.get("pool", (1, 1)), places=a.get("places", False),
        )  # fmt: skip
        if a.get("fp8"):
            scaled = dict.fromkeys(("bias", "scale", "scales"), FP32)
            return Lowered(CONV2D, problem, {"weight": FP8, "shortcut_weight": FP8, **scaled})
        by_channel = dict.fromkeys(("gain", "shift"), FP32)
        return Lowered(CONV2D, problem, {"weight": NHWC, "shortcut_weight": NHWC, **by_channel})

    def constants_in_pytorch(self, node: Node) -> Mapping[str, str]:
        return dict.fromkeys(("weight", "shortcut_weight"), NHWC)

    def side_by_side(self, nodes: Sequence[Node], graph: Graph) -> Node | None:
        first = nodes[0]
        if first.attributes["groups"] != 1 or not first.inputs.keys() <= {"x", "weight", "bias"}:
            return None
        if first.attributes.get("fp8") or not first.inputs.keys() >= {"x", "weight"}:
            return None
        windows = {graph.constants[node.inputs["weight"]].shape[1:] for node in nodes}
        if len(windows) > 1:
            return None
        constants = {
            role: graph.add_constant(
                f"{first.name}_joined_{role}",
                torch.cat([graph.constants[node.inputs[role]] for node in nodes]),
            )
            for role in ("weight", "bias")
            if role in first.inputs
        }
        filters = graph.constants[constants["weight"]].shape[0]
        source = ", ".join(dict.fromkeys(node.source for node in nodes if node.source))
        return replace(with_channels(first, filters).with_inputs(**constants), source=source)

    def preparing(
        self, node: Node, expression: Expression, operands: Mapping[str, str], graph: Graph
    ) -> Node | None:
        """A filter of one pixel reads each pixel once for all filters."""
        if not _is_of_pixels(node, graph) or "shortcut" in node.inputs or node.attributes["groups"] != 1:
            return None
        return node.with_inputs(**operands).with_attributes(prologue=expression.text)

    def is_map_of_pixels(self, node: Node, graph: Graph) -> bool:
        is_plain = has_one_input(node) and self.applied(node).is_identity
        return is_plain and _is_of_pixels(node, graph) and node.attributes["stride"] == (1, 1)

    def scaled_axis(self, node: Node) -> int:
        return 1

    def padded(self, node: Node, zeros: tuple[int, int]) -> Node:
        rows, columns = node.attributes["padding"]
        return node.with_attributes(padding=(rows + zeros[0], columns + zeros[1]))

    def reading_channels(
        self, node: Node, order: tuple[int, ...], channels: int, graph: Graph
    ) -> Node | None:
        weight, groups = graph.constants[node.inputs["weight"]], node.attributes["groups"]
        if groups > 1:
            within = is_reordering(order, channels) and all(
                taken // weight.shape[1] == own // weight.shape[1] for own, taken in enumerate(order)
            )
            if not within:
                return None
            inside = [
                torch.tensor(order[first : first + weight.shape[1]]) - first
                for first in range(0, channels, weight.shape[1])
            ]
            parts = zip(weight.chunk(groups), inside, strict=True)
            read = torch.cat([torch.empty_like(part).index_copy(1, where, part) for part, where in parts])
        else:
            most = _MOST_READ_FOR_ONE_PIXEL if tuple(weight.shape[2:]) == (1, 1) else _MOST_READ
            if channels > most * len(order):
                return None
            read = spread(weight, 1, order, channels)
        return node.with_inputs(weight=graph.add_constant(f"{node.name}_weight", read))

    def before_channels(self, node: Node, order: tuple[int, ...], channels: int, graph: Graph) -> Node | None:
        """One filter a channel goes with its channel."""
        weight = graph.constants[node.inputs["weight"]]
        if not len(order) == node.attributes["groups"] == weight.shape[0] or not has_one_input(node):
            return None
        if channels > len(order) and not self._is_finite_of_zeros(node):
            return None
        constants = {
            role: graph.add_constant(
                f"{node.name}_{role}", spread(graph.constants[node.inputs[role]], 0, order, channels)
            )
            for role in ("weight", "bias")
            if role in node.inputs
        }
        return with_channels(node, channels).with_inputs(**constants).with_attributes(groups=channels)

    def writing_channels(self, node: Node, order: tuple[int | None, ...], graph: Graph) -> Node | None:
        if node.attributes["groups"] != 1 or not has_one_input(node):
            return None
        if None in order and not self._is_finite_of_zeros(node):
            return None
        taken = [(place, channel) for place, channel in enumerate(order) if channel is not None]
        places, channels = tuple(place for place, _ in taken), torch.tensor([channel for _, channel in taken])
        constants = {
            role: graph.add_constant(
                f"{node.name}_{role}",
                spread(graph.constants[node.inputs[role]][channels], 0, places, len(order)),
            )
            for role in ("weight", "bias")
            if role in node.inputs
        }
        return with_channels(node, len(order)).with_inputs(**constants)

    def _is_finite_of_zeros(self, node: Node) -> bool:
        """Whether filters of zeros give numbers, which others may multiply with zero."""
        (value,) = self.applied(node).evaluate({"x": torch.zeros(1)})
        return bool(value.isfinite().all())

    def pads_channels(self, node: Node) -> bool:
        return node.attributes["groups"] == 1

    def fp8_weights(self, node: Node) -> Mapping[str, str]:
        if node.attributes["groups"] != 1:
            return {}
        pairs = {"weight": "x", "shortcut_weight": "shortcut"}
        return {weight: value for weight, value in pairs.items() if weight in node.inputs}


def _finish_scaled(node: Node, y: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    """Finishes a node in FP8, where every number is a multiple of a unit of its own."""
    y = y * inputs["scale"].view(-1, 1, 1) + inputs["bias"].view(-1, 1, 1)
    residual = inputs["residual"] * inputs["scales"][0] if "residual" in inputs else None
    return activate(node, y, residual) * inputs["scales"][1]


def _is_of_pixels(node: Node, graph: Graph) -> bool:
    """Whether a convolution has filters of one pixel, over an image as it is."""
    a = node.attributes
    window = tuple(graph.constants[node.inputs["weight"]].shape[2:])
    return window == (1, 1) and a["padding"] == (0, 0) and "prologue" not in a and not a.get("fp8")


def has_one_input(node: Node) -> bool:
    """Whether a convolution reads nothing but x and its weights."""
    return not {"residual", "shortcut"} & node.inputs.keys()


def fuse_shortcuts(graph: Graph) -> None:
    """A 1×1 convolution whose result is only added to another convolution's becomes more of its products.

    Nothing is written for the shortcut and nothing read again: the products of both go into one sum.
    """
    for node in graph:
        if not Conv2d.matches(node) or "residual" not in node.inputs:
            continue
        if "residual" in Conv2d().applied(node).inputs:
            continue  # it is more than added
        short = graph.nodes.get(node.inputs["residual"])
        if not Conv2d.matches(short) or not _is_shortcut(graph, short, node):
            continue
        inputs = {
            **node.inputs,
            "shortcut": short.inputs["x"],
            "shortcut_weight": short.inputs["weight"],
            "bias": _joint_bias(graph, node, short),
        }
        del inputs["residual"]
        stride = short.attributes["stride"][0]
        graph.nodes[node.name] = replace(
            node.with_attributes(shortcut_stride=stride),
            inputs={role: name for role, name in inputs.items() if name is not None},
            source=", ".join(dict.fromkeys((node.source, short.source))),
        )
        del graph.nodes[short.name]


def _is_shortcut(graph: Graph, short: Node, node: Node) -> bool:
    if not Conv2d().applied(short).is_identity or not has_one_input(short):
        return False
    if graph.only_user(short.name) is not node:
        return False
    weight = graph.constants[short.inputs["weight"]]
    stride = short.attributes["stride"]
    return (
        tuple(weight.shape[2:]) == (1, 1)
        and stride[0] == stride[1]
        and short.attributes["padding"] == (0, 0)
        and short.attributes["groups"] == node.attributes["groups"] == 1
        and weight.shape[1] % 8 == 0
        and graph.constants[node.inputs["weight"]].shape[1] % 8 == 0
    )


def _joint_bias(graph: Graph, node: Node, short: Node) -> str | None:
    biases = [layer.inputs["bias"] for layer in (node, short) if "bias" in layer.inputs]
    if len(biases) < 2:
        return biases[0] if biases else None
    both = graph.constants[biases[0]].double() + graph.constants[biases[1]].double()
    return graph.add_constant(f"{node.name}_bias", both.float())
