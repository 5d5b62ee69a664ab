"""Whole networks: capture -> passes -> plan -> run."""

from typing import TYPE_CHECKING, Any

from escalade.engine.compiler import compile, load
from escalade.engine.engine import Engine

if TYPE_CHECKING:
    from escalade.engine.training.step import training_step

__all__ = ["Engine", "compile", "load", "training_step"]


def __getattr__(name: str) -> Any:
    """Import training steps on first use."""
    if name == "training_step":
        from escalade.engine.training.step import training_step

        return training_step
    raise AttributeError(f"module 'escalade.engine' has no attribute {name!r}")
