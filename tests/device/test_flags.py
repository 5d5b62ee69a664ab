"""Launch flags for dependencies on the preceding and following launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade import engine
from escalade.device import packing
from escalade.device.arguments import ArgumentList
from escalade.device.program import Program
from escalade.device.recipe import (
    HALF_SM_COUNT,
    HALF_SM_SHARED_BYTES,
    KernelCall,
    Recipe,
    ReleaseDependents,
    WeightsReady,
)
from escalade.device.run import Executable
from escalade.engine.graph.graph import Node
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.engine.plan.plan import PlanStep
from escalade.ops import OPERATIONS
from escalade.ops.calling.executables import prepare_rung
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from escalade.ops.linear import LinearOperation, LinearProblem

CALL = KernelCall(Program.of("relu/scalar.cu", "relu_scalar"), (1000, 1, 1), (128, 1, 1), ())


def _never(tensor_map: object, address: int) -> bytes:
    raise AssertionError("there is no map here")


def test_neither_holds_by_default() -> None:
    arguments = ArgumentList((7, WeightsReady(), ReleaseDependents()), _never)
    assert [value.value for value in arguments.values] == [7, 0, 0]
    arguments.set(weights_ready=True, release_dependents=False)
    assert [value.value for value in arguments.values] == [7, 1, 0]
    arguments.set(weights_ready=False, release_dependents=True)
    assert [value.value for value in arguments.values] == [7, 0, 1]


def flags(executable: Executable) -> set[int]:
    """Flags of an executable's launches about their weights."""
    found = [
        value.value
        for step, made in zip(executable.recipe.steps, executable._steps, strict=True)
        if isinstance(step, KernelCall)
        for argument, value in zip(step.arguments, made.arguments.values, strict=True)  # type: ignore[attr-defined]
        if isinstance(argument, WeightsReady)
    ]
    assert found, "the recipe asks"
    return set(found)


def asking() -> tuple[Any, Any]:
    """A linear layer's problem, and its rung that asks for the flag."""
    problem = LinearProblem(1, 64, 8, dtype="fp16")
    return problem, LinearOperation.ladder.rung("warp_per_output")


def test_an_operator_assumes_nothing_about_its_weights_producer() -> None:
    """The preceding launch may have written them, as an optimizer step does in training."""
    problem, rung = asking()
    recipe = rung.recipe(problem, rung.configs(problem)[0])
    assert flags(Executable(recipe, torch.device("cpu"))) == {0}
    assert flags(prepare_rung(OPERATIONS["linear"], problem, torch.device("cpu"), rung.name).executable) == {
        0
    }
    assert flags(Executable(recipe, torch.device("cpu"), weights_ready=True)) == {1}


def test_weights_that_the_plan_computes_are_not_ready() -> None:
    inputs = {"x": "given", "weight": "w", "bias": "b", "residual": "value"}
    step = PlanStep(Node("y", "linear", inputs, {}, (2, 8), "float32"))
    assert step.weights_are_constant({"w", "b"})
    assert not step.weights_are_constant({"b"}) and not step.weights_are_constant({"w"})
    assert PlanStep(Node("y", "relu", {"x": "given"}, {}, (2, 8), "float32")).weights_are_constant(())


@pytest.mark.parametrize("weights_ready", [True, False])
def test_a_plan_passes_flags_to_its_kernels(weights_ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's weights are ready; if one were computed, the flag would say otherwise."""
    if not weights_ready:
        monkeypatch.setattr(PlanStep, "weights_are_constant", lambda step, constants: False)
    torch.manual_seed(0)
    compiled = engine.compile(torch.nn.Linear(64, 8), torch.randn(1, 64), dtype="fp16", device="twin")
    program = compiled.program(torch.randn(1, 64))
    assert isinstance(program, KernelProgram)
    (call,) = program.calls
    assert isinstance(call, Executable) and flags(call) == {int(weights_ready)}


def test_many_small_blocks_do_not_come_early() -> None:
    assert not Recipe((CALL,)).launches_early_after_packing
    assert Recipe((replace(CALL, shared_bytes=HALF_SM_SHARED_BYTES + 1),)).launches_early_after_packing
    assert Recipe((replace(CALL, grid=(HALF_SM_COUNT, 1, 1)),)).launches_early_after_packing
    assert not Recipe((replace(CALL, grid=(HALF_SM_COUNT // 2, 3, 1)),)).launches_early_after_packing


def test_packing_does_not_count() -> None:
    packing = replace(CALL, grid=(1, 1, 1), weights_only=True)
    assert not Recipe((packing, CALL)).launches_early_after_packing
    assert not Recipe((packing,)).launches_early_after_packing


def test_persistent_blocks_have_a_multiprocessor_each() -> None:
    problem = Conv2dProblem.square(128, 128, 28, 3, batch=32, dtype="fp16", layout="nhwc")
    rung = Conv2dOperation.ladder.rung("overlapped_store")
    assert rung.recipe(problem, rung.configs(problem)[0]).launches_early_after_packing


def test_a_plan_reports_the_following_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[bool, bool]] = []

    class Listening(Executable):
        def __init__(self, recipe: Recipe, device: torch.device, label: str = "", **more: Any) -> None:
            if more.get("weights_ready"):
                told.append((recipe.launches_early_after_packing, more["release_dependents"]))
            super().__init__(recipe, device, label, **more)

    monkeypatch.setattr(packing, "Executable", Listening)
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(64, 64, 3, padding=1) for _ in range(2)]
    model = torch.nn.Sequential(*layers, torch.nn.MaxPool2d(2)).eval()
    engine.compile(model, torch.randn(1, 64, 12, 12), dtype="fp16", device="twin")
    early, release_dependents = zip(*told, strict=True)
    assert len(told) >= 3 and True in early
    assert release_dependents == (*early[1:], False)
