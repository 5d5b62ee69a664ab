"""Tensors that an operator takes: one line that both checks them and describes them to users.

    x: N C H W, weight: K C/groups R S, bias: K

A letter is a size, the same wherever it occurs; `...` any number of sizes, also the same; `1` a single element of any
rank; `*` any shape. `C/groups` is C divided by the argument `groups`.

Behind `of` are the dtypes that a tensor may have: PyTorch's names, `floating` for those that kernels compute in, or the
name of another tensor for the dtype of that one. Without `of` the first tensor is floating, and all others have its
dtype. All are on the device of the first; optional tensors may be None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import NAMES

_FLOATING = " or ".join(str(dtype).removeprefix("torch.") for dtype in NAMES).replace(
    " or ", ", ", len(NAMES) - 2
)


@dataclass(frozen=True)
class _Tensor:
    name: str
    sizes: tuple[str, ...]
    dtypes: tuple[str, ...]


class TakenTensors:
    """The tensors of one operator."""

    def __init__(self, operator: str, line: str) -> None:
        self._operator, self._line = operator, line
        self._tensors: list[_Tensor] = []
        for part in line.split(", "):
            name, _, form = part.partition(": ")
            sizes, _, dtypes = form.partition(" of ")
            usual = self._tensors[0].name if self._tensors else "floating"
            self._tensors.append(_Tensor(name, tuple(sizes.split()), tuple((dtypes or usual).split("|"))))

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raise unless the tensors among the arguments are as described. Sizes may be symbolic."""
        known: dict[str, Any] = {}
        device = arguments[self._tensors[0].name].device
        for each in self._tensors:
            tensor = arguments[each.name]
            if tensor is None:
                continue
            dtypes = [dtype for one in each.dtypes for dtype in _dtypes(one, arguments)]
            before = dict(known)
            fits = _fits(tuple(tensor.shape), each.sizes, known, arguments)
            if not fits or tensor.dtype not in dtypes or tensor.device != device:
                raise UnsupportedError(
                    f"{each.name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; {self._operator} takes "
                    f"{self._line}, of one dtype ({_FLOATING}) unless another is named, on one device"
                    f"{_found({**arguments, **before}, each.sizes)}"
                )
        first = self._tensors[0].name
        if arguments.get("tf32") and arguments[first].dtype != torch.float32:
            raise UnsupportedError(
                f"{first} has dtype {arguments[first].dtype}; tf32=True applies to float32 tensors only"
            )


def _dtypes(name: str, arguments: Mapping[str, Any]) -> Sequence[torch.dtype]:
    if name == "floating":
        return tuple(NAMES)
    return (arguments[name].dtype if name in arguments else getattr(torch, name),)


def _fits(
    shape: tuple[Any, ...], sizes: tuple[str, ...], known: dict[str, Any], arguments: Mapping[str, Any]
) -> bool:
    """Return True if a shape is as described; add the sizes it defines to those `known`."""
    if sizes in (("*",), ("1",)):
        return sizes == ("*",) or math.prod(shape) == 1
    if "..." in sizes:
        first, more = sizes.index("..."), len(shape) - len(sizes) + 1
        between = shape[first : first + more]
        if more < 0 or known.setdefault("...", between) != between:
            return False
        shape, sizes = shape[:first] + shape[first + more :], (*sizes[:first], *sizes[first + 1 :])
    if len(shape) != len(sizes):
        return False
    for size, spelled in zip(shape, sizes, strict=True):
        letter, _, divisor = spelled.partition("/")
        parts = arguments[divisor] if divisor else 1
        if parts < 1 or size * parts != known.setdefault(letter, size * parts):
            return False
    return True


def _found(known: Mapping[str, Any], sizes: Sequence[str]) -> str:
    """Return those of the sizes that earlier arguments define."""
    parts = (part for spelled in sizes for part in spelled.split("/"))
    found = ", ".join(f"{part} is {known[part]}" for part in parts if part in known and part != "...")
    return f"; here {found}" if found else ""
