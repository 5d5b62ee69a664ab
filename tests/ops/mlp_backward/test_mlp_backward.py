"""mlp_backward: its problem, refusals, bitwise reproducible gradients of mlp, and training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from escalade.device.run import TwinOptions
from escalade.device.twin import Order
from escalade.errors import UnsupportedError
from escalade.models import FusedSpectralAutoencoder, SpectralAutoencoder
from escalade.ops import OPERATIONS, mlp, mlp_backward
from escalade.ops.base.cards import typical_card
from escalade.ops.base.draw import Draw
from escalade.ops.choose.choice import choose
from escalade.ops.mlp import problem as reference
from escalade.ops.mlp.problem import MlpProblem, parse_layers
from escalade.ops.mlp_backward import MlpBackwardProblem
from tests.support import TINY, check

CPU = torch.device("cpu")
CHAIN = "2x6n-5bg_10-3_3n-7bt_7-12r"
RUNGS = tuple(rung.name for rung in OPERATIONS["mlp_backward"].ladder)
CHAINS = {"folded": "2x6n-5bg_10-3_3-16b_2x8-7bt"}
"""For rungs that do not support CHAIN."""


def dtype_of(rung: str, layers: str) -> torch.dtype:
    """fp32 if the rung supports it, else fp16; skips chains that it does not support."""
    one = OPERATIONS["mlp_backward"].ladder.rung(rung)
    for dtype, name in ((torch.float32, "fp32"), (torch.float16, "fp16")):
        if one.supports(MlpBackwardProblem(5, parse_layers(layers), dtype=name)) is None:
            return dtype
    pytest.skip(f"{rung} does not take {layers}")


def tolerance_of(dtype: torch.dtype) -> float:
    return 2e-5 if dtype == torch.float32 else 1e-2


def tensors(
    layers: str, rows: tuple[int, ...] = (5,), dtype: torch.dtype = torch.float32, seed: int = 3
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """x, parameters, and a gradient of y."""
    problem = MlpProblem(max(1, torch.Size(rows).numel()), parse_layers(layers))
    inputs = reference.random_inputs(problem, Draw(CPU, seed))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*rows, problem.features, generator=generator).to(dtype)
    gradient = torch.randn(*rows, problem.outputs, generator=generator).to(dtype)
    return x, [inputs[name].to(dtype) for name in problem.sizes], gradient


def chain(
    x: torch.Tensor, parameters: Sequence[torch.Tensor], layers: str, error: bool = False
) -> torch.Tensor:
    """By PyTorch, in any dtype."""
    rows = x.reshape(-1, x.shape[-1])
    problem = MlpProblem(rows.shape[0], parse_layers(layers))
    y = reference.compute(problem, {"x": rows, **dict(zip(problem.sizes, parameters, strict=True))})
    y = y.view(*x.shape[:-1], problem.outputs)
    return (y - x).square().mean(-1) if error else y


def gradients(
    function: Callable[..., torch.Tensor],
    x: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    gradient: torch.Tensor,
) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, *parameters)]
    y = function(leaves[0], leaves[1:])
    return list(torch.autograd.grad(y, leaves, gradient.to(y.dtype)))


def assert_close(
    results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float = 2e-5
) -> None:
    for result, one in zip(results, expected, strict=True):
        scale = float(one.abs().max()) + 1e-3
        torch.testing.assert_close(result.double(), one.double(), rtol=0, atol=tolerance * scale)


# --- the problem


def test_names_and_sizes() -> None:
    problem = MlpBackwardProblem.parse("2x3n-4bg_8-2_b6_dx", "fp16")
    assert problem == MlpBackwardProblem(6, parse_layers("2x3n-4bg_8-2"), True, "fp16")
    assert problem.name == "2x3n-4bg_8-2_b6_dx"
    assert problem.offsets == {"norm_weight0": 0, "norm_bias0": 3, "weight0": 6, "bias0": 18, "weight1": 22}
    assert (problem.parameter_elements, problem.result_elements) == (38, 38 + 6 * 6)
    # The last layer's forward product is not needed.
    assert problem.flops == 2 * 6 * (3 * 2 * 12 + 2 * 16)
    assert problem.bytes == 2 * (6 * 6 + 6 * 2 + 38) + 4 * 74
    with pytest.raises(UnsupportedError, match="the form is"):
        MlpBackwardProblem.parse("64-64")
    with pytest.raises(UnsupportedError, match="dtype 'fp8'"):
        MlpBackwardProblem(1, parse_layers("4-4"), dtype="fp8")


def test_the_choice() -> None:
    autoencoder = parse_layers("5x64n-64bg_320-32_32n-32bg_32-320_5x64-64b")
    assert choose(OPERATIONS["mlp_backward"], MlpBackwardProblem(512, autoencoder), CPU).rung.name == "fused"
    wide = MlpBackwardProblem(512, parse_layers("1024-1024"))
    assert choose(OPERATIONS["mlp_backward"], wide, CPU).rung.name == "layers"
    rung = OPERATIONS["mlp_backward"].ladder.rung("fused")
    assert "shared memory" in (rung.supports(wide) or "")
    assert "up to 16 layers" in (
        rung.supports(MlpBackwardProblem(1, parse_layers("_".join(["4-4"] * 17)))) or ""
    )
    for batch, layers, dtype, name in (
        (512, autoencoder, "fp16", "fused"),
        (65536, autoencoder, "fp32", "fused"),
        (8192, autoencoder, "fp16", "folded"),
        (1048576, autoencoder, "bf16", "folded"),
        (65536, parse_layers("64-128br_128-128br_128-10b"), "fp16", "tensor_core"),
    ):
        problem = MlpBackwardProblem(batch, layers, dtype=dtype)
        assert choose(OPERATIONS["mlp_backward"], problem, CPU).rung.name == name
    tensor_core = OPERATIONS["mlp_backward"].ladder.rung("tensor_core")
    assert "`fused` takes fp32" in (tensor_core.supports(MlpBackwardProblem(512, autoencoder)) or "")
    many = MlpBackwardProblem(512, parse_layers("256-256"), dtype="fp16")
    assert "takes 32" in (tensor_core.supports(many) or "")
    small = MlpBackwardProblem(512, autoencoder)
    assert rung.on(typical_card("sm_90a")).refusal(small) is None
    assert "a CTA has 101376" in (rung.on(typical_card("sm_86")).refusal(small) or "")


# --- as an operator


@pytest.mark.parametrize("rung", RUNGS)
def test_gradients_are_those_of_float64(rung: str) -> None:
    layers = CHAINS.get(rung, CHAIN)
    dtype = dtype_of(rung, layers)
    x, parameters, gradient = tensors(layers, dtype=dtype)
    expected = gradients(
        lambda x, parameters: chain(x, parameters, layers),
        x.double(),
        [p.double() for p in parameters],
        gradient.double(),
    )
    grad_x, found = mlp_backward(x, gradient, parameters, layers, input_gradient=True, rung=rung)
    assert grad_x is not None
    assert_close([grad_x, *found], expected, tolerance_of(dtype))
    without, same = mlp_backward(x, gradient, parameters, parse_layers(layers), rung=rung)
    assert without is None
    assert_close(same, found, 1e-6)


@pytest.mark.parametrize("rung", RUNGS)
def test_every_run_gives_the_same_bits(rung: str) -> None:
    layers = CHAINS.get(rung, CHAIN)
    x, parameters, gradient = tensors(layers, (37,), dtype_of(rung, layers))
    first, again = (
        torch.ops.escalade.mlp_backward(x, gradient, parameters, layers, True, rung) for _ in range(2)
    )
    assert torch.equal(first, again)


@pytest.mark.parametrize("rung", RUNGS)
def test_nan_and_flat_relu(rung: str) -> None:
    """A NaN of one row is in its own gradient and in the parameters'; behind a flat ReLU nothing passes."""
    layers = "3-3r_3-2b"
    dtype = dtype_of(rung, layers)
    x = torch.ones(5, 3)
    weight, head, bias = torch.eye(3), torch.ones(2, 3), torch.zeros(2)
    x[1] = -1.0
    gradient = torch.ones(5, 2)
    nan = float("nan")
    gradient[1] = nan
    x, gradient, *parameters = (tensor.to(dtype) for tensor in (x, gradient, weight, head, bias))
    grad_x, found = mlp_backward(x, gradient, parameters, layers, input_gradient=True, rung=rung)
    # Of x, of the first weight (ReLU-masked gradient times x), of the head (the sum over rows of gradient times
    # relu(x), in which zeros of the second row are multiplied by NaN) and of its bias.
    expected = (
        torch.full((5, 3), 2.0),
        torch.full((3, 3), 8.0),
        torch.full((2, 3), nan),
        torch.full((2,), nan),
    )
    expected[0][1] = 0
    for result, one in zip([grad_x, *found], expected, strict=True):
        torch.testing.assert_close(result, one.to(dtype), equal_nan=True)


@pytest.mark.parametrize("rung", RUNGS)
def test_rows_that_are_not_there_add_nothing(rung: str) -> None:
    """An infinite weight times a row of zeros would be a NaN."""
    x, parameters, gradient = torch.ones(1, 2), [torch.ones(2, 2), torch.ones(1, 2)], torch.ones(1, 1)
    parameters[0][0, 0] = float("inf")
    dtype = dtype_of(rung, "2-2_2-1")
    parameters = [one.to(dtype) for one in parameters]
    _, found = mlp_backward(x.to(dtype), gradient.to(dtype), parameters, "2-2_2-1", rung=rung)
    assert torch.equal(found[1], torch.tensor([[float("inf"), 2.0]], dtype=dtype))
    parameters[0][0, 0], parameters[1][0, 0] = 1.0, float("inf")
    _, found = mlp_backward(x.to(dtype), gradient.to(dtype), parameters, "2-2_2-1", rung=rung)
    assert torch.equal(found[0], torch.tensor([[float("inf")] * 2, [1.0] * 2], dtype=dtype))


@pytest.mark.share(7)
@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mlp_has_a_gradient(dtype: torch.dtype, error: bool) -> None:
    layers = "2x6n-5bg_10-3_3-12r"
    x, parameters, gradient = tensors(layers, (2, 3), dtype)
    upstream = gradient[..., 0] if error else gradient
    ours = gradients(lambda x, parameters: mlp(x, parameters, layers, error=error), x, parameters, upstream)
    assert [one.dtype for one in ours] == [dtype] * (1 + len(parameters))
    expected = gradients(
        lambda x, parameters: chain(x, parameters, layers, error),
        x.double(),
        [p.double() for p in parameters],
        upstream.double(),
    )
    assert_close(ours, expected, 2e-5 if dtype == torch.float32 else 5e-3)


def test_only_what_is_asked_for() -> None:
    x, parameters, gradient = tensors("4-3b")
    parameters[0].requires_grad_()
    mlp(x, parameters, "4-3b").backward(gradient)
    torch.testing.assert_close(parameters[0].grad, gradient.T @ x)
    assert x.grad is None and parameters[1].grad is None
    torch.ops.escalade.mlp(x, parameters, "4-3b").backward(gradient)  # defaults left out


def test_no_second_derivative() -> None:
    x, parameters, gradient = tensors("4-3b")
    x.requires_grad_()
    result = torch.ops.escalade.mlp_backward(x, gradient, parameters, "4-3b")
    with pytest.raises(UnsupportedError, match="first derivatives only"):
        result.sum().backward()


def test_no_rows_no_launch() -> None:
    x, parameters, gradient = tensors("4-3b", (0,))
    grad_x, found = mlp_backward(x, gradient, parameters, "4-3b", input_gradient=True)
    assert grad_x is not None and grad_x.shape == (0, 4)
    assert all(torch.equal(one, torch.zeros_like(one)) for one in found)


def test_views_are_taken_as_they_are_meant() -> None:
    x, parameters, gradient = tensors("4-3b", (6,))
    _, found = mlp_backward(x[::2], gradient[1::2], [parameters[0].T.contiguous().T, parameters[1]], "4-3b")
    torch.testing.assert_close(found[0], gradient[1::2].T @ x[::2])


def test_tensors_that_pose_no_problem() -> None:
    x, parameters, gradient = tensors("4-3b")
    for arguments, sentence in (
        ((x[:, :3], gradient, parameters, "4-3b"), "rows of 3"),
        ((x, gradient[:2], parameters, "4-3b"), "grad_y: ... O"),
        ((x, gradient, parameters[:1], "4-3b"), "1 parameters, but 4-3b takes 2"),
        ((x, gradient, parameters[::-1], "4-3b"), "weight0 has shape"),
        ((x, gradient.half(), parameters, "4-3b"), "grad_y is torch.float16"),
        ((x.double(), gradient, parameters, "4-3b"), "float32, float16"),
        ((x, gradient, parameters, "4x3b"), "layer of mlp"),
    ):
        with pytest.raises(UnsupportedError, match=sentence):
            mlp_backward(*arguments)


@pytest.mark.share(7)
@pytest.mark.parametrize("rows", [4, 8])
@pytest.mark.parametrize("name", ["2x8n-8bg_16-4_4n-4bg_4-16_2x8-8b_b22_dx", "72n-72b_72-136_136-72br_b9"])
def test_a_block_takes_many_tiles(name: str, rows: int, seed: int) -> None:
    """Sums that stay in registers across tiles, and more of them than registers."""
    operation = OPERATIONS["mlp_backward"]
    rung, problem = operation.ladder.rung("fused").on(TINY), MlpBackwardProblem.parse(name)
    config = next(config for config in rung.configs(problem) if config.as_dict()["rows"] == rows)
    options = TwinOptions(order=Order(seed=seed), checks=problem.batch == 22)
    check(operation, rung, problem, config, CPU, seed, options)


@pytest.mark.share(7)
@pytest.mark.parametrize("rung", ["tensor_core", "folded"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "name",
    [
        "2x8n-8bg_16-4_4n-4bg_4-16_2x8-8b_b70_dx",  # x of the next tile replaces the gradients
        "3x6n-5g_15-4t_4-12b_3x4-9bt_b70",  # odd widths: separate memory
        "5x64n-64bg_320-32_32n-32bg_32-320_5x64-64b_b100",
    ],
)
def test_tiles_follow_each_other(rung: str, dtype: str, name: str, seed: int) -> None:
    """Sums stay in registers, and rows arrive while the previous tile is processed."""
    operation = OPERATIONS["mlp_backward"]
    one, problem = operation.ladder.rung(rung).on(TINY), MlpBackwardProblem.parse(name, dtype)
    config = one.configs(problem)[-1 if problem.features < 320 else 0]
    options = TwinOptions(order=Order(seed=seed, late=bool(seed % 2)), checks=problem.features < 320)
    check(operation, one, problem, config, CPU, seed, options)


@pytest.mark.parametrize("rung", RUNGS)
def test_a_nan_stays_in_its_row(rung: str) -> None:
    """Also if rows are wider in memory than in the chain."""
    layers = "3-3t_3-2b"
    dtype = dtype_of(rung, layers)
    x, parameters, gradient = tensors(layers, dtype=dtype)
    x[1] = float("nan")
    grad_x, _ = mlp_backward(x, gradient, parameters, layers, input_gradient=True, rung=rung)
    assert grad_x is not None
    assert grad_x.isnan().any(1).tolist() == [False, True, False, False, False]


# --- training


def train(
    model: nn.Module, x: torch.Tensor, loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> list[float]:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        optimiser.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.share(7)
@pytest.mark.parametrize("score", [False, True])
def test_the_spectral_autoencoder_learns_the_same(score: bool) -> None:
    torch.manual_seed(5)
    plain = SpectralAutoencoder(8, 2, 4)
    ours = FusedSpectralAutoencoder(8, 2, 4)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(6, 16)

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if score:
            return model.anomaly_score(x).mean()  # type: ignore[operator]
        return (model(x) - x).square().mean()

    losses, expected = train(ours, x, loss_of), train(plain, x, loss_of)
    assert expected[-1] < expected[0]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)


def test_the_fused_autoencoder_refuses_other_shapes() -> None:
    with pytest.raises(UnsupportedError, match="2 frames of 8 bands"):
        FusedSpectralAutoencoder(8, 2, 4)(torch.ones(3, 15))
