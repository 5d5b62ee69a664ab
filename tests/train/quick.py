"""Cheap runs for tests: no plots and no planned steps, which take a second each; and a noisy network."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

from escalade_apps.train import pictures, tasks
from escalade_apps.train.data import Images
from escalade_apps.train.settings import Settings
from escalade_apps.train.steps import DistributedStep
from escalade_apps.train.trainer import Trainer

NOISY = "noisy"


def _shared(run: Trainer, twin: bool) -> DistributedStep:
    own = run._processes
    return DistributedStep(
        own.wrap(run.model), run._task.loss, run._optimizer, run.settings.dtype, own.device
    )


def hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends."""
    monkeypatch.setattr(pictures, "curve", lambda *arguments: None)
    monkeypatch.setattr(Trainer, "_make_step", _shared)


def _noisy(settings: Settings, images: Images) -> nn.Module:
    width = settings.width
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.Dropout(0.5), nn.Conv2d(width, 3, 3, padding=1)
    )  # fmt: skip


def add_noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the task `NOISY` until the test ends: its network draws random numbers and updates statistics in training
    mode only."""
    task = dataclasses.replace(tasks.TASKS["autoencoder"], name=NOISY, make=_noisy)
    monkeypatch.setitem(tasks.TASKS, NOISY, task)
