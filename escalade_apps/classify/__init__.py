"""Image files through a classifier: found, decoded in processes or on the GPU, streamed through an engine, labelled."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from escalade_apps.classify.prediction import Guess, Prediction, predict

__all__ = ["Guess", "Prediction", "predict"]


def __getattr__(name: str) -> Any:
    """The public names come when they are first used: processes that decode do without PyTorch."""
    if name in __all__:
        return getattr(importlib.import_module("escalade_apps.classify.prediction"), name)
    raise AttributeError(f"module 'escalade_apps.classify' has no attribute {name!r}")
