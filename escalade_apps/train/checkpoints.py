"""All that a run needs to go on, in one file that is replaced whole."""

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
    """Whoever looks finds the file as it was or as it is now, whenever the process ends."""
    text = io.BytesIO()
    torch.save({"escalade_checkpoint": FORMAT, **state}, text)
    files.replace(path, text.getvalue())


def load(path: pathlib.Path) -> dict[str, Any] | None:
    """What `save` has written, tensors on the CPU; None if there is no such file. No code in it is run."""
    contents = files.read(path)
    if contents is None:
        return None
    try:
        state = torch.load(io.BytesIO(contents), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises all sorts of things over what is no file of tensors
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UnsupportedError(
            f"{printable(path)} cannot be read as a checkpoint: {printable(reason)}"
        ) from error
    if not isinstance(state, dict) or state.get("escalade_checkpoint") != FORMAT:
        raise UnsupportedError(f"{printable(path)} is no checkpoint of this version of Escalade")
    return state


def save_weights(path: pathlib.Path, model: torch.nn.Module) -> None:
    """The model's parameters and buffers alone, for whoever uses it."""
    text = io.BytesIO()
    torch.save({name: value.detach().cpu() for name, value in model.state_dict().items()}, text)
    files.replace(path, text.getvalue())


def randomness(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of PyTorch's own generators, which layers such as dropout draw from."""
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore_randomness(states: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
