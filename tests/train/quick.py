"""What makes tests of runs cheap: no curves are drawn and no steps planned, which take a second each."""

from __future__ import annotations

import pytest

from escalade.train import pictures
from escalade.train.steps import SharedStep
from escalade.train.trainer import Trainer


def _shared(run: Trainer, twin: bool) -> SharedStep:
    own = run._processes
    return SharedStep(own.wrap(run.model), run._task.loss, run._optimizer, run.settings.dtype, own.device)


def hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends."""
    monkeypatch.setattr(pictures, "curve", lambda *arguments: None)
    monkeypatch.setattr(Trainer, "_step", _shared)
