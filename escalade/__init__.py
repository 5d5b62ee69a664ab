"""Escalade: convolutional-network kernels for NVIDIA GPUs, as ladders, and networks compiled to plans of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from escalade.discovery import be_found
from escalade.errors import EscaladeError
from escalade.version import VERSION as __version__

if TYPE_CHECKING:
    from escalade import ops
    from escalade.engine import Engine, compile, load, training_step

__all__ = ["Engine", "EscaladeError", "__version__", "compile", "load", "ops", "training_step"]

be_found()


def __getattr__(name: str) -> Any:
    """The public names come when they are first used: compiler processes and `--help` do without PyTorch."""
    import importlib
    import random

    drawn = random.getstate()
    try:
        if name == "ops":
            return importlib.import_module("escalade.ops")
        if name in __all__:
            return getattr(importlib.import_module("escalade.engine"), name)
    finally:
        # Rich draws a number when it is imported, and the caller may have chosen a seed.
        random.setstate(drawn)
    raise AttributeError(f"module 'escalade' has no attribute {name!r}")
