"""mlp: its problem, refusals, and agreement with PyTorch as an operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.device.recipe import KernelCall
from escalade.errors import UnsupportedError
from escalade.models.autoencoders import SpectralAutoencoder
from escalade.ops import OPERATIONS, mlp
from escalade.ops.base.cards import typical_card
from escalade.ops.choose.choice import choose
from escalade.ops.mlp import Layer, MlpOperation, MlpProblem
from escalade.ops.mlp.persistent import Persistent, PersistentConfig, Shape, plan
from escalade.ops.mlp.problem import AUTOENCODER, parse_layers, spell_layers

CPU = torch.device("cpu")
LAYERS = (Layer(8, 6, 2, norm=True, activation="gelu"), Layer(12, 16, bias=False))
RUNGS = [rung.name for rung in MlpOperation.ladder if rung.supports(MlpProblem(1, LAYERS)) is None]


def tensors(layers: tuple[Layer, ...] = LAYERS, rows: tuple[int, ...] = (3,)) -> list[torch.Tensor]:
    """x, then the parameters."""
    problem = MlpProblem(max(1, torch.Size(rows).numel()), layers)
    inputs = MlpOperation().inputs(problem, CPU, 1)
    x = inputs.pop("x")[: torch.Size(rows).numel()].reshape(*rows, problem.features)
    return [x, *inputs.values()]


def expected(x: torch.Tensor, parameters: list[torch.Tensor], error: bool = False) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    problem = MlpProblem(len(rows), LAYERS, "error" if error else "y")
    y = MlpOperation().reference(problem, {"x": rows, **dict(zip(problem.sizes, parameters, strict=True))})
    return y.reshape((*x.shape[:-1], *y.shape[1:]))


def assert_close(result: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(result, wanted.to(result.dtype), rtol=1e-5, atol=1e-5, equal_nan=True)


# --- the problem


def test_names_and_sizes() -> None:
    name = "5x64n-64bg_320-32_32n-32bg_32-320_5x64-64b_b512_error"
    problem = MlpProblem.parse(name, "fp16")
    assert problem == MlpProblem(512, AUTOENCODER, "error", "fp16") and problem.name == name
    assert problem.flops == 2 * 512 * 62_464
    assert problem.bytes == 2 * (512 * 320 + problem.parameter_elements) + 4 * 512
    assert list(problem.sizes)[:5] == ["norm_weight0", "norm_bias0", "weight0", "bias0", "weight1"]
    with pytest.raises(UnsupportedError, match="the form is"):
        MlpProblem.parse("320to64")


def test_layers_are_spelled_and_read_again() -> None:
    layers = (Layer(8, 4, 3, norm=True, bias=False, activation="gelu_tanh", epsilon=1e-3), Layer(12, 1))
    assert spell_layers(layers) == "3x8n1e-3-4t_12-1b"
    assert parse_layers("3x8n1e-3-4t_12-1b") == layers


@pytest.mark.parametrize(
    ("layers", "output", "sentence"),
    [
        ("8-4_5-3", "y", "4 outputs, but layer 5-3 takes 5"),
        ("8-4", "error", "has 4 and 8"),
        ("20000-4", "y", "up to 16384"),
    ],
)
def test_chains_that_make_no_sense(layers: str, output: str, sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        MlpProblem(1, parse_layers(layers), output)


# --- the rungs


def test_a_rung_for_every_chain() -> None:
    wide = MlpProblem(4, parse_layers("16384-16384b_16384-16384b"))
    assert MlpOperation.ladder.rung("layers").supports(wide) is None
    long = MlpProblem(4, parse_layers("_".join(["130-130"] * 33)))
    assert "33" in (MlpOperation.ladder.rung("fused").supports(long) or "")
    assert choose(OPERATIONS["mlp"], long, CPU).rung.name == "layers"
    many = MlpProblem(2**30, parse_layers("2x1-1"))
    assert "split the batch" in (MlpOperation.ladder.rung("layers").supports(many) or "")
    assert "split the batch" in (MlpOperation.ladder.rung("persistent").supports(many) or "")


def test_shared_memory_is_that_of_the_card() -> None:
    rung = MlpOperation.ladder.rung("persistent")
    problem = MlpProblem(512, AUTOENCODER)
    assert rung.on(typical_card("sm_90a")).refusal(problem) is None
    small = rung.on(typical_card("sm_86"))
    (call,) = small.recipe(problem, small.configs(problem)[0]).steps
    assert isinstance(call, KernelCall) and call.shared_bytes <= small.card.shared_bytes
    assert "shared memory" in (small.refusal(MlpProblem(4, parse_layers("16000-16000"))) or "")
    assert MlpOperation.ladder.rung("vectorised").on(typical_card("sm_86")).refusal(problem) is None


@pytest.mark.parametrize("batch", [1, 32, 512, 1048576])
@pytest.mark.parametrize("layers", [AUTOENCODER, parse_layers("1280-128b_128-1280b"), parse_layers("7-3")])
def test_persistent_blocks_fit_and_cover_the_items(batch: int, layers: tuple[Layer, ...]) -> None:
    rung, problem = MlpOperation.ladder.rung("persistent"), MlpProblem(batch, layers)
    for config in rung.configs(problem):
        assert isinstance(config, PersistentConfig)
        (call,) = rung.recipe(problem, config).steps
        assert isinstance(call, KernelCall) and call.shared_bytes <= 227 * 1024
        assert call.grid[0] <= 132


def test_weights_that_do_not_fit_stay_where_they_are() -> None:
    planned = plan(parse_layers("2x64-64b_128-1024b_1024-128b"), Shape(2, 128, 2), 227 * 1024)
    assert planned is not None
    assert [layout.weight_at >= 0 for layout in planned.layouts] == [True, False, False]


@pytest.mark.parametrize("shape", [(2, 32, 3), (4, 64, 2), (1, 96, 8)])
def test_teams_of_other_sizes(shape: tuple[int, int, int]) -> None:
    """Several rounds per team, the last of them short; more tiles than threads."""
    from tests.support import check

    problem = MlpProblem(29, parse_layers("3x20n-12bg_36-40br_40n-60"), "error")
    rung = MlpOperation.ladder.rung("persistent")
    assert isinstance(rung, Persistent)
    check(MlpOperation(), rung, problem, PersistentConfig(*shape, 2, "erf"), CPU, 5)


# --- the operator


@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize("rows", [(3,), (), (2, 5)])
def test_leading_dimensions_are_rows(rows: tuple[int, ...], error: bool) -> None:
    x, *parameters = tensors(rows=rows)
    y = mlp(x, parameters, LAYERS, error=error)
    assert y.shape == (rows if error else (*rows, 16))
    assert_close(y, expected(x, parameters, error))


def test_layers_may_be_spelled() -> None:
    x, *parameters = tensors()
    text = spell_layers(LAYERS)
    assert torch.equal(mlp(x, parameters, text), mlp(x, parameters, LAYERS))
    with pytest.raises(UnsupportedError, match="single digit"):
        mlp(x, parameters, (replace(LAYERS[0], epsilon=1.5e-5), LAYERS[1]))


def test_views_are_taken_as_they_are_meant() -> None:
    x, *parameters = tensors(rows=(6,))
    assert_close(mlp(x[::2], parameters, LAYERS), expected(x[::2], parameters))
    shifted = torch.cat((torch.zeros(1), x.flatten()))[1:].view_as(x)
    assert_close(mlp(shifted, parameters, LAYERS), expected(x, parameters))
    turned = [tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for tensor in parameters]
    assert_close(mlp(x, turned, LAYERS), expected(x, parameters))


@pytest.mark.parametrize("rung", RUNGS)
def test_nan_and_infinity_stay_in_their_rows(rung: str) -> None:
    x, *parameters = tensors(rows=(4,))
    x[0, 3], x[2, 15] = float("nan"), float("inf")
    y = mlp(x, parameters, LAYERS, rung=rung)
    assert y[0].isnan().all() and y[2].isnan().all()
    assert_close(y[1::2], expected(x[1::2], parameters))


def test_half_precision() -> None:
    x, *parameters = (tensor.half() for tensor in tensors())
    y, error = mlp(x, parameters, LAYERS), mlp(x, parameters, LAYERS, error=True)
    assert y.dtype == torch.float16 and error.dtype == torch.float32
    wanted = expected(x.double(), [tensor.double() for tensor in parameters])
    torch.testing.assert_close(y, wanted.half(), rtol=2e-3, atol=2e-3)


def test_no_rows_no_launch() -> None:
    x, *parameters = tensors(rows=(0,))
    assert mlp(x, parameters, LAYERS).shape == (0, 16)
    with pytest.raises(UnsupportedError, match="no rung 'nonsense'"):
        mlp(x, parameters, LAYERS, rung="nonsense")


def test_the_spectral_autoencoder_is_such_a_chain() -> None:
    torch.manual_seed(3)
    network = SpectralAutoencoder(bands=12, frames=3, latent=8).eval()
    basis = torch.nn.functional.normalize(network.basis, dim=1)
    parameters = [
        network.frame_norm.weight, network.frame_norm.bias, network.frame_encoder.weight, network.frame_encoder.bias,
        basis, network.latent_norm.weight, network.latent_norm.bias, network.latent_layer.weight,
        network.latent_layer.bias, basis.T, network.frame_decoder.weight, network.frame_decoder.bias,
    ]  # fmt: skip
    x = torch.randn(5, 36)
    with torch.no_grad():
        layers = "3x12n-12bg_36-8_8n-8bg_8-36_3x12-12b"
        assert_close(mlp(x, parameters, layers), network(x))
        assert_close(mlp(x, parameters, layers, error=True), network.anomaly_score(x))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": torch.ones(2, 9)}, "rows of 9, but 2x8n-6bg_12-16 takes 16"),
        ({"x": torch.ones(())}, "mlp takes x: ... I"),
        ({"x": torch.ones(2, 16).double()}, "torch.float64.*float32, float16"),
        ({"drop": 1}, "4 parameters, but 2x8n-6bg_12-16 takes 5: norm_weight0"),
        ({"parameter": (2, torch.ones(8, 6))}, r"weight0 has shape \(8, 6\); for .* it must be \(6, 8\)"),
        ({"parameter": (1, torch.ones(8).half())}, "norm_bias0 is torch.float16; convert"),
        ({"parameter": (3, torch.ones(6, device="meta"))}, "bias0 is on meta"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], sentence: str) -> None:
    x, *parameters = tensors()
    x = change.get("x", x)
    if "drop" in change:
        parameters = parameters[: -change["drop"]]
    if "parameter" in change:
        number, tensor = change["parameter"]
        parameters[number] = tensor
    with pytest.raises(UnsupportedError, match=sentence):
        mlp(x, parameters, LAYERS)


def test_the_operator_is_sound() -> None:
    x, *parameters = tensors()
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.escalade.mlp, (x, parameters, spell_layers(LAYERS)), test_utils=checks)
    torch.library.opcheck(
        torch.ops.escalade.mlp, (x, parameters, spell_layers(LAYERS), True), test_utils=checks
    )
