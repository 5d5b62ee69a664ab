"""Context in which `torch.export` or AOTAutograd traces a model copy, in addition to that of every capture."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import nn
from torch._functorch import aot_autograd
from torch._library.simple_registry import singleton
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution
from torch.export import _trace
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import checkpoint

from escalade.engine.capture.muted_logs import muted

_CHECK_OF_FAILURES = "aten::_linalg_check_errors"
# PyTorch modules that log what they do not support in a model.
_LOGGING_MODULES = (FakeTensor.__module__, GuardOnDataDependentSymNode.__module__, _trace.__name__)


@contextmanager
def export_context() -> Iterator[None]:
    """Trace in this thread only, without logging and checks of values, and run `torch.compile`d code eagerly."""
    with (
        _trace_in_this_thread(),
        quiet_in_this_thread(),
        _without_value_checks(),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


@contextmanager
def _without_value_checks() -> Iterator[None]:
    """Skip the branches in PyTorch's own Python code that only check or recognize values, which are not known yet.

    A mask that is not recognized as causal is applied like any other.
    """
    validated = Distribution._validate_args
    failures = singleton.find(_CHECK_OF_FAILURES).effect
    effect = failures.effect
    with (
        _replaced(F, "gaussian_nll_loss", _UNCHECKED_GAUSSIAN_LOSS),
        _replaced(
            transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: bool(is_causal)
        ),
    ):
        Distribution._validate_args = False
        failures._effect = None  # PyTorch would keep it in the graph by tokens, as more inputs and results
        try:
            yield
        finally:
            Distribution._validate_args, failures._effect = validated, effect


def _with_any_false(function: Any) -> Callable[..., Any]:
    """Return a function of PyTorch as if no element of any tensor failed its checks by `torch.any`."""
    names = types.SimpleNamespace(**{**vars(torch), "any": lambda *_: False})
    unchecked = types.FunctionType(function.__code__, {**function.__globals__, "torch": names})
    unchecked.__defaults__ = function.__defaults__
    unchecked.__globals__[function.__name__] = unchecked  # it hands itself to modes of PyTorch
    return unchecked


_UNCHECKED_GAUSSIAN_LOSS = _with_any_false(F.gaussian_nll_loss)


@contextmanager
def _replaced(module: Any, name: str, ours: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a module in this thread."""
    original, thread = getattr(module, name), threading.get_ident()

    @functools.wraps(original)
    def function(*arguments: Any, **keywords: Any) -> Any:
        return (ours if threading.get_ident() == thread else original)(*arguments, **keywords)

    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)


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
        vars(names).pop("print", None)  # a capture inside this one has removed it


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


@contextmanager
def ignore_checkpoints() -> Iterator[None]:
    """Run what `torch.utils.checkpoint` wraps as if it were not wrapped, in this thread.

    A plan decides itself what is computed again. While a step is captured, a second run would be outside of
    `functional_call`: on the caller's own tensors.
    """
    names: Any = checkpoint
    function, generator = names.CheckpointFunction, names._checkpoint_without_reentrant_generator
    thread = threading.get_ident()

    class Ignored(function):  # type: ignore[misc, valid-type]
        @classmethod
        def apply(cls, run: Callable[..., Any], preserve: bool, *arguments: Any) -> Any:
            if threading.get_ident() == thread:
                return run(*arguments)
            return function.apply(run, preserve, *arguments)

    def ignored(*arguments: Any, **keywords: Any) -> Iterator[None]:
        return iter((None,)) if threading.get_ident() == thread else generator(*arguments, **keywords)

    names.CheckpointFunction, names._checkpoint_without_reentrant_generator = Ignored, ignored
    try:
        yield
    finally:
        names.CheckpointFunction, names._checkpoint_without_reentrant_generator = function, generator


@contextmanager
def joint_graph_traced_once() -> Iterator[None]:
    """Keep `aot_export_module` from tracing a joint graph again, in this thread.

    It does so to drop the tangents and the gradients of inputs that need none, which takes longer than the first trace.
    """
    original = aot_autograd.make_fx

    def make_fx(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Callable[..., Any]:
        joint = _traced_joint(function)
        if joint is None:
            made: Callable[..., Any] = original(function, *arguments, **keywords)
            return made
        return functools.partial(_flattened, joint)

    with _replaced(aot_autograd, "make_fx", make_fx):
        yield


def _traced_joint(function: Callable[..., Any]) -> torch.fx.GraphModule | None:
    """Return the joint graph that a function of `aot_export_module` calls; None in other PyTorch versions."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    free = dict(zip(code.co_freevars, cells or (), strict=False)) if code is not None else {}
    joint = free["fx_g"].cell_contents if free.keys() == {"fx_g", "metadata"} else None
    return joint if isinstance(joint, torch.fx.GraphModule) else None


def _flattened(joint: torch.fx.GraphModule, *arguments: Any) -> torch.fx.GraphModule:
    """Return the joint graph with plain inputs, no tangents, and the gradients of arguments that require them."""
    graph = joint.graph
    for tangent in list(graph.find_nodes(op="placeholder"))[len(arguments) :]:
        graph.erase_node(tangent)
    (output,) = graph.find_nodes(op="output")
    results: list[Any] = list(output.args[0])
    split = len(results) - len(arguments)
    gradients = [
        gradient
        for argument, gradient in zip(arguments, results[split:], strict=True)
        if isinstance(argument, torch.Tensor) and argument.requires_grad
    ]
    assert None not in gradients, "a parameter that requires a gradient has none"
    output.args = ((*results[:split], *gradients),)
    graph.set_codegen(torch.fx.graph.CodeGen())
    joint.recompile()
    return joint


def trace_factors(model: nn.Module) -> None:
    """Replace `forward` of the BatchNorm modules that average cumulatively, in a copy of the caller's model.

    With `momentum=None` PyTorch computes the averaging factor, 1 / num_batches_tracked, on the host. A plan is fixed
    before the count is known, so the plan itself has to compute the factor from the buffer, as a tensor.

    Modules with a custom `forward`, and those that do not update statistics, are skipped.
    """
    for module in model.modules():
        if (
            isinstance(module, _BatchNorm)
            and type(module).forward is _BatchNorm.forward
            and "forward" not in vars(module)
            and module.momentum is None
            and module.training
            and module.track_running_stats
            and module.num_batches_tracked is not None
            and module.running_mean is not None
            and module.running_var is not None
        ):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(module: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """Compute the same as `_BatchNorm.forward`."""
    module._check_input_dim(x)
    mean, variance, count = module.running_mean, module.running_var, module.num_batches_tracked
    assert mean is not None and variance is not None and count is not None
    count.add_(1)
    new_mean, new_variance = (torch.zeros_like(value, dtype=torch.float32) for value in (mean, variance))
    # Momentum 1 replaces the zeros with the statistics of this batch.
    y = F.batch_norm(x, new_mean, new_variance, module.weight, module.bias, True, 1.0, module.eps)
    with torch.no_grad():
        factor = 1.0 / count.to(torch.float32)
        for value, new in ((mean, new_mean), (variance, new_variance)):
            value.copy_(value.float() * (1 - factor) + new * factor)
    return y
