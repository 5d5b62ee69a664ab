"""Named tensors from files that PyTorch or safetensors have written: data alone, never code."""

from __future__ import annotations

import os
import pathlib
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load_file

from escalade.errors import UnsupportedError
from escalade.terminal_text import printable

ENDINGS = (".safetensors", ".pth", ".pt")
_CONTAINERS = ("state_dict", "model", "net")
"""Keys under which training scripts put the tensors, beside what else they keep."""


def read_tensors(file: pathlib.Path) -> dict[str, torch.Tensor]:
    """The tensors of a file by their names, in fp32 or whatever they are, on the CPU."""
    if not os.path.isfile(file):
        raise UnsupportedError(f"there is no file {printable(file)}")
    if file.suffix not in ENDINGS:
        raise UnsupportedError(
            f"{printable(file.name)}: weights are read from .safetensors, .pth and .pt files"
        )
    state: Any
    try:
        if file.suffix == ".safetensors":
            state = load_file(str(file))
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises all sorts of things over what is no file of tensors
        raise UnsupportedError(f"{printable(file.name)} cannot be read as weights: {_why(error)}") from error
    for name in _CONTAINERS:
        if isinstance(state, Mapping) and isinstance(state.get(name), Mapping):
            state = state[name]
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UnsupportedError(
            f"{printable(file.name)} holds something else than named tensors; save the model's state_dict()"
        )
    return dict(state)


def _why(error: Exception) -> str:
    """PyTorch's own words over a pickle ask for trust in it."""
    if isinstance(error, pickle.UnpicklingError) and "Unsupported global" in str(error):
        return (
            "it holds objects, as of a whole model, and is not unpickled, since that would run its code; save "
            "model.state_dict() instead"
        )
    return printable((str(error) or type(error).__name__).splitlines()[0])
