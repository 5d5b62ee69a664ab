"""Every registered graph operator: matched, evaluated as in PyTorch, lowered correctly, and consistent with
its declared traits. A new operator needs an example here, and nothing else.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine.capture.export import capture
from escalade.engine.capture.joint import capture_step
from escalade.engine.check import check_graph
from escalade.engine.compiler import insert_normalization
from escalade.engine.graph.forms import InputFormat
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import BY_NAME, OPERATORS, operator_of
from escalade.engine.nodes.aten import IDENTITIES
from escalade.engine.nodes.base import (
    CAPTURE,
    FOLDED,
    UNFUSED,
    VOLUMES,
    Operator,
    activation_of,
    with_activation,
)
from escalade.engine.nodes.conv2d import Conv2d
from escalade.engine.nodes.convert import Normalize
from escalade.engine.nodes.elementwise import Add
from escalade.engine.nodes.evaluate import compute
from escalade.engine.nodes.matching import MATCHERS
from escalade.engine.passes import for_batch, optimize, optimize_step, quantize
from escalade.engine.passes.calibrate import histograms
from escalade.engine.passes.channel_order import (
    passing_channels,
    reading_channels,
    selected_channels,
    writing_channels,
)
from escalade.engine.passes.channel_scale import channel_scale, scaled_axis
from escalade.engine.passes.epilogues import takes_epilogue
from escalade.engine.passes.layout import feature_constants
from escalade.engine.passes.quantize import quantized_weights
from escalade.engine.plan.plan import PlanStep
from escalade.engine.plan.planner import make_plan
from escalade.models import FusedSpectralAutoencoder
from escalade.ops.expressions import IDENTITY, Expression

BATCH = 2
aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Example:
    """A model whose graph contains a node of the operator, at capture or for a dtype."""

    model: nn.Module
    shape: tuple[int, ...]
    dtype: str = ""
    """The dtype of the plan with the node; empty if capture already creates it."""
    normalised: bool = False
    in_step: bool = False
    """True if only the plan of a training step contains it."""
    loss: Callable[[torch.Tensor], torch.Tensor] = lambda y: y.square().mean()
    """Settings that reduce the work of such a step."""


class _BiasedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(16, 48), nn.Parameter(torch.randn(2, 5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(-1, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return (q @ k.mT + self.bias).softmax(-1) @ v


class Call(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class _Difference(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) - x


def _gate() -> nn.Module:
    layers = nn.Conv2d(16, 8, 1), nn.SiLU(), nn.Conv2d(8, 16, 1), nn.Sigmoid()
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), *layers)


def _chain() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 16))


def _attention() -> nn.Module:
    bias = torch.randn(5, 5)
    return Call(lambda x: F.scaled_dot_product_attention(x, x.sin(), x.cos(), bias))


def _convolution_backward(result: int) -> nn.Module:
    weight = torch.randn(8, 8, 3, 3)
    window = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    return Call(
        lambda x: aten.convolution_backward(x, x.sin(), weight, None, *window, [True, True, False])[result]
    )


def _normalised() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU())


def _max_pool2d_backward(x: torch.Tensor) -> torch.Tensor:
    y, indices = aten.max_pool2d_with_indices(x, 3, 2, 1)
    return aten.max_pool2d_with_indices_backward(y, x, 3, 2, 1, 1, False, indices)


EXAMPLES: Mapping[str, Callable[[], Example]] = {
    "conv2d": lambda: Example(nn.Conv2d(8, 16, 3, 2, 1), (8, 9, 9)),
    "conv_transpose2d": lambda: Example(nn.ConvTranspose2d(8, 16, 3, 2, 1, 1), (8, 5, 5)),
    "conv2d_input_gradient": lambda: Example(_convolution_backward(0), (8, 5, 5), "fp32"),
    "conv2d_weight_gradient": lambda: Example(_convolution_backward(1), (8, 5, 5), "fp32"),
    "batch_norm": lambda: Example(nn.BatchNorm2d(8), (8, 5, 5)),
    "batch_norm_training": lambda: Example(_normalised(), (8, 5, 5), in_step=True),
    "batch_norm_backward": lambda: Example(_normalised(), (8, 5, 5), in_step=True),
    "relu": lambda: Example(nn.ReLU(), (8, 5, 5)),
    "add": lambda: Example(Call(lambda x: x.abs() + x), (16,)),
    "max_pool2d": lambda: Example(nn.MaxPool2d(3, 2, 1), (8, 9, 9)),
    "max_pool2d_backward": lambda: Example(Call(_max_pool2d_backward), (8, 9, 9), "fp32"),
    "avg_pool2d": lambda: Example(nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), (8, 8, 8)),
    "avg_pool2d_backward": lambda: Example(
        Call(lambda x: aten.avg_pool2d_backward(F.avg_pool2d(x, 3, 2, 1), x, 3, 2, 1, False, True, None)),
        (8, 9, 9),
        "fp32",
    ),
    "adaptive_avg_pool2d": lambda: Example(nn.AdaptiveAvgPool2d(2), (8, 6, 6)),
    "upsample2d": lambda: Example(nn.Upsample(scale_factor=(1.7, 2.0), mode="bilinear"), (8, 5, 6)),
    "upsample2d_backward": lambda: Example(
        Call(lambda x: aten.upsample_nearest2d_backward(x, (6, 6), (x.shape[0], 8, 3, 3))), (8, 6, 6), "fp32"
    ),
    "pad2d": lambda: Example(nn.ReflectionPad2d((1, 2, 3, 0)), (8, 5, 6)),
    "pixel_shuffle": lambda: Example(nn.PixelShuffle(2), (8, 5, 6)),
    "filter_sums": lambda: Example(
        nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(8, 8, 3)), (8, 5, 5), in_step=True
    ),
    "linear": lambda: Example(nn.Linear(16, 8), (16,)),
    "squeeze_excite": lambda: Example(nn.Sequential(nn.Conv2d(16, 16, 3), _gate()), (16, 5, 5), "fp16"),
    "layer_norm": lambda: Example(nn.LayerNorm(16), (16,)),
    "layer_norm_backward": lambda: Example(
        nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), (16,), in_step=True
    ),
    "group_norm": lambda: Example(nn.GroupNorm(2, 8), (8, 5, 5)),
    "group_norm_backward": lambda: Example(
        nn.Sequential(nn.Conv2d(4, 8, 1), nn.GroupNorm(2, 8)), (4, 5, 5), in_step=True
    ),
    "gelu": lambda: Example(nn.GELU(), (16,)),
    "pointwise": lambda: Example(Call(lambda x: torch.sigmoid(x) * x[:, :1]), (16,)),
    "cross_entropy": lambda: Example(
        nn.Linear(16, 8), (16,), in_step=True, loss=lambda y: F.cross_entropy(y, torch.arange(len(y)))
    ),
    "pointwise_loss": lambda: Example(_Difference(8, 8, 1), (8, 5, 5), in_step=True),
    "reduce": lambda: Example(Call(lambda x: x.amax((2, 3))), (8, 5, 5)),
    "arg_reduce": lambda: Example(Call(lambda x: x.argmax(1)), (8, 5, 5)),
    "softmax": lambda: Example(nn.Softmax(-1), (16,)),
    "log_softmax": lambda: Example(nn.LogSoftmax(-1), (16,)),
    "softmax_backward": lambda: Example(
        nn.Sequential(nn.Linear(16, 16), nn.Softmax(-1)), (16,), in_step=True
    ),
    "attention": lambda: Example(_attention(), (2, 5, 16)),
    **dict.fromkeys(
        ("attention_bias", "attention_forward", "attention_backward"),
        lambda: Example(_BiasedAttention(), (5, 16), in_step=True),
    ),
    "reshape": lambda: Example(nn.Flatten(), (8, 1, 1)),
    "permute": lambda: Example(Call(lambda x: x.transpose(1, 2)), (6, 5)),
    "concatenate": lambda: Example(Call(lambda x: torch.cat([x.sin(), x.cos()], 1)), (16,)),
    "slice": lambda: Example(Call(lambda x: x.sin().chunk(2, 1)[1].cos()), (16, 5, 5)),
    "shuffle": lambda: Example(nn.ChannelShuffle(2), (8, 5, 5)),
    "normalise": lambda: Example(nn.Identity(), (3, 5, 5), normalised=True),
    "stem": lambda: Example(
        nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1)), (3, 16, 16), "fp16", True
    ),
    "few_channels": lambda: Example(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2)), (1, 10, 10), "fp32"
    ),
    **dict.fromkeys(
        ("conv3d", "conv3d_input_gradient", "conv3d_weight_gradient"),
        # Along frames, whose problem has the same images as the node.
        lambda: Example(
            nn.Sequential(nn.Conv3d(8, 8, (3, 1, 1)), nn.Conv3d(8, 8, (2, 1, 1))),
            (8, 6, 3, 2),
            "tf32",
            in_step=True,
        ),
    ),
    "frames": lambda: Example(nn.MaxPool3d(2), (8, 4, 6, 6), "fp16"),
    # Of one channel and one pixel, so that all layouts are alike.
    "frame_stack": lambda: Example(nn.Conv3d(1, 8, 3, padding=(0, 1, 1)), (1, 3, 1, 1), "fp16"),
    "volume_shuffle": lambda: Example(nn.ConvTranspose3d(8, 1, 2, 2), (8, 1, 1, 1), "fp16"),
    "mlp": lambda: Example(_chain(), (16,), "fp16"),
    "mlp_backward": lambda: Example(FusedSpectralAutoencoder(8, 2, 4), (16,), in_step=True),
    "slice_scatter": lambda: Example(
        nn.Sequential(nn.Linear(8, 8), Call(lambda x: x[:, ::3, 1:-1] * 2)), (6, 8), in_step=True
    ),
    "move": lambda: Example(Call(lambda x: torch.softmax(x.transpose(1, 2), -1)), (6, 5), "fp32"),
    "convert": lambda: Example(nn.Conv2d(8, 8, 1), (8, 5, 5), "fp16"),
    "fake_quantize": lambda: Example(
        Call(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 2, -128, 127)), (8, 5, 5)
    ),
    "quantise": lambda: Example(nn.Conv2d(16, 128, 3), (16, 5, 5), "fp8"),
    "further": lambda: Example(nn.Sequential(nn.Conv2d(8, 8, 1), nn.MaxPool2d(2)), (8, 6, 6), in_step=True),
    "aten": lambda: Example(Call(torch.lgamma), (16,)),
}


@dataclass(frozen=True)
class Found:
    """A node of an operator in its graph for a batch, with its inputs."""

    graph: Graph
    node: Node
    inputs: dict[str, torch.Tensor]
    step: PlanStep
    read: dict[str, torch.Tensor]
    """Inputs of the step's own node, which may replace several."""

    @property
    def operator(self) -> Operator:
        return operator_of(self.node)

    def result(self, node: Node | None = None, /, **changed: torch.Tensor) -> torch.Tensor:
        return self.operator.compute(node or self.node, {**self.inputs, **changed})


def find(name: str) -> Found:
    """The example's node, and the step of a plan that computes it."""
    torch.manual_seed(0)
    example = EXAMPLES[name]()
    if example.in_step:
        return find_in_step(name, example)
    model = example.model.eval()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean, part.running_var = torch.randn(8), torch.rand(8) + 0.5
    x = torch.randn(BATCH, *example.shape)
    graph = capture(model, (x,))
    if example.normalised:
        channels = example.shape[0]
        insert_normalization(graph, ((0.5,) * channels, (0.2,) * channels))
        x = torch.rand(BATCH, *example.shape) * 255
    dtype = example.dtype or "fp32"
    if dtype == "fp8":
        found = histograms(optimize(graph, dtype), [x], torch.device("cpu"))
        graph.ranges = {name: each.largest for name, each in found.items()}
    if not example.dtype:
        return find_among(name, graph.at(BATCH), dtype, x)
    with patch.object(quantize, "fastest_layers", lambda *given: {*given[4]}):  # however small the image is
        fixed = for_batch(optimize(graph, dtype), dtype, BATCH)
    return find_among(name, fixed, dtype, x)


def find_in_step(name: str, example: Example) -> Found:
    """The example's node in a step that trains its model."""
    x = torch.randn(BATCH, *example.shape)
    joint = capture_step(example.model.train(), example.loss, (x,), ())
    state = {**dict(example.model.named_parameters()), **dict(example.model.named_buffers())}
    given = [state[one].detach() for one in (*joint.parameters, *joint.buffers)]
    dtype = example.dtype or "fp32"
    return find_among(name, optimize_step(joint.graph, {}, {}, dtype), dtype, *given, x)


def find_among(name: str, graph: Graph, dtype: str, *given: torch.Tensor) -> Found:
    """The first node of an operator, in a graph with these input tensors."""
    inputs = {one.name: tensor for one, tensor in zip(graph.inputs, given, strict=True)}
    values = {**inputs, **graph.constants}
    for node in graph:
        read = {role: values[value] for role, value in node.inputs.items()}
        values[node.name] = compute(node, read, torch.device("cpu"))
    formats = {one: InputFormat.of(tensor) for one, tensor in inputs.items()}
    plan = make_plan(graph, dtype, torch.device("cpu"), formats)
    node = next(node for node in (*graph, *plan.graph) if node.op == name)
    step = next(step for step in plan.steps if step.node.name == node.name)
    own = {role: values[value] for role, value in node.inputs.items()}
    read = {role: values[value] for role, value in step.node.inputs.items()}
    return Found(graph, node, own, step, read)


@pytest.fixture(scope="module", params=[operator.name for operator in OPERATORS])
def found(request: pytest.FixtureRequest) -> Found:
    return find(request.param)


def close(result: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(result.double(), expected.double(), rtol=tolerance, atol=tolerance)


def test_every_operator_has_an_example_and_a_name_of_its_own() -> None:
    assert set(EXAMPLES) == set(BY_NAME) and len(BY_NAME) == len(OPERATORS)


def test_each_pytorch_operator_is_matched_by_one() -> None:
    importlib.import_module("torch.ao.quantization.fx._decomposed")  # which registers some of them
    captured, *later = phases = [
        [rule.name for operator in OPERATORS for rule, _ in operator.rules(phase)]
        for phase in (CAPTURE, FOLDED, UNFUSED, VOLUMES)
    ]
    assert not set(captured) & set(IDENTITIES) and all(later)
    assert all(len(set(names)) == len(names) for names in phases)
    for name in itertools.chain(*phases):
        namespace, _, operator = name.rpartition("::")
        assert hasattr(getattr(torch.ops, namespace or "aten"), operator), f"PyTorch has no operator {name}"
    assert set(captured) < set(MATCHERS)


@pytest.mark.parametrize(
    "name", [name for name in EXAMPLES if not (EXAMPLES[name]().dtype or EXAMPLES[name]().in_step)]
)
def test_captured_graphs_match_the_model(name: str) -> None:
    torch.manual_seed(1)
    example = EXAMPLES[name]()
    model = example.model.eval()
    x = torch.randn(BATCH, *example.shape)
    graph = capture(model, (x,))
    if example.normalised:
        channels = example.shape[0]
        insert_normalization(graph, ((0.5,) * channels, (0.2,) * channels))
    check_graph(graph)  # nodes that a file may hold, with the sizes that the operator returns
    assert name in {node.op for node in graph}
    fixed = graph.at(BATCH)
    values = {fixed.inputs[0].name: x, **fixed.constants}
    for node in fixed:
        read = {role: values[value] for role, value in node.inputs.items()}
        values[node.name] = compute(node, read, torch.device("cpu"))
    expected = model((x / 255 - 0.5) / 0.2 if example.normalised else x).detach()
    close(values[fixed.outputs[0]], expected)


def test_the_operation_matches_the_node(found: Found) -> None:
    """The problem of a node has the node's own result, by the operation's reference."""
    lowered = found.step.lowered
    says_so = type(operator_of(found.step.node)).lower is not Operator.lower
    assert (lowered is not None) == (says_so and not found.step.is_alias)
    assert found.step.in_pytorch == (lowered is None and found.step.runs)
    if lowered is None:
        return
    result = lowered.operation.reference(lowered.problem, found.read)
    expected = found.result()
    close(result.reshape(expected.shape), expected, 1e-2 if lowered.problem.dtype != "fp32" else 1e-4)


def test_expressions_that_it_takes_are_applied(found: Found) -> None:
    node = found.node
    for text in ("relu(x)", "silu(x)", "t0 = x + 1; t0 * sigmoid(t0)"):
        expression = Expression.parse(text)
        if not takes_epilogue(node, expression) or activation_of(node) == Expression.parse("relu(x)"):
            continue
        plain, taken = with_activation(node, IDENTITY), with_activation(node, expression)
        assert activation_of(plain) == IDENTITY and activation_of(taken) == expression
        close(found.result(taken), expression.evaluate({"x": found.result(plain)})[0])


def test_its_expression_matches_its_result(found: Found) -> None:
    own = found.operator.expression(found.node)
    if own is not None:
        assert set(own.inputs) == found.inputs.keys()
        close(found.result(), own.evaluate(found.inputs)[0])


def test_a_residual_that_it_takes_is_added(found: Found) -> None:
    if found.operator.takes_residual(found.node):
        residual = torch.randn(found.node.shape)  # type: ignore[arg-type]
        close(found.result(residual=residual), found.result() + residual)
    if Add.matches(found.node):
        close(found.result(), found.inputs["x"] + found.inputs["residual"])


def test_a_scale_of_channels_is_one(found: Found) -> None:
    factors = channel_scale(found.node, found.graph, 1)
    if factors is not None:
        scale, shift = (factor.view(-1, *[1] * (len(found.node.shape) - 2)) for factor in factors)
        close(found.result(), found.inputs["x"] * scale + shift)
    if scaled_axis(found.node) is not None:
        weight, bias = found.inputs["weight"], found.inputs["bias"]
        twice = found.result(weight=2 * weight, bias=2 * bias + 1)
        close(twice, 2 * found.result() + 1)
    if Normalize.matches(found.node):
        scale, shift = (found.inputs[role].view(1, -1, 1, 1) for role in ("scale", "shift"))
        close(found.result(), found.inputs["x"] * scale + shift)


def test_features_may_be_in_another_order(found: Found) -> None:
    roles = feature_constants(found.node)
    if roles:
        order = torch.randperm(found.inputs["x"].shape[-1])
        moved = {role: found.inputs[role][..., order] for role in ("x", *roles)}
        close(found.result(**moved), found.result())


@pytest.mark.parametrize("more", [0, 2])
def test_channels_may_be_some_of_more_in_another_order(found: Found, more: int) -> None:
    x, operator, node = found.inputs.get("x"), found.operator, found.node
    if x is None or x.dim() < 2 or len(node.shape) < 2:
        return
    channels = x.shape[1] + more
    order = tuple(torch.randperm(channels)[: x.shape[1]].tolist())
    wide, graph = torch.randn(x.shape[0], channels, *x.shape[2:]), found.graph.copy()
    expected = found.result(x=wide[:, order])

    def changed(other: Node, **inputs: torch.Tensor) -> torch.Tensor:
        constants = {role: graph.constants.get(name) for role, name in other.inputs.items()}
        given = {role: tensor for role, tensor in constants.items() if tensor is not None}
        return operator.compute(other, {**given, **inputs})

    reading = reading_channels(node, order, channels, graph)
    if reading is not None:
        close(changed(reading, x=wide), expected)
    before = passing_channels(node, order, channels, graph)
    if before is not None:
        result = changed(before, x=wide)
        assert result.shape == before.shape
        close(result[:, order], expected)
    made = (*torch.randperm(node.shape[1]).tolist(), *[None] * more)  # type: ignore[arg-type]
    writing = writing_channels(node, made, graph)
    if writing is not None:
        result = changed(writing, x=x)
        assert result.shape == writing.shape and not result[:, len(made) - more :].any()
        close(result[:, : len(made) - more], found.result()[:, made[: len(made) - more]])
    taken = selected_channels(node)
    if taken is not None:
        assert torch.equal(found.result(), x[:, taken])


def test_channels_of_zeros_change_nothing(found: Found) -> None:
    if Conv2d.matches(found.node) and found.node.attributes["groups"] == 1:
        weight = F.pad(found.inputs["weight"], (0, 0, 0, 0, 0, 3), value=1.0)
        x = F.pad(found.inputs["x"], (0, 0, 0, 0, 0, 3))
        close(found.result(x=x, weight=weight), found.result())


def test_roles_are_those_of_the_node(found: Found) -> None:
    node, operator = found.step.node, operator_of(found.step.node)
    weights = quantized_weights(node)
    assert {*weights, *weights.values()} <= node.inputs.keys()
    assert set(weights.values()) <= set(operator.values)
    if found.step.lowered is not None:
        assert found.graph.typed or all(
            role in operator.values or name in found.graph.constants for role, name in node.inputs.items()
        )
    if (
        operator.signature is not None
        and not found.step.node.attributes.keys() - operator.signature.attributes.keys()
    ):
        assert all(operator.signature.role(role) is not None for role in node.inputs)


def test_a_view_is_the_same_elements(found: Found) -> None:
    if found.operator.is_view:
        close(found.result().flatten(), found.inputs["x"].flatten())
        assert found.step.is_alias


@pytest.mark.parametrize("folder", ["passes", "plan"])
def test_passes_and_plans_name_no_operator(folder: str) -> None:
    """Passes query traits: a new operator is not a special case elsewhere."""
    package = pathlib.Path(__file__).parents[3] / "escalade" / "engine" / folder
    for path in package.rglob("*.py"):
        for part in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(part, ast.Attribute) and part.attr == "op"), f"{path.name} asks for a name"


def test_nodes_can_be_distinguished() -> None:
    node = find("relu").node
    assert type(operator_of(node)).matches(node) and not BY_NAME["gelu"].matches(node)
    assert not BY_NAME["relu"].matches(None)
    assert operator_of(replace(node, op="gelu")) is BY_NAME["gelu"]
