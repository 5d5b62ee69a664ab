"""Chains of small linear layers as one step: which are matched, which are not, and unchanged results."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import escalade
from escalade import models
from escalade.engine import compile, load
from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.passes import FusionLevel, for_batch, optimize
from escalade.engine.passes.fuse_mlp import MAX_WEIGHT_BYTES
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.ops.mlp.problem import Layer, MlpProblem

TOLERANCE = {"fp32": 1e-5, "tf32": 1e-5, "fp16": 5e-3, "bf16": 4e-2}
SPECTRAL = (
    Layer(64, 64, 5, norm=True, activation="gelu"),
    Layer(320, 32, bias=False),
    Layer(32, 32, norm=True, activation="gelu"),
    Layer(32, 320, bias=False),
    Layer(64, 64, 5),
)


class Score(nn.Module):
    def __init__(self, model: models.SpectralAutoencoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.anomaly_score(x)


class Parts(nn.Module):
    """Layers for small chains."""

    def __init__(self, run: Callable[[Parts, torch.Tensor], Any]) -> None:
        super().__init__()
        self.run = run
        self.a, self.b, self.c = nn.Linear(12, 8), nn.Linear(8, 6, bias=False), nn.Linear(6, 12)
        self.frame, self.back = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.frame_norm = nn.LayerNorm(12), nn.LayerNorm(4, eps=1e-3)
        self.plain_norm = nn.LayerNorm(8, elementwise_affine=False)
        self.wide_in, self.wide_out = nn.Linear(12, 2100), nn.Linear(2100, 12)

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def graph_of(run: Callable[[Parts, torch.Tensor], Any], *shape: int) -> tuple[Parts, Graph]:
    torch.manual_seed(3)
    model = Parts(run).eval()
    for norm in (model.norm, model.frame_norm):
        nn.init.uniform_(norm.weight, -1, 2)
        nn.init.normal_(norm.bias)
    return model, capture(model, (torch.randn(2, *(shape or (12,))),))


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph]


def mlp_of(graph: Graph) -> Node:
    (found,) = (node for node in graph if node.op == "mlp")
    return found


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.detach().double()
    return float((found.double() - expected).norm() / expected.norm())


def check(model: nn.Module, graph: Graph, *shape: int, dtype: str = "fp32", device: str = "cpu") -> None:
    x = torch.randn(3, *shape)
    with torch.no_grad():
        expected = model(x)
    found = Engine(graph, dtype, device)(x)
    for one, other in zip(
        (found,) if isinstance(found, torch.Tensor) else found,
        (expected,) if isinstance(expected, torch.Tensor) else expected,
        strict=True,
    ):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert difference(one, other) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_the_spectral_autoencoder_is_one_step(dtype: str) -> None:
    model, x = models.model("spectral_autoencoder")
    graph = capture(model, (x,))
    mlp = mlp_of(optimize(graph, dtype))
    assert mlp.attributes == {"layers": SPECTRAL, "output": "y"} and mlp.inputs["x"] == graph.inputs[0].name
    (step,) = Engine(graph, dtype, "cpu").plan(x).steps
    assert step.lowered is not None
    assert step.lowered.problem == MlpProblem(1, SPECTRAL, "y", "fp32" if dtype == "tf32" else dtype)
    check(model, graph, 320, dtype=dtype)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_its_score_is_one_step_too_and_fp32(dtype: str) -> None:
    torch.manual_seed(4)
    model = Score(models.SpectralAutoencoder()).eval()
    x = torch.randn(5, 320)
    graph = capture(model, (x,))
    plan = Engine(graph, dtype, "cpu").plan(x)
    (step,) = plan.steps
    assert step.lowered is not None and step.lowered.problem == MlpProblem(5, SPECTRAL, "error", dtype)
    form = plan.forms[step.node.name]
    assert (form.shape, form.dtype) == ((5,), torch.float32)
    check(model, graph, 320, dtype=dtype)
    large = 40 * torch.randn(2, 320)  # mean squares beyond the precision of fp16, but not of fp32
    found = Engine(graph, "fp16", "cpu")(large)
    assert found.dtype == torch.float32 and difference(found, model(large)) < 1e-3


def test_the_operator_with_constant_parameters_is_one_step() -> None:
    torch.manual_seed(6)
    fused = models.FusedSpectralAutoencoder(8, 2, 4).eval()
    for model in (fused, Score(fused)):
        graph = capture(model, (torch.randn(2, 16),))
        assert ops(optimize(graph, "fp16")) == ["mlp"]
        check(model, graph, 16)
    named = nn.Parameter(torch.randn(3, 4))

    class Named(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return escalade.ops.mlp(x, [named], "4-3", rung="fused")

    assert ops(optimize(capture(Named(), (torch.randn(2, 4),)), "fp32")) == ["aten"], (
        "the caller's rung counts"
    )


@pytest.mark.parametrize("device", [None, "twin"])
def test_training_steps_of_the_operator_are_pytorchs(device: str | None) -> None:
    """Slices of the gradients are read in place if aligned, in fp32 also under autocast."""
    aligned, unaligned = (8, 2, 4), (6, 2, 3)
    # Launches: 3 to normalize the basis (5 with casts), 2 that pack weights, 1 forward, 1 loss, 2
    # backward, 5 for the gradient of the basis.
    for sizes, dtype, launches in ((aligned, "fp32", 14), (aligned, "fp16", 16), (unaligned, "fp16", None)):
        torch.manual_seed(7)
        plain, fused = models.SpectralAutoencoder(*sizes), models.FusedSpectralAutoencoder(*sizes)
        fused.load_state_dict(plain.state_dict())
        x = torch.randn(7, sizes[0] * sizes[1])
        theirs, own = (torch.optim.SGD(one.parameters(), 0.05, momentum=0.9) for one in (plain, fused))
        scale = 64.0 if dtype == "fp16" else None
        step = escalade.training_step(
            fused, F.mse_loss, own, (x, x), dtype=dtype, loss_scale=scale, device=device
        )
        close = 1e-5 if dtype == "fp32" else 5e-3
        for _ in range(3):
            theirs.zero_grad()
            loss = F.mse_loss(plain(x), x)
            loss.backward()
            theirs.step()
            torch.testing.assert_close(step(x, x), loss.detach(), rtol=close, atol=close)
        torch.testing.assert_close(fused.state_dict(), plain.state_dict(), rtol=close, atol=close)
        plan = step.explain()
        assert {"mlp", "mlp_backward"} <= {one.operation for one in plan.steps}
        if device == "twin":
            assert not any(one.rung == "PyTorch" for one in plan.steps)
            assert launches in (None, plan.launches)


@pytest.mark.parametrize("fusion", [FusionLevel.naive, FusionLevel.separate])
def test_other_fusion_levels_keep_every_layer_apart(fusion: FusionLevel) -> None:
    model, x = models.model("spectral_autoencoder")
    graph = optimize(capture(model, (x,)), "fp16", fusion)
    assert ops(graph).count("linear") == 5 and ops(graph).count("layer_norm") == 2
    assert ops(graph).count("gelu") == 2 and "aten" not in ops(graph) and "mlp" not in ops(graph)
    engine = Engine(capture(model, (x,)), "fp32", "cpu", fusion=fusion)
    assert difference(engine(x), model(x)) < TOLERANCE["fp32"]


@pytest.mark.share(7)
@pytest.mark.parametrize(
    ("bands", "frames", "latent"),
    [(40, 1, 8), (64, 10, 16), (128, 5, 32), (48, 3, 128), (128, 10, 32), (7, 2, 3)],
)
def test_other_sizes_that_fit(bands: int, frames: int, latent: int) -> None:
    torch.manual_seed(5)
    made = models.SpectralAutoencoder(bands, frames, latent)
    for model in (made, Score(made)):
        graph = capture(model, (torch.randn(1, frames * bands),))
        assert ops(optimize(graph, "fp16")) == ["mlp"]
        check(model, graph, frames * bands)


@pytest.mark.parametrize(("bands", "frames", "latent"), [(128, 10, 128), (128, 10, 64), (96, 10, 100)])
def test_sizes_that_do_not_fit_whole(bands: int, frames: int, latent: int) -> None:
    """Parts of them may."""
    torch.manual_seed(6)
    model = Score(models.SpectralAutoencoder(bands, frames, latent))
    graph = capture(model, (torch.randn(1, frames * bands),))
    done = optimize(graph, "fp16")
    assert len(ops(done)) > 1
    for node in done:
        if node.op == "mlp":
            layers = node.attributes["layers"]
            assert len(layers) > 1 and node.attributes["output"] == "y"
            assert 2 * sum(layer.weight_elements for layer in layers) <= MAX_WEIGHT_BYTES
    check(model, graph, frames * bands)


@pytest.mark.parametrize(
    ("run", "shape", "layers"),
    [
        (
            lambda p, x: p.c(F.gelu(p.b(F.relu(p.a(p.norm(x)))), approximate="tanh")), (12,),
            (Layer(12, 8, norm=True, activation="relu"), Layer(8, 6, bias=False, activation="gelu_tanh"), Layer(6, 12)),
        ),
        (  # a LayerNorm without its own weight
            lambda p, x: p.b(p.plain_norm(p.a(x))), (12,), (Layer(12, 8), Layer(8, 6, norm=True, bias=False)),
        ),
        (  # frames are rows; no layer mixes the items of a batch
            lambda p, x: p.a(p.frame(p.frame_norm(x.view(-1, 4))).view(-1, 12)), (12,),
            (Layer(4, 4, 3, norm=True, epsilon=1e-3), Layer(12, 8)),
        ),
        (  # a row is a frame if no layer reads more
            lambda p, x: p.back(F.gelu(p.frame(x))), (3, 4), (Layer(4, 4, activation="gelu"), Layer(4, 4)),
        ),
        (  # halves and thirds of an item
            lambda p, x: p.a(p.frame(x.view(-1, 4)).view(-1, 12)).view(-1, 2, 4) * 1, (12,),
            (Layer(4, 4, 3), Layer(12, 8)),
        ),
        (  # products with the model's matrices
            lambda p, x: (x @ p.a.weight.T) @ F.normalize(p.a.weight, dim=0), (12,),
            (Layer(12, 8, bias=False), Layer(8, 12, bias=False)),
        ),
    ],
)  # fmt: skip
def test_chains_that_are_caught(
    run: Callable[..., Any], shape: tuple[int, ...], layers: tuple[Layer, ...]
) -> None:
    model, graph = graph_of(run, *shape)
    done = optimize(graph, "fp32")
    assert mlp_of(done).attributes["layers"] == layers
    assert not {"linear", "gelu", "relu", "layer_norm"} & set(ops(done))
    check(model, graph, *shape)


@pytest.mark.parametrize(
    "run",
    [
        lambda p, x: F.gelu(p.a(p.norm(x))),  # a single layer
        lambda p, x: (lambda y: (p.b(y), y))(p.a(x)),  # the value in between is returned
        lambda p, x: (lambda y: p.b(y) + p.b(F.relu(y)))(p.a(x)),  # and read twice
        lambda p, x: p.b(F.relu6(p.a(x))),
        lambda p, x: p.b(torch.sigmoid(p.a(x))),
        lambda p, x: p.b(F.relu(F.gelu(p.a(x)))),  # one after the other
        lambda p, x: p.wide_out(p.wide_in(x)),  # too wide between
        lambda p, x: p.a(F.silu(p.norm(x))),  # more than a norm
        lambda p, x: p.b(F.rms_norm(p.a(x), (p.a.out_features,))),  # a different norm
        lambda p, x: p.back(
            p.frame_norm(p.frame(x.view(-1, 4, 3, 1).permute(0, 2, 3, 1)))
        ),  # of four dimensions
        lambda p, x: p.a(p.frame(x.view(-1, 3, 4)).transpose(1, 2).flatten(1)),
    ],
)
def test_chains_that_are_not_caught(run: Callable[..., Any]) -> None:
    model, graph = graph_of(run)
    assert "mlp" not in ops(optimize(graph, "fp32"))
    check(model, graph, 12)


def test_a_norm_over_two_dimensions_is_one_of_a_row() -> None:
    model, graph = graph_of(lambda p, x: p.a(F.layer_norm(p.frame(x.view(-1, 3, 4)), (3, 4)).flatten(1)))
    assert ops(optimize(graph, "fp32")) == ["mlp"]
    check(model, graph, 12)


def test_a_norm_of_other_groups_begins_a_new_chain() -> None:
    def run(p: Parts, x: torch.Tensor) -> torch.Tensor:
        y = p.c(F.relu(p.b(p.a(x))))
        return p.back(p.frame(p.frame_norm(y.view(-1, 3, 4)).flatten(1).view(-1, 4)))

    model, graph = graph_of(run)
    assert ops(optimize(graph, "fp32")) == ["mlp"]  # each frame separately, whatever its intermediate shape

    def other(p: Parts, x: torch.Tensor) -> torch.Tensor:
        y = p.c(F.relu(p.b(p.a(x))))
        return p.b(p.a(p.frame_norm(y.view(-1, 3, 4)).flatten(1)))

    model, graph = graph_of(other)
    assert [op for op in ops(optimize(graph, "fp32")) if op != "reshape"] == ["mlp", "layer_norm", "mlp"]
    check(model, graph, 12)


def test_heavy_layers_split_a_chain() -> None:
    """3 x 60,000 weights: no two fit together, but the small ones do."""
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(600, 200), nn.ReLU(), nn.Linear(200, 600), nn.GELU(), nn.Linear(600, 20), nn.ReLU(),
        nn.Linear(20, 4), nn.GELU(), nn.Linear(4, 2),
    ).eval()  # fmt: skip
    graph = capture(model, (torch.randn(1, 600),))
    done = optimize(graph, "fp16")
    assert ops(done) == ["linear", "linear", "mlp"]
    assert mlp_of(done).attributes["layers"][0] == Layer(600, 20, activation="relu")
    check(model, graph, 600)


def test_large_heads_stay_as_they_are() -> None:
    model, x = models.model("resnet18")
    assert "mlp" not in ops(optimize(capture(model, (x,)), "fp16"))
    first, second, third = nn.Linear(1024, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 1000)
    head = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)  # VGG's, after fewer pixels
    assert ops(optimize(capture(head, (torch.randn(1, 1024),)), "fp16")).count("linear") == 3


SCORES: dict[str, Callable[..., Any]] = {
    "the other way round": lambda y, x: (x - y).pow(2).mean(-1),
    "a product": lambda y, x: (lambda d: d * d)(y - x).mean(1),
    "by name": lambda y, x: F.mse_loss(y, x, reduction="none").mean(1, keepdim=True),
    "in frames": lambda y, x: (y.view(-1, 3, 4) - x.view(-1, 3, 4)).square().mean((1, 2)),
    "compared": lambda y, x: (y - x).square().mean(1) > 0.5,
}


@pytest.mark.parametrize("name", SCORES)
def test_the_error_in_other_words(name: str) -> None:
    model, graph = graph_of(lambda p, x: SCORES[name](p.c(F.relu(p.b(p.a(x)))), x))
    for dtype in ("fp32", "fp16"):
        done = optimize(graph, dtype)
        assert mlp_of(done).attributes["output"] == "error"
        assert set(ops(done)) <= {"mlp", "pointwise"} and ops(done).count("pointwise") == (name == "compared")
    x = torch.randn(4, 12)
    torch.testing.assert_close(Engine(graph, "fp32", "cpu")(x), model(x))
    assert torch.isfinite(Engine(graph, "fp16", "cpu")(x).float()).all()


@pytest.mark.parametrize(
    "error",
    [
        lambda y, x: (y - x).square().sum(1),
        lambda y, x: (y - x).square().mean(0),
        lambda y, x: (y - x).square().mean(),
        lambda y, x: (y - 2 * x).square().mean(1),
        lambda y, x: torch.sub(y, x, alpha=2).square().mean(1),
        lambda y, x: (y - x).pow(3).mean(1),
        lambda y, x: (y - x[:1]).square().mean(1),
        lambda y, x: ((y - x).square().mean(1), y),
        lambda y, x: (lambda d: (d.square().mean(1), d))(y - x),
        lambda y, x: (y - x).view(-1, 3, 4).square().mean(2),
        lambda y, x: F.relu((y - x).square().mean(1)),  # a kernel of the plan's own dtype reads it
    ],
)
def test_other_errors_than_per_row_ones(error: Callable[..., Any]) -> None:
    model, graph = graph_of(lambda p, x: error(p.c(F.relu(p.b(p.a(x)))), x))
    assert mlp_of(optimize(graph, "fp32")).attributes["output"] == "y"
    x = torch.randn(2, 12)
    torch.testing.assert_close(Engine(graph, "fp32", "cpu")(x), model(x))


class Head(nn.Module):
    """A convolution whose flattened result goes into a chain."""

    def __init__(self, norm: bool, error: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 6, 3)
        self.norm = nn.LayerNorm(6 * 4 * 5) if norm else nn.Identity()
        self.a, self.b = nn.Linear(6 * 4 * 5, 7), nn.Linear(7, 6 * 4 * 5)
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).flatten(1)
        y = self.b(F.relu(self.a(self.norm(x))))
        return (y - x).square().mean(1) if self.error else y


@pytest.mark.parametrize("norm", [False, True])
def test_a_chain_reads_flattened_pixels_in_place(norm: bool) -> None:
    torch.manual_seed(8)
    model = Head(norm).eval()
    if norm:
        assert isinstance(model.norm, nn.LayerNorm)
        nn.init.normal_(model.norm.weight)
        nn.init.normal_(model.norm.bias)
    graph = capture(model, (torch.randn(1, 8, 6, 7),))
    plan = Engine(graph, "fp32", "cpu").plan(torch.randn(2, 8, 6, 7))
    assert [step.node.op for step in plan.steps] == ["convert", "conv2d", "reshape", "mlp"]
    check(model, graph, 8, 6, 7)
    check(model, graph, 8, 6, 7, device="twin")


def test_a_chain_that_is_compared_with_pixels_takes_them_in_order() -> None:
    torch.manual_seed(9)
    model = Head(True, error=True).eval()
    graph = capture(model, (torch.randn(1, 8, 6, 7),))
    done = optimize(graph, "fp32")
    assert mlp_of(done).attributes["output"] == "error"
    assert ops(done) == ["convert", "conv2d", "convert", "reshape", "mlp"]
    check(model, graph, 8, 6, 7)


@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("score", [False, True])
def test_kernels_match_the_plan(score: bool, dtype: str) -> None:
    torch.manual_seed(10)
    made = models.SpectralAutoencoder(24, 3, 8)
    model = (Score(made) if score else made).eval()
    graph = capture(model, (torch.randn(1, 72),))
    twin = Engine(graph, dtype, "twin")
    x = torch.randn(21, 72)
    program = twin.program(x)
    assert isinstance(program, KernelProgram) and len(program.plan.steps) == 1
    program._values.arena.fill_(0xFF)
    y = twin(x)
    with torch.no_grad():
        assert difference(y, model(x)) <= TOLERANCE[dtype]
    assert y.dtype == torch.float32 and difference(y, Engine(graph, dtype, "cpu")(x)) <= TOLERANCE[dtype]


def test_a_saved_score_comes_back(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(11)
    model = Score(models.SpectralAutoencoder(16, 3, 8)).eval()
    x = torch.randn(4, 48)
    engine = compile(model, x, dtype="fp16", device="cpu")
    engine.save(tmp_path / "score.engine")
    again = load(tmp_path / "score.engine", device="cpu")
    assert [step.node.op for step in again.plan(x).steps] == ["mlp"]
    torch.testing.assert_close(again(x), engine(x), rtol=0, atol=0)
    assert (tmp_path / "score.engine").stat().st_size < 4 * 1.1 * sum(
        p.numel() for p in model.parameters()
    ) + 16384


@pytest.mark.parametrize(("dtype", "most_rows"), [("fp16", 512), ("fp32", None)])
def test_many_rows_are_left_to_tensor_cores_where_the_chain_has_none(
    dtype: str, most_rows: int | None
) -> None:
    """A token mixer: one row per image channel, and hidden features as wide as the input."""
    model = nn.Sequential(nn.Linear(196, 256), nn.GELU(), nn.Linear(256, 196))
    graph = optimize(capture(model, (torch.randn(1, 196),)), dtype)
    for rows in (1, 512, 4096):
        is_one = most_rows is None or rows <= most_rows
        assert ("mlp" in ops(for_batch(graph, dtype, rows))) is is_one
