"""Runs in folders: begun, and gone on with."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from escalade.errors import UnsupportedError
from escalade.terminal_text import printable
from escalade_apps.train import checkpoints, data, tasks
from escalade_apps.train.parallel import Processes
from escalade_apps.train.settings import settings_of
from escalade_apps.train.trainer import CHECKPOINT, Trainer


def trainer(
    task: str,
    given: Mapping[str, Any],
    folder: pathlib.Path,
    processes: Processes,
    *,
    resume: bool = False,
    weights: pathlib.Path | None = None,
    twin: bool = False,
    tensorboard: bool = False,
) -> Trainer:
    """The run in a folder: a new one, or with `resume` the one that is there, at the step that it was kept at.

    What is not given is what is usual for the task, or what the run was begun with. One that was ended before it was
    first kept begins anew.
    """
    state = checkpoints.load(folder / CHECKPOINT)
    if state is not None and not resume:
        raise UnsupportedError(
            f"{printable(folder)} holds a run already; --resume goes on with it, and another --output begins a new one"
        )
    if state is None:
        settings = tasks.settings(task, given, processes.device)
    else:
        try:
            settings = settings_of(state["settings"])
        except ValueError as error:
            raise UnsupportedError(f"the settings in {printable(folder / CHECKPOINT)}: it {error}") from error
        settings = settings.resumed({"task": task, **given})
    dataset = data.read(settings.data, side=settings.side, held_out=settings.held_out, seed=settings.seed)
    return Trainer(
        settings, dataset, folder, processes, weights=weights, state=state, twin=twin, tensorboard=tensorboard
    )
