"""Constant weights are packed once; others are packed, and waited for, at every call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from escalade.device.packing import PreparedRecipe
from escalade.device.program import Program
from escalade.device.recipe import (
    HALF_SM_COUNT,
    Buffer,
    KernelCall,
    Recipe,
    ReleaseDependents,
    WeightsReady,
    Workspace,
)
from tests.device.conftest import Write

CPU = torch.device("cpu")
COUNT = 8

SOURCE = """// packed = 2 * weight; y = x * packed, and two flags
extern "C" __global__ void pack(const float* weight, float* packed) { packed[threadIdx.x] = 2 * weight[threadIdx.x]; }

extern "C" __global__ void multiply(const float* x, const float* packed, float* y, int* flags, int ready, int release) {
    y[threadIdx.x] = x[threadIdx.x] * packed[threadIdx.x];
    flags[0] = ready;
    flags[1] = release;
}
"""
ONE, BLOCK = (1, 1, 1), (COUNT, 1, 1)
PACK = KernelCall(
    Program.of("packing.cu", "pack"), ONE, BLOCK, (Buffer("weight"), Buffer("packed")), weights_only=True
)
MULTIPLY = KernelCall(
    Program.of("packing.cu", "multiply"),
    ONE,
    BLOCK,
    (Buffer("x"), Buffer("packed"), Buffer("y"), Buffer("flags"), WeightsReady(), ReleaseDependents()),
)
RECIPE = Recipe((PACK, MULTIPLY), (Workspace("packed", 4 * COUNT),))
CROWD = (HALF_SM_COUNT + 1, 1, 1)
CROWDED = Recipe((replace(MULTIPLY, grid=CROWD),))
"""Weights that must not start early: many small CTAs."""
CROWDED_AFTER_PACKING = Recipe((PACK, *CROWDED.steps), RECIPE.workspaces)
CROWDED_PACKING = Recipe((replace(PACK, grid=CROWD), MULTIPLY), RECIPE.workspaces)
"""Packing is the first launch only if weights change."""


@pytest.fixture(autouse=True)
def kernels(write_kernel: Write) -> None:
    write_kernel("packing.cu", SOURCE)


def tensors() -> dict[str, torch.Tensor | None]:
    made = {"x": torch.randn(COUNT), "weight": torch.randn(COUNT), "y": torch.zeros(COUNT)}
    return {**made, "flags": torch.zeros(2, dtype=torch.int32)}


@pytest.mark.parametrize("stay", [True, False])
def test_weights_that_stay_are_packed_once(stay: bool) -> None:
    given = tensors()
    x, weight, y = given["x"], given["weight"], given["y"]
    assert x is not None and weight is not None and y is not None
    before = weight.clone()
    prepared = PreparedRecipe(RECIPE, CPU, weights_are_constant=stay)
    assert prepared.packs == stay
    call = prepared.bind(given)
    assert torch.equal(y, torch.zeros(COUNT)), "nothing but weights is touched before the call"
    weight.fill_(3.0)
    call()
    assert torch.equal(y, x * 2 * (before if stay else 3.0))


@pytest.mark.parametrize(
    ("stay", "behind", "wanted"),
    [
        (True, RECIPE, [1, 1]),
        (True, CROWDED, [1, 0]),
        (True, None, [1, 0]),
        (False, RECIPE, [0, 1]),
        (False, None, [0, 0]),
        (True, CROWDED_AFTER_PACKING, [1, 0]),
        (False, CROWDED_AFTER_PACKING, [0, 1]),
        (True, CROWDED_PACKING, [1, 1]),
        (False, CROWDED_PACKING, [0, 0]),
    ],
)
def test_only_weights_that_stay_are_ready(stay: bool, behind: Recipe | None, wanted: list[int]) -> None:
    given = tensors()
    PreparedRecipe(RECIPE, CPU, weights_are_constant=stay, behind=behind).bind(given)()
    assert given["flags"] is not None and given["flags"].tolist() == wanted


def test_sets_of_tensors_keep_their_own_packed_weights() -> None:
    """One executable serves all of them."""
    prepared = PreparedRecipe(RECIPE, CPU, weights_are_constant=True)
    given = [tensors() for _ in range(2)]
    packed = [prepared.pack(each) for each in given]
    for each in packed:
        prepared.executable.bind(each)()
    for each in given:
        x, weight, y = (each[name] for name in ("x", "weight", "y"))
        assert x is not None and weight is not None and y is not None
        assert torch.equal(y, x * 2 * weight)


def test_packed_weights_and_counters_persist() -> None:
    places = Workspace("packed", 4), Workspace("counter", 4, zeroed=True), Workspace("scratch", 4)
    assert Recipe((PACK, MULTIPLY), places).lasting == places[:2]
    assert Recipe((MULTIPLY,), places).lasting == places[1:2], "nothing is packed"


def test_a_workspace_that_is_given_is_used() -> None:
    own = torch.empty(4 * COUNT, dtype=torch.uint8)
    given = {**tensors(), "packed": own}
    assert PreparedRecipe(RECIPE, CPU, weights_are_constant=True).pack(given)["packed"] is own
    weight = given["weight"]
    assert weight is not None and torch.equal(own.view(torch.float32), 2 * weight)
