"""How code reaches a processor: programs, recipes of launches, and what runs them on a GPU or on the twin.

What a kernel of one's own needs is here by name; see `examples/own_kernel.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from escalade.device.program import Macro, Program, Type
    from escalade.device.recipe import Buffer, KernelCall, Recipe, Workspace
    from escalade.device.run import TwinOptions, bind

_HOMES = {
    "Buffer": "recipe",
    "KernelCall": "recipe",
    "Macro": "program",
    "Program": "program",
    "Recipe": "recipe",
    "TwinOptions": "run",
    "Type": "program",
    "Workspace": "recipe",
    "bind": "run",
}
__all__ = ["Buffer", "KernelCall", "Macro", "Program", "Recipe", "TwinOptions", "Type", "Workspace", "bind"]


def __getattr__(name: str) -> Any:
    """The names come when they are first used: processes that only compile do without PyTorch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'escalade.device' has no attribute {name!r}")
    return getattr(importlib.import_module(f"escalade.device.{_HOMES[name]}"), name)
