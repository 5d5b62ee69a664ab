"""Models that write to their tensors, and those whose control flow reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from escalade.engine.capture.export import capture
from escalade.engine.capture.reader import CaptureError
from escalade.engine.engine import Engine
from tests.engine.untouched import untouched


class Counts(nn.Module):
    def __init__(self, through_view: bool) -> None:
        super().__init__()
        self.count = nn.Buffer(torch.zeros(2, 3))
        self.through_view = through_view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (self.count.view(-1) if self.through_view else self.count).add_(1)
        return x + self.count


class TrainsAlways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=True)


class Writes(nn.Module):
    """Writes to its tensors as configured, and multiplies by them."""

    def __init__(self, write: Callable[[Any, torch.Tensor], Any], counts: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        self.mask = nn.Buffer(torch.tensor([1.0, 0.0, 1.0]))
        self.count = nn.Buffer(torch.zeros(()))
        self.plain = torch.ones(3)
        self.write, self.counts = write, counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self, x)
        y = x * self.weight * self.plain
        return y + self.count if self.counts else y


def _mask_data(model: Writes, x: torch.Tensor) -> None:
    model.weight.data *= model.mask


def _mask_in_place(model: Writes, x: torch.Tensor) -> None:
    with torch.no_grad():
        model.weight.mul_(model.mask)


def _replace_data(model: Writes, x: torch.Tensor) -> None:
    model.weight.data = model.weight.data.clamp(-1, 1)


def _fill_anew(model: Writes, x: torch.Tensor) -> None:
    model.count = x.abs().amax()  # type: ignore[assignment]


class WritesView(nn.Module):
    """Writes to a tensor, and reads another one that shares some of its bytes."""

    def __init__(self, part: slice, reads_whole: bool) -> None:
        super().__init__()
        self.whole = nn.Buffer(torch.tensor([1.0, 0.0, 2.0]))
        self.part = nn.Buffer(self.whole[part])
        self.reads_whole = reads_whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.whole.clamp_(0, 1)  # a second write changes nothing
        return x * self.part.sum() * (self.whole if self.reads_whole else 1)


@pytest.mark.parametrize(
    "model",
    [
        *(WritesView(part, reads) for part in (slice(3), slice(1, 3)) for reads in (False, True)),
        Counts(False),
        Counts(True),
        TrainsAlways(),
        Writes(lambda model, x: model.weight.data.neg_()),
        Writes(lambda model, x: model.plain.mul_(2)),
        Writes(lambda model, x: model.count.add_(x.amax())),
    ],
)
def test_models_with_state_are_refused(model: nn.Module) -> None:
    x = torch.randn(2, 3)
    with untouched(model), pytest.raises(CaptureError, match="changes its own .* when it runs"):
        capture(model, (x,))


@pytest.mark.parametrize(
    "model",
    [
        Writes(_mask_data),
        Writes(_mask_in_place),
        Writes(_replace_data),
        Writes(_fill_anew),
        Writes(lambda model, x: model.count.add_(x.amax()), counts=False),
    ],
)
def test_writes_that_do_not_affect_results_are_not_state(model: nn.Module) -> None:
    x = torch.randn(2, 3)
    with untouched(model):
        graph = capture(model, (x,))
    engine = Engine(graph, "fp32", "cpu")
    assert any("writes to its own" in note for note in graph.notes)
    for batch in (x, torch.randn(5, 3)):
        torch.testing.assert_close(engine(batch), model(batch))


class Initialised(nn.Module):
    """Branches on its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.initialised = nn.Buffer(torch.tensor([True]))
        self.repeats = nn.Buffer(torch.tensor([[1, 2]]))
        self.plain = torch.tensor([2.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.initialised:
            self.repeats.add_(1)
        for _ in range(int(self.repeats.max())):
            x = x * self.plain.item()
        return x + float(np.asarray(self.plain)[0])


def test_control_flow_on_constants_is_resolved_at_capture() -> None:
    model, x = Initialised(), torch.randn(2, 3)
    engine = Engine(capture(model, (x,)), "fp32", "cpu")
    for batch in (x, x[:1]):
        torch.testing.assert_close(engine(batch), model(batch))
    model.initialised.fill_(False)
    with untouched(model), pytest.raises(CaptureError, match="branches on the values of its tensors"):
        capture(model, (x,))  # they change once it has written to them


def test_random_values_are_not_answers() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chance = nn.Buffer(torch.tensor(0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if torch.bernoulli(self.chance) else x

    model, x = Draws(), torch.randn(2, 3)
    with untouched(model), pytest.raises(CaptureError, match="branches on the values of its tensors"):
        capture(model, (x,))
    assert not _get_current_function_mode_stack()
