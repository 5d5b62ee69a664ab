"""Whole networks: capture -> passes -> plan -> run."""

from escalade.engine.compiler import compile, load
from escalade.engine.engine import Engine

__all__ = ["Engine", "compile", "load"]
