"""Evaluation of nodes with PyTorch: for constants, for plans without a GPU, and as a reference."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from escalade.engine.graph.aten import OperatorError
from escalade.engine.graph.graph import Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.aten import on_device, reporting_errors
from escalade.engine.nodes.base import Tensors
from escalade.ops.base.switches import precision

modes_lock = threading.RLock()
"""PyTorch's precision modes and default dtype are global: two threads would restore each other's settings."""
_DEVICES = ("cpu", "cuda")
_CPU_MODES: tuple[Any, ...] = tuple(
    mode for name in ("conv", "matmul") if (mode := getattr(torch.backends.mkldnn, name, None)) is not None
)


def compute(node: Node, inputs: Tensors, home: torch.device) -> torch.Tensor:
    """Compute a node's result on the device `home`, in the dtype of its inputs and the shape that the graph has."""
    with reporting_errors(node.op):
        result = operator_of(node).compute(on_device(node, home), inputs)
    require_result(node, result, home)
    return result


def require_result(node: Node, result: torch.Tensor, home: torch.device) -> None:
    """Require a node's result to be on the device `home`, in the shape that the graph has."""
    if result.device.type != home.type:  # a kernel would be passed a pointer of another device
        raise OperatorError(
            f"{node.source or node.name} is computed on {result.device}; the plan is on {home}"
        )
    if tuple(result.shape) != node.shape:
        raise OperatorError(
            f"{node.source or node.name} returns shape {list(result.shape)}; the plan has memory for "
            f"{list(node.shape)}"
        )


@contextmanager
def own_arithmetic(dtype: str, device: torch.device) -> Iterator[None]:
    """Let PyTorch compute for a plan without gradients and in the plan's dtypes, whatever the caller's modes are.

    Autocast and the default dtype are ignored, and TF32 is used for `tf32` on a GPU only. Modes that are right already
    are left alone; on the CPU that is nearly always all of them.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(without_autocast())
        has_other_default = torch.get_default_dtype() is not torch.float32
        if has_other_default or device.type == "cuda" or not _cpu_is_exact():
            stack.enter_context(modes_lock)
            stack.enter_context(precision(dtype if device.type == "cuda" else "fp32"))
        if has_other_default:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)
        yield


@contextmanager
def without_autocast() -> Iterator[None]:
    with ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _cpu_is_exact() -> bool:
    """Return True if the CPU multiplies fp32 as fp32."""
    return all(mode.fp32_precision in ("none", "ieee") for mode in _CPU_MODES)
