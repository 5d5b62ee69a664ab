"""PyTorch's compiler over the operator of a ladder: Triton's kernels, fused and searched by Inductor."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch

from escalade.bench.peers.layer import Inputs, LayerPeer
from escalade.bench.peers.torch_network import MAX_AUTOTUNE, compile_system
from escalade.ops.base.operation import Operation


def compiled_operator(operation: Operation[Any]) -> LayerPeer:
    """The operator compiled for one problem, in channels_last where there are layouts; seconds for each problem."""
    layout = "nhwc" if "nhwc" in operation.layouts else operation.layouts[0]
    return LayerPeer(compile_system(MAX_AUTOTUNE), layout, partial(_run, operation))


def _run(operation: Operation[Any], problem: Any, inputs: Inputs) -> torch.Tensor:
    return _compiled(operation, problem)(inputs)


@lru_cache(maxsize=1)
def _compiled(operation: Operation[Any], problem: Any) -> Callable[[Inputs], torch.Tensor]:
    # What was compiled before is of no use, and after a few of one function the compiler gives up.
    torch.compiler.reset()
    return torch.compile(
        lambda inputs: operation.peer(problem, inputs), mode="max-autotune-no-cudagraphs", dynamic=False
    )
