"""Convolutions and transposed convolutions of images, and the gradients of convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from escalade.engine.graph.graph import ATEN, Graph, Node, Reference, Shape, dtype_name, product
from escalade.engine.nodes.base import (
    CAPTURE,
    FOLDED,
    AtenCall,
    Layouts,
    Match,
    Operator,
    Tensors,
    activate,
    match_aten,
)
from escalade.engine.nodes.batch_norm import training_statistics
from escalade.engine.nodes.lowering import FP32, NHWC, Forms, Lowered, problem_from
from escalade.engine.nodes.pools import MaxPool2d
from escalade.engine.nodes.rearrange import Pad2d, PixelShuffle
from escalade.engine.nodes.reduce import Reduce
from escalade.engine.nodes.signature import (
    COUNT,
    FILTERS,
    FLAG,
    IMAGE,
    OPTIONAL_VECTOR,
    RESULT,
    Attributes,
    Signature,
    SizeError,
    Sizes,
    pair,
    require_positive,
)
from escalade.engine.nodes.views import Permute, Reshape
from escalade.ops.batch_norm_backward import BatchNormBackwardProblem, gradients, masked
from escalade.ops.conv2d import CONV2D, Conv2dProblem
from escalade.ops.conv2d_input_gradient import CONV2D_INPUT_GRADIENT, Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.op import is_worthwhile, supports_groups
from escalade.ops.conv2d_input_gradient.rungs.phases import pixel_phases
from escalade.ops.conv2d_weight_gradient import CONV2D_WEIGHT_GRADIENT, Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs.depthwise import DEPTHWISE
from escalade.ops.conv2d_weight_gradient.rungs.skinny import MOST_COLUMNS
from escalade.ops.conv2d_weight_gradient.rungs.sm90_wgmma import WGMMA_GROUPS
from escalade.ops.conv2d_weight_gradient.rungs.tensor_core import TENSOR_CORE
from escalade.ops.shared import prologue
from escalade.ops.shared.activation import VECTORS

BIAS_GRADIENT = "bias_gradient"
"""Buffer of the bias gradient, a side output of the weight gradient."""
BIAS_DIMS = (0, 2, 3)
"""Dimensions that the gradient of a bias is summed over."""
FEW_FILTERS = 8
"""Below this a tile of products is mostly padding: 7x7 from 32 channels to 3 filters takes 316 us by estimate, from 3
channels to 32 filters 42."""
_SEQUENCE = ("input", "weight")


class _Filters(Operator):
    """A layer on images with filters, in NHWC unless a pass chooses another layout for a node."""

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        layout = node.attributes.get("layout", "nhwc")
        return Layouts(layout, layout)

    def pytorch_constants(self, node: Node) -> Mapping[str, str]:
        return dict.fromkeys(("weight", "shortcut_weight"), NHWC)


class Conv2d(_Filters):
    """y = conv(x, weight) + bias [+ conv(shortcut, shortcut_weight)] [+ residual], then ReLU or another expression.

    Passes also fuse a prologue of x, and a max pool of the result with its argmax indices as a side output. In a
    training step the statistics of the result, for the batch normalization that follows, may be side outputs.
    """

    name = "conv2d"
    signature = Signature(
        {"x": IMAGE, "weight": FILTERS, "bias": OPTIONAL_VECTOR},
        {"stride": pair(1), "padding": pair(0), "dilation": pair(1), "groups": COUNT, "relu": FLAG},
    )
    takes_expressions = True
    fp32_roles = ("running_mean", "running_variance")
    values = (*Operator.values, "gate", *fp32_roles)

    @match_aten("convolution")
    def _match_either(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        operator = ConvTranspose2d() if call("transposed", False) else self
        return operator._match(node, call, graph)

    @match_aten("conv2d", phases=(CAPTURE, FOLDED))
    @match_aten("convolution", phases=(FOLDED,))
    @match_aten("conv1d", phases=(CAPTURE, FOLDED), sequence=_SEQUENCE)
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        x, weight, bias = (call.value(name) for name in ("input", "weight", "bias"))
        if len(node.shape) != 4 or call("transposed", False):
            return None
        if not graph.typed and not {weight, bias or weight} <= graph.constants.keys():
            return None  # kernels pack their weights once, except in a training step
        dilation, padding = call.pair("dilation", 1), call("padding", 0)
        pads = call.pair("padding", 0) if not isinstance(padding, str) else (0, 0)
        if padding == "same":
            assert x is not None and weight is not None
            taps = zip(dilation, graph.shape_of(weight)[2:], strict=True)
            rows, columns = (step * (size - 1) for step, size in taps)  # type: ignore[operator]
            if rows % 2 or columns % 2:
                x = self._pad(node, x, rows, columns, graph)
            else:
                pads = (rows // 2, columns // 2)
        return self.instead_of(
            node, {"x": x, "weight": weight, "bias": bias},
            stride=call.pair("stride", 1), padding=pads, dilation=dilation, groups=call("groups", 1), relu=False,
        )  # fmt: skip

    def _pad(self, node: Node, x: str, rows: int, columns: int, graph: Graph) -> str:
        """Add rows and columns of zeros around x; of an odd number, one more after it."""
        batch, channels, height, width = graph.shape_of(x)
        pads = (rows // 2, rows - rows // 2, columns // 2, columns - columns // 2)
        shape = (batch, channels, height + rows, width + columns)  # type: ignore[operator]
        attributes = {"pads": pads, "mode": "constant", "value": 0.0}
        return graph.add(Pad2d.node(f"{node.name}_padded", {"x": x}, attributes, shape, node.dtype))

    def takes_residual(self, node: Node) -> bool:
        return not node.attributes.get("quantized")  # quantized values have scales

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        inputs = prologue.apply(a.get("prologue", ""), inputs)
        bias = None if a.get("quantized") else inputs.get("bias")
        window = a["stride"], a["padding"], a["dilation"], a["groups"]
        y = F.conv2d(inputs["x"], inputs["weight"], bias, *window)
        if "shortcut" in inputs:
            y = y + F.conv2d(inputs["shortcut"], inputs["shortcut_weight"], stride=a["shortcut_stride"])
        y = (
            _finish_quantized(node, y, inputs)
            if a.get("quantized")
            else activate(node, y, inputs.get("residual"), inputs)
        )
        pool = F.avg_pool2d if a.get("mean") else F.max_pool2d
        return pool(y, a["pool"]) if a.get("pool", (1, 1)) != (1, 1) else y

    def side_outputs(self, node: Node, inputs: Tensors) -> Tensors:
        """Return the argmax indices of the fused max pool, or the statistics of the result."""
        a = node.attributes
        y = self.compute(node.with_attributes(pool=(1, 1)), inputs)
        if "epsilon" in a:
            return training_statistics(y, inputs, a["epsilon"], a["momentum"])
        pool = MaxPool2d.instead_of(
            node, {},
            kernel=a["pool"], stride=a["pool"], padding=(0, 0), ceil_mode=False, dilation=(1, 1), behind_relu=a["relu"],
        )  # fmt: skip
        return MaxPool2d().side_outputs(pool, {"x": y})

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        batch, _, *image = sizes["x"]
        filters, channels, *window = sizes["weight"]
        groups = attributes["groups"]
        if filters % groups:
            raise SizeError(f"{groups} groups do not divide {filters} filters")
        steps = (attributes[key] for key in ("stride", "padding", "dilation"))
        result = [
            (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
            for size, taps, stride, padding, dilation in zip(image, window, *steps, strict=True)
        ]
        return {
            "x": (batch, channels * groups, *image),
            RESULT: (batch, filters, *require_positive(result)),
        }

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        a = node.attributes
        layout = a.get("layout", "nhwc")
        if layout == "nchw" and forms.dtype != "tf32":
            return None  # PyTorch computes it as a matrix product; see the layout pass
        shortcut: dict[str, Any] = {}
        if "shortcut" in node.inputs:
            _, channels, *size = forms.value(node.inputs["shortcut"]).shape
            shortcut = {"shortcut_channels": channels, "shortcut_size": tuple(size)}
        quantized = a.get("quantized")
        problem = filter_problem(
            Conv2dProblem, node, forms.value(node.inputs["x"]).shape, forms.sizes(node.inputs["weight"]),
            dtype=quantized or forms.dtype, output="fp16" if quantized and not a["store"] else "", layout=layout,
            **shortcut,
        )  # fmt: skip
        constants = (
            {} if layout == "nchw" else dict.fromkeys(("weight", "shortcut_weight"), quantized or NHWC)
        )
        vectors = ("bias", "scale", "scales") if quantized else ("gain", "shift", *VECTORS)
        return Lowered(CONV2D, problem, {**constants, **dict.fromkeys(vectors, FP32)})


def _finish_quantized(node: Node, y: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    """Apply scales, bias and activation of a quantized convolution."""
    y = y * inputs["scale"].view(-1, 1, 1) + inputs["bias"].view(-1, 1, 1)
    residual = inputs["residual"] * inputs["scales"][0] if "residual" in inputs else None
    return activate(node, y, residual) * inputs["scales"][1]


def filter_problem(kind: type[Any], node: Node, image: Sizes, filters: Sizes, **given: Any) -> Any:
    """Return a problem of NHWC images and filters of these shapes; see `problem_from`."""
    sizes = dict(zip(("batch", "channels", "height", "width"), image, strict=True))
    count, _, height, width = filters
    window = {"filters": count, "filter_height": height, "filter_width": width}
    return problem_from(kind, node, **sizes, **window, **{"layout": "nhwc", **given})


def is_pixelwise(node: Node, graph: Graph) -> bool:
    """Return True for a 1×1 convolution without padding or prologue, in which each pixel depends on one of x."""
    a = node.attributes
    window = tuple(graph.constants[node.inputs["weight"]].shape[2:])
    return window == (1, 1) and a["padding"] == (0, 0) and "prologue" not in a and not a.get("quantized")


def has_one_input(node: Node) -> bool:
    """Return True if a convolution reads nothing but x and its weights."""
    return not {"residual", "shortcut"} & node.inputs.keys()


_TRANSPOSED_WINDOW = ("stride", "padding", "output_padding", "dilation")


class ConvTranspose2d(_Filters):
    """y = conv_transpose(gradient, weight) + bias, then ReLU or another expression.

    It is the gradient of a convolution by its input, and computed by that operation, which names its operands.
    """

    name = "conv_transpose2d"
    signature = Signature(
        {"gradient": IMAGE, "weight": FILTERS, "bias": OPTIONAL_VECTOR},
        {
            "stride": pair(1), "padding": pair(0), "output_padding": pair(0), "dilation": pair(1), "groups": COUNT,
            "relu": FLAG,
        },
    )  # fmt: skip
    values = ("gradient",)
    takes_expressions = True

    @match_aten("conv_transpose2d", phases=(CAPTURE, FOLDED))
    @match_aten("conv_transpose1d", phases=(CAPTURE, FOLDED), sequence=_SEQUENCE)
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        x, weight, bias = (call.value(name) for name in ("input", "weight", "bias"))
        is_constant = {weight, bias or weight} <= graph.constants.keys()
        if len(node.shape) != 4 or not (is_constant or graph.typed):
            return None  # kernels pack their weights once, except in a training step
        assert x is not None and weight is not None
        window = {
            key: call.pair(key, 1 if key in ("stride", "dilation") else 0) for key in _TRANSPOSED_WINDOW
        }
        if not _is_input_gradient(call):
            return None
        groups, taps = call("groups", 1), graph.shape_of(weight)[2:]
        if groups == 1:
            window["stride"] = _effective_stride(graph.shape_of(x)[2:], taps, window)
        if window["stride"] == (1, 1) and weight in graph.constants:
            reach = ((size - 1) * step for size, step in zip(taps, window["dilation"], strict=True))  # type: ignore[operator]
            rows, columns = (far - own for far, own in zip(reach, window["padding"], strict=True))
            if min(rows, columns) >= 0:  # else the convolution would have to crop x
                flipped = graph.derive_constant(f"{node.name}_weight", weight, partial(_flipped, groups))
                return Conv2d.instead_of(
                    node, {"x": x, "weight": flipped, "bias": bias},
                    stride=(1, 1), padding=(rows, columns), dilation=window["dilation"], groups=groups, relu=False,
                )  # fmt: skip
        inputs = {"gradient": x, "weight": weight, "bias": bias}
        return self.instead_of(node, inputs, **window, groups=groups, relu=False)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        y = F.conv_transpose2d(
            inputs["gradient"], inputs["weight"], inputs.get("bias"), a["stride"], a["padding"], a["output_padding"],
            a["groups"], a["dilation"],
        )  # fmt: skip
        return activate(node, y, inputs.get("residual"))

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        batch, _, *image = sizes["gradient"]
        filters, channels, *window = sizes["weight"]
        groups = attributes["groups"]
        if filters % groups:
            raise SizeError(f"{groups} groups do not divide {filters} channels")
        result = []
        for size, taps, stride, padding, more, dilation in zip(
            image, window, *(attributes[key] for key in _TRANSPOSED_WINDOW), strict=True
        ):
            if more >= stride:
                raise SizeError(f"output padding {more} is not less than stride {stride}")
            result.append((size - 1) * stride - 2 * padding + dilation * (taps - 1) + more + 1)
        return {
            "gradient": (batch, filters, *image),
            RESULT: (batch, channels * groups, *require_positive(result)),
        }

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        """Return the gradient; None for groups that only naive kernels support, and pixels that no tap reaches."""
        result, filters = forms.value(node.name).shape, forms.sizes(node.inputs["weight"])
        layout = node.attributes.get("layout", "nhwc")
        forward = filter_problem(Conv2dProblem, node, result, filters, dtype=forms.dtype, layout=layout)
        problem = Conv2dInputGradientProblem(forward)
        if node.attributes["groups"] != 1 and not supports_groups(problem):
            return None
        if not all(one.taps for one in pixel_phases(forward)):
            return None
        return Lowered(CONV2D_INPUT_GRADIENT, problem, {"weight": NHWC} if layout == "nhwc" else {})


def _is_input_gradient(call: AtenCall) -> bool:
    """Return True if a transposed convolution is the input gradient of a convolution: others have larger results."""
    more, stride = call.pair("output_padding", 0), call.pair("stride", 1)
    return all(one < step for one, step in zip(more, stride, strict=True))


def _flipped(groups: int, filters: torch.Tensor) -> torch.Tensor:
    """Return the filters of the convolution that equals a transposed one of stride 1."""
    turned = filters.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(2, 3)
    return turned.contiguous()


def _effective_stride(
    image: tuple[Any, ...], filters: tuple[Any, ...], window: Mapping[str, tuple[int, int]]
) -> tuple[int, int]:
    """Return the stride, or for an image of one pixel the size of the filter.

    The stride does not matter there, and with that one each pixel of the result has a single tap, so that no products
    with padding are computed.
    """
    rows, columns = (
        max(stride, taps) if (size, dilation, more) == (1, 1, 0) else stride
        for size, taps, stride, dilation, more in zip(
            image, filters, window["stride"], window["dilation"], window["output_padding"], strict=True
        )
    )
    return rows, columns


def _has_separate_windows(window: Mapping[str, Any], filters: Shape, image: Shape) -> bool:
    """Return True if square windows cover an image side by side."""
    size = filters[2]
    return (
        filters[2:] == window["stride"] == (size, size)
        and (window["padding"], window["dilation"], window["groups"]) == ((0, 0), (1, 1), 1)
        and all(isinstance(side, int) and side % size == 0 for side in image[2:])  # type: ignore[operator]
    )


def _convolution_backward(
    node: Node, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, result: int
) -> torch.Tensor:
    a = node.attributes
    backward: Any = torch.ops.aten.convolution_backward
    found: torch.Tensor = backward(
        gradient, x, weight, None, a["stride"], a["padding"], a["dilation"], False, [0, 0], a["groups"],
        [index == result for index in range(3)],
    )[result]  # fmt: skip
    return found


def bias_gradient(node: Node, gradient: str) -> Node:
    """Return the gradient of a convolution's bias in place of a node."""
    return Reduce.instead_of(
        node, {"x": gradient}, kind="sum", dims=BIAS_DIMS, keepdim=False, correction=0, relu=False
    )


class InputGradient(Operator):
    """The gradient of a convolution's input: with a residual added, of a ReLU before it, or of a normalization."""

    def convolution_gradient(
        self, node: Node, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of the convolution alone, for an input with the shape of x."""
        raise NotImplementedError

    def takes_residual(self, node: Node) -> bool:
        return True

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        gradient = inputs["gradient"]
        x = gradient.new_empty(node.shape)  # type: ignore[arg-type]  # only its shape is used
        dx = self.convolution_gradient(node, gradient, x, inputs["weight"])
        if "residual" in inputs:
            dx = dx + inputs["residual"]
        if "norm" in node.attributes:
            return masked(*normalization(node, inputs, dx))
        return torch.where(inputs["mask"] <= 0, 0.0, dx) if "mask" in inputs else dx

    def side_outputs(self, node: Node, inputs: Tensors) -> Tensors:
        """Return the gradients of the normalization's weight and bias."""
        dx = self.compute(node, inputs)  # masked, and masking it again changes nothing
        _, weight_gradient, bias_gradient = gradients(*normalization(node, inputs, dx))
        return {"weight_gradient": weight_gradient.float(), "bias_gradient": bias_gradient.float()}


class Conv2dInputGradient(InputGradient, _Filters):
    """dx of y = conv(x, weight), from the gradient of y.

    Zero where `mask`, the result of a ReLU, is not positive; or plus `residual`, the gradient of other uses of x. If x
    is the result of a batch normalization, whose inputs are then `norm_x` and so on, the gradient before its ReLU, and
    side outputs are the gradients of its weight and bias. `norm` is the `mask` of that normalization's gradients.
    """

    name = "conv2d_input_gradient"
    fp32_roles = ("norm_mean", "norm_rstd", "norm_weight", "norm_bias")
    values = ("gradient", "mask", "residual", "norm_x", "norm_output", *fp32_roles)

    @match_aten("convolution_backward")
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        gradient, x, weight = (call.value(role) for role in ("grad_output", "input", "weight"))
        if gradient is None or x is None or weight is None:
            return None
        if len(graph.shape_of(x)) != 4 or not node.is_floating:
            return None
        window = {
            "stride": call.pair("stride", 1), "padding": call.pair("padding", 0), "dilation": call.pair("dilation", 1),
            "groups": call("groups", 1),
        }  # fmt: skip
        # A transposed convolution is the input gradient of a convolution, whose input is the transposed one's result.
        is_transposed = call("transposed", False)
        if is_transposed and not _is_input_gradient(call):
            return None
        match node.attributes["result"]:
            case 0 if is_transposed:
                return Conv2d.instead_of(node, {"x": gradient, "weight": weight}, **window, relu=False)
            case 0 if _has_separate_windows(window, graph.shape_of(weight), node.shape) and (
                not is_worthwhile(window["stride"], 1)
            ):
                return self._by_window(node, gradient, weight, graph)
            case 0:
                return self.instead_of(node, {"gradient": gradient, "weight": weight}, **window)
            case 1:
                image, result = (gradient, x) if is_transposed else (x, gradient)
                inputs = {"x": image, "gradient": result}
                if Conv2dWeightGradient.has_few_filters(node.shape, window):
                    return Conv2dWeightGradient.by_few_channels(node, inputs, window["padding"], graph)
                return Conv2dWeightGradient.instead_of(node, inputs, **window, bias=False)
        return bias_gradient(node, gradient)

    def _by_window(self, node: Node, gradient: str, weight: str, graph: Graph) -> Node:
        """Return the gradient as that of a 1×1 convolution whose channels are the elements of a window."""
        batch, filters, *sides = graph.shape_of(gradient)
        _, channels, size, _ = graph.shape_of(weight)
        elements = product((channels, size, size))
        matrix = Reshape.node(
            f"{node.name}_matrix",
            {"x": weight},
            {},
            (filters, elements, 1, 1),
            dtype_name(graph.dtype_of(weight)),
        )
        windows = self.node(
            f"{node.name}_windows", {"gradient": gradient, "weight": graph.add(matrix)},
            {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1},
            (batch, elements, *sides), node.dtype,
        )  # fmt: skip
        return PixelShuffle.instead_of(node, {"x": graph.add(windows)}, factor=size, down=False)

    def convolution_gradient(
        self, node: Node, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        return _convolution_backward(node, gradient, x, weight, 0)

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        a, filters = node.attributes, forms.sizes(node.inputs["weight"])
        image = forms.value(node.name).shape
        forward = filter_problem(Conv2dProblem, node, image, filters, dtype=forms.dtype)
        problem = Conv2dInputGradientProblem(forward, mask="mask" in node.inputs, norm=a.get("norm", ""))
        if not is_worthwhile(a["stride"], a["groups"]) and not supports_groups(problem):
            return None
        return Lowered(CONV2D_INPUT_GRADIENT, problem, {"weight": NHWC})


def normalization(
    node: Node, inputs: Tensors, gradient: torch.Tensor
) -> tuple[BatchNormBackwardProblem, dict[str, torch.Tensor]]:
    """Return the gradients of the normalization as a problem, and its inputs."""
    batch, channels, height, width = gradient.shape
    problem = BatchNormBackwardProblem(batch, channels, height, width, node.attributes["norm"])
    own = {role.removeprefix("norm_"): value for role, value in inputs.items() if role.startswith("norm_")}
    return problem, {**own, "gradient": gradient}


class Conv2dWeightGradient(Operator):
    """dw of y = conv(x, w), from x and the gradient of y; with `bias`, the gradient of the bias is a side output."""

    name = "conv2d_weight_gradient"
    values = ("x", "gradient")

    @staticmethod
    def has_few_filters(shape: Shape, window: Mapping[str, Any]) -> bool:
        """Return True if x and the gradient should change roles: kernels take few channels, but pad few filters."""
        filters, channels, *size = shape
        rows_and_columns = zip(size, window["padding"], strict=True)
        return (
            (window["stride"], window["dilation"], window["groups"]) == ((1, 1), (1, 1), 1)
            and filters < FEW_FILTERS <= channels  # type: ignore[operator]
            and product((filters, *size)) >= MOST_COLUMNS  # type: ignore[operator]
            and all(padding < taps for taps, padding in rows_and_columns)
        )

    @classmethod
    def by_few_channels(
        cls, node: Node, inputs: Mapping[str, str], padding: tuple[int, int], graph: Graph
    ) -> Node:
        """Return the gradient of filters that are applied to the gradient, and result in x: they are flipped."""
        filters, channels, *size = node.shape
        rows, columns = (taps - 1 - own for taps, own in zip(size, padding, strict=True))  # type: ignore[operator]
        shape = channels, filters, *size
        dual = cls.node(
            graph.fresh(f"{node.name}_dual"), {"x": inputs["gradient"], "gradient": inputs["x"]},
            {"stride": (1, 1), "padding": (rows, columns), "dilation": (1, 1), "groups": 1, "bias": False},
            shape, node.dtype,
        )  # fmt: skip
        attributes = {"target": "aten::flip", "arguments": {"self": Reference("in0"), "dims": [2, 3]}}
        flipped = Node(
            graph.fresh(f"{node.name}_flipped"), ATEN, {"in0": graph.add(dual)}, attributes, shape, node.dtype
        )
        return Permute.instead_of(node, {"x": graph.add(flipped)}, order=(1, 0, 2, 3))

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        x, gradient = inputs["x"], inputs["gradient"]
        weight = x.new_empty(node.shape)  # type: ignore[arg-type]  # only its shape is used
        return _convolution_backward(node, gradient, x, weight, 1)

    def side_outputs(self, node: Node, inputs: Tensors) -> Tensors:
        return {BIAS_GRADIENT: inputs["gradient"].sum(BIAS_DIMS).view(node.shape)}  # type: ignore[arg-type]

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        image, filters = forms.value(node.inputs["x"]).shape, forms.value(node.name).shape
        forward = filter_problem(Conv2dProblem, node, image, filters, dtype=forms.stored)
        problem = Conv2dWeightGradientProblem(forward)
        if node.attributes["groups"] != 1 and all(
            rung.supports(problem) for rung in (DEPTHWISE, WGMMA_GROUPS, TENSOR_CORE)
        ):
            return None  # only the naive rung supports other groups
        return Lowered(CONV2D_WEIGHT_GRADIENT, problem)
