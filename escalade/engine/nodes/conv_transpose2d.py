"""The transposed convolution of images with bias and activation: the gradient of a convolution by its input."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall, name_of
from escalade.engine.nodes.base import (
    Operator,
    Recognised,
    Recogniser,
    Tensors,
    activation_of,
    finish,
)
from escalade.engine.nodes.conv2d import Conv2d
from escalade.engine.nodes.lowering import NHWC, Forms, Lowered
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
from escalade.ops.conv2d import Conv2dProblem
from escalade.ops.conv2d_input_gradient import CONV2D_INPUT_GRADIENT, Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.op import supports_groups
from escalade.ops.conv2d_input_gradient.rungs.phases import pixel_phases

_WINDOW = ("stride", "padding", "output_padding", "dilation")


class ConvTranspose2d(Operator):
    """y = conv_transpose(gradient, weight) + bias, then ReLU or another expression.

    The input has the name that the operation gives it: its weight is that of the convolution from y to it.
    """

    name = "conv_transpose2d"
    signature = Signature(
        {
            "gradient": IMAGE,
            "weight": Role((4, 4), constant=True),
            "bias": Role((1, 1), constant=True, optional=True),
        },
        {
            "stride": pair(1), "padding": pair(0), "output_padding": pair(0), "dilation": pair(1), "groups": COUNT,
            "relu": FLAG,
        },
    )  # fmt: skip
    values = ("gradient",)
    takes_expressions = True

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return self.folded

    @property
    def folded(self) -> Mapping[str, Recogniser]:
        of_rows = of_sequences(self._recognise, "input", "weight")
        return {"conv_transpose2d": self._recognise, "conv_transpose1d": of_rows}

    def recognise_rest(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        is_one = name_of(node.attributes["target"]) == "convolution" and call("transposed", False)
        return self._recognise(node, call, graph) if is_one else None

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        inputs = {"gradient": call.value("input"), "weight": call.value("weight"), "bias": call.value("bias")}
        weight, bias = inputs["weight"], inputs["bias"]
        if len(node.shape) != 4 or weight not in graph.constants or (bias or weight) not in graph.constants:
            return None
        window = {key: call.pair(key, 1 if key in ("stride", "dilation") else 0) for key in _WINDOW}
        if any(more >= step for more, step in zip(window["output_padding"], window["stride"], strict=True)):
            return None  # no convolution makes an image of this size of that one
        if call("groups", 1) == 1:
            window["stride"] = _stride(graph, inputs, window)
        if window["stride"] == (1, 1):
            plain = self._convolution(node, inputs, window, call("groups", 1), graph)
            if plain is not None:
                return plain
        return self.instead_of(node, inputs, **window, groups=call("groups", 1), relu=False)

    def _convolution(
        self, node: Node, inputs: Mapping[str, str | None], window: Mapping[str, tuple[int, int]], groups: int,
        graph: Graph,
    ) -> Node | None:  # fmt: skip
        """The convolution by the filters turned around that it is with stride 1; None if that would have to cut x."""
        assert inputs["weight"] is not None
        weight = graph.constants[inputs["weight"]]
        reach = ((size - 1) * step for size, step in zip(weight.shape[2:], window["dilation"], strict=True))
        rows, columns = (far - own for far, own in zip(reach, window["padding"], strict=True))
        if min(rows, columns) < 0:
            return None
        turned = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(2, 3).contiguous()
        return Conv2d.instead_of(
            node,
            {
                "x": inputs["gradient"],
                "weight": graph.add_constant(f"{node.name}_weight", turned),
                "bias": inputs["bias"],
            },
            stride=(1, 1), padding=(rows, columns), dilation=window["dilation"], groups=groups, relu=False,
        )  # fmt: skip

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        y = F.conv_transpose2d(
            inputs["gradient"], inputs["weight"], inputs.get("bias"), a["stride"], a["padding"], a["output_padding"],
            a["groups"], a["dilation"],
        )  # fmt: skip
        return finish(node, y, inputs)

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        batch, _, *image = sizes["gradient"]
        filters, channels, *window = sizes["weight"]
        groups = attributes["groups"]
        if filters % groups:
            raise SizeError(f"{filters} channels are no multiple of {groups} groups")
        result = []
        for size, reach, stride, padding, more, dilation in zip(
            image, window, *(attributes[key] for key in _WINDOW), strict=True
        ):
            if more >= stride:
                raise SizeError(f"an output padding of {more} is no less than the stride of {stride}")
            result.append((size - 1) * stride - 2 * padding + dilation * (reach - 1) + more + 1)
        return {
            "gradient": (batch, filters, *image),
            "bias": (channels * groups,),
            RESULT: (batch, channels * groups, *positive(result)),
        }

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        """The gradient that it is; PyTorch where there is a thread for each element at most, or pixels that no tap
        meets.
        """
        filters, channels, filter_height, filter_width = forms.sizes(node.inputs["weight"])
        batch, _, height, width = forms.value(node.name).shape
        a = node.attributes
        forward = Conv2dProblem(
            batch, channels * a["groups"], height, width, filters, filter_height, filter_width, a["stride"],
            a["padding"], a["dilation"], a["groups"], forms.dtype, "nhwc", "bias" in node.inputs, **activation_of(node),
        )  # fmt: skip
        problem = Conv2dInputGradientProblem(forward)
        if a["groups"] != 1 and not supports_groups(problem):
            return None
        if not all(one.taps for one in pixel_phases(forward)):
            return None
        return Lowered(CONV2D_INPUT_GRADIENT, problem, {"weight": NHWC})

    def constants_in_pytorch(self, node: Node) -> Mapping[str, str]:
        return {"weight": NHWC}

    def scaled_axis(self, node: Node) -> int:
        return 1

    def scaled_weight(self, node: Node, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        groups = node.attributes["groups"]
        split = weight.double().unflatten(0, (groups, -1))
        return (split * scale.view(groups, 1, -1, 1, 1)).flatten(0, 1)


def _stride(
    graph: Graph, inputs: Mapping[str, str | None], window: Mapping[str, tuple[int, int]]
) -> tuple[int, int]:
    """The stride; where the image is a single pixel, which none moves, as long as the filter, so that each pixel of the
    result is met by one tap, and no products are made of padding."""
    assert inputs["gradient"] is not None and inputs["weight"] is not None
    image, taps = graph.shape_of(inputs["gradient"])[2:], graph.constants[inputs["weight"]].shape[2:]
    first, second = (
        max(window["stride"][d], taps[d])
        if (image[d], window["dilation"][d], window["output_padding"][d]) == (1, 1, 0)
        else window["stride"][d]
        for d in (0, 1)
    )
    return first, second
