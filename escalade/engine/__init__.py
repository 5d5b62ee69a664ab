"""Whole networks: capture -> passes -> plan -> run."""

from escalade.engine.compiler import compile
from escalade.engine.engine import Engine
from escalade.engine.file import load

__all__ = ["Engine", "compile", "load"]
