"""Weights that others may change at any time: a copy of them, and whether they still hold what it holds.

PyTorch counts the changes that go through its operators in a tensor's version; those through `.data`, a NumPy array
over the same memory or another library it does not, and tensors made in inference mode have no version. So contents are
compared, bit for bit: nothing that is written is missed, and nothing is rebuilt for what was written back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

_ALIGNMENT = 16
"""Bytes to which each weight is aligned among the others: kernels load so many at a time."""
_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Watched:
    """Weights as they were when this was made."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._places = [_place(weight) for weight in weights]
        by_device: dict[torch.device, list[int]] = {}
        for number, weight in enumerate(weights):
            by_device.setdefault(weight.device, []).append(number)
        self._groups = [
            _group(device)([weights[number] for number in numbers], numbers)
            for device, numbers in by_device.items()
        ]

    @property
    def copies(self) -> list[torch.Tensor]:
        """Tensors like them with what they held."""
        made: dict[int, torch.Tensor] = {}
        for group in self._groups:
            made |= zip(group.numbers, group.copies, strict=True)
        return [made[number] for number in sorted(made)]

    @torch.inference_mode(False)
    @torch.no_grad()
    def hold_for(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether these hold the same, bit for bit. On a GPU it waits for all work in front of it."""
        places = [_place(weight) for weight in weights]
        if places != self._places:
            if [place[1:] for place in places] != [place[1:] for place in self._places]:
                return False
            for group in self._groups:
                group.moved([weights[number] for number in group.numbers])
            self._places = places
        return all(group.same() for group in self._groups)


class _Group:
    """Weights on one device, and their bytes one after another."""

    def __init__(self, weights: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.moved(weights)
        self._kept = torch.cat(self._bytes())
        self.copies: list[torch.Tensor] = []
        offset = 0
        for weight in weights:
            flat = self._kept[offset : offset + weight.nbytes].view(weight.dtype)
            self.copies.append(flat.as_strided(weight.shape, _strides(weight), flat.storage_offset()))
            offset += weight.nbytes + _gap(weight)

    def moved(self, weights: Sequence[torch.Tensor]) -> None:
        """The weights lie here from now on. As long as they are held, nothing else does."""
        self._weights = [weight.detach() for weight in weights]
        self._views = _pieces(self._weights) if all(map(_is_dense, weights)) else None

    def _bytes(self) -> list[torch.Tensor]:
        """The weights' bytes as they are now: their own memory, unless there are gaps between their elements."""
        return _pieces(self._weights) if self._views is None else self._views


class _OnHost(_Group):
    def same(self) -> bool:
        kept = self._kept.data_ptr()
        for piece in self._bytes():
            if _libc.memcmp(piece.data_ptr(), kept, piece.numel()):
                return False
            kept += piece.numel()
        return True


class _OnDevice(_Group):
    def same(self) -> bool:
        """One copy of them all, one comparison, and one answer to wait for."""
        return torch.equal(torch.cat(self._bytes()).view(torch.int64), self._kept.view(torch.int64))


def _group(device: torch.device) -> type[_OnHost] | type[_OnDevice]:
    return _OnHost if device.type == "cpu" else _OnDevice


def _place(weight: torch.Tensor) -> tuple[Any, ...]:
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, weight.device, weight.is_neg()


def _is_dense(weight: torch.Tensor) -> bool:
    """Whether its elements fill its memory, in whatever order."""
    dense: bool = torch.ops.aten.is_non_overlapping_and_dense(weight)
    return dense and not (weight.is_neg() or weight.is_conj())


def _strides(weight: torch.Tensor) -> tuple[int, ...]:
    """The strides of a weight's bytes among the others."""
    if _is_dense(weight):
        return weight.stride()
    return torch.empty(weight.shape, device="meta").stride()


def _gap(weight: torch.Tensor) -> int:
    return -weight.nbytes % _ALIGNMENT


def _pieces(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The bytes of each in the order of memory, with zeros up to where the next begins."""
    zeros = torch.zeros(_ALIGNMENT, dtype=torch.uint8, device=weights[0].device)
    found = []
    for weight in weights:
        dense = weight if _is_dense(weight) else weight.clone(memory_format=torch.contiguous_format)
        flat = dense.as_strided((dense.numel(),), (1,), dense.storage_offset())
        found += [flat.view(torch.uint8), zeros[: _gap(weight)]]
    return [piece for piece in found if piece.numel()]
