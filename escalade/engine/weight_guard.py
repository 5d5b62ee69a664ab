"""Detect changes of weights by comparing their contents with a copy.

PyTorch's version counter only counts changes by its own operators. It misses writes through `.data`, through a NumPy
array on the same memory or by another library, and inference tensors have none. A bitwise comparison misses no change,
and does not rebuild an engine when the old values are written back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

_ALIGNMENT = 16
"""Alignment in bytes of each weight in the concatenated copy: kernels use 16-byte vector loads."""
_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class WeightSnapshot:
    """A copy of weights at the time of construction."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._layouts = [_layout(weight) for weight in weights]
        by_device: dict[torch.device, list[int]] = {}
        for number, weight in enumerate(weights):
            by_device.setdefault(weight.device, []).append(number)
        self._groups = [
            _Group([weights[number] for number in numbers], numbers) for numbers in by_device.values()
        ]

    @property
    def copies(self) -> list[torch.Tensor]:
        """The copied weights, with the strides of the originals where those are dense."""
        made: dict[int, torch.Tensor] = {}
        for group in self._groups:
            made |= zip(group.numbers, group.copies, strict=True)
        return [made[number] for number in sorted(made)]

    @torch.inference_mode(False)
    @torch.no_grad()
    def matches(self, weights: Sequence[torch.Tensor]) -> bool:
        """Return True if these weights are bitwise equal to the copy. On a GPU this waits for all earlier work."""
        layouts = [_layout(weight) for weight in weights]
        if layouts != self._layouts:
            if [place[1:] for place in layouts] != [place[1:] for place in self._layouts]:
                return False
            for group in self._groups:
                group.rebind([weights[number] for number in group.numbers])
            self._layouts = layouts
        return all(group.is_unchanged() for group in self._groups)


class _Group:
    """Weights on one device, and a concatenated copy of their bytes."""

    def __init__(self, weights: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.rebind(weights)
        self._saved = torch.cat(self._bytes())
        self.copies: list[torch.Tensor] = []
        offset = 0
        for weight in weights:
            flat = self._saved[offset : offset + weight.nbytes].view(weight.dtype)
            self.copies.append(flat.as_strided(weight.shape, _strides(weight), flat.storage_offset()))
            offset += weight.nbytes + _padding(weight)

    def rebind(self, weights: Sequence[torch.Tensor]) -> None:
        """Compare with these tensors from now on. Holding them keeps their addresses from being reused."""
        self._weights = [weight.detach() for weight in weights]
        self._views = _padded_bytes(self._weights) if all(map(_is_dense, weights)) else None

    def _bytes(self) -> list[torch.Tensor]:
        """Return the weights' current bytes: views if all weights are dense, else copies."""
        return _padded_bytes(self._weights) if self._views is None else self._views

    def is_unchanged(self) -> bool:
        if self._saved.device.type != "cpu":
            # One concatenation, one comparison, one synchronization for all weights.
            return torch.equal(torch.cat(self._bytes()).view(torch.int64), self._saved.view(torch.int64))
        kept = self._saved.data_ptr()
        for piece in self._bytes():
            if _libc.memcmp(piece.data_ptr(), kept, piece.numel()):
                return False
            kept += piece.numel()
        return True


def _layout(weight: torch.Tensor) -> tuple[Any, ...]:
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, weight.device, weight.is_neg()


def _is_dense(weight: torch.Tensor) -> bool:
    """Return True if the elements fill a contiguous block of memory, in any order."""
    dense: bool = torch.ops.aten.is_non_overlapping_and_dense(weight)
    return dense and not (weight.is_neg() or weight.is_conj())


def _strides(weight: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a weight's copy."""
    if _is_dense(weight):
        return weight.stride()
    return torch.empty(weight.shape, device="meta").stride()


def _padding(weight: torch.Tensor) -> int:
    return -weight.nbytes % _ALIGNMENT


def _padded_bytes(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the bytes of each weight in memory order, padded with zeros to the alignment."""
    zeros = torch.zeros(_ALIGNMENT, dtype=torch.uint8, device=weights[0].device)
    found = []
    for weight in weights:
        dense = weight if _is_dense(weight) else weight.clone(memory_format=torch.contiguous_format)
        flat = dense.as_strided((dense.numel(),), (1,), dense.storage_offset())
        found += [flat.view(torch.uint8), zeros[: _padding(weight)]]
    return [piece for piece in found if piece.numel()]
