"""Compiling, loading and launching kernels on a GPU or on the twin.

The names exported here are all that a kernel of your own needs; see `examples/own_kernel.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from escalade.device.program import Macro, Program, Type
    from escalade.device.recipe import Buffer, KernelCall, Recipe, Workspace
    from escalade.device.run import TwinOptions, bind

_MODULES = {
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
    """Import names on first use: processes that only compile do not need PyTorch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'escalade.device' has no attribute {name!r}")
    return getattr(importlib.import_module(f"escalade.device.{_MODULES[name]}"), name)
