"""Checkpoint files, replaced atomically."""

from __future__ import annotations

import io
import pathlib
from typing import Any

import torch

from escalade import files
from escalade.errors import UnsupportedError
from escalade.terminal_text import printable

FORMAT = 1


def save(path: pathlib.Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically."""
    contents = io.BytesIO()
    torch.save({"escalade_checkpoint": FORMAT, **state}, contents)
    files.replace(path, contents.getvalue())


def load(path: pathlib.Path) -> dict[str, Any] | None:
    """Read a checkpoint with its tensors on the CPU, or return None if there is no file. Runs no code from the file."""
    contents = files.read(path)
    if contents is None:
        return None
    try:
        state = torch.load(io.BytesIO(contents), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises arbitrary exceptions for files that it did not write
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UnsupportedError(
            f"{printable(path)} cannot be read as a checkpoint: {printable(reason)}"
        ) from error
    if not isinstance(state, dict) or state.get("escalade_checkpoint") != FORMAT:
        raise UnsupportedError(f"{printable(path)} is not a checkpoint of this version of Escalade")
    return state


def save_weights(path: pathlib.Path, model: torch.nn.Module) -> None:
    """Write only the model's parameters and buffers, for inference."""
    contents = io.BytesIO()
    torch.save({name: value.detach().cpu() for name, value in model.state_dict().items()}, contents)
    files.replace(path, contents.getvalue())


def randomness(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of PyTorch's default generators, which layers such as dropout draw from."""
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore_randomness(states: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
