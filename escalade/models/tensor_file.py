"""Read named tensors from PyTorch and safetensors files without running code from them."""

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

ENDINGS = (".safetensors", ".pth", ".pt", ".bin")
_CONTAINERS = ("state_dict", "model", "net")
"""Keys under which training scripts commonly store the state_dict."""


def read_tensors(file: pathlib.Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name, on the CPU, in the dtype of the file."""
    if not os.path.isfile(file):
        raise UnsupportedError(f"no such file: {printable(file)}")
    if file.suffix not in ENDINGS:
        raise UnsupportedError(
            f"{printable(file.name)}: weights are read from {', '.join(ENDINGS[:-1])} and {ENDINGS[-1]} files"
        )
    state: Any
    try:
        if file.suffix == ".safetensors":
            state = load_file(str(file))
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises arbitrary exceptions for files that it did not write
        raise UnsupportedError(
            f"{printable(file.name)} cannot be read as weights: {_reason(error)}"
        ) from error
    for name in _CONTAINERS:
        if isinstance(state, Mapping) and isinstance(state.get(name), Mapping):
            state = state[name]
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise UnsupportedError(
            f"{printable(file.name)} does not contain named tensors; save the model's state_dict()"
        )
    return dict(state)


def _reason(error: Exception) -> str:
    # PyTorch's own message recommends weights_only=False, which runs code from the file.
    if isinstance(error, pickle.UnpicklingError) and "Unsupported global" in str(error):
        return (
            "it contains Python objects, perhaps a whole model, which are not unpickled because that can run code from "
            "the file; save model.state_dict() instead"
        )
    return printable((str(error) or type(error).__name__).splitlines()[0])
