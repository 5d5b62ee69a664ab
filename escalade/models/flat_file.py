"""Weights in files of int32 counts, each followed by so many float32."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

import torch

from escalade.errors import UnsupportedError


class FlatFile:
    """Read from front to back; a file that ends early or goes on too long is refused."""

    def __init__(self, path: str | pathlib.Path) -> None:
        self._path = pathlib.Path(path)
        try:
            self._data = self._path.read_bytes()
        except OSError as error:
            raise UnsupportedError(f"{self._path} cannot be read: {error}") from error
        self._at = 0

    def count(self) -> int:
        return int.from_bytes(self._take(4), "little", signed=True)

    def floats(self, count: int) -> torch.Tensor:
        if count < 0:
            raise UnsupportedError(f"{self._path.name}: a count of {count} at byte {self._at - 4}")
        return torch.frombuffer(bytearray(self._take(4 * count)), dtype=torch.float32)

    def fill(self, parameters: Iterable[torch.Tensor], count: int) -> None:
        """Deals the next `count` numbers to the parameters in order."""
        values = self.floats(count)
        expected = 0
        with torch.no_grad():
            for parameter in parameters:
                part = values[expected : expected + parameter.numel()]
                if part.numel() == parameter.numel():
                    parameter.copy_(part.view_as(parameter))
                expected += parameter.numel()
        if expected != count:
            raise UnsupportedError(f"{self._path.name} has {count} numbers where the network has {expected}")

    def end(self) -> None:
        if self._at != len(self._data):
            raise UnsupportedError(f"{self._path.name} goes on after the last layer, at byte {self._at}")

    def _take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) != count:
            raise UnsupportedError(f"{self._path.name} ends at byte {len(self._data)}, within a layer")
        self._at += count
        return taken
