"""Classify image files: find them, decode them in worker processes or on the GPU, and stream them through an engine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from escalade_apps.classify.prediction import Guess, Prediction, predict

__all__ = ["Guess", "Prediction", "predict"]


def __getattr__(name: str) -> Any:
    # Lazy, because decode workers import this package and must start without PyTorch.
    if name in __all__:
        return getattr(importlib.import_module("escalade_apps.classify.prediction"), name)
    raise AttributeError(f"module 'escalade_apps.classify' has no attribute {name!r}")
