"""Convolutions in FP8 on the twin: every code, saturation, units, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from escalade.device.run import bind
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, Config
from escalade.ops.base.cards import typical_card
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import E4M3, to_e4m3
from escalade.ops.conv2d import Conv2dProblem
from escalade.ops.conv2d.reference import empty_output, peer, random_inputs
from tests.support import check

CPU = torch.device("cpu")
CONV2D = OPERATIONS["conv2d"]
RUNG = CONV2D.ladder.rung("fused_epilogue")
SMALL = Conv2dProblem.square(
    32, 48, 5, 3, batch=2, dtype="fp8", layout="nhwc", bias=True, residual=True, relu=True
)
CODES = torch.arange(256, dtype=torch.uint8).view(E4M3)


def run(problem: Conv2dProblem, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    y = empty_output(problem, CPU)
    bind(RUNG.recipe(problem, RUNG.configs(problem)[0]), {**inputs, "y": y}, problem.name)()
    return y


def identity(**changed: object) -> tuple[Conv2dProblem, dict[str, torch.Tensor]]:
    """16 pixels of 16 channels and an identity 1x1 filter: every code once."""
    problem = Conv2dProblem.square(16, 16, 4, 1, dtype="fp8", layout="nhwc", **changed)  # type: ignore[arg-type]
    image = CODES.view(1, 4, 4, 16).permute(0, 3, 1, 2)
    inputs = {
        "x": image,
        "weight": torch.eye(16).view(16, 16, 1, 1).to(E4M3).contiguous(memory_format=torch.channels_last),
        "scale": torch.ones(16),
        "scales": torch.ones(2),
    }
    return problem, inputs


def test_every_code_is_multiplied_as_what_it_means() -> None:
    problem, inputs = identity(output="fp16")
    inputs["x"] = inputs["x"].float().nan_to_num().to(E4M3)
    assert torch.equal(run(problem, inputs), inputs["x"].half())


def test_every_code_is_added_as_what_it_means() -> None:
    problem, inputs = identity(output="fp16", residual=True)
    inputs |= {"residual": inputs["x"], "x": torch.zeros(1, 16, 4, 4).to(E4M3)}
    inputs["x"] = inputs["x"].contiguous(memory_format=torch.channels_last)
    y, expected = run(problem, inputs), inputs["residual"].half()
    assert torch.equal(y.isnan(), expected.isnan()) and int(y.isnan().sum()) == 2
    assert torch.equal(y.nan_to_num(), expected.nan_to_num())


def test_a_nan_spreads_over_its_pixel_and_stays_a_nan() -> None:
    problem, inputs = identity(relu=True)
    y = run(problem, inputs).float()
    assert torch.equal(y.isnan(), inputs["x"].float().isnan().any(1, keepdim=True).expand_as(y))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("output", ["", "fp16"])
def test_rounding_is_that_of_the_exact_result(output: str, splits: int) -> None:
    """If fp32 sums are exact, kernel and PyTorch must agree to the last bit except for ties."""
    problem = replace(SMALL, output=output, channels=128)
    inputs = random_inputs(problem, Draw(CPU, 1))
    inputs["x"] = inputs["x"].float().round().to(E4M3)
    inputs["weight"] = inputs["weight"].float().round().to(E4M3)
    inputs |= {"scale": torch.full((48,), 2.0**-4), "scales": torch.tensor([0.5, 8.0])}
    inputs["bias"] = inputs["bias"].mul(8).round().div(8)
    config = next(config for config in RUNG.configs(problem) if config.splits == splits)
    y = empty_output(problem, CPU)
    recipe = RUNG.recipe(problem, config)
    spaces = {workspace.name: workspace.allocate(CPU) for workspace in recipe.workspaces}
    bind(recipe, {**inputs, **spaces, "y": y}, problem.name)()
    assert torch.equal(y.float(), peer(problem, inputs).float())


def test_results_saturate() -> None:
    problem, inputs = identity()
    inputs["x"] = to_e4m3(torch.linspace(-448, 448, 256)).view(1, 4, 4, 16).permute(0, 3, 1, 2)
    inputs["scales"] = torch.tensor([0.0, 100.0])
    y = run(problem, inputs).float()
    assert y.abs().max() == 448 and torch.equal(
        y, (inputs["x"].float() * 100).clamp(-448, 448).to(E4M3).float()
    )


@pytest.mark.parametrize("output", ["", "fp16"])
def test_configs_of_every_width_store_the_same(output: str) -> None:
    """Warps of 16, 32 and 64 filters stage their rows differently."""
    problem = replace(SMALL, filters=64, output=output)
    widths: dict[int, Config] = {}
    for config in RUNG.configs(problem):
        widths.setdefault(config.warp_tile[1], config)
    assert widths.keys() >= {16, 32}
    for config in widths.values():
        check(CONV2D, RUNG, problem, config, CPU, 2)


def test_what_is_refused_is_said() -> None:
    assert "multiples of 16" in (RUNG.supports(replace(SMALL, channels=24)) or "")
    assert "multiples of 16" in (RUNG.supports(replace(SMALL, filters=40)) or "")
    assert "nhwc" in (RUNG.supports(replace(SMALL, layout="nchw")) or "")
    assert "this GPU is sm_86" in (RUNG.on(typical_card("sm_86")).refusal(SMALL) or "")
    assert RUNG.on(typical_card("sm_90a")).refusal(SMALL) is None
    assert RUNG.on(typical_card("sm_86")).refusal(replace(SMALL, dtype="fp16")) is None
    for rung in CONV2D.ladder:
        if "fp8" not in rung.dtypes:  # type: ignore[attr-defined]
            assert "fp8" in (rung.supports(SMALL) or ""), rung.name
    assert "output fp16" in (RUNG.supports(replace(SMALL, dtype="bf16", output="fp16")) or "")
    with pytest.raises(UnsupportedError, match="output 'int8'"):
        replace(SMALL, output="int8")


def test_names() -> None:
    problem = replace(SMALL, output="fp16")
    assert problem.name == "32to48_5_k3s1_b2_bias+res+relu+out16"
    assert Conv2dProblem.parse(problem.name, "fp8", "nhwc") == problem
    plain = replace(problem, bias=False, residual=False, relu=False)
    assert Conv2dProblem.parse(plain.name, "fp8", "nhwc") == plain
