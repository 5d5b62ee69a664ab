"""conv2d_weight_gradient by halves: huge and tiny numbers, where the first power of two is not sufficient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from escalade.device.run import bind
from escalade.ops import OPERATIONS
from escalade.ops.conv2d_weight_gradient import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs.sm90_halves import WGMMA_SPLIT

CPU = torch.device("cpu")
OPERATION = OPERATIONS["conv2d_weight_gradient"]


@pytest.mark.parametrize(
    ("of_x", "of_gradient", "outlier"),
    [
        (2.0**60, 2.0**-90, 1.0),
        (2.0**-90, 2.0**40, 1.0),
        (1.0, 1.0, 2.0**20),  # one number outside of the sample is too large for the first power of two
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "tf32"])
def test_numbers_of_any_magnitude(of_x: float, of_gradient: float, outlier: float, dtype: str) -> None:
    problem = replace(
        Conv2dWeightGradientProblem.parse("64to64_12x9_k3s1_b4_bias"), dtype=dtype, layout="nhwc"
    )
    inputs = OPERATION.inputs(problem, CPU, 1)
    inputs["x"] *= of_x
    inputs["gradient"] *= of_gradient
    inputs["x"].permute(0, 2, 3, 1).reshape(-1)[64 + 5] *= outlier  # a view: these are in NHWC
    channels = 2.0 ** -torch.linspace(0, 30, 64).view(1, -1, 1, 1)  # none may lose bits because of another
    inputs["x"] *= channels
    inputs["gradient"] *= channels.flip(1)
    inputs["x"][:, 7] = 0
    inputs["x"][3, 7, 11, 8] = of_x  # outside of the sample
    recipe = WGMMA_SPLIT.recipe(problem, WGMMA_SPLIT.configs(problem)[0])
    outputs = {"y": OPERATION.output(problem, CPU), **OPERATION.extra_outputs(problem, CPU)}
    run = bind(recipe, {**inputs, **outputs})
    for _ in range(2):  # recorded magnitudes are cleared before the next call
        run()
        magnitudes = references(problem, {name: one.abs() for name, one in inputs.items()})
        for name, right in references(problem, inputs).items():
            # Values below 2^-18 of their channel's largest have fewer bits in two halves.
            allowed = 2.0**-10 if dtype == "tf32" else 2.0**-21 * max(1, outlier / 2**16)
            assert ((outputs[name].double() - right).abs() <= allowed * magnitudes[name]).all(), name


def references(
    problem: Conv2dWeightGradientProblem, inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    return {"y": OPERATION.reference(problem, inputs), **OPERATION.extra_references(problem, inputs)}
