"""Plans beside PyTorch: what is timed, kept, stored and reported."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import escalade
from escalade.device.timing import Subject, Timing, summarize
from escalade.engine import comparison as comparing
from escalade.engine.capture.export import capture
from escalade.engine.comparison import (
    ComparedStep,
    Comparison,
    StepTime,
    faster_in_pytorch,
    time_plan,
    time_steps,
    whole_in_pytorch,
)
from escalade.engine.engine import Engine
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.engine.plan.planner import make_plan
from escalade.errors import UnsupportedError
from escalade.files import FileError
from escalade.ops.choose import table
from tests.bench.fake_cuda import Card
from tests.bench.fake_cuda import card as card

CPU = torch.device("cpu")


class Net(nn.Module):
    """Two convolutions of one problem, a PyTorch step between them, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.fc = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.cumsum(F.relu(self.first(x)), 3).relu())
        return self.fc(F.relu(y).mean((2, 3)))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(4)
    return Net().eval()


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(2, 8, 6, 6)


@pytest.fixture(scope="module")
def engine(model: nn.Module, x: torch.Tensor) -> Engine:
    return Engine(capture(model, (x,)), "fp32", "twin")


@pytest.fixture(scope="module")
def program(engine: Engine, x: torch.Tensor) -> KernelProgram:
    made = engine.program(x)
    assert isinstance(made, KernelProgram)
    return made


Times = Callable[[dict[str, float]], list[list[str]]]


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    """Fake the time of each subject by its name after running it; return the subjects timed in turns."""

    def made_up(given: dict[str, float]) -> list[list[str]]:
        turns: list[list[str]] = []

        def timed(subjects: Sequence[Subject], device: torch.device, **others: Any) -> dict[str, Timing]:
            for subject in subjects:
                for call in subject.calls:
                    call()
            turns.append([subject.name for subject in subjects])
            return {subject.name: summarize([given[subject.name]], "graph") for subject in subjects}

        monkeypatch.setattr(comparing, "time_interleaved", timed)
        return turns

    return made_up


def test_steps_take_turns_with_pytorch(program: KernelProgram, x: torch.Tensor, times: Times) -> None:
    turns = times({"plan": 4.0, "PyTorch": 3.0})
    found = time_steps(program, (x,), CPU, lambda step: step.node.op == "conv2d")
    assert [each.step for each in found] == [step for step in program.plan.steps if not step.is_alias]
    by_op = {each.step.node.op: each for each in found}
    assert (by_op["conv2d"].pytorch_us, by_op["conv2d"].lost_us) == (3.0, 1.0)
    assert by_op["aten"].step.in_pytorch and (by_op["aten"].pytorch_us, by_op["aten"].lost_us) == (4.0, 0.0)
    assert by_op["convert"].pytorch_us is None and by_op["convert"].lost_us == 0.0
    assert turns.count(["plan", "PyTorch"]) == 2 and turns.count(["plan"]) == len(turns) - 2
    assert not program._values._pytorch_owned


def test_pytorch_writes_the_form_that_the_next_kernel_reads(program: KernelProgram, x: torch.Tensor) -> None:
    """A lazy permutation of PyTorch is not comparable to a kernel that does it."""
    comparing.copy_inputs(program, (x,))
    convert = next(step for step in program.plan.steps if step.node.op == "convert")
    result = program.pytorch_call(convert)()
    assert torch.equal(result, x) and not result.is_contiguous()
    assert result.is_contiguous(memory_format=torch.channels_last)


def test_layers_that_pytorch_refuses_have_no_time(
    program: KernelProgram, x: torch.Tensor, times: Times, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(step: Any) -> Any:
        def call() -> None:
            raise UnsupportedError("not these")

        return call

    monkeypatch.setattr(program, "pytorch_call", refuses)
    times({"plan": 4.0})
    assert {each.pytorch_us for each in time_steps(program, (x,), CPU, lambda step: True)} == {4.0, None}


def test_the_whole_plan_is_timed_over_its_inputs(card: Card) -> None:
    x, y, given = torch.zeros(3), torch.zeros(3), torch.ones(3)

    def work() -> None:
        y.copy_(x)
        x.fill_(torch.nan)  # inputs share their memory with later values

    program = SimpleNamespace(inputs=(x,), run=lambda: card.kernel(12.0, work))
    assert time_plan(program, (given,)) == pytest.approx(12.0)
    assert torch.equal(y, given)


def test_steps_are_timed_by_the_clock_of_the_card(card: Card) -> None:
    steps = [SimpleNamespace(in_pytorch=False, node=SimpleNamespace(name=name)) for name in "ab"]

    def one_by_one() -> Iterator[tuple[Any, Callable[[], None]]]:
        yield from zip(steps, (lambda: card.kernel(4.0), lambda: card.kernel(9.0)), strict=True)

    kernels = SimpleNamespace(inputs=(), iter_steps=one_by_one, bind_own_memory=lambda: None)
    found = time_steps(kernels, (), torch.device("cuda"))  # type: ignore[arg-type]
    assert [each.plan_us for each in found] == pytest.approx([4.0, 9.0])


@pytest.fixture
def remembered(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The user's table file for a fake GPU."""
    path = tmp_path / "table.json"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(comparing, "user_path", lambda gpu: path)
    return path


def test_steps_faster_in_pytorch_are_left_to_it(
    engine: Engine, model: nn.Module, x: torch.Tensor, times: Times, remembered: pathlib.Path
) -> None:
    """Also a second step of the same problem, which is not measured again; and results are unchanged."""
    program = engine.program(x)
    assert isinstance(program, KernelProgram)
    turns = times({"plan": 4.0, "PyTorch": 3.0})
    reasons = faster_in_pytorch(program, (x,))
    convolutions = [step.node.name for step in program.plan.steps if step.node.op == "conv2d"]
    assert len(convolutions) == 2 and set(convolutions) <= reasons.keys()
    assert set(reasons.values()) == {"faster when measured: 3 µs, not 4"}
    problems = {step.lowered.problem for step in program.plan.steps if step.lowered}
    assert sum(turn == ["plan", "PyTorch"] for turn in turns) == len(problems)
    entries = json.loads(remembered.read_text())
    assert all(key.startswith("step/") for key in entries) and len(entries) == len(problems)
    formats = {
        given.name: SimpleNamespace(dtype=torch.float32, layout="nchw") for given in program.plan.graph.inputs
    }
    plan = make_plan(program.plan.graph, "fp32", CPU, formats, pytorch_nodes=reasons)  # type: ignore[arg-type]
    assert all(step.in_pytorch or step.is_alias for step in plan.steps)
    other = KernelProgram(plan, program._constants, CPU)
    other.inputs[0].copy_(x)
    other.run()
    torch.testing.assert_close(other.outputs[0], model(x).detach(), rtol=1e-4, atol=1e-5)


def test_steps_without_a_clear_win_stay(
    program: KernelProgram, x: torch.Tensor, times: Times, remembered: pathlib.Path
) -> None:
    times({"plan": 4.0, "PyTorch": 3.99})
    assert faster_in_pytorch(program, (x,)) == {}
    assert {entry["median_us"] for entry in json.loads(remembered.read_text()).values()} == {4.0}


def test_a_table_that_cannot_be_written_is_no_reason_not_to_compile(
    program: KernelProgram,
    x: torch.Tensor,
    times: Times,
    remembered: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*given: Any) -> table.Table:
        raise FileError("it cannot be written")

    monkeypatch.setattr(comparing, "add", refuse)
    times({"plan": 4.0, "PyTorch": 3.0})
    assert faster_in_pytorch(program, (x,)) and "could not be saved: it cannot be written" in caplog.text


def test_the_whole_model_in_pytorch_is_the_model(engine: Engine, model: nn.Module, x: torch.Tensor) -> None:
    (found,) = whole_in_pytorch(engine.graph.at(2), "fp32", (x,))()
    torch.testing.assert_close(found, model(x).detach())
    (found,) = whole_in_pytorch(engine.graph.at(2), "bf16", (x,))()
    assert found.dtype == torch.bfloat16


def test_a_comparison_shows_where_time_is_lost(program: KernelProgram) -> None:
    fast = ComparedStep(1, "a", "layer1", "conv2d", "window", 2.0, 5.0, 0.0)
    slow = ComparedStep(3, "b", "layer2", "conv2d", "direct", 9.0, 5.0, 4.0)
    alone = ComparedStep(4, "c", "", "stem", "stem", 1.0, None, 0.0)
    found = Comparison("fp16", 8, (fast, slow, alone), 10.0, 25.0, "net")
    text = " ".join(str(found).split())  # lines are as wide as the terminal
    assert found.speedup == 2.5 and found.losing == (slow,)
    assert "net: fp16, batch 8" in text and "11.0 µs, in PyTorch 10.0 µs" in text
    assert "takes 10.0 µs" in text and "25.0 µs: 2.50 times as fast" in text
    assert "than in PyTorch, 4.0 µs in total; the slowest: conv2d layer2 (4.0 µs)" in text
    assert "No step takes longer" in str(Comparison("fp16", 8, (fast, alone), 10.0, 25.0))
    data = json.loads(found.to_json())
    assert data["speedup"] == 2.5 and data["steps"][1]["lost_us"] == 4.0


def test_steps_are_compared_under_their_names(program: KernelProgram) -> None:
    step = next(step for step in program.plan.steps if step.node.op == "conv2d")
    found = comparing._compared(2, StepTime(step, 4.0, 3.0))
    assert (found.operation, found.rung, found.lost_us) == ("conv2d", step.choice.rung.name, 1.0)  # type: ignore[union-attr]


@pytest.mark.parametrize("device", ["cpu", "twin"])
def test_without_a_gpu_nothing_is_measured(device: str, model: nn.Module, x: torch.Tensor) -> None:
    with pytest.raises(
        UnsupportedError, match=r"measured=True times kernels .* needs a GPU; this engine runs on"
    ):
        escalade.compile(model, x, device=device, measured=True)
    engine = Engine(capture(model, (x,)), "fp32", device)
    with pytest.raises(UnsupportedError, match=f"compare times kernels .*{device}"):
        engine.compare(x)
