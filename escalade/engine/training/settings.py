"""Options of a training step, and its optimizations by name, each of which can be left out to measure what it gains."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from escalade.engine.passes import STEP_TECHNIQUES
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card

RUNGS, GRAPH = "rungs", "graph"
TECHNIQUES: Mapping[str, str] = {
    RUNGS: "Uses the rung chosen for each step instead of the lowest one of its ladder.",
    **STEP_TECHNIQUES,
    GRAPH: "Replays all launches as one CUDA graph instead of launching them one by one.",
}
"""The techniques, with a description."""
Reduce = Callable[[torch.Tensor], None]
"""Replaces the gradients of one process, all in one tensor, by those of all processes."""
_AUTOCAST = {"fp32": None, "tf32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class StepSettings:
    """Options of a training step; `training_step` describes them."""

    dtype: str
    on_twin: bool = False
    without: frozenset[str] = frozenset()
    reduce: Reduce | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    memory: int | None = None
    plan_only: Card | None = None
    """Choose kernels for this card, but do not compile them."""

    def __post_init__(self) -> None:
        for name, limit in (("clip_norm", self.clip_norm), ("clip_value", self.clip_value)):
            if limit is not None and not (is_number(limit) and 0 < limit < math.inf):
                raise UnsupportedError(f"{name} {limit!r}: pass a finite number above 0, or None")
        if not _is_count(self.accumulate) or isinstance(self.accumulate, bool):
            raise UnsupportedError(f"accumulate {self.accumulate!r}: pass the calls per update, at least 1")
        if self.dtype not in _AUTOCAST:
            raise UnsupportedError(f"dtype {self.dtype!r}: training steps support {', '.join(_AUTOCAST)}")
        if self.memory is not None and not _is_count(self.memory):
            raise UnsupportedError(f"memory {self.memory!r}: pass a number of bytes, or None for no limit")

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of mixed precision."""
        return _AUTOCAST[self.dtype]

    @property
    def products(self) -> str:
        """Product algorithm of fp32."""
        return "tf32" if self.dtype == "tf32" else "fp32"


def check_techniques(names: Collection[str]) -> frozenset[str]:
    """Return the names as a set; raises UnsupportedError for an unknown technique."""
    unknown = [name for name in names if name not in TECHNIQUES]
    if unknown or isinstance(names, str):
        raise UnsupportedError(
            f"without={names!r}: the techniques that can be left out are {', '.join(TECHNIQUES)}"
        )
    return frozenset(names)


def check_scale(scale: Any) -> float:
    """Return a loss scale as a number."""
    number = float(scale) if is_number(scale) else 0.0
    if not 0 < number <= torch.finfo(torch.float32).max:
        raise UnsupportedError(f"loss_scale {scale!r}: pass a finite number above 0")
    return number


def is_number(value: Any) -> bool:
    try:
        return not math.isnan(float(value))
    except (TypeError, ValueError, RuntimeError):
        return False


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 1
