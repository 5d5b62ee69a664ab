"""What holds while `torch.export` or AOTAutograd traces a copy of a model, beside what holds for every capture."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import _trace
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from escalade.engine.capture.reports import unlogged

_REPORTING = (
    FakeTensor.__module__,
    GuardOnDataDependentSymNode.__module__,
    _trace.__name__,
)
"""Modules of PyTorch that log what a model does not take."""


@contextmanager
def exporting() -> Iterator[None]:
    """PyTorch traces for this thread alone and reports nothing; what is compiled with `torch.compile` runs as it is."""
    with (
        _traced_in_this_thread(),
        no_reports_of_this_thread(),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


@contextmanager
def _traced_in_this_thread() -> Iterator[None]:
    """While `torch.export` traces, all modules ask its tracer about every call and every attribute, in whichever thread
    they are used. It is told to leave other threads alone.
    """
    names: Any = proxy_tensor
    theirs = names._ModuleStackTracer
    names._ModuleStackTracer = _of_its_thread(theirs)
    try:
        yield
    finally:
        names._ModuleStackTracer = theirs


@contextmanager
def no_reports_of_this_thread() -> Iterator[None]:
    """PyTorch logs and prints what a model does not take, with all that it has traced, and then raises it: whoever
    captures will say it."""
    thread = threading.get_ident()
    names: Any = _trace

    def print_anothers(*texts: object, **how: Any) -> None:
        if threading.get_ident() != thread:
            print(*texts, **how)

    names.print = print_anothers
    try:
        with unlogged(*_REPORTING):
            yield
    finally:
        del names.print


@functools.cache
def _of_its_thread(tracer: Any) -> Any:
    class OfItsThread(tracer):
        def __init__(self, *arguments: Any) -> None:
            self._thread = threading.get_ident()
            super().__init__(*arguments)

        def call_module(
            self, module: nn.Module, forward: Callable[..., Any], arguments: Any, keywords: Any
        ) -> Any:
            if threading.get_ident() != self._thread:
                return forward(*arguments, **keywords)
            return super().call_module(module, forward, arguments, keywords)

        def getattr(self, name: str, value: Any, proxies: Any) -> Any:
            if threading.get_ident() != self._thread:
                return value
            return super().getattr(name, value, proxies)

    return OfItsThread
