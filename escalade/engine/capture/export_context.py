"""Context in which `torch.export` or AOTAutograd traces a model copy, in addition to that of every capture."""

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

from escalade.engine.capture.muted_logs import muted

# PyTorch modules that log what they do not support in a model.
_LOGGING_MODULES = (FakeTensor.__module__, GuardOnDataDependentSymNode.__module__, _trace.__name__)


@contextmanager
def export_context() -> Iterator[None]:
    """Trace in this thread only, without logging, and run `torch.compile`d code eagerly."""
    with _trace_in_this_thread(), quiet_in_this_thread(), torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _trace_in_this_thread() -> Iterator[None]:
    """Restrict PyTorch's module tracer to this thread.

    `torch.export` patches nn.Module globally: calls and attribute reads of other threads would reach its tracer too.
    """
    names: Any = proxy_tensor
    original = names._ModuleStackTracer
    names._ModuleStackTracer = _thread_local(original)
    try:
        yield
    finally:
        names._ModuleStackTracer = original


@contextmanager
def quiet_in_this_thread() -> Iterator[None]:
    """Drop what PyTorch logs and prints about an unsupported model: it raises the error as well."""
    thread = threading.get_ident()
    names: Any = _trace

    def print_from_others(*texts: object, **how: Any) -> None:
        if threading.get_ident() != thread:
            print(*texts, **how)

    names.print = print_from_others
    try:
        with muted(*_LOGGING_MODULES):
            yield
    finally:
        del names.print


@functools.cache
def _thread_local(tracer: Any) -> Any:
    class ThreadLocalTracer(tracer):
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

    return ThreadLocalTracer
