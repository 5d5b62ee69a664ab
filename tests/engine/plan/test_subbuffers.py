"""Values inside others: concatenations and ranges without copies, and copies where needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import escalade
from escalade.engine.capture.export import capture
from escalade.engine.graph.forms import InputFormat
from escalade.engine.passes import for_batch, optimize
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.planner import make_plan
from tests.engine.plan.simulation import check_execution
from tests.engine.plan.test_plan import check_memory

BATCH = 2


class Model(nn.Module):
    """Layers by name, and a function of them."""

    def __init__(self, forward: Callable[..., object], **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.function = forward

    def forward(self, x: torch.Tensor) -> object:
        return self.function(x, **self.layers)


def _norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    norm.running_mean, norm.running_var = torch.randn(channels), torch.rand(channels) + 0.5
    return norm


def dense_features(x: torch.Tensor, **layers: nn.Module) -> torch.Tensor:
    """Features concatenated repeatedly, each time with one more."""
    found = [F.max_pool2d(x, 2)]
    for name in ("first", "second"):
        found.append(layers[name](torch.cat(found, 1))[:, :16])
    return F.adaptive_avg_pool2d(torch.cat(found, 1), 2)


def branches(x: torch.Tensor) -> torch.Tensor:
    """Parallel pools of two halves."""
    low, high = x.chunk(2, 1)
    return torch.cat([F.max_pool2d(low, 2), F.adaptive_avg_pool2d(high, 4), F.max_pool2d(x, 2)], 1)


def planned(model: nn.Module, shape: tuple[int, ...], dtype: str = "fp32") -> Plan:
    x = torch.randn(BATCH, *shape)
    graph = for_batch(optimize(capture(model.eval(), (x,)), dtype), dtype, BATCH)
    plan = make_plan(graph, dtype, torch.device("cpu"), {graph.inputs[0].name: InputFormat.of(x)})
    check_memory(plan)
    return plan


def copies(plan: Plan) -> list[str]:
    return [step.node.name for step in plan.steps if step.node.attributes.get("copy")]


def agree(model: nn.Module, shape: tuple[int, ...], device: str, dtype: str = "fp32") -> None:
    torch.manual_seed(0)
    x = torch.randn(BATCH, *shape)
    found = escalade.compile(model.eval(), x, dtype=dtype, device=device)(x)
    torch.testing.assert_close(found, model(x).detach(), rtol=1e-2, atol=1e-2 if dtype == "fp16" else 1e-4)


@pytest.mark.parametrize("device", ["twin", "cpu"])
def test_repeated_concatenations_share_one_buffer(device: str) -> None:
    model = Model(dense_features, first=_norm(16), second=_norm(32))
    agree(model, (16, 8, 8), device)
    plan = planned(model, (16, 8, 8))
    # The largest one contains the smaller one; part of the second norm's result is copied into it.
    assert len(copies(plan)) == 1
    joined = [step.node for step in plan.steps if step.is_alias and "x1" in step.node.inputs]
    small, large = sorted(joined, key=lambda node: node.shape[1])  # type: ignore[arg-type,return-value]
    assert plan.offsets[small.name] == plan.offsets[large.name]
    assert plan.forms[small.name].pitch == plan.forms[large.name].row == 48


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_kernels_write_and_read_parts_in_place(dtype: str) -> None:
    model = Model(branches)
    agree(model, (32, 8, 8), "twin", dtype)
    plan = planned(model, (32, 8, 8), dtype)
    assert not copies(plan) and not plan.fallbacks


def dense_block(x: torch.Tensor, **layers: nn.Module) -> torch.Tensor:
    """DenseNet block: each layer reads all previous ones."""
    found = [layers["stem"](x)]
    for number in range(2):
        features = F.relu(layers[f"norm{number}"](torch.cat(found, 1)))
        found.append(layers[f"conv{number}"](features))
    return layers["last"](F.relu(layers["norm2"](torch.cat(found, 1))))


def inception_block(x: torch.Tensor, **layers: nn.Module) -> torch.Tensor:
    """Branches of different filters beside a pool."""
    x = layers["stem"](x).relu()
    branches = [layers["one"](x).relu(), layers["three"](x).relu(), F.max_pool2d(x, 3, 1, 1)]
    return layers["last"](torch.cat(branches, 1))


def u_block(x: torch.Tensor, **layers: nn.Module) -> torch.Tensor:
    """A pooled skip connection, concatenated with the upsampled branch."""
    skip = layers["stem"](x).relu()
    back = F.interpolate(layers["deep"](F.max_pool2d(skip, 2)).relu(), scale_factor=2.0)
    return layers["last"](torch.cat([skip, back], 1))


def split_block(x: torch.Tensor, **layers: nn.Module) -> torch.Tensor:
    """Half of the channels continue, and all intermediate values are concatenated."""
    low, high = layers["stem"](x).relu().chunk(2, 1)
    return layers["last"](torch.cat([low, high, layers["further"](high).relu()], 1))


def _conv(channels: int, filters: int, size: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, filters, size, padding=size // 2)


BLOCKS = {
    "dense": lambda: Model(
        dense_block, stem=_conv(64, 64, 3), norm0=_norm(64), conv0=_conv(64, 32, 3), norm1=_norm(96),
        conv1=_conv(96, 32, 3), norm2=_norm(128), last=_conv(128, 64),
    ),
    "inception": lambda: Model(
        inception_block, stem=_conv(64, 64), one=_conv(64, 32), three=_conv(64, 64, 3), last=_conv(160, 64)
    ),
    "u": lambda: Model(u_block, stem=_conv(64, 64, 3), deep=_conv(64, 64, 3), last=_conv(128, 64, 3)),
    "split": lambda: Model(split_block, stem=_conv(64, 64), further=_conv(32, 32, 3), last=_conv(96, 64)),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", ["fp16", "tf32"])
def test_convolutions_write_and_read_parts_in_place(name: str, dtype: str) -> None:
    plan = planned(BLOCKS[name](), (64, 16, 16), dtype)
    assert not copies(plan)
    apart = [step.lowered.problem.name for step in plan.steps if step.lowered and step.choice]
    assert any("pitch" in problem for problem in apart)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_compute_their_formulas(name: str) -> None:
    agree(BLOCKS[name](), (64, 16, 16), "cpu")


@pytest.mark.share(7)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat([x, x], 1),
        lambda x: torch.cat([x.sin()[:, 3:], F.max_pool2d(x, 1)[:, :5]], 1).cos(),
        lambda x: torch.cat([F.relu(x), x.sin()], 0)[:BATCH],
        lambda x: torch.cat([x.mean((2, 3)), x.amax((2, 3))], -1),
        lambda x: torch.cat([x.sin(), x.cos()], 2),
        lambda x: torch.cat([x.sin(), torch.ones(BATCH, 1, 8, 16)], 1),
        lambda x: torch.cat([*x.sin().split([4, 3, 9], 1), x.cos()], 1)[:, -20:].relu(),
        lambda x: torch.softmax(x, -1)[..., 8:].flatten(2).sin(),
    ],
    ids=["an input twice", "odd ranges", "batches", "rows", "height", "a constant", "all pieces", "columns"],
)
@pytest.mark.parametrize("device", ["twin", "cpu"])
def test_values_that_cannot_be_in_place_are_copied(
    function: Callable[..., torch.Tensor], device: str
) -> None:
    agree(Model(function), (16, 8, 16), device)
    planned(Model(function), (16, 8, 16))


def test_a_value_of_which_all_pieces_are_joined_is_not_cut() -> None:
    def pieces(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([*F.max_pool2d(x, 2).chunk(2, 1), F.max_pool2d(x, 3, 2, 1)], 1)

    assert not copies(planned(Model(pieces), (16, 8, 8)))


def test_an_input_of_which_all_pieces_are_joined_is_copied_once() -> None:
    def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = [*x.chunk(2, -1), torch.softmax(x, -1)]
        return torch.softmax(torch.cat(first, -1), -1), torch.cat([*first, x.sin()], -1)

    x = torch.randn(BATCH, 16)
    plan = planned(Model(twice), (16,))
    assert [name for name in copies(plan) if plan.graph.nodes[name].inputs["x0"] == "x"] == ["x_part"]
    torch.testing.assert_close(check_execution(plan, x), list(twice(x)))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_kernels_keep_their_wide_accesses_where_parts_begin_between_them(dtype: str) -> None:
    def odd(x: torch.Tensor) -> torch.Tensor:
        parts = (F.max_pool2d(part, 3, 1, 1) for part in (x[:, :2], x[:, 8:], x[:, :6]))
        return F.max_pool2d(torch.cat([*parts], 1), 2)

    assert not planned(Model(odd), (16, 4, 4), dtype).fallbacks


def test_parts_of_parts_have_the_right_address() -> None:
    """After the first member of the whole, and with a member in another layout."""

    def behind(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, last = F.max_pool2d(x, 3, 1, 1), F.max_pool2d(x, 5, 1, 2)
        return torch.softmax(torch.cat([first, last], 1), 1), torch.cat([F.relu(x), first, last], 1)

    def single(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        row, pixels = torch.softmax(x.mean(1, True), -1), F.max_pool2d(x, 3, 1, 1)
        return torch.cat([row, pixels], 1).sin(), torch.cat([F.max_pool2d(x, 1) + 1, row, pixels], 1)

    x = torch.randn(BATCH, 16, 4, 4)
    for model in (behind, single):
        torch.testing.assert_close(check_execution(planned(Model(model), (16, 4, 4)), x), list(model(x)))


def test_flattened_values_that_are_sliced_are_views() -> None:
    """A part of a flattened value has the address of that part before it is flattened."""
    plan = planned(Model(lambda x: torch.softmax(x, -1).flatten(1)[:, :8].relu()), (4, 4))
    (flat,) = (step.node for step in plan.steps if step.node.op == "reshape")
    assert plan.offsets[flat.name] == plan.offsets[flat.inputs["x"]]
    assert flat.name not in {one.name for one in plan.lifetimes}, "it has no bytes of its own"


def test_functions_of_elements_read_parts_where_they_are() -> None:
    """Gated convolution: half of its channels gate the other half."""

    def gated(x: torch.Tensor) -> torch.Tensor:
        left, right = F.max_pool2d(x, 2).chunk(2, 1)
        return F.max_pool2d(torch.tanh(left) * torch.sigmoid(right), 2)

    assert not copies(planned(Model(gated), (16, 8, 8)))
    agree(Model(gated), (16, 8, 8), "twin")
    odd = Model(lambda x: (lambda y: F.max_pool2d(y[:, :7].sin() * y[:, 7:14], 2))(F.max_pool2d(x, 2)))
    agree(odd, (14, 8, 8), "twin")
    # The result of a softmax over columns stays in PyTorch's order, and so does what is computed from it.
    rows = Model(lambda x: (lambda y: torch.cat([y, torch.relu(y)[:, :, :1]], 2))(torch.softmax(x, 3)))
    agree(rows, (5, 6, 12), "twin")


class Joined(nn.Module):
    """Values concatenated with constants, filled tensors and expanded values."""

    def __init__(self) -> None:
        super().__init__()
        self.grid, self.token = nn.Buffer(torch.randn(8, 3, 4)), nn.Parameter(torch.randn(1, 1, 12))
        self.layer = nn.Conv2d(8, 16, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, batch = self.layer(x), x.shape[0]
        mean = y.mean((2, 3), keepdim=True)
        image = torch.cat([y, self.grid.expand(batch, -1, -1, -1), mean.expand_as(y)], 1)
        rows = torch.cat([self.token.expand(batch, -1, -1), x.sin().flatten(2)], 1)
        padded = torch.cat(
            [torch.zeros(batch, 8, 3, 4, device=x.device), y.exp(), y.new_full((batch, 8, 3, 4), 0.5)], 1
        )
        return torch.relu(image), rows, F.avg_pool2d(padded, 2), torch.cat([mean.expand(-1, -1, 2, 3)] * 2, 3)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_concatenation_expands_its_operands_and_reads_constants(dtype: str) -> None:
    model, x = Joined().eval(), torch.randn(BATCH, 8, 3, 4)
    plan = planned(model, (8, 3, 4), dtype)
    assert not any(step.in_pytorch for step in plan.steps)
    copies = [step.node.name for step in plan.steps if step.is_copy]
    assert len(copies) == 4  # one per concatenation, whatever its members
    tolerance = {"fp32": 1e-5, "fp16": 1e-2}[dtype]
    for device in ("twin", "cpu"):
        engine = escalade.compile(model, x, dtype=dtype, device=device)
        for given in (x, x[:1]) if device == "cpu" else (x,):
            torch.testing.assert_close(engine(given), model(given), rtol=tolerance, atol=tolerance)
