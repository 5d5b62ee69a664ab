"""Each rewriting by itself on small graphs: what it does, what it must leave alone, and that results stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine.capture import capture
from escalade.engine.compiler import _normalise
from escalade.engine.graph import Batch, Graph, Node
from escalade.engine.passes import for_batch, optimise
from escalade.engine.passes.batch_norm import fold_batch_norm
from escalade.engine.passes.fuse import fuse_activations, fuse_residuals, fuse_shortcuts
from escalade.engine.passes.layout import convert_between, convert_inputs, layout_of, reorder_flattened
from escalade.engine.passes.simplify import fold_constants, remove_dead_code
from escalade.engine.passes.stem import fuse_stem
from escalade.engine.reference import compute
from escalade.engine.way import Way
from escalade.models import settle


class Parts(nn.Module):
    """Layers to build small networks of."""

    def __init__(self, run: Callable[[Parts, torch.Tensor], Any]) -> None:
        super().__init__()
        self.run = run
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.a = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.b = nn.Conv2d(8, 8, 1)
        self.wide = nn.Conv2d(8, 16, 3, 2, 1, bias=False)
        self.short = nn.Conv2d(8, 16, 1, 2, bias=False)
        self.n, self.m = nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False)
        self.wn, self.sn = nn.BatchNorm2d(16), nn.BatchNorm2d(16)
        self.fc, self.fn = nn.Linear(8 * 6 * 6, 5), nn.BatchNorm1d(5)
        self.rows, self.rn = nn.Linear(36, 4), nn.BatchNorm1d(8)
        self.head, self.pair = nn.Linear(8, 5), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def graph_of(run: Callable[[Parts, torch.Tensor], Any], side: int = 6) -> Graph:
    torch.manual_seed(1)
    model = Parts(run)
    for norm in model.modules():
        if isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d)):
            assert norm.running_mean is not None and norm.running_var is not None
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.3, 3)
            if norm.affine:
                nn.init.uniform_(norm.weight, -1, 2)
                nn.init.normal_(norm.bias)
    graph = capture(model, (torch.randn(1, 3, side, side),))
    remove_dead_code(graph)
    return graph


def evaluate(graph: Graph, x: torch.Tensor) -> list[torch.Tensor]:
    fixed = graph.at(x.shape[0])
    values = {fixed.inputs[0].name: x, **fixed.constants}
    with torch.no_grad():
        for node in fixed:
            values[node.name] = compute(node, {role: values[name] for role, name in node.inputs.items()})
            assert tuple(values[node.name].shape) == node.shape, node
    return [values[name] for name in fixed.outputs]


def same_results(before: Graph, after: Graph, side: int = 6) -> None:
    x = torch.randn(3, 3, side, side)
    for old, new in zip(evaluate(before, x), evaluate(after, x), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5)


def after(
    run: Callable[[Parts, torch.Tensor], Any], *passes: Callable[[Graph], object], side: int = 6
) -> Graph:
    graph = graph_of(run, side)
    changed = graph.copy()
    for each in passes:
        each(changed)
    remove_dead_code(changed)
    same_results(graph, changed, side)
    return changed


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph]


def node_of(graph: Graph, op: str) -> Node:
    (found,) = (node for node in graph if node.op == op)
    return found


@pytest.mark.parametrize(
    "run",
    [
        lambda p, x: p.n(p.first(x)),  # with a bias
        lambda p, x: p.n(p.a(p.first(x).relu())),  # without
        lambda p, x: p.m(p.first(x)),  # no scale of its own
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
        lambda p, x: p.n(p.first(x).relu()),  # not right behind it
        lambda p, x: p.rn(p.rows(p.first(x).flatten(2))),  # normalises rows
        lambda p, x: p.n(x[:, :1].expand(-1, 8, -1, -1)),  # no layer in front
    ],
)
def test_batch_norm_that_is_not_folded(run: Callable[..., Any]) -> None:
    graph = after(run, fuse_activations, fold_batch_norm)
    assert ops(graph).count("batch_norm") == 1


def test_folding_two_norms_of_one_weight_keeps_them_apart() -> None:
    graph = after(lambda p, x: p.n(p.a(p.first(x))) + p.m(p.a(p.first(x))), fold_batch_norm)
    weights = {node.inputs["weight"] for node in graph if node.op == "conv2d"}
    assert "batch_norm" not in ops(graph) and len(weights) == 3  # the first one's own, and two of a's


def test_relu_is_fused() -> None:
    graph = after(lambda p, x: F.relu(p.n(F.relu(p.first(x)))), fuse_activations)
    assert ops(graph) == ["conv2d", "batch_norm"]
    assert all(node.attributes["relu"] for node in graph)


@pytest.mark.parametrize(
    ("run", "left"),
    [
        (lambda p, x: F.relu6(p.first(x)), 1),
        (lambda p, x: (lambda y: (F.relu(y), y))(p.first(x)), 1),
        (lambda p, x: (lambda y: F.relu(y) * y)(p.first(x)), 1),
        (lambda p, x: F.relu(F.max_pool2d(p.first(x), 2)), 1),
        (lambda p, x: F.relu(x), 1),
    ],
)
def test_relu_that_is_not_fused(run: Callable[..., Any], left: int) -> None:
    graph = after(run, fuse_activations)
    assert ops(graph).count("relu") == left


def fused_block(p: Parts, x: torch.Tensor) -> torch.Tensor:
    y = F.relu(p.first(x))
    return F.relu(p.n(p.a(y)) + y)


def test_the_way_around_is_added_by_the_convolution() -> None:
    graph = after(fused_block, fold_batch_norm, fuse_activations, fuse_residuals, fuse_activations)
    first, second = graph
    assert ops(graph) == ["conv2d", "conv2d"]
    assert second.inputs["residual"] == first.name and second.attributes["relu"]


def test_the_larger_convolution_takes_the_other() -> None:
    def run(p: Parts, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(p.first(x))
        return p.sn(p.short(y)) + p.wn(p.wide(y))  # the small one first

    graph = after(run, fold_batch_norm, fuse_activations, fuse_residuals)
    taker = next(node for node in graph if "residual" in node.inputs)
    assert graph.constants[taker.inputs["weight"]].shape[2:] == (3, 3)
    assert graph.constants[graph.nodes[taker.inputs["residual"]].inputs["weight"]].shape[2:] == (1, 1)
    graph = after(run, fold_batch_norm, fuse_activations, fuse_residuals, fuse_shortcuts)
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
    graph = after(run, fuse_activations, fuse_residuals)
    assert all("residual" not in node.inputs for node in graph if node.op == "conv2d")


def test_a_chain_of_additions_is_fused_once_a_convolution() -> None:
    def run(p: Parts, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(p.first(x))
        return F.relu(p.a(y) + y + p.b(y))

    graph = after(run, fuse_activations, fuse_residuals, fuse_activations, fuse_shortcuts)
    assert ops(graph).count("add") == 0 and ops(graph).count("relu") == 0


@pytest.mark.parametrize(
    "run",
    [
        lambda p, x: (lambda y, s: (p.wide(y) + s, s * 2))(p.first(x), p.short(p.first(x))),  # read again
        lambda p, x: (lambda y: p.wide(y) + F.relu(p.short(y)))(p.first(x)),
        lambda p, x: p.first(x) + F.conv2d(x, torch.ones(8, 3, 1, 1)),  # 3 channels
    ],
)
def test_shortcuts_that_are_not_fused(run: Callable[..., Any]) -> None:
    graph = after(run, fold_constants, fuse_activations, fuse_residuals, fuse_shortcuts)
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
    for way in Way:
        done = for_batch(optimise(graph_of(run), "fp16", way), "fp16", 1, way)
        assert ("adaptive_avg_pool2d" in ops(done)) == (way is not Way.fused)


class Stem(nn.Module):
    def __init__(self, pool: nn.Module | None, filters: int = 16, bias: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, filters, 7, 2, 3, bias=bias)
        self.pool = pool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.conv(x))
        return y if self.pool is None else self.pool(y)


def stem_of(model: nn.Module, normalise: bool) -> tuple[Graph, Graph]:
    torch.manual_seed(2)
    graph = capture(model, (torch.randn(1, 3, 12, 12),))
    if normalise:
        _normalise(graph, ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)))
    changed = graph.copy()
    fuse_activations(changed)
    fuse_stem(changed)
    convert_inputs(changed, pad_channels=True)
    remove_dead_code(changed)
    same_results(graph, changed, 12)
    return graph, changed


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(
    ("pool", "window"),
    [(None, None), (nn.MaxPool2d(3, 2, 1), (3, 2, 1)), (nn.MaxPool2d(2), (2, 2, 0))],
)
def test_the_stem_is_one_step(pool: nn.Module | None, window: Any, normalise: bool) -> None:
    _, graph = stem_of(Stem(pool), normalise)
    assert ops(graph) == ["stem"]
    stem = node_of(graph, "stem")
    assert stem.attributes["pool"] == window and stem.attributes["relu"]
    assert stem.inputs["x"] == graph.inputs[0].name and ("scale" in stem.inputs) == normalise


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(
    "pool",
    [nn.MaxPool2d(3, 2), nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d((2, 3), (2, 3)), nn.AvgPool2d(2)],
)
def test_other_pools_stay_behind_the_stem(pool: nn.Module, normalise: bool) -> None:
    _, graph = stem_of(Stem(pool), normalise)
    assert ops(graph)[0] == "stem" and len(ops(graph)) == 2


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("model", [Stem(None, filters=12), Stem(None, bias=False)])
def test_what_is_no_stem_reads_a_padded_image(model: nn.Module, normalise: bool) -> None:
    _, graph = stem_of(model, normalise)
    assert ops(graph) == ["convert", "conv2d"]
    convert = node_of(graph, "convert")
    assert convert.shape[1] == 4 and ("scale" in convert.inputs) == normalise
    weight = graph.constants[node_of(graph, "conv2d").inputs["weight"]]
    assert weight.shape[1] == 4 and not weight[:, 3].any()


def test_an_image_that_others_read_is_not_padded() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 12, 3, padding=1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.conv(x), x * 2

    for normalise in (False, True):
        _, graph = stem_of(Both(), normalise)
        assert node_of(graph, "convert").shape[1] == 3


def test_an_image_of_a_stem_can_be_read_by_others() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 16, 3, padding=1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return F.relu(self.conv(x)), x * 2

    _, graph = stem_of(Both(), False)
    assert sorted(ops(graph)) == ["aten", "convert", "stem"]
    _, graph = stem_of(Both(), True)
    assert sorted(ops(graph)) == ["aten", "conv2d", "convert"]


def test_flattened_pixels_keep_their_order() -> None:
    graph = after(lambda p, x: p.fc(p.first(x).flatten(1)), reorder_flattened)
    assert node_of(graph, "reshape").attributes["order"] == "nhwc"
    graph = after(
        lambda p, x: (lambda f: (p.fc(f), f))(p.first(x).flatten(1)), reorder_flattened, convert_between
    )
    assert "order" not in node_of(graph, "reshape").attributes  # the model returns it: PyTorch's order
    assert ops(graph) == ["conv2d", "convert", "reshape", "linear"]


def test_values_are_converted_where_their_order_shows() -> None:
    def run(p: Parts, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = p.first(x)
        return F.relu(y.flatten(2).view(-1, 8, 6, 6)), y

    graph = after(run, convert_between)
    layouts = {name: layout_of(graph.nodes[name]) for name in graph.outputs}
    assert set(layouts.values()) == {"nchw"}
    for node in graph:
        if node.op == "reshape" and len(graph.shape_of(node.inputs["x"])) == 4:
            assert layout_of(graph.nodes[node.inputs["x"]]) == "nchw"


def test_constants_are_computed_once() -> None:
    def run(p: Parts, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, p.a.weight[:, :3] * 2 + 1).mean((2, 3)) + torch.arange(8.0)

    graph = after(run, fold_constants)
    assert ops(graph) == ["aten", "adaptive_avg_pool2d", "reshape", "aten"]


def test_what_depends_on_the_batch_or_on_chance_is_not_a_constant() -> None:
    def run(p: Parts, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        token = p.n.bias.expand(x.shape[0], -1)
        return torch.cat([token, x.flatten(1)], 1), x.new_zeros(x.shape[0], 2)

    graph = after(run, fold_constants)
    assert any(node.attributes.get("target") == "aten::expand" for node in graph)
    graph = graph_of(lambda p, x: torch.rand_like(p.n.bias) + x.mean((1, 2, 3))[:, None])
    fold_constants(graph)
    assert any("rand_like" in node.attributes.get("target", "") for node in graph)


def test_nothing_is_left_that_nobody_reads() -> None:
    graph = graph_of(lambda p, x: (p.a(p.first(x)).sum(), p.b(p.first(x)))[1])
    assert ops(graph) == ["conv2d", "conv2d"]
    assert len(graph.constants) == 4


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16"])
def test_all_passes_together_change_no_result(dtype: str, way: Way) -> None:
    def run(p: Parts, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.max_pool2d(F.relu(p.n(p.first(x))), 3, 1, 1)
        y = F.relu(p.m(p.a(y)) + y)
        z = F.relu(p.wn(p.wide(y)) + p.sn(p.short(y)))
        return p.fc(y.flatten(1)), z

    graph = graph_of(run)
    before = graph.copy()
    done = optimise(graph, dtype, way)
    same_results(graph, done)
    assert graph == before  # a plan of another dtype starts from it
    if way is Way.fused:
        assert not {"batch_norm", "relu", "add"} & set(ops(done))


def test_sizes_follow_the_batch() -> None:
    graph = graph_of(lambda p, x: p.first(x).flatten(0, 1))
    assert graph.shape_of(graph.outputs[0]) == (Batch(8), 6, 6)
    assert graph.at(5).shape_of(graph.outputs[0]) == (40, 6, 6)


def test_settled_networks_are_folded_without_growing() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    settle(model, torch.randn(4, 3, 8, 8))
    graph = capture(model, (torch.randn(1, 3, 8, 8),))
    done = optimise(graph, "fp32")
    same_results(graph, done, 8)


class Computed(nn.Module):
    """Layers whose weights the model computes from its parameters."""

    def __init__(self, run: Callable[[Computed, torch.Tensor], Any]) -> None:
        super().__init__()
        self.run = run
        self.w = nn.Parameter(torch.randn(7, 12))
        self.b = nn.Parameter(torch.randn(7))
        self.small = nn.Parameter(torch.randn(64, 1))

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def computed(
    run: Callable[[Computed, torch.Tensor], Any], *shape: int
) -> tuple[Computed, Graph, torch.Tensor]:
    torch.manual_seed(15)
    model, x = Computed(run), torch.randn(2, *(shape or (12,)))
    return model, capture(model, (x,)), x


@pytest.mark.parametrize(
    ("run", "shape"),
    [
        (lambda m, x: x @ F.normalize(m.w, dim=1).T, (12,)),
        (lambda m, x: torch.matmul(x, m.w.T), (5, 12)),
        (lambda m, x: torch.mm(x, m.w.t()), (12,)),
        (lambda m, x: torch.addmm(m.b, x, m.w.t()), (12,)),
        (lambda m, x: F.linear(x, m.w / m.w.norm(dim=1, keepdim=True), m.b.exp()), (12,)),
        (lambda m, x: x[:, :7] @ m.w, (12,)),
    ],
)
def test_products_with_constants_are_linear_layers(run: Callable[..., Any], shape: tuple[int, ...]) -> None:
    model, graph, x = computed(run, *shape)
    done = optimise(graph, "fp32")
    linear = node_of(done, "linear")
    assert {node.attributes["target"] for node in done if node.op == "aten"} <= {"aten::slice.Tensor"}
    assert done.constants[linear.inputs["weight"]].is_contiguous()
    torch.testing.assert_close(evaluate(done, x)[0], model(x))


@pytest.mark.parametrize(
    ("run", "shape"),
    [
        (lambda m, x: x @ x.T, (12,)),
        (lambda m, x: m.w @ x, (12, 4)),  # the constant in front
        (lambda m, x: torch.addmm(m.b, x, m.w.t(), alpha=2), (12,)),
        (lambda m, x: torch.addmm(x[:, :7], x, m.w.t()), (12,)),  # what is added comes with the input
        (lambda m, x: x @ m.b[:, None].expand(7, 7).expand(2, 7, 7), (7, 7)),  # a matrix for each item
    ],
)
def test_other_products_are_pytorchs(run: Callable[..., Any], shape: tuple[int, ...]) -> None:
    model, graph, x = computed(run, *shape)
    done = optimise(graph, "fp32")
    assert "linear" not in ops(done)
    torch.testing.assert_close(evaluate(done, x)[0], model(x))


def test_convolutions_with_computed_weights_are_escalades() -> None:
    def run(m: Computed, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, m.w.view(7, 3, 2, 2) * m.b.view(7, 1, 1, 1), m.b + 1)

    model, graph, x = computed(run, 3, 5, 5)
    done = optimise(graph, "fp32")
    assert "aten" not in ops(done)
    torch.testing.assert_close(evaluate(done, x)[0], model(x))


def test_constants_are_summed_in_float64() -> None:
    model, graph, _ = computed(lambda m, x: x[:, :1] + m.w.sum())
    fold_constants(graph)
    (total,) = (tensor for tensor in graph.constants.values() if tensor.dim() == 0)
    assert total.dtype == torch.float32
    assert float(total) == float(model.w.detach().double().sum().float())


def test_constants_that_would_grow_are_computed_each_time() -> None:
    model, graph, x = computed(lambda m, x: (x[:, :1, None] + m.small.expand(64, 2**17)).amax((1, 2)))
    fold_constants(graph)
    assert any(node.attributes.get("target") == "aten::expand" for node in graph)
    torch.testing.assert_close(evaluate(graph, x)[0], model(x))
    model, graph, x = computed(lambda m, x: (x[:, :1, None] + m.small.expand(64, 16)).amax((1, 2)))
    fold_constants(graph)
    assert not any(node.attributes.get("target") == "aten::expand" for node in graph)


def test_constants_keep_their_bits_where_they_are_reinterpreted() -> None:
    model, graph, x = computed(lambda m, x: x[:, :7] + m.b.view(torch.int32).bitwise_and(1).float())
    fold_constants(graph)
    assert ops(graph)[-1] in ("add", "aten")
    torch.testing.assert_close(evaluate(graph, x)[0], model(x), rtol=0, atol=0)


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
    assert ops(graph) == ["layer_norm", "gelu", "layer_norm", "gelu", "add", "aten"]
    x = torch.randn(3, 4, 6)
    torch.testing.assert_close(evaluate(graph, x)[0], Known()(x))
