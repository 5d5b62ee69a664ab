"""Escalade: convolutional-network kernels for NVIDIA GPUs, and a compiler that runs whole networks with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from escalade.discovery import register_entry_point
from escalade.errors import EscaladeError
from escalade.version import VERSION as __version__

if TYPE_CHECKING:
    from escalade import ops
    from escalade.engine import Engine, compile, load, training_step

__all__ = ["Engine", "EscaladeError", "__version__", "compile", "load", "ops", "training_step"]

register_entry_point()


def __getattr__(name: str) -> Any:
    """Import public names on first use: compiler processes and `--help` do not need PyTorch."""
    import importlib

    from escalade.terminal_text import preserved_random_state

    with preserved_random_state():
        if name == "ops":
            return importlib.import_module("escalade.ops")
        if name in __all__:
            return getattr(importlib.import_module("escalade.engine"), name)
    raise AttributeError(f"module 'escalade' has no attribute {name!r}")
