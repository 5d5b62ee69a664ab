"""Read weights from files without running code from them: named tensors, and flat files of float32 values."""

from __future__ import annotations

import os
import pathlib
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from escalade.errors import UnsupportedError
from escalade.terminal_text import first_line, printable

ENDINGS = (".safetensors", ".pth", ".pt", ".bin")
_COUNTER = "num_batches_tracked"
"""Buffer of normalization layers that nothing reads in evaluation mode."""
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
    return first_line(error)


def load_weights(model: nn.Module, state: Mapping[str, torch.Tensor], title: str) -> None:
    """Load weights into a model; raises with the first names that do not match."""
    require_fit(model, state, title)
    model.load_state_dict(dict(state), strict=False)


def require_fit(model: nn.Module, state: Mapping[str, torch.Tensor], title: str) -> None:
    """Refuse weights whose names or shapes differ from the model's. Counters of training batches may be absent."""
    own = model.state_dict()
    missing = [name for name in own if name not in state and not name.endswith(_COUNTER)]
    unknown = [name for name in state if name not in own]
    shapes = [
        f"{name} {list(state[name].shape)} instead of {list(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    if missing or unknown or shapes:
        kinds = (("lacks", missing), ("has in addition", unknown), ("has other shapes for", shapes))
        reasons = (f"it {verb} {_first(names)}" for verb, names in kinds if names)
        raise UnsupportedError(f"{title} does not fit the network: {'; '.join(reasons)}")


def _first(names: list[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(printable, names[:most])) + rest


class FlatFile:
    """Sequential reader of blocks: an int32 count, then `count` float32 values.

    Raises UnsupportedError if the file is too short or too long.
    """

    def __init__(self, path: str | pathlib.Path) -> None:
        self._path = pathlib.Path(path)
        try:
            self._data = self._path.read_bytes()
        except OSError as error:
            raise UnsupportedError(f"{self._path} cannot be read: {error}") from error
        self._offset = 0

    def count(self) -> int:
        return int.from_bytes(self._read(4), "little", signed=True)

    def floats(self, count: int) -> torch.Tensor:
        if count < 0:
            raise UnsupportedError(f"{self._path.name}: negative count {count} at byte {self._offset - 4}")
        return torch.frombuffer(bytearray(self._read(4 * count)), dtype=torch.float32)

    def fill(self, parameters: Iterable[torch.Tensor], count: int) -> None:
        """Fill the parameters in order from the next `count` values, which must be exactly enough."""
        values = self.floats(count)
        expected = 0
        with torch.no_grad():
            for parameter in parameters:
                part = values[expected : expected + parameter.numel()]
                if part.numel() == parameter.numel():
                    parameter.copy_(part.view_as(parameter))
                expected += parameter.numel()
        if expected != count:
            raise UnsupportedError(f"{self._path.name} has {count} values where the network has {expected}")

    def end(self) -> None:
        if self._offset != len(self._data):
            raise UnsupportedError(f"{self._path.name} has data after the last layer, at byte {self._offset}")

    def _read(self, count: int) -> bytes:
        data = self._data[self._offset : self._offset + count]
        if len(data) != count:
            raise UnsupportedError(f"{self._path.name} is truncated at byte {len(self._data)}")
        self._offset += count
        return data
