"""Check that a model, and all state around it, is unchanged after a use."""

from __future__ import annotations

import functools
import os
import random
import types
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch._dynamo  # its first import adds warning filters
from torch.nn.parameter import is_lazy


@contextmanager
def untouched(*things: Any) -> Iterator[None]:
    """Fail if any reachable object was replaced or changed, or if random state, modes or switches differ
    afterwards, even if the code in between raises.
    """
    before, around, draws = state(*things), _surroundings(), _draws()
    try:
        yield
    finally:
        after = state(*things)
        assert after.keys() == before.keys(), sorted(after.keys() ^ before.keys())[:5]
        changed = [path for path, what in before.items() if after[path] != what]
        assert not changed, f"{changed[0]}: {before[changed[0]]} is now {after[changed[0]]}"
        now = _surroundings()
        switched = {name: (value, now[name]) for name, value in around.items() if now[name] != value}
        assert not switched, f"before and after: {switched}"
        assert _draws() == draws, "random numbers have been drawn"


def state(*things: Any) -> dict[str, Any]:
    """Every reachable object by its path: its identity and contents."""
    found: dict[str, Any] = {}
    seen: dict[int, str] = {}
    for number, thing in enumerate(things):
        _visit(thing, str(number), found, seen)
    return found


def _visit(value: Any, path: str, found: dict[str, Any], seen: dict[int, str]) -> None:
    if isinstance(value, (int, float, str, type(None))):
        found[path] = value
        return
    found[path] = (type(value).__name__, id(value))
    if id(value) in seen:
        return
    seen[id(value)] = path
    if isinstance(value, torch.Tensor):
        if not is_lazy(value) and not value.is_meta:
            found[path] += _tensor(value)
        return
    parts: dict[str, Any] = {}
    if isinstance(value, dict):
        parts |= {f"[{key!r}]": item for key, item in value.items()}
        found[path] += (list(value),)
    elif isinstance(value, (list, tuple, deque)):
        parts |= {f"[{number}]": item for number, item in enumerate(value)}
    elif isinstance(value, types.FunctionType):
        parts |= {f"<{number}>": cell.cell_contents for number, cell in enumerate(value.__closure__ or ())}
        parts["<defaults>"] = value.__defaults__
    elif isinstance(value, types.MethodType):
        parts["<self>"] = value.__self__
    elif isinstance(value, functools.partial):
        parts |= {"<function>": value.func, "<arguments>": value.args}
    elif isinstance(value, torch.Generator):
        found[path] += (value.get_state().tolist(),)
    elif isinstance(value, np.ndarray):
        found[path] += (value.tobytes(),)
    elif isinstance(value, type):
        parts |= {f".{name}": item for name, item in vars(value).items() if not name.startswith("__")}
    elif hasattr(value, "cache_info"):
        found[path] += (value.cache_info().currsize,)
    if hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType)):
        parts |= {f".{name}": item for name, item in vars(value).items()}
    for name in getattr(type(value), "__slots__", ()):
        parts[f".{name}"] = getattr(value, name, None)
    for name, part in parts.items():
        _visit(part, path + name, found, seen)


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad,
        tensor.is_leaf, tensor.is_inference() or tensor._version, tensor.is_leaf and tensor.grad is None,
        tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes(),
    )  # fmt: skip


def _surroundings() -> dict[str, Any]:
    cudnn = torch.backends.cudnn
    return {
        "grad": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "matmul precision": torch.get_float32_matmul_precision(),
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        "mkldnn": torch.backends.mkldnn.enabled,
        "threads": torch.get_num_threads(),
        "warnings": list(warnings.filters),
        "anomaly": torch.is_anomaly_enabled(),
        "environment": dict(os.environ),
    }


def _draws() -> tuple[Any, ...]:
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    states = [state.tolist() for state in (torch.get_rng_state(), *gpus)]
    return random.getstate(), repr(np.random.get_state()), states
