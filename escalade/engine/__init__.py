"""Whole networks: capture -> passes -> plan -> run."""

from escalade.engine.compiler import compile, load
from escalade.engine.engine import Engine
from escalade.engine.training.step import training_step

__all__ = ["Engine", "compile", "load", "training_step"]
