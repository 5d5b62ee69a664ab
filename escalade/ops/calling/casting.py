"""Casts under autocast: a parameter that several calls of a step use is cast once."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from escalade.device.pytorch import WORDS


class _Cast(NamedTuple):
    source: weakref.ref[torch.Tensor]
    state: tuple[Any, ...]
    result: TensorWeakRef


_known: dict[int, _Cast] = {}


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in that dtype; that of a parameter as it was made before, while a graph of autograd still holds it.

    Nothing is kept alive for it: what a backward pass has freed is gone. A parameter that has been changed in place
    since, or given other memory or another gradient, is cast anew (what writes to `.data` goes by no version, but by
    a gradient mostly), and so is every one while a CUDA graph is recorded, whose replays have to do it themselves.
    """
    if tensor.dtype == dtype:
        return tensor
    if not _is_shared(tensor):
        return tensor.to(dtype)
    gradient = tensor.grad
    given = None if gradient is None else (id(gradient), gradient._version)
    state = (tensor._version, tensor.data_ptr(), dtype, given)
    key = id(tensor)
    found = _known.get(key)
    if found is not None and found.source() is tensor and found.state == state:
        result: torch.Tensor | None = found.result()
        if result is not None:
            return result
    made = tensor.to(dtype)
    source = weakref.ref(tensor, lambda _: _known.pop(key, None))
    _known[key] = _Cast(source, state, TensorWeakRef(made))
    return made


def _is_shared(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter whose cast others may use: one that a graph will hold, in plain eager code."""
    return (
        type(tensor) is torch.nn.Parameter
        and tensor.requires_grad
        and torch.is_grad_enabled()
        and torch.is_autocast_cache_enabled()
        and not WORDS.dispatch_modes()
        and not WORDS.transforms()
        and not (tensor.is_cuda and WORDS.is_recording())
    )
