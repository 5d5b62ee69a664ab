"""Python state: models whose later results depend on their changes are refused, those that only write are accepted."""

from __future__ import annotations

import collections
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from escalade.engine.capture.export import AnySize, capture
from escalade.engine.capture.python_state import _MAX_VALUES
from escalade.engine.capture.reader import CaptureError
from escalade.engine.training.step import training_step
from tests.engine.untouched import untouched

CALLS = 0
TABLE: dict[str, Any] = {"calls": 0}


class Holder:
    """User-defined object."""

    def __init__(self) -> None:
        self.calls = 0


class Stateful(nn.Module):
    """Run a function that may change the model's state."""

    shared = 0

    def __init__(self, run: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.run = run
        self.calls, self.log = 0, []  # type: ignore[var-annotated]
        self.cache: torch.Tensor | None = None
        self.by_size: dict[int, Any] = {}
        self.last = torch.zeros(3)
        self.queue = collections.deque([1.0], maxlen=3)
        self.holder = Holder()
        self.numpy, self.python = np.random.default_rng(0), random.Random(3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def _attribute(model: Stateful, x: torch.Tensor) -> Any:
    model.calls += 1
    return model.layer(x) * model.calls


def _submodule(model: Stateful, x: torch.Tensor) -> Any:
    model.other.calls = getattr(model.other, "calls", 0) + 1  # type: ignore[assignment]
    return model.other(x) / model.other.calls


def _list(model: Stateful, x: torch.Tensor) -> Any:
    model.log.append(x)
    return model.layer(x) * len(model.log)


def _dict(model: Stateful, x: torch.Tensor) -> Any:
    model.by_size[x.shape[1]] = model.by_size.get(x.shape[1], 0) + 1
    return model.layer(x) * model.by_size[x.shape[1]]


def _deque(model: Stateful, x: torch.Tensor) -> Any:
    model.queue.append(model.queue[-1] * 2)
    return model.layer(x) * model.queue[-1]


def _object(model: Stateful, x: torch.Tensor) -> Any:
    model.holder.calls += 1
    return model.layer(x) + model.holder.calls


def _global(model: Stateful, x: torch.Tensor) -> Any:
    global CALLS
    CALLS += 1
    return model.layer(x) * CALLS


def _global_dict(model: Stateful, x: torch.Tensor) -> Any:
    TABLE["calls"] += 1
    return model.layer(x) * TABLE["calls"]


def _class_attribute(model: Stateful, x: torch.Tensor) -> Any:
    Stateful.shared += 1
    return model.layer(x) * Stateful.shared


def _closure() -> Callable[[Any, torch.Tensor], Any]:
    calls = 0

    def run(model: Stateful, x: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        return model.layer(x) * calls

    return run


def _last_result(model: Stateful, x: torch.Tensor) -> Any:
    y = model.layer(x) + model.last
    model.last = y[0]
    return y


def _first_input(model: Stateful, x: torch.Tensor) -> Any:
    if model.cache is None:
        model.cache = x.sum(0)
    return model.layer(x) + model.cache


def _branch(model: Stateful, x: torch.Tensor) -> Any:
    model.calls, first = 1, not model.calls
    return model.layer(x) if first else model.other(x)


def _result(model: Stateful, x: torch.Tensor) -> Any:
    model.calls += 1
    return model.layer(x), model.calls


def _exported(model: Stateful, x: torch.Tensor) -> Any:
    model.calls += 1
    return model.layer(x) + torch.tensor([float(model.calls)] * 3)  # only torch.export can follow this


REFUSED = {
    _attribute: "its attribute calls", _submodule: "its attribute other.calls", _list: "its attribute .*log",
    _dict: r"its attribute .*by_size", _deque: "its attribute .*queue", _object: "its attribute holder.calls",
    _global: "the global CALLS", _global_dict: "a dict that its code uses",
    _class_attribute: "the class attribute Stateful.shared", _closure(): "its attribute run: calls",
    _last_result: "its attribute last", _first_input: "its attribute cache", _branch: "its attribute calls",
    _result: "its attribute calls", _exported: "its attribute calls",
    lambda model, x: model.layer(x) * random.random(): "random numbers",
    lambda model, x: model.layer(x) * float(np.random.rand()): "random numbers",
    lambda model, x: model.layer(x) * float(model.numpy.random()): "its attribute numpy",
    lambda model, x: model.layer(x) * model.python.random(): "its attribute python",
    lambda model, x: model.layer(x) * time.time(): "the clock",
}  # fmt: skip


@pytest.mark.parametrize(("run", "change"), REFUSED.items())
def test_state_that_changes_results_is_refused(run: Any, change: str) -> None:
    model, x = Stateful(run), torch.randn(2, 3)
    with (
        untouched(model, TABLE, Stateful),
        pytest.raises(
            CaptureError, match=f"Stateful changes .*{change}.* when it runs, and its next results"
        ),
    ):
        capture(model, (x,))
    assert (CALLS, Stateful.shared) == (0, 0)


def _cached(model: Stateful, x: torch.Tensor) -> Any:
    if model.cache is None:
        model.cache = torch.arange(3.0) + model.layer.bias
    return model.layer(x) + model.cache


def _counted(model: Stateful, x: torch.Tensor) -> Any:
    global CALLS
    CALLS += 1
    model.calls += 1
    model.log.append(x)
    return model.layer(x)


def _timed(model: Stateful, x: torch.Tensor) -> Any:
    before = time.perf_counter()
    y = model.layer(x)
    model.log.append(time.perf_counter() - before)
    return y


def _sized(model: Stateful, x: torch.Tensor) -> Any:
    model.calls = x.shape[0]
    return model.layer(x)


@pytest.mark.parametrize("run", [_cached, _counted, _timed, _sized])
def test_writes_that_change_no_result_are_taken(run: Any) -> None:
    model, x = Stateful(run), torch.randn(2, 3)
    with untouched(model, TABLE):
        graph = AnySize(model, (x,)).graph
    assert graph.is_batched and CALLS == 0


def test_state_of_another_size_is_refused() -> None:
    """State that changes only for another input size is found when that size is captured."""

    def run(model: Stateful, x: torch.Tensor) -> Any:
        if x.shape[1] > 1:
            model.calls += 1
        return x * model.layer.bias[0] * (1 + model.calls)

    captured = AnySize(Stateful(run), (torch.randn(2, 1),))
    with pytest.raises(CaptureError, match="its attribute calls"):
        captured.graph_for([(2, 4)])


def test_state_in_a_training_step_is_refused() -> None:
    for run in (_attribute, _list, _global):
        model = Stateful(run)
        optimizer = torch.optim.SGD(model.layer.parameters(), 0.1)
        example = torch.randn(2, 3), torch.randn(2, 3)
        with untouched(model), pytest.raises(CaptureError, match="something else each time it runs"):
            training_step(model, nn.functional.mse_loss, optimizer, example)


def test_torch_compile_follows_state() -> None:
    model = Stateful(_attribute).eval()
    compiled = torch.compile(model, backend="escalade")
    x = torch.randn(2, 3)
    with torch.no_grad():
        expected = model.layer(x)
        for times in (1, 2, 3):
            torch.testing.assert_close(compiled(x), expected * times)


@pytest.mark.parametrize("counts", (True, False))
def test_state_among_more_values_than_are_compared(counts: bool) -> None:
    """A counter next to a vocabulary is noticed, and a vocabulary alone is no reason to refuse a model."""
    model = Stateful(_attribute if counts else lambda model, x: model.layer(x))
    model.vocabulary = {f"word {number}": number for number in range(_MAX_VALUES)}  # type: ignore[assignment]
    if counts:
        with pytest.raises(CaptureError, match="attributes"):
            capture(model, (torch.ones(2, 3),))
    else:
        capture(model, (torch.ones(2, 3),))
