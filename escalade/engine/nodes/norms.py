"""Norms and softmax over rows, or over the channels of images: LayerNorm, RMSNorm, GroupNorm, InstanceNorm, softmax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import ClassVar

import torch
import torch.nn.functional as F

from escalade.engine.graph.forms import NAMES, Form
from escalade.engine.graph.graph import Graph, Node, dtype_name, product
from escalade.engine.nodes.base import (
    CAPTURE,
    FOLDED,
    UNFUSED,
    AtenCall,
    Layouts,
    Match,
    Operator,
    Tensors,
    activate,
    activation_of,
    match_aten,
)
from escalade.engine.nodes.batch_norm import BatchNorm, BatchNormBackward
from escalade.engine.nodes.lowering import Forms, Lowered, image_problem, problem_from
from escalade.engine.nodes.side_outputs import SideOutput, match_side_output
from escalade.engine.nodes.signature import (
    COUNT,
    EPSILON,
    FLAG,
    OPTIONAL_ROW,
    OPTIONAL_VECTOR,
    ROWS,
    Attributes,
    Role,
    Signature,
    SizeError,
    Sizes,
)
from escalade.engine.nodes.views import CHANNELS_FIRST, CHANNELS_LAST, Reshape
from escalade.ops.group_norm import GROUP_NORM, GroupNormProblem, statistics
from escalade.ops.group_norm_backward import GROUP_NORM_BACKWARD, GroupNormBackwardProblem
from escalade.ops.group_norm_backward import gradients as group_norm_gradients
from escalade.ops.layer_norm import EPSILON as DEFAULT_EPSILON
from escalade.ops.layer_norm import LAYER_NORM, MOST_THREADS, MOST_VALUES, LayerNormProblem
from escalade.ops.layer_norm_backward import LAYER_NORM_BACKWARD, ROUNDED, LayerNormBackwardProblem, gradients
from escalade.ops.shared.columns import MOST_LENGTH
from escalade.ops.softmax import SOFTMAX, SoftmaxProblem
from escalade.ops.softmax_backward import SOFTMAX_BACKWARD, TENSORS, SoftmaxBackwardProblem, gradient_of
from escalade.terminal_text import counted

_PARAMETERS = ("weight", "bias")
_GRADIENT_OUTPUTS = ("weight_gradient", "bias_gradient")
"""Buffers of the side outputs, in PyTorch's order."""
_STATISTICS = ("mean", "rstd")
"""The same of a GroupNorm."""
_LAYER_NORMS = ("layer_norm", "native_layer_norm", "rms_norm")


class _RowOperator(Operator):
    """A node that computes each row, or the channels of each pixel, independently."""

    most_channels: ClassVar[int] = MOST_LENGTH
    """Most channels that kernels for strided channels hold."""

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        """Return PyTorch's order for rows; for channels, any layout if kernels for strided channels can hold them."""
        if not node.attributes.get("of_channels"):
            return Layouts("nchw", "nchw")
        channels = node.shape[1]
        assert isinstance(channels, int)
        return Layouts.common(given) if channels <= self.most_channels else Layouts("nhwc", "nhwc")


def _adjacent_rows(node: Node, form: Form) -> int:
    """Return the number of interleaved rows: the pixels of an NCHW image, whose channels are strided; else 1."""
    is_strided = node.attributes.get("of_channels") and form.layout == "nchw"
    return prod(form.shape[2:]) if is_strided else 1


def _parameters(call: AtenCall, graph: Graph, in_step: bool = False) -> dict[str, str | None] | None:
    """Return weight and bias of a norm; None if one is not a constant, or in a training step if one is not fp32."""
    found = {role: call.value(role) for role in _PARAMETERS}
    names = [name for name in found.values() if name is not None]
    is_supported = (
        graph.dtype_of(name) is torch.float32 if in_step else name in graph.constants for name in names
    )
    return found if all(is_supported) else None


class LayerNorm(_RowOperator):
    """Rows with mean 0 and variance 1, or divided by their RMS; times weight, plus bias, then any expression.

    Fused into chains of linear layers.
    """

    name = "layer_norm"
    signature = Signature(
        {"x": ROWS, **dict.fromkeys(_PARAMETERS, OPTIONAL_ROW)},
        {"epsilon": EPSILON, "rms": FLAG, "relu": FLAG},
    )
    values = ("x",)
    takes_expressions = True
    mixes_types = True
    computes_in_fp32 = True
    takes_casts = True

    @match_aten(*_LAYER_NORMS)
    def _match_any_rank(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match a norm over several dimensions as one over flattened rows."""
        sizes = call("normalized_shape", ())
        if len(sizes) < 2 or not all(isinstance(size, int) for size in sizes):
            return self._match(node, call, graph)
        shape = (*node.shape[: -len(sizes)], prod(sizes))
        known = self._match(replace(node, shape=shape), call, graph)
        if not isinstance(known, Node):
            return None
        x = {"x": known.inputs["x"]}
        rows = graph.add(Reshape.node(f"{node.name}_rows", x, {}, shape, node.dtype))
        flattened = {
            role: _flattened(graph, f"{node.name}_{role}", known.inputs[role])
            for role in _PARAMETERS
            if role in known.inputs
        }
        flat = graph.add(replace(known.with_inputs(x=rows, **flattened), name=f"{node.name}_flat"))
        return Reshape.instead_of(node, {"x": flat})

    @match_aten(*_LAYER_NORMS, phases=(FOLDED,))
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        parameters = _parameters(call, graph, in_step=graph.typed)
        if prod(call("normalized_shape", ())) != node.shape[-1] or node.attributes.get("result", 0) != 0:
            return None
        if parameters is None:
            return None
        rms = node.calls == "rms_norm"
        epsilon = call("eps", torch.finfo(getattr(torch, node.dtype)).eps if rms else DEFAULT_EPSILON)
        inputs = {"x": call.value("input"), **parameters}
        return self.instead_of(node, inputs, epsilon=epsilon, rms=rms, relu=False)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        x = inputs["x"]
        if node.attributes.get("of_channels"):
            rows = {**inputs, "x": x.permute(CHANNELS_LAST)}
            return self.compute(node.with_attributes(of_channels=False), rows).permute(CHANNELS_FIRST)
        weight, bias, epsilon = inputs.get("weight"), inputs.get("bias"), node.attributes["epsilon"]
        if any(one is not None and one.dtype != x.dtype for one in (weight, bias)):
            return self.compute(node, {**inputs, "x": x.float()}).to(x.dtype)
        if node.attributes["rms"]:
            y = F.rms_norm(x, x.shape[-1:], weight, epsilon)
            return activate(node, y if bias is None else y + bias)
        return activate(node, F.layer_norm(x, x.shape[-1:], weight, bias, epsilon))

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        form = forms.value(node.name)
        x = NAMES.get(forms.value(node.inputs["x"]).dtype) if forms.typed else forms.stored
        features = form.shape[1 if node.attributes.get("of_channels") else -1]
        rows = prod(form.shape) // max(1, features)
        inner = _adjacent_rows(node, form)
        wide = forms.typed and x != "fp32" and any(role in node.inputs for role in _PARAMETERS)
        is_mixed = x != forms.stored
        if x is None or (is_mixed and inner > 1):
            return None
        if (wide or is_mixed) and features > MOST_THREADS * MOST_VALUES:
            return None
        if features > MOST_THREADS * MOST_VALUES and not node.attributes["rms"]:  # too long for one block
            problem = problem_from(
                GroupNormProblem, node,
                batch=rows, channels=features, height=1, width=1, groups=1, layout="nchw", dtype=forms.stored,
            )  # fmt: skip
            return Lowered(GROUP_NORM, problem)
        sizes = {"batch": rows // inner, "features": features, "inner": inner, "wide": wide}
        types = {"dtype": x, "output": forms.stored if is_mixed else ""}
        return Lowered(LAYER_NORM, problem_from(LayerNormProblem, node, **sizes, **types))


def _flattened(graph: Graph, name: str, parameter: str) -> str:
    """Return a parameter as a vector; in a training step it is a value."""
    if parameter in graph.constants:
        return graph.derive_constant(name, parameter, torch.Tensor.flatten)
    shape, dtype = graph.shape_of(parameter), dtype_name(graph.dtype_of(parameter))
    return graph.add(Reshape.node(name, {"x": parameter}, {}, (product(shape),), dtype))


class LayerNormBackward(Operator):
    """dx of a LayerNorm, plus a residual. Its statistics are recomputed.

    Side outputs are the gradients of its weight and its bias, and a copy of dx in the dtype `rounded`.
    """

    name = "layer_norm_backward"
    values = ("gradient", "x", "residual")
    mixes_types = True
    computes_in_fp32 = True
    takes_casts = True

    @match_aten("native_layer_norm_backward")
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match it with the norm whose statistics it reads, for epsilon, in the graph of a training step."""
        gradient, x, weight = (call.value(name) for name in ("grad_out", "input", "weight"))
        result, source = node.attributes.get("result"), node.attributes.get("call")
        epsilon = self._epsilon(graph, call.value("rstd"))
        if source is None or result is None or gradient is None or x is None or epsilon is None:
            return None
        if weight is not None and graph.dtype_of(weight) is not torch.float32:
            return None
        if result:
            return match_side_output(self, node, _GRADIENT_OUTPUTS, graph)
        features = prod(call("normalized_shape"))
        inputs = {"gradient": gradient, "x": x, "weight": weight}
        return self.instead_of(node, inputs, epsilon=epsilon, rms=False, features=features, source=source)

    @staticmethod
    def _epsilon(graph: Graph, rstd: str | None) -> float | None:
        norm = None if rstd is None else graph.nodes.get(rstd)
        if norm is None or norm.calls != "native_layer_norm":
            return None
        epsilon = AtenCall(norm)("eps")
        return epsilon if isinstance(epsilon, float) else None

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts("nchw", "nchw")

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        x = inputs["x"]
        return gradients(_backward_problem(node, x.shape), inputs)[0].view(x.shape).to(x.dtype)

    def side_outputs(self, node: Node, inputs: Tensors) -> Tensors:
        found = gradients(_backward_problem(node, inputs["x"].shape), inputs)
        named = zip((ROUNDED, *_GRADIENT_OUTPUTS), found, strict=True)
        shape: tuple[int, ...] = node.shape  # type: ignore[assignment]  # a step has concrete sizes
        return {name: one.float().view(shape) for name, one in named if name == node.attributes["buffer"]}

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        roles = (role for role in self.values if role in node.inputs)
        found = {role: NAMES.get(forms.value(node.inputs[role]).dtype) for role in roles}
        known = {role: dtype for role, dtype in found.items() if dtype is not None}
        if len(known) < len(found):
            return None
        x = known.pop("x")
        others = {"gradient": known["gradient"], "output": forms.stored}
        own = {field: "" if dtype == x else dtype for field, dtype in others.items()}
        types = {**known, **own, "dtype": x}
        return Lowered(LAYER_NORM_BACKWARD, _backward_problem(node, forms.value(node.name).shape, **types))


def _backward_problem(node: Node, shape: Sequence[int], **types: str) -> LayerNormBackwardProblem:
    rows = prod(shape) // node.attributes["features"]
    return problem_from(LayerNormBackwardProblem, node, batch=rows, **{"residual": "", **types})


class GroupNorm(Operator):
    """Groups of channels of each image with mean 0 and variance 1, times weight, plus bias, then any expression.

    In a training step, side outputs are mean and reciprocal standard deviation of each group.
    """

    name = "group_norm"
    preferred_layout = None
    signature = Signature(
        {"x": Role((2, 15)), **dict.fromkeys(_PARAMETERS, OPTIONAL_VECTOR)},
        {"groups": COUNT, "epsilon": EPSILON, "relu": FLAG},
    )
    values = ("x",)
    takes_expressions = True
    takes_any_rank = True
    mixes_types = True
    computes_in_fp32 = True
    takes_casts = True

    @match_aten("group_norm", "native_group_norm", phases=(CAPTURE, FOLDED))
    def _match_groups(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        return self._match(node, call, graph, call("num_groups", call("group")))

    @match_aten("instance_norm", phases=(CAPTURE, FOLDED))
    def _match_instances(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match one group per channel; with running statistics it is a BatchNorm."""
        if not call("use_input_stats", True):
            return BatchNorm().match(node, call, graph)
        if call.value("running_mean") is not None:
            return None  # it updates them
        return self._match(node, call, graph, node.shape[1] if len(node.shape) > 1 else None)

    @match_aten("_native_batch_norm_legit")
    def _match_image(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match batch statistics of a single image, as which autograd sees the instances of a batch, in a step."""
        x = call.value("input")
        is_instance = graph.typed and node.attributes.get("result") is not None and call("training")
        if (
            not is_instance
            or x is None
            or graph.shape_of(x)[0] != 1
            or call.value("running_mean") is not None
        ):
            return None
        return self._match(node, call, graph, graph.shape_of(x)[1])

    def _match(self, node: Node, call: AtenCall, graph: Graph, groups: object) -> Match:
        parameters = _parameters(call, graph, in_step=graph.typed)
        result, source = node.attributes.get("result", 0), node.attributes.get("call")
        if not isinstance(groups, int) or parameters is None:
            return None
        if result and source is not None:
            return match_side_output(self, replace(node, dtype="float32"), _STATISTICS, graph)
        if len(node.shape) < 2 or result:
            return None
        inputs = {"x": call.value("input"), **parameters}
        own = {"source": source, "statistics": True} if graph.typed else {}
        return self.instead_of(node, inputs, groups=groups, epsilon=call("eps", 1e-5), relu=False, **own)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        x, a, weight, bias = inputs["x"], node.attributes, inputs.get("weight"), inputs.get("bias")
        if any(one is not None and one.dtype != x.dtype for one in (weight, bias)):
            return self.compute(node, {**inputs, "x": x.float()}).to(x.dtype)
        return activate(node, torch.group_norm(x, a["groups"], weight, bias, a["epsilon"]))

    def side_outputs(self, node: Node, inputs: Tensors) -> Tensors:
        x = inputs["x"]
        problem = problem_from(
            GroupNormProblem, node, batch=x.shape[0], **_image_sizes(x.shape), dtype="fp32"
        )
        found = statistics(problem, x.double())
        shape: tuple[int, ...] = node.shape  # type: ignore[assignment]  # a step has concrete sizes
        return {name: one.float().view(shape) for name, one in found.items()}

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        """Return values of any rank as images; all dimensions after the channels are pixels."""
        form = forms.value(node.name)
        x = NAMES.get(forms.value(node.inputs["x"]).dtype) if forms.typed else forms.stored
        if 0 in form.shape or x is None:
            return None
        own = {"layout": "nhwc"} if prod(form.shape[2:]) == 1 else {}  # one pixel: alike in both layouts
        is_mixed = x != forms.stored
        wide = forms.typed and x != "fp32" and any(role in node.inputs for role in _PARAMETERS)
        problem = image_problem(
            GroupNormProblem, node, form, x, wide=wide, output=forms.stored if is_mixed else "", **own
        )
        return Lowered(GROUP_NORM, problem, in_place=None if is_mixed else "x")


class GroupNormBackward(Operator):
    """dx of a GroupNorm; side outputs are the gradients of its weight and its bias.

    `function` is the backward expression of an activation behind the norm, whose operand is recomputed from x.
    """

    name = "group_norm_backward"
    preferred_layout = None
    values = ("gradient", "x")
    mixes_types = True
    computes_in_fp32 = True
    takes_casts = True

    @match_aten("native_group_norm_backward")
    def _match_groups(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        return self._match(node, call, graph, call("group"), ("mean", "rstd"))

    @match_aten("native_batch_norm_backward")
    def _match_image(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match the gradients of `_native_batch_norm_legit` of a single image."""
        mean, x = graph.nodes.get(call.value("save_mean") or ""), call.value("input")
        if x is None or not SideOutput.matches(mean) or mean.attributes["operator"] != GroupNorm.name:
            return BatchNormBackward().match(node, call, graph)
        return self._match(node, call, graph, graph.shape_of(x)[1], ("save_mean", "save_invstd"))

    def _match(
        self, node: Node, call: AtenCall, graph: Graph, groups: object, names: tuple[str, str]
    ) -> Match:
        found = dict(zip(_STATISTICS, map(call.value, names), strict=True))
        gradient, x, weight = (call.value(name) for name in ("grad_out", "input", "weight"))
        result, source = node.attributes.get("result"), node.attributes.get("call")
        if source is None or result is None or gradient is None or x is None or not isinstance(groups, int):
            return None
        vectors = [name for name in (weight, *found.values()) if name is not None]
        if None in found.values() or any(graph.dtype_of(name) is not torch.float32 for name in vectors):
            return None
        if result:
            return match_side_output(self, node, _GRADIENT_OUTPUTS, graph)
        inputs = {"gradient": gradient, "x": x, "weight": weight, **found}
        return self.instead_of(node, inputs, groups=groups, function="", source=source)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        x = inputs["x"]
        return group_norm_gradients(_group_norm_problem(node, x.shape), inputs)[0].to(
            getattr(torch, node.dtype)
        )

    def side_outputs(self, node: Node, inputs: Tensors) -> Tensors:
        _, *found = group_norm_gradients(_group_norm_problem(node, inputs["x"].shape), inputs)
        return {name: one.float() for name, one in zip(_GRADIENT_OUTPUTS, found, strict=True)}

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        form = forms.value(node.name)
        x, gradient = (NAMES.get(forms.value(node.inputs[role]).dtype) for role in ("x", "gradient"))
        if 0 in form.shape or x is None or gradient is None:
            return None
        others = {"gradient": gradient, "output": forms.stored}
        types = {field: "" if dtype == x else dtype for field, dtype in others.items()}
        problem = image_problem(GroupNormBackwardProblem, node, form, x, **types)
        return Lowered(GROUP_NORM_BACKWARD, problem)


def _image_sizes(shape: Sequence[int]) -> dict[str, int]:
    """Return the sizes of a value of any rank as images, without the batch."""
    return {"channels": shape[1], "height": 1, "width": prod(shape[2:])}


def _group_norm_problem(node: Node, shape: Sequence[int]) -> GroupNormBackwardProblem:
    return problem_from(
        GroupNormBackwardProblem, node, batch=shape[0], **_image_sizes(shape), gradient="", output=""
    )


class _AnySoftmax(_RowOperator):
    """Softmax, its logarithm or the gradient of one, over the last dimension or over the channels of images."""

    def _over(
        self, node: Node, inputs: Mapping[str, str], dim: object, graph: Graph, **attributes: object
    ) -> Match:
        """Match it over any dimension: with others after it, as the channels of images one column wide."""
        rank = len(node.shape)
        if not rank or not isinstance(dim, int):
            return None
        dim %= rank
        of_channels = rank == 4 and dim == 1
        if of_channels or dim == rank - 1:
            return self.instead_of(node, inputs, of_channels=of_channels, **attributes)
        outer, classes, inner = node.shape[:dim], node.shape[dim], node.shape[dim + 1 :]
        if not all(isinstance(size, int) for size in (classes, *outer[1:], *inner)):
            return None
        shape = (product(outer), classes, prod(inner), 1)  # type: ignore[arg-type]
        images = {}
        for role, name in inputs.items():
            suffix = "image" if len(inputs) == 1 else f"{role}_image"
            dtype = dtype_name(graph.dtype_of(name))
            image = Reshape.node(f"{node.name}_{suffix}", {"x": name}, {}, shape, dtype)
            images[role] = graph.add(image)
        attributes = {"of_channels": True, **attributes}
        made = self.node(f"{node.name}_of_channels", images, attributes, shape, node.dtype)
        return Reshape.instead_of(node, {"x": graph.add(made)})


def _row_sizes(node: Node, form: Form) -> dict[str, int]:
    """Return the sizes of a problem on rows, or on the channels of images."""
    classes = form.shape[1 if node.attributes["of_channels"] else -1]
    inner = _adjacent_rows(node, form)
    return {"batch": prod(form.shape) // max(1, classes * inner), "classes": classes, "inner": inner}


class _RowSoftmax(_AnySoftmax):
    """Softmax or its logarithm, over the last dimension or over the channels of images, then any expression."""

    signature = Signature({"x": ROWS}, {"of_channels": FLAG})
    takes_expressions = True
    is_log: ClassVar[bool]

    def _match_any_dim(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        x = call.value("self")
        return (
            None if x is None or call.converts(x, graph) else self._over(node, {"x": x}, call("dim"), graph)
        )

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        function = torch.log_softmax if self.is_log else torch.softmax
        y = function(inputs["x"], 1 if node.attributes["of_channels"] else -1)
        (activated,) = activation_of(node).evaluate({"x": y})
        return activated

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        if attributes["of_channels"] and len(sizes["x"]) != 4:
            raise SizeError(f"x has {counted(len(sizes['x']), 'dimension')}; with of_channels it has four")
        return super().sizes(sizes, attributes)

    def lower(self, node: Node, forms: Forms) -> Lowered:
        sizes = _row_sizes(node, forms.value(node.name))
        return Lowered(
            SOFTMAX, problem_from(SoftmaxProblem, node, **sizes, dtype=forms.stored, log=self.is_log)
        )


class Softmax(_RowSoftmax):
    """exp(x) / sum(exp(x)) over the last dimension, or over the channels of images."""

    name = "softmax"
    is_log = False

    @match_aten("softmax", "_softmax")
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        return self._match_any_dim(node, call, graph)


class LogSoftmax(_RowSoftmax):
    """x - log(sum(exp(x))) over the last dimension, or over the channels of images."""

    name = "log_softmax"
    is_log = True

    @match_aten("log_softmax", "_log_softmax", "special_log_softmax")
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match it in inference; a training step has most losses and their gradients in one operation."""
        return None if graph.typed else self._match_any_dim(node, call, graph)

    @match_aten("_log_softmax", phases=(UNFUSED,))
    def _match_unfused(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        return self._match_any_dim(node, call, graph)


class SoftmaxBackward(_AnySoftmax):
    """dx of a softmax, or of its logarithm, from its result and the gradient of that."""

    name = "softmax_backward"
    values = ("gradient", "softmax")
    most_channels = MOST_LENGTH // TENSORS
    mixes_types = True
    computes_in_fp32 = True
    takes_casts = True

    @match_aten("_softmax_backward_data")
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        return self._match_gradient(node, call, graph, log=False)

    @match_aten("_log_softmax_backward_data", phases=(UNFUSED,))
    def _match_log(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        return self._match_gradient(node, call, graph, log=True)

    def _match_gradient(self, node: Node, call: AtenCall, graph: Graph, log: bool) -> Match:
        gradient, y = call.value("grad_output"), call.value("output")
        if gradient is None or y is None or not graph.typed:
            return None
        return self._over(node, {"gradient": gradient, "softmax": y}, call("dim"), graph, log=log)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        gradient, y = (inputs[role].float() for role in self.values)
        dim = 1 if node.attributes["of_channels"] else -1
        return gradient_of(gradient, y, dim, node.attributes["log"]).to(getattr(torch, node.dtype))

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        gradient, y = (NAMES.get(forms.value(node.inputs[role]).dtype) for role in self.values)
        if gradient is None or y is None:
            return None
        types = {"gradient": gradient, "output": forms.stored}
        own = {field: "" if dtype == y else dtype for field, dtype in types.items()}
        sizes = _row_sizes(node, forms.value(node.name))
        problem = problem_from(SoftmaxBackwardProblem, node, **sizes, **own, dtype=y)
        in_place = "gradient" if problem.read == problem.result else None
        return Lowered(SOFTMAX_BACKWARD, problem, in_place=in_place)
