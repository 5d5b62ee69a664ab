"""Helpers for the twin's tests: tensors as kernel arguments, launches over tensors, planted bugs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from escalade.device.twin import Order, TwinError, TwinKernel, build

ORDERS = (Order(), Order(seed=11), Order(late=True), Order(seed=12, late=True))


def arguments(values: Sequence[Any]) -> list[Any]:
    """Tensors become pointers, integers and floats 32-bit values."""
    result: list[Any] = []
    for value in values:
        match value:
            case torch.Tensor():
                result.append(ctypes.c_void_p(value.data_ptr()))
            case int():
                result.append(ctypes.c_int(value))
            case float():
                result.append(ctypes.c_float(value))
            case _:
                result.append(value)
    return result


def buffers(values: Sequence[Any]) -> list[tuple[int, int]]:
    return [(v.data_ptr(), v.numel() * v.element_size()) for v in values if isinstance(v, torch.Tensor)]


def launch(kernel: TwinKernel, grid: int, block: int, values: Sequence[Any], **options: Any) -> None:
    """One-dimensional launch; all tensors are its buffers."""
    kernel.launch((grid, 1, 1), (block, 1, 1), arguments(values), buffers=buffers(values), **options)


def planted(source: str, *edits: tuple[str, str]) -> str:
    """The source with a bug: every (old, new) is replaced once."""
    for old, new in edits:
        assert old in source, old
        source = source.replace(old, new, 1)
    return source


def report_of(source: str, entry: str, grid: int, block: int, values: Sequence[Any], **options: Any) -> str:
    """Return the checks' report on a kernel that must not pass."""
    kernel = build(source, entry, checks=True)
    with pytest.raises(TwinError) as caught:
        launch(kernel, grid, block, values, **options)
    return str(caught.value)


def line_of(source: str, text: str) -> int:
    """Return the number of the first line with that text."""
    return next(i for i, line in enumerate(source.splitlines(), 1) if text in line)
