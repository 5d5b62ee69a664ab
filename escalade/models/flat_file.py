"""Weights in flat files: int32 counts, each followed by that many float32 values."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

import torch

from escalade.errors import UnsupportedError


class FlatFile:
    """Sequential reader. Raises UnsupportedError if the file is too short or too long."""

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
