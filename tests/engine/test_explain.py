"""Plans to read: as a table and as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from escalade.device.sources import KERNELS
from escalade.engine import compile
from escalade.engine.comparison import ComparedStep, Comparison
from escalade.engine.engine import Engine
from escalade.engine.explain import PYTORCH, Explanation, explain_plan
from escalade.errors import UnsupportedError
from escalade.terminal_text import counted


class Small(nn.Module):
    """A convolution with BatchNorm and ReLU, a step without a kernel, and a flattened end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16 * 16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        return self.fc(torch.cumsum(y, 3).flatten(1))


@pytest.fixture(scope="module")
def engine() -> Engine:
    torch.manual_seed(0)
    return compile(Small(), torch.randn(2, 8, 4, 4), dtype="fp16", device="cpu")


@pytest.fixture(scope="module")
def explanation(engine: Engine) -> Explanation:
    """The plan as executed by kernels."""
    return explain_plan(engine.plan(torch.randn(2, 8, 4, 4)))


def test_steps_name_their_executor_and_the_reason(explanation: Explanation) -> None:
    steps = {step.source: step for step in explanation.steps}
    conv = steps["conv"]
    assert conv.operation == "conv2d" and conv.rung not in ("", PYTORCH) and conv.why and conv.launches > 0
    assert all((KERNELS / source).is_file() for source in conv.kernels) and conv.kernels
    assert conv.flops == 2 * (2 * 16 * 4 * 4) * 8 * 9
    assert conv.result_bytes == 2 * 16 * 4 * 4 * 2 and conv.offset is not None
    (fallback,) = explanation.fallbacks
    assert fallback.operation == "aten::cumsum" and fallback.bytes == 2 * conv.result_bytes
    reshape = next(step for step in explanation.steps if step.operation == "reshape")
    assert reshape.rung == "" and reshape.launches == 0


def test_totals_are_those_of_the_plan(engine: Engine) -> None:
    x = torch.randn(3, 8, 4, 4)
    plan = engine.plan(x)
    explanation = explain_plan(plan)
    assert explanation.batch == 3 and explanation.total_bytes == plan.bytes == sum(
        explanation.memory.values()
    )
    assert {block.name for block in explanation.arena} <= set(plan.offsets) and explanation.arena
    assert max(block.offset + block.bytes for block in explanation.arena) <= plan.arena_bytes
    conv = next(step for step in explanation.steps if step.source == "conv")
    (block,) = (one for one in explanation.arena if one.name == conv.name)
    assert (block.offset, block.bytes, block.first) == (conv.offset, conv.result_bytes, conv.number)
    assert conv.number < block.last <= len(explanation.steps)
    assert explanation.flops == sum(step.lowered.problem.flops for step in plan.steps if step.lowered)
    assert explanation.floor_us is None
    with_floor = explain_plan(plan, lambda flops, moved, dtype: flops / 1e3)
    assert with_floor.floor_us == pytest.approx(plan_flops(with_floor) / 1e3)


def plan_flops(explanation: object) -> int:
    return sum(step.flops for step in explanation.steps)  # type: ignore[attr-defined]


def test_text_and_json_have_it_all(explanation: Explanation) -> None:
    text = str(explanation)
    assert "conv2d" in text and "aten::cumsum" in text and "PyTorch runs 1 of the steps" in text
    assert "floor µs" not in text
    data = json.loads(explanation.to_json())
    assert [step["number"] for step in data["steps"]] == list(range(1, len(explanation.steps) + 1))
    assert data["totals"]["fallbacks"] == ["aten::cumsum"] and data["arena_bytes"] == explanation.arena_bytes


def test_times_are_shown_where_they_are_known(explanation: Explanation) -> None:
    conv = next(step for step in explanation.steps if step.source == "conv")
    timed = explanation.with_times({conv.name: 12.25}, 20.0)
    assert "12.25" in str(timed) and "20.0 µs" in str(timed)
    assert [step.time_us for step in timed.steps if step.name != conv.name] == [None] * (len(timed.steps) - 1)


def test_on_the_cpu_pytorch_computes_everything(engine: Engine, explanation: Explanation) -> None:
    """Steps without a kernel show neither a rung nor a launch, and PyTorch's own steps are not fallbacks."""
    here = engine.explain()
    assert not here.in_kernels and here.launches == 0 and not here.arena
    assert {step.rung for step in here.steps} == {PYTORCH, ""}
    assert not any(step.config or step.kernels for step in here.steps)
    text = str(here)
    assert "PyTorch computes every step" in text and "device='twin'" in text
    rungs = {step.rung for step in explanation.steps} - {"", PYTORCH}
    assert rungs and not any(rung in text for rung in rungs)
    assert "falls back" not in text and "for lack of a faster kernel" not in text and "launches" not in text
    assert [step.operation for step in here.steps] == [step.operation for step in explanation.steps]


def test_on_the_twin_kernels_run(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "240")  # with room for sources
    on_twin = Engine(engine.graph, "fp16", "twin").explain(torch.randn(2, 8, 4, 4))
    assert on_twin.in_kernels and on_twin.launches > 0 and "PyTorch computes every step" not in str(on_twin)
    assert "conv2d/" in str(on_twin)  # the source
    assert on_twin.device == "twin" and "as for an H200" in str(on_twin)


def test_an_engine_without_a_plan_asks_for_inputs(engine: Engine) -> None:
    fresh = Engine(engine.graph, "fp32", "cpu")
    with pytest.raises(UnsupportedError, match="pass inputs like those of a call to explain"):
        fresh.explain()
    assert fresh.explain(torch.randn(1, 8, 4, 4)).batch == 1


def test_text_is_as_wide_as_the_terminal(explanation: Explanation, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = Comparison(
        "fp16", 2, (ComparedStep(1, "c", "layer", "conv2d", "window", 2.0, 5.0, 0.0),), 2.0, 5.0
    )
    for shown in (explanation, comparison):
        for columns in (60, 100, 240):
            monkeypatch.setenv("COLUMNS", str(columns))
            assert max(map(len, str(shown).splitlines())) <= columns
        monkeypatch.delenv("COLUMNS")
        assert max(map(len, str(shown).splitlines())) > 80, "a log has room"


def test_a_notebook_shows_a_table_with_a_bar_per_step(explanation: Explanation) -> None:
    named = replace(
        explanation,
        title="<plan>",
        steps=(replace(explanation.steps[0], source="<b>"), *explanation.steps[1:]),
    )
    bars: dict[str, list[float]] = {}
    timed = {step.name: 2.0 * step.number for step in named.steps}
    comparison = Comparison(
        "fp16", 2, (ComparedStep(1, "c", "<b>", "conv2d", "window", 2.0, 5.0, 0.0),), 2.0, 5.0, "<plan>"
    )
    for name, shown in (("plan", named), ("timed", named.with_times(timed)), ("comparison", comparison)):
        page = shown._repr_html_()
        ElementTree.fromstring(page)  # well-formed
        assert "&lt;plan&gt;" in page and "&lt;b&gt;" in page and "<b>" not in page
        bars[name] = [float(width) for width in re.findall(r"width:([0-9.]+)px", page)]
        assert len(bars[name]) == len(shown.steps) and max(bars[name]) == 160
    count = len(named.steps)
    assert bars["timed"] == pytest.approx([160 * (number + 1) / count for number in range(count)], abs=0.1)


def test_counts_agree_with_their_nouns(engine: Engine) -> None:
    one = compile(nn.Linear(8, 8), torch.randn(2, 8), device="twin")
    first, second = explain_plan(one.plan(torch.randn(2, 8))).summary()[0], engine.explain().summary()[0]
    assert first.startswith("1 step, 1 kernel launch, ") and re.match(r"\d+ steps, ", second)
    assert [counted(n, "entry") for n in (0, 1, 1000)] == ["0 entries", "1 entry", "1,000 entries"]
    assert [counted(2, noun) for noun in ("step", "launch", "class")] == [
        "2 steps",
        "2 launches",
        "2 classes",
    ]
