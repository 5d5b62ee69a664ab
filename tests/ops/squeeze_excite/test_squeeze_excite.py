"""Squeeze-and-excite gates: messages, gradients, the choice of rung, and when a launch pays off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from escalade import ops
from escalade.device.run import Executable
from escalade.errors import UnsupportedError
from escalade.ops.base.rung import Rung
from escalade.ops.choose.choice import choose
from escalade.ops.squeeze_excite import (
    SLICED,
    SQUEEZE_EXCITE,
    SlicedConfig,
    SqueezeExciteProblem,
    one_launch_pays,
)
from tests.support import check, label

Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _given() -> Five:
    return torch.randn(2, 8, 3, 5), torch.randn(4, 8), torch.randn(4), torch.randn(8, 4), torch.randn(8)


def _expected(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor,
) -> torch.Tensor:
    hidden = torch.relu(x.mean((2, 3)) @ weight.t() + bias)
    return torch.sigmoid(hidden @ gate_weight.t() + gate_bias)


def test_images_of_both_orders() -> None:
    x, *_ = given = _given()
    expected = _expected(*given)
    torch.testing.assert_close(ops.squeeze_excite(*given), expected)
    nhwc = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(ops.squeeze_excite(nhwc, *given[1:]), expected)
    assert ops.squeeze_excite(x[:0], *given[1:]).shape == (0, 8)


def test_the_gradient_is_pytorchs() -> None:
    given, results = _given(), []
    runs: tuple[Callable[..., torch.Tensor], ...] = (ops.squeeze_excite, _expected)
    for run in runs:
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        run(*leaves).square().sum().backward()
        results.append([leaf.grad for leaf in leaves])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("rung", [rung.name for rung in SQUEEZE_EXCITE.ladder.rungs])
def test_an_image_that_is_not_finite_stays_alone(rung: str) -> None:
    given = _given()
    given[0][1, 3, 2, 2] = torch.nan
    y = ops.squeeze_excite(*given, hidden="x", rung=rung)
    assert y[0].isfinite().all() and y[1].isnan().all()


@pytest.mark.parametrize("rung", SQUEEZE_EXCITE.ladder.rungs, ids=label)
def test_pixels_may_lie_apart(rung: Rung[SqueezeExciteProblem], seed: int) -> None:
    problem = SqueezeExciteProblem(3, 12, 4, 4, 6, hidden="silu(x)", x_pitch=24, dtype="fp16")
    assert SqueezeExciteProblem.parse(problem.name) == replace(problem, dtype="fp32")
    config = rung.configs(problem)[-1]
    check(SQUEEZE_EXCITE, rung, problem, config, torch.device("cpu"), seed)


@pytest.mark.parametrize(
    "config",
    [SlicedConfig(256, 1, 1, 8), SlicedConfig(256, 2, 3, 2), SlicedConfig(256, 4, 8, 1, True)],
    ids=str,
)
def test_blocks_share_slices_parts_and_images(config: SlicedConfig, seed: int) -> None:
    """Slices not divisible by a power of two, a narrower last one, and fewer images than CTAs of a cluster."""
    problem = SqueezeExciteProblem(3, 120, 3, 5, 6, dtype="fp16")
    check(SQUEEZE_EXCITE, SLICED, problem, config, torch.device("cpu"), seed)


def test_hidden_features_may_be_beyond_16_bits(seed: int) -> None:
    problem = SqueezeExciteProblem(4, 16, 2, 2, 4, bias=False, gate_bias=False, hidden="x", dtype="fp16")
    inputs = SQUEEZE_EXCITE.inputs(problem, torch.device("cpu"), seed)
    inputs["x"].fill_(4.0)
    inputs["weight"].fill_(60000.0)
    inputs["gate_weight"].fill_(0.1)[::2].neg_()
    y = torch.empty(4, 16, dtype=torch.float16)
    recipe = SLICED.recipe(problem, SlicedConfig(256, 4, 1, 1, True))
    Executable(recipe, torch.device("cpu")).bind({**inputs, "y": y})()
    assert torch.equal(y, SQUEEZE_EXCITE.reference(problem, inputs).to(torch.float16))


def test_what_does_not_fit_is_said() -> None:
    x, weight, bias, gate_weight, gate_bias = _given()
    with pytest.raises(UnsupportedError, match=r"gate_weight is torch.float32 \[4, 8\]"):
        ops.squeeze_excite(x, weight, bias, gate_weight.t(), gate_bias)
    with pytest.raises(UnsupportedError, match="gate 'x \\+ z'"):
        ops.squeeze_excite(x, weight, bias, gate_weight, gate_bias, gate="x + z")
    with pytest.raises(UnsupportedError, match="up to 24576"):
        SqueezeExciteProblem(1, 20_000, 1, 1, 5_000)
    with pytest.raises(UnsupportedError, match="the form is"):
        SqueezeExciteProblem.parse("96_5_b3_s4")


@pytest.mark.parametrize(
    ("name", "rung", "pays"),
    [
        ("1152_7_b1_s48", "sliced", True),
        ("96_56_b32_s4", "sliced", True),
        ("240_28_b256_s10", "sliced", True),
        ("1152_7_b256_s288", "cluster", False),
        ("20000_1_b1_s4000", "naive", False),
    ],
)
def test_blocks_have_slices_and_large_weights_are_left_to_layers(name: str, rung: str, pays: bool) -> None:
    problem = SqueezeExciteProblem.parse(f"{name}_bias_gatebias[silu(x)][sigmoid(x)]")
    problem = replace(problem, dtype="fp16")
    assert choose(SQUEEZE_EXCITE, problem, torch.device("cpu")).rung.name == rung
    assert one_launch_pays(problem) == pays
