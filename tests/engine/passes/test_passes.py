"""Each pass alone on small graphs: its rewrites, the graphs it must not change, and unchanged results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine.capture.export import capture
from escalade.engine.graph.graph import Batch, Graph
from escalade.engine.nodes import layout_of
from escalade.engine.nodes.base import activation_of
from escalade.engine.passes import FusionLevel, for_batch, optimize
from escalade.engine.passes.channel_scale import fold_batch_norm
from escalade.engine.passes.epilogues import fuse_expressions, fuse_operands, fuse_residuals
from escalade.engine.passes.gradient_patterns import sort_nodes
from escalade.engine.passes.layout import assign_layouts, reorder_flattened
from escalade.engine.passes.merge_convs import fuse_shortcuts
from escalade.engine.passes.simplify import eliminate_common_subexpressions, fold_constants
from escalade.engine.passes.views import sink_permutes
from escalade.models import settle
from tests.engine.graphs import Parts, after, evaluate, graph_of, node_of, ops, same_results

TABLE = torch.linspace(-2, 2, 288).view(1, 8, 6, 6).expand(2, -1, -1, -1).contiguous()


def test_repeated_work_is_done_once() -> None:
    def run(p: Parts, x: torch.Tensor) -> Any:
        y = p.first(x)
        gates = [torch.sigmoid(y.amax((2, 3), keepdim=True)) for _ in range(3)]
        others = torch.sigmoid(y.amax((2, 3))), torch.sigmoid(y.amax((1, 2), keepdim=True))
        return y * gates[0] + gates[1], gates[2] * y, *others, *others

    graph = after(run, eliminate_common_subexpressions)
    assert ops(graph).count("reduce") == 3
    assert ops(optimize(graph_of(run), "fp16")).count("reduce") == 3
    alike = after(
        lambda p, x: (lambda y: y.cumsum(1) * y.cumsum(2) + y.cumsum(1))(p.first(x)),
        eliminate_common_subexpressions,
    )
    assert ops(alike).count("aten") == 2, "along other dimensions it is not the same"
    results = after(lambda p, x: (p.first(x), p.first(x)), eliminate_common_subexpressions)
    assert len(set(results.outputs)) == 2, "each is a tensor of its own"
    drawn = graph_of(lambda p, x: F.dropout(x, 0.5, True) - F.dropout(x, 0.5, True))
    eliminate_common_subexpressions(drawn)
    assert len(drawn.nodes) == 3


def test_weights_stay_within_the_range_of_their_type() -> None:
    """Neither of the two alone exceeds it."""
    graph = graph_of(lambda p, x: p.n(p.a(p.first(x))))
    (norm,) = (node for node in graph if node.op == "batch_norm")
    graph.constants[norm.inputs["variance"]] = torch.full((8,), 1e-9)
    graph.constants[norm.inputs["weight"]] = torch.full((8,), 1e4)
    for dtype, folded in (("fp16", False), ("bf16", True), ("fp32", True)):
        done = graph.copy()
        fold_batch_norm(done, dtype)
        assert ("batch_norm" not in ops(done)) == folded


def test_a_constant_is_permuted_with_the_value_it_is_added_to() -> None:
    rows = TABLE.permute(0, 2, 3, 1).contiguous()
    x = torch.randn(2, 3, 6, 6)
    graph = capture(Parts(lambda p, x: p.first(x).permute(0, 2, 3, 1) + rows), (x,))
    assert "add" in ops(graph)
    sunk = graph.copy()
    sink_permutes(sunk)
    assert ops(sunk).index("add") < ops(sunk).index("permute")
    torch.testing.assert_close(evaluate(sunk, x), evaluate(graph, x))


def test_permutations_are_put_together_in_their_order() -> None:
    def run(p: Parts, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(p.first(x).permute(0, 2, 1, 3))
        return F.relu(y.permute(0, 1, 3, 2) - 1).permute(0, 3, 2, 1)

    assert ops(after(run, sink_permutes)).count("permute") <= 1
    others = after(
        lambda p, x: (lambda y: y.permute(0, 2, 1, 3) + y.permute(0, 3, 2, 1))(p.first(x)),
        sink_permutes,
        side=8,
    )
    assert ops(others).count("permute") == 2, "of two orders there is none for the sum"


@pytest.mark.parametrize(
    "run",
    [
        lambda p, x: p.n(p.first(x)),  # with a bias
        lambda p, x: p.n(p.a(p.first(x).relu())),  # without
        lambda p, x: p.m(p.first(x)),  # without its own scale
        lambda p, x: p.fn(p.fc(p.first(x).flatten(1))),
    ],
)
def test_batch_norm_is_folded(run: Callable[..., Any]) -> None:
    graph = after(run, fold_batch_norm)
    assert "batch_norm" not in ops(graph)
    assert all("bias" in node.inputs for node in graph if node.op in ("conv2d", "linear"))


@pytest.mark.parametrize(
    "run",
    [
        lambda p, x: (lambda y: (p.n(y), y * 2))(p.first(x)),  # two users
        lambda p, x: (lambda y: (p.n(y), y))(p.first(x)),  # an output
        lambda p, x: p.n(p.first(x).relu()),  # not directly after it
        lambda p, x: p.rn(p.rows(p.first(x).flatten(2))),  # normalizes rows
        lambda p, x: p.n(x[:, :1].expand(-1, 8, -1, -1)),  # no layer before it
    ],
)
def test_batch_norm_that_is_not_folded(run: Callable[..., Any]) -> None:
    graph = after(run, fuse_expressions, fold_batch_norm)
    assert ops(graph).count("batch_norm") == 1


@pytest.mark.parametrize(
    ("run", "layers"),
    [
        (lambda p, x: torch.tanh((p.first(x) - p.first.bias.view(8, 1, 1)) * 3), ["few_channels"]),
        (
            lambda p, x: torch.tanh(p.m(p.first(x).relu()) * p.first.bias.view(8, 1, 1)),
            ["few_channels", "batch_norm"],
        ),
        (
            lambda p, x: F.group_norm(p.first(x), 2) + p.first.bias.view(8, 1, 1),
            ["few_channels", "group_norm"],
        ),
    ],
)
def test_an_explicit_bias_is_folded_into_the_layer_before_it(
    run: Callable[..., Any], layers: list[str]
) -> None:
    graph = graph_of(run)
    optimised = optimize(graph, "fp32")
    assert [op for op in ops(optimised) if op != "convert"] == layers
    same_results(graph, optimised)


def test_folding_two_norms_of_one_weight_keeps_them_apart() -> None:
    graph = after(lambda p, x: p.n(p.a(p.first(x))) + p.m(p.a(p.first(x))), fold_batch_norm)
    weights = {node.inputs["weight"] for node in graph if node.op == "conv2d"}
    assert "batch_norm" not in ops(graph) and len(weights) == 3  # the first one's own, and two of a's


def test_relu_is_fused() -> None:
    graph = after(lambda p, x: F.relu(p.n(F.relu(p.first(x)))), fuse_expressions)
    assert ops(graph) == ["conv2d", "batch_norm"]
    assert all(node.attributes["relu"] for node in graph)


@pytest.mark.parametrize(
    ("run", "left"),
    [
        (lambda p, x: (lambda y: (F.relu(y), y))(p.first(x)), 1),
        (lambda p, x: (lambda y: F.relu(y) * y)(p.first(x)), 1),
        (lambda p, x: F.relu(F.max_pool2d(p.first(x), 2)), 1),
        (lambda p, x: F.relu(x), 1),
    ],
)
def test_relu_that_is_not_fused(run: Callable[..., Any], left: int) -> None:
    graph = after(run, fuse_expressions)
    assert ops(graph).count("relu") == left


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (lambda p, x: F.relu6(p.n(p.first(x))), "clamp(x, 0, 6)"),
        (lambda p, x: F.gelu(F.relu6(p.first(x))), "gelu(clamp(x, 0, 6))"),
        (lambda p, x: F.gelu(p.fc(p.first(x).flatten(1)), approximate="tanh"), "gelu_tanh(x)"),
    ],
)
def test_expressions_are_fused(run: Callable[..., Any], text: str) -> None:
    graph = after(run, fold_batch_norm, fuse_expressions)
    assert set(ops(graph)) <= {"conv2d", "linear", "reshape"}
    last = tuple(graph)[-1]
    assert activation_of(last).text == text


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (lambda p, x: (lambda y: y + F.silu(p.n(p.a(y))))(p.first(x).relu()), "residual + silu(x)"),
        (lambda p, x: (lambda y: F.relu(torch.tanh(p.a(y)) * y))(p.first(x)), "relu(tanh(x) * residual)"),
    ],
)
def test_another_value_is_read_on_the_way_out(run: Callable[..., Any], text: str) -> None:
    graph = after(run, fold_batch_norm, fuse_expressions, fuse_residuals, fuse_operands, fuse_expressions)
    first, second = graph
    assert second.inputs["residual"] == first.name
    assert activation_of(second).text == text


@pytest.mark.parametrize(
    "run",
    [
        lambda p, x: (lambda y: F.silu(p.a(y)) * y.mean((2, 3), keepdim=True))(p.first(x)),  # other sizes
        lambda p, x: (lambda y: F.silu(y) * y)(p.first(x)),  # two readers
        lambda p, x: (lambda y: F.silu(p.a(y) + y) * y)(p.first(x)),  # already has a residual
    ],
)
def test_another_value_that_is_not_read_on_the_way_out(run: Callable[..., Any]) -> None:
    graph = after(run, fold_batch_norm, fuse_expressions, fuse_residuals, fuse_expressions, fuse_operands)
    assert "pointwise" in ops(graph)


@pytest.mark.parametrize(
    "run",
    [
        lambda p, x: p.b(p.first(x)) + TABLE,  # as large as the image: there is one batch size
        lambda p, x: F.silu(p.b(p.first(x))) * TABLE,
        lambda p, x: F.silu(p.b(p.first(x))) * TABLE[:1],
        lambda p, x: F.silu(p.b(p.first(x))) + TABLE.int(),
        lambda p, x: (lambda y: F.silu(p.a(y)) * y.sort(1).indices)(p.first(x)),  # integers
        lambda p, x: (lambda y: F.silu(p.a(y)) * (y.sort(1).values > 0))(p.first(x)),  # booleans
    ],
)
def test_kernels_read_values_of_their_own_type_on_the_way_out(run: Callable[..., Any]) -> None:
    """A packed constant weight does not have an image's layout."""
    x = torch.randn(2, 3, 6, 6)
    graph = capture(Parts(run).eval(), (x,))
    for batch in (1, 2) if graph.is_batched else (2,):
        done = for_batch(optimize(graph, "fp32"), "fp32", batch)
        for node in done:
            operand = node.inputs.get("residual") if "weight" in node.inputs else None
            assert operand is None or (operand in done.nodes and done.nodes[operand].dtype == node.dtype)
        for old, new in zip(evaluate(graph, x[:batch]), evaluate(done, x[:batch]), strict=True):
            torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5)


def fused_block(p: Parts, x: torch.Tensor) -> torch.Tensor:
    y = F.relu(p.first(x))
    return F.relu(p.n(p.a(y)) + y)


def test_the_way_around_is_added_by_the_convolution() -> None:
    graph = after(fused_block, fold_batch_norm, fuse_expressions, fuse_residuals, fuse_expressions)
    first, second = graph
    assert ops(graph) == ["conv2d", "conv2d"]
    assert second.inputs["residual"] == first.name and second.attributes["relu"]


def test_the_larger_convolution_takes_the_other() -> None:
    def run(p: Parts, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(p.first(x))
        return p.sn(p.short(y)) + p.wn(p.wide(y))  # the small one first

    graph = after(run, fold_batch_norm, fuse_expressions, fuse_residuals)
    taker = next(node for node in graph if "residual" in node.inputs)
    assert graph.constants[taker.inputs["weight"]].shape[2:] == (3, 3)
    assert graph.constants[graph.nodes[taker.inputs["residual"]].inputs["weight"]].shape[2:] == (1, 1)
    graph = after(run, fold_batch_norm, fuse_expressions, fuse_residuals, fuse_shortcuts)
    assert ops(graph) == ["conv2d", "conv2d"]
    joined = tuple(graph)[1]
    assert joined.inputs["shortcut"] == joined.inputs["x"] == next(iter(graph)).name
    assert joined.attributes["shortcut_stride"] == 2 and "residual" not in joined.inputs


@pytest.mark.parametrize(
    "run",
    [
        lambda p, x: (lambda y: F.relu(p.a(y)) + F.relu(p.b(y)))(p.first(x)),  # relu before the sum
        lambda p, x: (lambda y, z: (y + z, z * y))(p.b(p.first(x)).sigmoid(), p.a(p.first(x))),  # two users
        lambda p, x: (lambda y: (y + x.mean(1, keepdim=True).expand(-1, 8, -1, -1), y))(
            p.first(x)
        ),  # an output
        lambda p, x: (lambda y: y + y)(p.first(x)),  # both terms
        lambda p, x: p.first(x) + torch.ones(8, 1, 1),  # broadcast
    ],
)
def test_additions_that_are_not_fused(run: Callable[..., Any]) -> None:
    graph = after(run, fuse_expressions, fuse_residuals)
    assert all("residual" not in node.inputs for node in graph if node.op == "conv2d")


def test_a_chain_of_additions_is_fused_once_a_convolution() -> None:
    def run(p: Parts, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(p.first(x))
        return F.relu(p.a(y) + y + p.b(y))

    graph = after(run, fuse_expressions, fuse_residuals, fuse_expressions, fuse_shortcuts)
    assert ops(graph).count("add") == 0 and ops(graph).count("relu") == 0


@pytest.mark.parametrize(
    "run",
    [
        lambda p, x: (lambda y, s: (p.wide(y) + s, s * 2))(p.first(x), p.short(p.first(x))),  # read again
        lambda p, x: (lambda y: p.wide(y) + F.relu(p.short(y)))(p.first(x)),
        lambda p, x: p.first(x) + F.conv2d(x, torch.ones(8, 3, 1, 1)),  # 3 channels
        lambda p, x: (lambda s: p.a(s) + s)(p.b(p.first(x))),  # also read as x
    ],
)
def test_shortcuts_that_are_not_fused(run: Callable[..., Any]) -> None:
    graph = after(run, fold_constants, fuse_expressions, fuse_residuals, fuse_shortcuts)
    assert all("shortcut" not in node.inputs for node in graph)


def pooled_after(run: Callable[[Parts, torch.Tensor], Any], batch: int = 1, dtype: str = "fp16") -> Graph:
    graph = graph_of(run)
    done = for_batch(graph, dtype, batch)
    x = torch.randn(batch, 3, 6, 6)
    for old, new in zip(evaluate(graph, x), evaluate(done, x), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5)
    return done


@pytest.mark.parametrize(
    "run",
    [
        lambda p, x: p.head(F.adaptive_avg_pool2d(p.first(x), 1).flatten(1)),
        lambda p, x: p.head(p.first(x).mean((2, 3))),
        lambda p, x: p.head(F.avg_pool2d(p.first(x), 6).view(-1, 8)) * 2,
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16", "fp8"])
def test_the_mean_is_taken_by_the_layer_behind_it(run: Callable[..., Any], dtype: str) -> None:
    graph = pooled_after(run, dtype=dtype)
    linear = node_of(graph, "linear")
    assert linear.attributes["pooled"] and graph.nodes[linear.inputs["x"]].op == "conv2d"
    assert not {"adaptive_avg_pool2d", "reshape"} & set(ops(graph))


@pytest.mark.parametrize(
    "run",
    [
        lambda p, x: (lambda y: (p.head(y), y * 2))(p.first(x).mean((2, 3))),  # read again
        lambda p, x: (lambda y: (p.head(y), y))(p.first(x).mean((2, 3))),  # an output
        lambda p, x: (lambda y: (p.head(y.flatten(1)), y.sum()))(F.adaptive_avg_pool2d(p.first(x), 1)),
        lambda p, x: p.pair(F.adaptive_avg_pool2d(p.first(x), (1, 2)).flatten(1)),  # two pixels
        lambda p, x: p.head(F.adaptive_avg_pool2d(p.first(x), 1).view(1, -1, 8)),  # another shape
        lambda p, x: p.head(F.relu(p.first(x).mean((2, 3)))),
    ],
)
def test_means_that_stay_steps_of_their_own(run: Callable[..., Any]) -> None:
    assert "adaptive_avg_pool2d" in ops(pooled_after(run))


def test_the_mean_of_many_images_is_a_step_of_its_own() -> None:
    def run(p: Parts, x: torch.Tensor) -> torch.Tensor:
        return p.head(p.first(x).mean((2, 3)))

    assert "adaptive_avg_pool2d" in ops(pooled_after(run, batch=5))
    for fusion in FusionLevel:
        done = for_batch(optimize(graph_of(run), "fp16", fusion), "fp16", 1, fusion)
        assert ("adaptive_avg_pool2d" in ops(done)) == (fusion is not FusionLevel.fused)


def test_flattened_pixels_keep_their_order() -> None:
    graph = after(lambda p, x: p.fc(p.first(x).flatten(1)), reorder_flattened)
    assert node_of(graph, "reshape").attributes["order"] == "nhwc"
    graph = after(
        lambda p, x: (lambda f: (p.fc(f), f))(p.first(x).flatten(1)), reorder_flattened, assign_layouts
    )
    assert "order" not in node_of(graph, "reshape").attributes  # the model returns it: PyTorch's layout
    assert ops(graph) == ["convert", "conv2d", "convert", "reshape", "linear"]
    graph = after(lambda p, x: p.fc(p.first(x).softmax(-1).flatten(1)), reorder_flattened)
    assert "order" not in node_of(graph, "reshape").attributes  # planes already have PyTorch's layout


def test_values_are_converted_where_their_order_shows() -> None:
    def run(p: Parts, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = p.first(x)
        return F.relu(y.flatten(2).view(-1, 8, 6, 6)), y

    graph = after(run, assign_layouts)
    layouts = {name: layout_of(graph.nodes[name]) for name in graph.outputs}
    assert set(layouts.values()) == {"nchw"}
    for node in graph:
        if node.op == "reshape" and len(graph.shape_of(node.inputs["x"])) == 4:
            before = graph.nodes[node.inputs["x"]]
            assert layout_of(before) == "nchw"


def test_constants_are_computed_once() -> None:
    def run(p: Parts, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, p.a.weight[:, :3] * 2 + 1).mean((2, 3)) + torch.arange(8.0)

    graph = after(run, fold_constants)
    assert ops(graph) == ["aten", "adaptive_avg_pool2d", "reshape", "pointwise"]


def test_factories_like_a_value_are_constants() -> None:
    def run(p: Parts, x: torch.Tensor) -> torch.Tensor:
        mask = x.new_zeros(x.shape[2:])
        mask[:2, 1:] = 1.0
        mask[2:] = torch.full_like(x[0, 0, 2:], -3.0)
        return (x + mask) * torch.ones_like(mask)

    graph = after(run, fold_constants)
    assert set(ops(graph)) == {"pointwise"}


def test_batch_dependent_and_random_values_are_not_constants() -> None:
    def run(p: Parts, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return p.n.bias.expand(x.shape[0], -1), x.new_zeros(x.shape[0], 2)

    graph = after(run, fold_constants)
    assert any(node.attributes.get("target") == "aten::expand" for node in graph)
    graph = graph_of(lambda p, x: torch.rand_like(p.n.bias) + x.mean((1, 2, 3))[:, None])
    fold_constants(graph)
    assert any("rand_like" in node.attributes.get("target", "") for node in graph)


def test_no_unread_value_is_left() -> None:
    graph = graph_of(lambda p, x: (p.a(p.first(x)).sum(), p.b(p.first(x)))[1])
    assert ops(graph) == ["conv2d", "conv2d"]
    assert len(graph.constants) == 4


@pytest.mark.parametrize("fusion", list(FusionLevel))
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16"])
def test_all_passes_together_change_no_result(dtype: str, fusion: FusionLevel) -> None:
    def run(p: Parts, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.max_pool2d(F.relu(p.n(p.first(x))), 3, 1, 1)
        y = F.relu(p.m(p.a(y)) + y)
        z = F.relu(p.wn(p.wide(y)) + p.sn(p.short(y)))
        return p.fc(y.flatten(1)), z

    graph = graph_of(run)
    before = graph.copy()
    done = optimize(graph, dtype, fusion)
    same_results(graph, done)
    assert graph == before  # a plan of another dtype starts from it
    if fusion is FusionLevel.fused:
        assert not {"batch_norm", "relu", "add"} & set(ops(done))


def test_sizes_follow_the_batch() -> None:
    graph = graph_of(lambda p, x: p.first(x).flatten(0, 1))
    assert graph.shape_of(graph.outputs[0]) == (Batch(8), 6, 6)
    assert graph.at(5).shape_of(graph.outputs[0]) == (40, 6, 6)


def test_settled_networks_are_folded_without_growing() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    settle(model, torch.randn(4, 3, 8, 8))
    graph = capture(model, (torch.randn(1, 3, 8, 8),))
    done = optimize(graph, "fp32")
    same_results(graph, done, 8)


def test_norms_and_gelus_are_known() -> None:
    class Known(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.no_bias = nn.LayerNorm(6, elementwise_affine=False), nn.LayerNorm(6, bias=False)
            self.both = nn.LayerNorm((4, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.gelu(self.plain(x)) + F.gelu(self.no_bias(x), approximate="tanh")
            return self.both(y)

    graph = capture(Known(), (torch.randn(2, 4, 6),))
    norms = ["layer_norm", "gelu", "layer_norm", "gelu", "add", "reshape", "layer_norm", "reshape"]
    assert ops(graph) == norms
    x = torch.randn(3, 4, 6)
    torch.testing.assert_close(evaluate(graph, x)[0], Known()(x))


def test_sorting_puts_operands_first_and_names_a_node_that_depends_on_itself() -> None:
    graph = graph_of(lambda p, x: torch.tanh(p.first(x)) + 1.0)
    names = list(graph.nodes)
    first, last = graph.nodes[names[0]], graph.nodes[names[-1]]
    graph.arrange(list(reversed(graph.nodes.values())))
    sort_nodes(graph)
    assert list(graph.nodes) == names
    graph.nodes[first.name] = first.with_inputs(x=last.name)
    with pytest.raises(AssertionError, match="depends on itself"):
        sort_nodes(graph)
