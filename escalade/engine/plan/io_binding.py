"""The caller's tensors, where a plan's kernels read and write them: inputs as they want them, and new results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from escalade.device.strides import ALIGNMENT, is_packed
from escalade.device.torch_private import WORDS
from escalade.engine.graph.forms import Form

_MOST_GUARDS = 16
"""Kinds of readable tensors, one after another, that are remembered: making a guard takes longer than a look."""

Point = Callable[[int], object]
"""Points kernels at an address."""


class Given:
    """An input as the kernels want it."""

    def __init__(self, form: Form, device: torch.device, point: Point) -> None:
        self._dtype = form.dtype
        self._is_packed: Callable[[torch.Tensor], bool] = partial(is_packed, layout=form.layout)
        self._copy = Made(form, device, point)
        self._point = point
        self._is_like_last: Callable[..., bool] = lambda tensor: False
        self._guards = 0

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The launches read it, or a copy: of one of another type or order, that lies in the midst of another, or whose
        elements are negative by nothing but a mark on it.
        """
        address = tensor.data_ptr()
        if not address % ALIGNMENT and (self._is_like_last(tensor) or self._is_readable(tensor)):
            self._point(address)
            return tensor
        return self._copy.make().copy_(tensor.detach())

    def _is_readable(self, tensor: torch.Tensor) -> bool:
        """Looks at each of its properties, which takes several times as long as to see that they are those of the last
        one: for the first calls, and for those in other modes of PyTorch."""
        if tensor.dtype is not self._dtype or not self._is_packed(tensor) or WORDS.is_negative(tensor):
            return False
        if self._guards < _MOST_GUARDS:
            self._is_like_last = WORDS.guard([tensor])
            self._guards += 1
        return True


class Made:
    """Memory that the launches are pointed at, new at each call."""

    def __init__(self, form: Form, device: torch.device, point: Point) -> None:
        like = form.view(torch.empty(form.bytes, dtype=torch.uint8, device="meta"), 0)
        self._dtype, self._strides = form.dtype, like.stride()
        self._shape = tuple(like.shape)
        self._device = device
        self._quick = WORDS.allocator(device) if device.type == "cuda" else None
        self._point = point

    def _empty(self) -> torch.Tensor:
        if self._quick is not None and WORDS.current_device() == self._device.index:
            return self._quick(self._shape, self._strides, self._dtype)
        return torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=self._device)

    def make(self) -> torch.Tensor:
        made = self._empty()
        self._point(made.data_ptr())
        return made

    def within(self, room: torch.Tensor) -> torch.Tensor:
        """The launches write into that tensor, if they would have made one like it; else into a new one."""
        if not self._is_like(room):
            return self.make()
        self._point(room.data_ptr())
        return room

    def _is_like(self, room: torch.Tensor) -> bool:
        return (
            room.dtype is self._dtype
            and room.stride() == self._strides
            and not room.data_ptr() % ALIGNMENT
            and not WORDS.is_negative(room)
        )
