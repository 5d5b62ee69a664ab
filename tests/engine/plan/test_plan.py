"""Plans: who runs each step, which values share memory, and that everything is inside the arena."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade import models
from escalade.device.precompilation import CompileAhead
from escalade.device.program import Program
from escalade.device.recipe import ConstantCopy
from escalade.engine.capture.export import capture
from escalade.engine.explain import explain_plan
from escalade.engine.graph.forms import InputFormat
from escalade.engine.graph.graph import Graph, Input, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.lowering import NHWC
from escalade.engine.nodes.views import Concatenate, Slice
from escalade.engine.passes import for_batch, optimize
from escalade.engine.plan import choices
from escalade.engine.plan.plan import Plan, PlanStep
from escalade.engine.plan.planner import make_plan
from escalade.errors import UnsupportedError
from escalade.models.resnet import BasicBlock, ResNet
from escalade.ops.base.card import H200
from escalade.ops.choose import pytorch
from escalade.ops.choose.choice import Choice, choose
from escalade.ops.conv2d import CONV2D
from escalade.ops.relu import RELU

CPU = torch.device("cpu")


def planned(graph: Graph, batch: int, dtype: str = "fp16", like: torch.Tensor | None = None) -> Plan:
    formats = {
        given.name: InputFormat(torch.float32, "nchw" if len(given.shape) == 4 else "flat")
        for given in graph.inputs
    }
    if like is not None:
        formats = {graph.inputs[0].name: InputFormat.of(like)}
    return make_plan(for_batch(optimize(graph, dtype), dtype, batch), dtype, CPU, formats)


class Call(nn.Module):
    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleDict(parts)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.parts, x)


def of(function: Callable[..., Any], *shape: int, dtype: str = "fp32", **parts: nn.Module) -> Plan:
    return planned(capture(Call(function, **parts).eval(), (torch.randn(2, *shape),)), 2, dtype)


@pytest.fixture(scope="module")
def resnet18() -> Graph:
    return capture(models.resnet18().eval(), (torch.randn(1, 3, 224, 224),))


def test_a_result_that_its_room_does_not_hold_is_refused() -> None:
    """For any graph with wrong sizes: no kernel is launched over them."""
    graph = capture(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()), (torch.randn(2, 8, 6, 6),))
    graph.nodes = {name: replace(node, shape=(*node.shape[:3], 3)) for name, node in graph.nodes.items()}
    with pytest.raises(UnsupportedError, match=r"writes 1024 bytes .*\[2, 8, 4, 3\].* takes 768"):
        planned(graph, 2, "fp32")


@pytest.fixture(scope="module")
def small() -> list[Graph]:
    nets: list[tuple[nn.Module, tuple[int, ...]]] = [
        (ResNet(BasicBlock, (1, 1, 1, 1), 10), (3, 32, 32)),
        (models.UNet(3, 2, 8, 2), (3, 16, 16)),
        (models.DenseNet((2, 2), 8, 16, 2, 10), (3, 32, 32)),
        (models.MobileNetV2(((1, 8, 1, 1), (6, 16, 2, 2)), 10, 3, 1.0, 16, 32), (3, 32, 32)),
    ]
    return [capture(net.eval(), (torch.randn(1, *item),)) for net, item in nets]


def intervals(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return the first and last step at which each value's bytes matter, found without the plan's own bookkeeping.

    Values without a place in the arena are excluded; but if they may be views, their base must live as long
    as they do.
    """
    found = {given.name: (-1, -1) for given in plan.graph.inputs}
    for number, step in enumerate(plan.steps):
        for name in step.node.inputs.values():
            if name in found:
                found[name] = (found[name][0], number)
        found[step.node.name] = (number, number)
    for name in plan.graph.outputs:
        found[name] = (found[name][0], len(plan.steps))
    for step in reversed(plan.steps):
        if step.node.name not in plan.offsets:
            for name in step.node.inputs.values():
                if name in found and (step.is_alias or operator_of(step.node).may_alias(step.node)):
                    found[name] = (found[name][0], max(found[name][1], found[step.node.name][1]))
    return {name: interval for name, interval in found.items() if name in plan.offsets}


def check_memory(plan: Plan) -> None:
    """No step overwrites bytes that a later step, or the step itself, still reads as another value."""
    alive = intervals(plan)
    parted = {
        step.node.name for step in plan.steps if Concatenate.matches(step.node) or Slice.matches(step.node)
    }
    sources = {
        step.node.name: step.node.inputs.get("x")
        for step in plan.steps
        if step.is_alias and step.node.name not in parted
    }

    def place(name: str) -> tuple[int, int]:
        form, low = plan.forms[name], plan.offsets[name]
        behind = (max(form.rows, 1) - 1) * ((form.pitch or form.row) - form.row) * form.dtype.itemsize
        return low, low + form.bytes + behind

    def meet(one: str, other: str) -> bool:
        """Return True if two values share bytes; values with interleaved rows do not."""
        (low, high), (other_low, other_high) = place(one), place(other)
        if low >= other_high or other_low >= high:
            return False
        forms = plan.forms[one], plan.forms[other]
        pitches = {(form.pitch or form.row) * form.dtype.itemsize for form in forms}
        if len(pitches) > 1:
            return True
        (pitch,) = pitches
        distance = (low - other_low) % pitch
        row, other_row = (form.row * form.dtype.itemsize for form in forms)
        return distance < other_row or pitch - distance < row

    def joined_in(node: Node) -> set[str]:
        """A node's result, and its members if it is a concatenation without copies."""
        found = {node.name}
        if Concatenate.matches(node):
            for role, name in node.inputs.items():
                if role not in node.attributes.get("moved", ()) and name in plan.graph.nodes:
                    found |= joined_in(plan.graph.nodes[name])
        return found

    def origin(name: str) -> str:
        while name in sources:
            name = sources[name]  # type: ignore[assignment]
        return name

    ranges = {
        step.node.name: step.node.inputs["x"]
        for step in plan.steps
        if step.is_alias and Slice.matches(step.node)
    }

    def lies_in(name: str, wholes: set[str]) -> bool:
        """Return True if a value is one of these, or a range of one."""
        return origin(name) in wholes or (origin(name) in ranges and lies_in(ranges[origin(name)], wholes))

    for name in alive:
        low, high = place(name)
        inside = (0, plan.arena_bytes)
        first, last = (inside[1], inside[1] + plan.outside_bytes) if name in plan.outside else inside
        assert (low % 256 == 0 or parted) and first <= low <= high <= last
    for name, holder in plan.outside.items():
        (low, high), (first, last) = place(name), place(holder)
        assert first <= low <= high <= last, f"{name} goes beyond the caller's tensor for {holder}"
    assert len(set(plan.outputs_outside)) == len({place(name) for name in plan.outputs_outside})
    assert len(plan.outputs_outside) == len(set(plan.outputs_outside)), "each result is a tensor of its own"
    for number, step in enumerate(plan.steps):
        if step.node.name not in plan.offsets:
            assert origin(step.node.name) in {step.node.name for step in plan.fallbacks}
            continue
        if step.is_alias:
            assert step.node.name in parted or place(step.node.name) == place(origin(step.node.name))
            continue
        low, high = place(step.node.name)
        own = {origin(name) for name in joined_in(step.node)}
        in_place = step.node.inputs[step.lowered.in_place] if step.lowered and step.lowered.in_place else None
        for other, (first, last) in alive.items():
            if lies_in(other, own) or not (first <= number <= last and first < number):
                continue
            if not meet(step.node.name, other):
                continue
            # Overlapping values are read for the last time by this step, as the value it may overwrite.
            assert in_place is not None and origin(other) == origin(in_place) and last == number, (
                step,
                other,
            )
            assert place(other) == (low, high)
        for workspace in step.recipe.workspaces if step.recipe else ():
            label = step.workspace_name(workspace)
            if label in plan.persistent:
                continue
            start, end = plan.offsets[label], plan.offsets[label] + workspace.bytes
            assert start % 256 == 0 and end <= plan.arena_bytes
            for other, (first, last) in alive.items():
                if first <= number <= last:
                    other_low, other_high = place(other)
                    assert start >= other_high or other_low >= end, (label, other)


@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_no_value_is_overwritten_while_it_is_read(small: list[Graph], dtype: str) -> None:
    for graph in small:
        for batch in (1, 5):
            check_memory(planned(graph, batch, dtype))


def test_resnet18_takes_little_more_than_three_values(resnet18: Graph) -> None:
    plan = planned(resnet18, 32)
    check_memory(plan)
    assert not plan.fallbacks
    image, largest = 32 * 3 * 224 * 224 * 4, 32 * 64 * 56 * 56 * 2
    # A block's input, its intermediate value and its result; the image is the caller's.
    assert 3 * largest <= plan.arena_bytes < 1.05 * 3 * largest
    assert plan.outside_bytes == image + 32 * 1000 * 4
    assert plan.arena_bytes < 0.4 * sum(form.bytes for form in plan.forms.values())
    assert plan.constant_bytes == pytest.approx(2 * 11_689_512, rel=0.02)
    held = plan.arena_bytes + plan.constant_bytes + plan.persistent_bytes
    assert plan.bytes == held + plan.outside_bytes
    ops = [step.node.op for step in plan.steps if not step.is_alias]
    assert ops == ["stem"] + ["conv2d"] * 16 + ["adaptive_avg_pool2d", "linear", "convert"]


@pytest.mark.parametrize(
    ("batch", "dtype", "head"),
    [
        (1, "fp16", ["linear"]),
        (2, "bf16", ["linear"]),
        (3, "fp16", ["adaptive_avg_pool2d", "linear"]),
        (1, "fp32", ["linear"]),
        (2, "tf32", ["adaptive_avg_pool2d", "linear"]),
    ],
)
def test_a_few_images_take_one_launch_for_mean_and_layer(
    resnet18: Graph, batch: int, dtype: str, head: list[str]
) -> None:
    plan = planned(resnet18, batch, dtype)
    check_memory(plan)
    steps = [step for step in plan.steps if not step.is_alias and step.node.op != "convert"]
    assert [step.node.op for step in steps[-len(head) - 1 :]] == ["conv2d", *head]
    layer = steps[-1]
    assert layer.choice is not None and layer.lowered is not None and layer.recipe is not None
    together = head == ["linear"]
    assert (layer.choice.rung.name == "pooled") == together
    assert layer.lowered.problem.name == f"512to1000{'_mean49' if together else ''}_b{batch}_bias"
    assert layer.node.source == ("avgpool, fc" if together else "fc")
    assert len(layer.recipe.steps) == 1


def test_images_are_read_as_they_come(resnet18: Graph) -> None:
    image = torch.empty(2, 3, 224, 224, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    plan = planned(resnet18, 2, like=image)
    form = plan.forms[plan.graph.inputs[0].name]
    assert (form.dtype, form.layout) == (torch.float16, "nhwc")
    stem = plan.steps[0]
    assert stem.lowered is not None and stem.lowered.problem.source_layout == "nhwc"  # type: ignore[attr-defined]


def step_of(plan: Plan, op: str) -> PlanStep:
    (found,) = (step for step in plan.steps if step.node.op == op)
    return found


def test_reshapes_of_values_cost_nothing() -> None:
    plan = of(lambda p, x: torch.softmax(x, -1).view(-1, 3, 4).flatten(1) * 3, 12)
    aliases = [step for step in plan.steps if step.is_alias]
    assert len(aliases) == 2 and len({plan.offsets[step.node.name] for step in aliases}) == 1
    check_memory(plan)


def test_one_pixel_and_one_channel_need_no_conversion() -> None:
    for function, shape in (
        (lambda p, x: F.adaptive_avg_pool2d(x, 1).flatten(1) * 2, (8, 4, 4)),
        (lambda p, x: (x * 2).flatten(1) * 2, (1, 4, 4)),
    ):
        plan = of(function, *shape)
        given = plan.graph.inputs[0].name
        assert all(
            step.is_alias
            for step in plan.steps
            if step.node.op == "convert" and step.node.inputs["x"] != given
        )
        check_memory(plan)


def test_activations_overwrite_their_input_if_it_has_no_other_reader() -> None:
    plan = of(lambda p, x: F.relu(x.roll(1, 1)), 8, 4)
    relu = step_of(plan, "relu")
    assert plan.offsets[relu.node.name] == plan.offsets[relu.node.inputs["x"]]
    plan = of(lambda p, x: (lambda y: (F.relu(y), y))(torch.softmax(x, -1)), 8, 4)
    relu = step_of(plan, "relu")
    assert plan.offsets[relu.node.name] != plan.offsets[relu.node.inputs["x"]]
    check_memory(plan)


@pytest.mark.parametrize("function", [lambda p, x: F.relu(x), lambda p, x: F.relu(x.view(-1, 4, 8))])
def test_the_callers_input_is_not_overwritten_by_its_reader(function: Callable[..., Any]) -> None:
    plan = of(function, 8, 4)
    relu = step_of(plan, "relu")
    assert plan.offsets[relu.node.name] != plan.offsets[plan.graph.inputs[0].name]


def test_a_value_added_to_itself_is_not_overwritten() -> None:
    plan = of(lambda p, x: (lambda y: y + y)(torch.softmax(x, -1)), 8, 4)
    add = step_of(plan, "add")
    assert plan.offsets[add.node.name] != plan.offsets[add.node.inputs["x"]]


def test_pytorch_results_stay_in_pytorchs_memory() -> None:
    """A value in the arena would have to be copied. Outputs have a fixed address, which callers read."""
    plan = of(lambda p, x: (torch.cumsum(x, 1).sort(1).values, F.relu(x.cumsum(1)).sum(1)), 8)
    steps = {step.node.name: step for step in plan.fallbacks}
    assert (
        steps.keys() - set(plan.graph.outputs)
        == plan.pytorch_owned.keys()
        == steps.keys() - plan.offsets.keys()
    )
    assert plan.pytorch_owned.keys() and set(plan.graph.outputs) <= plan.offsets.keys()
    check_memory(plan)


def test_outputs_last_to_the_end() -> None:
    plan = of(lambda p, x: (lambda y: (y, F.relu(y * 3) * 4))(x * 2), 8, 4)
    first, second = (plan.offsets[name] for name in plan.graph.outputs)
    assert first != second
    check_memory(plan)


def test_no_step_keeps_weights_in_memory_that_it_shares() -> None:
    """Two steps of one problem share a program, and a program has one constant memory."""
    plan = of(
        lambda p, x: p.b(F.relu(p.a(x))),
        8, 16, 16, a=nn.Conv2d(8, 8, 3, padding=1), b=nn.Conv2d(8, 8, 3, padding=1),
    )  # fmt: skip
    recipes = [step.recipe for step in plan.steps if step.recipe]
    assert not any(isinstance(part, ConstantCopy) for recipe in recipes for part in recipe.steps)


def test_fallbacks_are_listed() -> None:
    plan = of(lambda p, x: torch.cumsum(F.relu(p.conv(x)), 1), 3, 8, 8, conv=nn.Conv2d(3, 8, 3))
    assert [step.node.op for step in plan.fallbacks] == ["aten"]
    assert all(step.choice is not None for step in plan.steps if not step.in_pytorch and not step.is_alias)


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda p, x: F.pad(x, (-1, 1, 2, 0), "replicate"), ["aten"]),
        (lambda p, x: F.pad(x, (0, 0, 4, -4), value=1.5), ["aten"]),  # nothing of the image is left
        (lambda p, x: F.layer_norm(x, (4,), eps=-1e-9), ["layer_norm"]),
        (  # F.batch_norm of some PyTorch versions refuses an eps of zero
            lambda p, x: torch.batch_norm(
                x, None, None, p.norm.running_mean, p.norm.running_var, False, 0.1, 0.0, False
            ),
            [],
        ),
    ],
)
def test_steps_left_to_pytorch(function: Callable[..., Any], left: list[str]) -> None:
    plan = of(function, 8, 4, 4, norm=nn.BatchNorm2d(8))
    assert [step.node.op for step in plan.fallbacks] == left


def test_steps_without_a_rung_run_in_pytorch() -> None:
    """As if all of them had failed to compile."""
    graph = for_batch(optimize(capture(nn.ReLU(), (torch.randn(2, 8),)), "fp32"), "fp32", 2)
    formats = {given.name: InputFormat(torch.float32, "flat") for given in graph.inputs}
    every = frozenset(f"relu/{rung.name}" for rung in RELU.ladder)
    (step,) = make_plan(graph, "fp32", H200, formats, avoid=every).steps
    assert step.in_pytorch and "no rung of relu" in step.why_pytorch


def test_linear_layers_over_pixels_are_convolutions() -> None:
    pool = nn.MaxPool2d(2)
    plan = of(lambda p, x: p.fc(p.pool(x).permute(0, 2, 3, 1)), 8, 4, 4, fc=nn.Linear(8, 5), pool=pool)
    assert not step_of(plan, "conv2d").in_pytorch and step_of(plan, "permute").is_alias


def test_rows_come_in_the_plans_type_and_images_in_their_own() -> None:
    graph = capture(nn.Linear(8, 4), (torch.randn(2, 8),))
    assert planned(graph, 2, "fp16").forms[graph.inputs[0].name].dtype == torch.float16
    graph = capture(nn.Embedding(9, 4), (torch.zeros(2, 8, dtype=torch.int64),))
    assert planned(graph, 2, "fp16").forms[graph.inputs[0].name].dtype == torch.int64
    graph = capture(nn.Conv2d(3, 4, 3), (torch.randn(2, 3, 8, 8),))
    assert planned(graph, 2, "fp16").forms[graph.inputs[0].name].dtype == torch.float32


def test_a_convolution_that_only_the_foot_takes_is_pytorchs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fused bias and ReLU, and a readable reason; the twin runs the kernel."""

    def by_the_foot(operation: Any, problem: Any, device: torch.device, **others: Any) -> Choice:
        return choose(operation, problem, CPU, "direct")

    monkeypatch.setattr(choices, "choose", by_the_foot)
    monkeypatch.setattr(pytorch, "tables_for", lambda device: ())
    conv = nn.Conv2d(64, 128, 3, groups=4)
    graph = capture(Call(lambda p, x: F.relu(p.conv(x)), conv=conv).eval(), (torch.randn(2, 64, 28, 28),))
    graph = for_batch(optimize(graph, "fp16"), "fp16", 2)
    graph.nodes = {name: node for name, node in graph.nodes.items() if node.op == "conv2d"}
    (node,) = graph.nodes.values()
    graph.outputs = (node.name,)
    graph.inputs = (Input(node.inputs["x"], (2, 64, 28, 28), "float32"),)
    formats = {node.inputs["x"]: InputFormat(torch.float16, "nhwc")}
    avoid = frozenset(f"conv2d/{rung.name}" for rung in CONV2D.ladder if not rung.last_resort)
    plan = make_plan(graph, "fp16", torch.device("cuda"), formats, avoid=avoid)
    assert [step.node.op for step in plan.fallbacks] == ["conv2d"]
    assert "direct is the only rung of conv2d for" in explain_plan(plan).steps[0].why
    assert explain_plan(plan).steps[0].rung == "PyTorch"
    assert plan.steps[0].constant("weight").form == NHWC
    assert not make_plan(graph, "fp16", CPU, formats).fallbacks


def test_a_config_has_the_same_programs_in_every_batch(resnet18: Graph) -> None:
    """A new batch size should compile only its differing choices."""
    graph = optimize(resnet18, "fp16")
    formats = {graph.inputs[0].name: InputFormat(torch.float32, "nchw")}
    several = [
        make_plan(for_batch(graph, "fp16", batch, card=H200), "fp16", H200, formats) for batch in (1, 8, 32)
    ]
    compared = 0
    for plan, other in itertools.permutations(several, 2):
        problems = {step.node.name: step.lowered.problem for step in other.steps if step.lowered}
        for step in plan.steps:
            if step.recipe is None or step.choice is None or step.node.name not in problems:
                continue
            rung, problem = step.choice.rung, problems[step.node.name]
            if rung.refusal(problem) is None:
                again = rung.recipe(problem, step.choice.config)
                assert again.programs == step.recipe.programs, f"{rung.name} for {problem.name}"
                compared += 1
    assert compared > 60


def test_programs_are_expected_while_the_plan_is_made() -> None:
    """Each is reported as soon as it is chosen, so that compilers start with it."""
    told: list[Program] = []

    class Noted(CompileAhead):
        def __init__(self) -> None:
            pass

        def add(self, programs: Iterable[Program]) -> None:
            told.extend(programs)

    model, x = models.model("lenet")
    graph = for_batch(optimize(capture(model, (x,)), "fp16"), "fp16", 1)
    formats = {graph.inputs[0].name: InputFormat.of(x)}
    plan = make_plan(graph, "fp16", H200, formats, expected=Noted())
    assert {*told} == {*plan.programs} != set()
