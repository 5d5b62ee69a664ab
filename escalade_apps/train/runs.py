"""Start or resume a run in a folder."""

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
    csv: bool = False,
) -> Trainer:
    """Return a new run, or with `resume` the one in `folder` at its last checkpoint.

    Settings that are not given default to the task's, or to those the run was started with. A run that was stopped
    before its first checkpoint starts over.
    """
    if resume and not folder.is_dir():
        raise UnsupportedError(
            f"--resume: there is no folder {printable(folder)}; pass the --output of the run, or leave --resume out to "
            "start one"
        )
    state = checkpoints.load(folder / CHECKPOINT)
    if state is not None and not resume:
        raise UnsupportedError(
            f"{printable(folder)} already holds a run; continue it with --resume, or pass another --output"
        )
    if state is None:
        settings = tasks.settings(task, given, processes.device)
    else:
        try:
            settings = settings_of(state["settings"])
        except ValueError as error:
            raise UnsupportedError(
                f"{printable(folder / CHECKPOINT)}: invalid settings: it {error}"
            ) from error
        settings = settings.resumed({"task": task, **given})
    dataset = data.read(settings.data, side=settings.side, held_out=settings.held_out, seed=settings.seed)
    return Trainer(
        settings, dataset, folder, processes,
        weights=weights, state=state, twin=twin, tensorboard=tensorboard, csv=csv,
    )  # fmt: skip
