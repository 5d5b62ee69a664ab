"""Rewrites of typed graphs, those of training steps: values and their dtypes are unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine.capture.joint import Joint, capture_step
from escalade.engine.graph.graph import Graph, Input
from escalade.engine.nodes.elementwise import Add
from escalade.engine.nodes.evaluate import compute
from escalade.engine.nodes.norms import LayerNormBackward
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.side_outputs import readers_of, side_outputs_of
from escalade.engine.passes import optimize_step
from escalade.engine.passes.casts import fuse_casts, lift_casts
from escalade.engine.passes.epilogues import fuse_biases
from escalade.engine.passes.norms import fuse_norm_gradients
from escalade.engine.passes.pointwise import fuse_siblings
from escalade.engine.passes.stacks import join_gradients
from escalade.engine.passes.step_permutes import sink_step_permutes
from escalade.engine.training.step import plan_training_step
from escalade.ops.base.card import H200

HALF, BRAIN = torch.float16, torch.bfloat16


class Model(nn.Module):
    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.run, self.conv, self.other = run, nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.first, self.wide, self.narrow = nn.Linear(8, 8), nn.Linear(8, 24, bias=False), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def joint_of(run: Callable[..., torch.Tensor], autocast: torch.dtype | None = None) -> tuple[Model, Joint]:
    torch.manual_seed(2)
    model = Model(run)
    x = torch.randn(2, 8, 6, 6)
    return model, capture_step(model, F.mse_loss, (x,), (torch.randn(2, 8, 6, 6),), autocast=autocast)


def results(graph: Graph, values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Evaluate a typed graph with every value in its declared dtype."""
    values = {**values, **graph.constants}
    for node in graph:
        inputs = {role: values[name] for role, name in node.inputs.items()}
        values[node.name] = compute(node, inputs, torch.device("cpu")).to(getattr(torch, node.dtype))
    return [values[name] for name in graph.outputs]


def given_to(graph: Graph) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        one.name: torch.randn(one.shape).to(getattr(torch, one.dtype))  # type: ignore[arg-type]
        for one in graph.inputs
    }


def test_an_input_is_cast_to_every_type_that_is_read() -> None:
    """Two casts of one input become two inputs, one per dtype; two to the same dtype become one."""
    casts: Callable[..., torch.Tensor] = lambda p, x: (  # noqa: E731
        p.conv(x) + x.half().float() + x.bfloat16().float() * x.half().sin().float()
    )
    _, joint = joint_of(casts)
    before, graph = joint.graph, joint.graph.copy()
    lifted = lift_casts(graph)
    images = [cast for cast in lifted if cast.dtype in (HALF, BRAIN)]
    assert sorted(str(cast.dtype) for cast in images) == ["torch.bfloat16", "torch.float16"]
    assert len({cast.source for cast in images}) == 1
    values = given_to(before)
    lying = {cast.name: values[cast.source].to(cast.dtype) for cast in lifted}
    types = {one.name: getattr(torch, one.dtype) for one in graph.inputs}
    assert all(types[cast.name] == cast.dtype for cast in lifted)
    for found, wanted in zip(results(graph, values | lying), results(before, values), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_cast_that_is_returned_is_computed() -> None:
    """An input that is also a result would be the caller's own tensor."""
    _, joint = joint_of(lambda p, x: p.conv(x) + x.half().float())
    graph = joint.graph.copy()
    (cast,) = (node for node in graph if node.dtype == "float16" and node.inputs.keys() == {"x"})
    graph.outputs, graph.output_types = (*graph.outputs, cast.name), (*graph.output_types, cast.dtype)
    assert all(one.name != cast.name for one in lift_casts(graph)) and cast.name in graph.nodes


def test_layers_take_no_operand_of_another_type() -> None:
    """A kernel reads all terms and factors in the dtype that it writes."""
    runs: list[Callable[..., torch.Tensor]] = [
        lambda p, x: p.conv(x) + x,
        lambda p, x: torch.sigmoid(p.conv(x)) * x,
        lambda p, x: torch.sigmoid(p.conv(x)) * x.half(),
        lambda p, x: p.conv(x) + p.other(x).float(),
        lambda p, x: torch.sigmoid(p.conv(x)) * p.other(x),  # same dtype
    ]
    fused = 0
    for run in runs:
        _, joint = joint_of(run, autocast=BRAIN)
        given_as = {one.name: "nchw" for one in joint.graph.inputs if len(one.shape) == 4}
        graph = optimize_step(joint.graph, given_as, {})
        for node in graph:
            if "residual" in node.inputs:
                fused += 1
                assert graph.dtype_of(node.inputs["residual"]) == graph.dtype_of(node.name), node
        values = given_to(joint.graph)
        pairs = zip(results(graph, values), results(joint.graph, values), strict=True)
        for found, wanted in pairs:
            torch.testing.assert_close(found.float(), wanted.float(), rtol=0.1, atol=0.1)
    assert fused


def test_functions_of_the_same_values_are_computed_together() -> None:
    """The gradients of both factors of a gate read its gradient, which nothing reads afterwards."""
    _, joint = joint_of(lambda p, x: p.conv(x) * torch.tanh(p.other(x)))
    given_as = {one.name: "nchw" for one in joint.graph.inputs if len(one.shape) == 4}
    graph, apart = (
        optimize_step(joint.graph, given_as, {}, without=without)
        for without in (frozenset[str](), frozenset({"siblings"}))
    )
    (fused,) = (node for node in graph if Pointwise.matches(node) and side_outputs_of(node, graph))
    (other,) = side_outputs_of(fused, graph)
    both = Pointwise().expression(fused)
    assert len(both.results) == 2 and other.inputs.items() >= fused.inputs.items()
    assert not any(Pointwise.matches(node) and side_outputs_of(node, apart) for node in apart)
    values = given_to(joint.graph)
    for found, wanted in zip(results(graph, values), results(joint.graph, values), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_kernels_of_several_results_read_parts_in_place() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(4, 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            values, gates = self.layer(x).chunk(2, 1)
            return torch.tanh(values) * torch.sigmoid(gates)

    model = Gate().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
    example, optimizer = (x, torch.randn(2, 8, 6, 6)), torch.optim.SGD(model.parameters(), 0.1)
    plan = plan_training_step(model, F.mse_loss, optimizer, example, "bf16", H200)
    (gradients,) = (
        step.node
        for step in plan.steps
        if Pointwise.matches(step.node) and ";" in step.node.attributes["expression"]
    )
    assert len(side_outputs_of(gradients, plan.graph)) == 1
    assert not [step.node.name for step in plan.steps if step.node.name.endswith("_part")]


@pytest.mark.parametrize(
    ("outputs", "last", "fused"),
    [
        (("u", "v"), {"x": "t", "a": "a"}, ["u"]),
        (("t", "u", "v"), {"x": "t", "a": "a"}, []),  # t stays alive, and v would for longer
        (("v",), {"x": "t", "a": "u"}, []),  # v is computed from u
    ],
)
def test_a_function_joins_another_one_if_its_result_takes_the_place_of_a_value(
    outputs: tuple[str, ...], last: dict[str, str], fused: list[str]
) -> None:
    inputs = tuple(Input(name, (2, 8), "float32") for name in ("g", "a"))
    graph = Graph(inputs, {}, {}, outputs, output_types=("float32",) * len(outputs), typed=True)
    reads = {"t": {"x": "g", "a": "a"}, "u": {"x": "t", "a": "g"}, "v": last}
    for name, values in reads.items():
        graph.append(Pointwise.node(name, values, {"expression": "tanh(x) * a"}, (2, 8), "float32"))
    fuse_siblings(graph)
    assert [node.name for node in graph if Pointwise.matches(node) and side_outputs_of(node, graph)] == fused


class Norms(nn.Module):
    """A norm of rounded values, and two of values in fp32 before a layer in 16 bits, one with a transpose between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.layer = nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.places = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(x.bfloat16(), (8,)) + self.places
        x = x + self.layer(self.first(x).transpose(0, 1)).transpose(0, 1)
        return self.layer(self.second(x))


def _norms_graph() -> Graph:
    x, target = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    return capture_step(Norms(), F.mse_loss, (x,), (target,), autocast=BRAIN).graph


def test_fused_casts_change_no_value_that_is_returned() -> None:
    """Every value of the graph, returned beside its results, has the values and the dtype that it had."""
    before = _norms_graph()
    norms = [node.name for node in before if node.op.startswith("layer_norm")]
    assert len(norms) == 5
    values = given_to(before)
    fused: list[int] = []
    sums: list[int] = []
    copies: list[int] = []
    for name in ("", *(node.name for node in before if node.is_floating)):
        graph = before.copy()
        if name:
            graph.outputs = (*graph.outputs, name)
            graph.output_types = (*graph.output_types, graph.nodes[name].dtype)
        expected = results(graph, values)
        fuse_casts(graph)
        for found, wanted in zip(results(graph, values), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        changed = graph.copy()
        fuse_norm_gradients(changed)
        for found, wanted in zip(results(changed, values), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-3)
        sums.append(sum("residual" in node.inputs for node in changed if LayerNormBackward.matches(node)))
        copies.append(
            sum("rounded" in node.attributes for node in changed if LayerNormBackward.matches(node))
        )
        narrow = [graph.dtype_of(norm) is BRAIN for norm in norms]
        narrow += [graph.dtype_of(graph.nodes[norm].inputs["gradient"]) is BRAIN for norm in norms[3:]]
        fused.append(sum(narrow))
    assert fused[0] == max(fused) == 5, "three results and two gradients are in 16 bits"
    assert min(fused) == 4, "a wide value that is returned stays"
    assert sums[0] == max(sums) == 1 and min(sums) == 0, "a gradient that is returned is not added to"
    assert set(copies) == {1}, "also of a cast that is returned"


@pytest.mark.parametrize("case", ["dependent", "rounded"])
def test_additions_that_no_norm_computes(case: str) -> None:
    """A penalty on the gradient of a weight adds a term that depends on it; a kernel cannot read its own results. Nor
    does it add in another dtype than that of dx."""
    graph = _norms_graph()
    fuse_casts(graph)
    norms = [node for node in graph if LayerNormBackward.matches(node)]
    (norm,) = (one for one in norms if all(Add.matches(reader) for reader in readers_of(one, graph)))
    weight_gradient, _ = side_outputs_of(norm, graph)
    (add,) = readers_of(norm, graph)
    if case == "rounded":
        graph.nodes[add.name] = replace(add, dtype="bfloat16")
    role, rest = next(pair for pair in add.inputs.items() if pair[1] != norm.name)
    inputs = {"x": rest, "a": weight_gradient.name}
    if case == "dependent":
        graph.insert_before(add.name, Pointwise.node("term", inputs, {"expression": "x + a"}, add.shape))
        graph.nodes[add.name] = add.with_inputs(**{role: "term"})
    values = given_to(graph)
    expected = results(graph, values)
    fuse_norm_gradients(graph)
    assert not any("residual" in graph.nodes[one.name].inputs for one in norms)
    for found, wanted in zip(results(graph, values), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def _heads(p: Model, x: torch.Tensor) -> torch.Tensor:
    """A projection in three parts by index, as in attention."""
    y = p.conv(x).flatten(2).transpose(1, 2)
    parts = torch.cat([y, y.sin(), y * y], 2).unflatten(-1, (3, 8)).unsqueeze(0).transpose(0, -2).squeeze(-2)
    q, k, v = (parts[n].transpose(0, 1) for n in range(3))
    return (q * k + v).transpose(0, 1).transpose(1, 2).reshape(x.shape)


def _items(p: Model, x: torch.Tensor) -> torch.Tensor:
    """Items whose gradients are stacked, behind a permutation."""
    a, b = p.conv(x).view(2, 4, 2, 6, 6).permute(2, 0, 1, 3, 4).unbind(0)
    return torch.cat([a.tanh(), b * a], 1)


def _gaps(p: Model, x: torch.Tensor) -> torch.Tensor:
    y = p.conv(x)
    return torch.cat([y[:, 1:3].tanh(), y[:, 5:] * x[:, :3], y[:, 1:3] * x[:, :2], p.other(x)[:, 7:]], 1)


def _nested(p: Model, x: torch.Tensor) -> torch.Tensor:
    """Quarters of an image, of which one is read twice, besides the whole."""
    y = p.conv(x)
    top, bottom = y[:, :, :3], y[:, :, -3:]
    left = torch.cat([top[..., :2].tanh(), bottom[..., :2] * top[..., :2]], 2)
    return torch.cat([left, torch.cat([top[..., 2:], bottom[..., 2:].exp()], 2)], 3) + y.sin()


@pytest.mark.parametrize(("run", "padded"), [(_heads, 0), (_items, 0), (_gaps, 1), (_nested, 0)])
def test_gradients_of_parts_are_joined(run: Callable[..., torch.Tensor], padded: int) -> None:
    """No gradient of a part is padded, except one that nothing is added to."""
    _, joint = joint_of(run)
    graph = joint.graph.copy()
    join_gradients(graph)
    calls = [node.calls for node in graph]
    assert calls.count("select_backward") + calls.count("slice_backward") == padded
    assert "stack" not in calls
    before, after = ([node.op for node in each].count("concatenate") for each in (joint.graph, graph))
    assert after > before
    for one in graph:
        assert one.op != "permute" or graph.nodes.get(one.inputs["x"], one).op != "concatenate"
    values = given_to(joint.graph)
    for found, wanted in zip(results(graph, values), results(joint.graph, values), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "run",
    [
        lambda p, x: torch.cat([p.conv(x)[:, :5].tanh() * x[:, :5], p.conv(x)[:, 2:5]], 1),  # of two values
        lambda p, x: (y := p.conv(x))[:, :6].repeat(1, 2, 1, 1)[:, :8] * y[:, 2:].repeat(1, 2, 1, 1)[:, :8],
        lambda p, x: (
            (y := p.conv(x))[:, ::3].repeat(1, 3, 1, 1)[:, :8] * y[:, 1::3].repeat(1, 3, 1, 1)[:, :8]
        ),
        lambda p, x: (y := p.conv(x))[:, ::2].repeat(1, 2, 1, 1) * y[:, ::4].repeat(1, 4, 1, 1),
        lambda p, x: (y := p.conv(x))[:, :4].repeat(1, 2, 1, 1) * y[:, :, :3].repeat(1, 1, 2, 1),
    ],
)
def test_gradients_of_parts_that_overlap_stay_sums(run: Callable[..., torch.Tensor]) -> None:
    _, joint = joint_of(run)
    graph = joint.graph.copy()
    join_gradients(graph)
    assert [node.op for node in graph] == [node.op for node in joint.graph]
    values = given_to(joint.graph)
    for found, wanted in zip(results(graph, values), results(joint.graph, values), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def _tokens(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(2).transpose(1, 2).sin()


def _image(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.transpose(1, 2).reshape(x.shape)


def _there_and_back(p: Model, x: torch.Tensor) -> torch.Tensor:
    """Tokens before the batch for a chain of layers."""
    y = _tokens(x)
    return _image(y + p.narrow(F.gelu(p.wide(p.first(y).transpose(0, 1)))).transpose(0, 1), x)


def _cycled(p: Model, x: torch.Tensor) -> torch.Tensor:
    """Three dimensions of rows in another order, with a function and a factor per feature."""
    y = _tokens(x).view(2, 4, 9, 8).permute(1, 2, 0, 3)
    y = p.narrow(p.wide(y).tanh() * p.narrow.weight.sum(0))
    return _image(y.permute(2, 0, 1, 3).reshape(2, 36, 8), x)


def _two_orders(p: Model, x: torch.Tensor) -> torch.Tensor:
    """A layer whose rows, and whose gradient's rows, are permuted in different ways."""
    y = p.wide(_tokens(x).view(2, 6, 6, 8).transpose(1, 2)).transpose(0, 1)
    return _image(p.narrow(y).transpose(0, 1).reshape(2, 36, 8), x)


def _attention(p: Model, x: torch.Tensor) -> torch.Tensor:
    """Operators of nn.MultiheadAttention."""
    y = _tokens(x)
    qkv = p.wide(y.transpose(0, 1)) + p.narrow.weight.sum(0)
    qkv = qkv.unflatten(-1, (3, 8)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    heads = [one.reshape(36, 4, 4).transpose(0, 1).view(2, 2, 36, 4) for one in qkv]
    mixed = F.scaled_dot_product_attention(*heads).permute(2, 0, 1, 3).contiguous().view(72, 8)
    return _image(y + p.first(mixed).view(36, 2, 8).transpose(0, 1), x)


@pytest.mark.parametrize(
    ("run", "permutes"),
    [(_there_and_back, 0), (_cycled, 0), (_two_orders, 2), (_attention, 8)],
    ids=["chain", "cycle", "two", "attention"],
)
def test_permutations_cancel_behind_products(run: Callable[..., torch.Tensor], permutes: int) -> None:
    """Operands and results of attention stay permuted, as views."""
    _, joint = joint_of(run, autocast=BRAIN)
    graph = joint.graph.copy()
    join_gradients(graph)
    before = graph.copy()
    sink_step_permutes(graph)
    orders, others = (
        [node.attributes["order"] for node in each if node.op == "permute"] for each in (graph, before)
    )
    of_rows = [order for order in orders if order[-1] == len(order) - 1]  # others are of the image
    assert len(of_rows) == permutes and len(orders) < len(others)
    assert run is not _attention or set(of_rows) == {(0, 2, 1, 3)}
    values = given_to(before)
    for found, wanted in zip(results(graph, values), results(joint.graph, values), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    "run",
    [
        lambda p, x: _image(p.wide(_tokens(x).transpose(0, 1)).softmax(0)[..., 8:16].transpose(0, 1), x),
        lambda p, x: p.narrow(p.wide(p.conv(x).permute(0, 2, 3, 1)).exp()).permute(0, 3, 1, 2),
    ],
    ids=["wider", "pixels"],
)
def test_permutations_that_would_copy_more_stay(run: Callable[..., torch.Tensor]) -> None:
    _, joint = joint_of(run, autocast=BRAIN)
    graph = joint.graph.copy()
    graph.remove_dead_code()
    nodes = dict(graph.nodes)
    sink_step_permutes(graph)
    assert dict(graph.nodes) == nodes


def test_separate_biases_are_those_of_layers() -> None:
    """The bias of a product, which is added to a view of it, and its gradient."""

    def run(p: Model, x: torch.Tensor) -> torch.Tensor:
        y = p.wide(_tokens(x)).view(2, 36, 3, 8).flatten(2) + p.narrow.weight.sum(0).bfloat16()
        z = p.wide(_tokens(x))
        return _image(
            p.narrow(y) + p.narrow(z + p.narrow.weight.sum(0).bfloat16() + z), x
        )  # the latter is read twice

    _, joint = joint_of(run, autocast=BRAIN)
    graph = joint.graph.copy()
    fuse_biases(graph)
    biases = [node.name for node in graph if node.op == "conv2d" and "bias" in node.inputs]
    before = [node.name for node in joint.graph if node.op == "conv2d" and "bias" in node.inputs]
    assert len(biases) == len(before) + 1
    optimized = optimize_step(
        joint.graph, {one.name: "nchw" for one in joint.graph.inputs if len(one.shape) == 4}, {}
    )
    gradients = [node for node in optimized if node.op == "conv2d_weight_gradient"]
    assert sum(node.attributes["bias"] for node in gradients) == 3, gradients
    values = given_to(joint.graph)
    for each in (graph, optimized):
        for found, wanted in zip(results(each, values), results(joint.graph, values), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))
