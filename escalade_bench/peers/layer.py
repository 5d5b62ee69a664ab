"""Peers of a single layer: PyTorch's operators, cuDNN's fused convolutions and torch.compile, in their best layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from escalade.errors import EscaladeError, UnsupportedError
from escalade.ops.base.dtypes import QUANTIZED
from escalade.ops.base.operation import Operation
from escalade.ops.base.switches import with_cudnn
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.reference import pooled
from escalade.ops.shared import activation, prologue
from escalade.ops.stem.problem import StemProblem
from escalade.tune.verification import compare
from escalade_bench.peers.torch_network import COMPILE, MODES

Inputs = Mapping[str, torch.Tensor]
Run = Callable[[Any, Inputs], torch.Tensor]

AGREEMENT = {"fp32": 1e-4, "tf32": 2e-3, "fp16": 4e-3, "bf16": 3e-2, "fp8": 0.1, "int8": 0.1}
"""Largest relative error of a peer's whole result. Winograd's algorithm passes; TF32 (3e-4) in place of fp32 fails."""


class WrongPeer(EscaladeError):
    """A peer computed a wrong result."""


@dataclass(frozen=True)
class LayerPeer:
    """A system that computes a problem in one layout; `run` returns its result."""

    system: str
    layout: str
    run: Run
    note: Callable[[], str] = str
    """Returns details that are known after the first run, such as the plan that was chosen."""


def agreement(problem: Any) -> float:
    """Return the largest error of a peer on a problem, by the coarser of its inputs' and its results' dtypes."""
    return max(AGREEMENT[problem.dtype], AGREEMENT.get(getattr(problem, "output", ""), 0.0))


def error_of(peer: LayerPeer, problem: Any, inputs: Inputs, expected: torch.Tensor) -> float:
    """Return the relative error of a peer's result; raise `WrongPeer` if it is too large."""
    failure, error = compare(peer.run(problem, inputs), expected, agreement(problem))
    if failure:
        raise WrongPeer(failure)
    return error


def operator_peers(operation: Operation[Any], problem: Any, compiled: bool = False) -> tuple[LayerPeer, ...]:
    """Return the peers of a ladder: PyTorch's operator in every layout, cuDNN's fused calls, and torch.compile if
    `compiled`."""
    if operation.name == "conv2d":
        plain = _conv2d_peers(problem)
    else:
        plain = [LayerPeer(f"torch-{layout}", layout, operation.peer) for layout in operation.layouts]
    return (*plain, compiled_peer(operation)) if compiled and plain else tuple(plain)


def torch_peers(operation: Operation[Any], problem: Any) -> list[LayerPeer]:
    """Return the eager peers of a layer: both layouts in fp32, where either may be faster, else nhwc."""
    found = operator_peers(operation, problem)
    if not found:
        raise UnsupportedError(f"PyTorch has no {operation.name} in {problem.dtype}")
    return [peer for peer in found if peer.layout == "nhwc" or problem.dtype == "fp32"]


def compiled_peers(operation: Operation[Any], problem: Any) -> list[LayerPeer]:
    """Return torch.compile as the peer of a layer."""
    if operation.name != "conv2d" or problem.dtype in QUANTIZED:
        raise UnsupportedError("only forward convolutions are compiled, and none in 8 bits")
    return [compiled_peer(operation)]


def compiled_peer(operation: Operation[Any]) -> LayerPeer:
    """Compile an operator for one problem; this takes up to tens of seconds per problem."""
    if operation.name == "conv2d":
        return LayerPeer(COMPILE, "nhwc", _compiled_conv2d)
    layout = "nhwc" if "nhwc" in operation.layouts else operation.layouts[0]
    return LayerPeer(
        COMPILE, layout, lambda problem, inputs: _compiled(operation.peer, problem, False)(inputs)
    )


@lru_cache(maxsize=1)
def _compiled(run: Run, problem: Any, fullgraph: bool) -> Callable[[Inputs], torch.Tensor]:
    torch.compiler.reset()  # Dynamo stops recompiling a function after a few variants
    return torch.compile(
        lambda inputs: run(problem, inputs), mode=MODES[COMPILE], fullgraph=fullgraph, dynamic=False
    )


def _conv2d_peers(problem: Conv2dProblem) -> list[LayerPeer]:
    if problem.dtype in QUANTIZED:
        return []  # PyTorch has no convolutions in 8 bits on GPUs
    found = [LayerPeer(f"torch-{layout}", layout, eager_conv2d) for layout in ("nchw", "nhwc")]
    if problem.relu and not problem.prologue:  # PyTorch exposes cuDNN's fusions only with a final ReLU
        found += [LayerPeer(f"cudnn-fused-{layout}", layout, _fused) for layout in ("nchw", "nhwc")]
    return found


def _convolve(p: Conv2dProblem, inputs: Inputs) -> torch.Tensor:
    x = prologue.apply(p.prologue, inputs)["x"]
    return F.conv2d(x, inputs["weight"], inputs.get("bias"), p.stride, p.padding, p.dilation, p.groups)


def eager_conv2d(problem: Conv2dProblem, inputs: Inputs) -> torch.Tensor:
    """Run the prologue, convolution, bias, residual, activation (ReLU in place) and pool one after another."""
    p = problem

    def compute() -> torch.Tensor:
        y = _convolve(p, inputs)
        if p.activation:
            return pooled(p, activation.apply(p, y, inputs["residual"] if p.residual else None))
        if p.residual:
            y.add_(inputs["residual"])
        return pooled(p, y.relu_() if p.relu else y)

    return with_cudnn(p.dtype, compute)


def _fused(problem: Conv2dProblem, inputs: Inputs) -> torch.Tensor:
    """Run cuDNN's convolution + bias (+ residual) + ReLU in one call, then the pool."""
    p = problem
    x, weight = inputs["x"], inputs["weight"]
    options = inputs.get("bias"), p.stride, p.padding, p.dilation, p.groups

    def compute() -> torch.Tensor:
        if p.residual:
            return torch.cudnn_convolution_add_relu(x, weight, inputs["residual"], 1.0, *options)
        return torch.cudnn_convolution_relu(x, weight, *options)

    return with_cudnn(p.dtype, lambda: pooled(p, compute()))


def _compiled_conv2d(problem: Conv2dProblem, inputs: Inputs) -> torch.Tensor:
    # The switches of cuDNN are set outside of the compiled function: they would break its graph.
    return with_cudnn(problem.dtype, lambda: _compiled(_whole_conv2d, problem, True)(inputs))


def _whole_conv2d(p: Conv2dProblem, inputs: Inputs) -> torch.Tensor:
    return pooled(p, activation.apply(p, _convolve(p, inputs), inputs.get("residual")))


def stem_convolution(problem: StemProblem) -> Conv2dProblem:
    """Return the convolution of a stem. Peers take normalized pixels in the convolution's dtype and nhwc only."""
    p = problem
    if p.normalise or p.source != p.storage or p.source_layout != "nhwc":
        raise UnsupportedError(f"{p.name}: peers take images in nhwc and {p.storage}, normalized before")
    return Conv2dProblem(
        p.batch, p.channels, p.height, p.width, p.filters, p.filter_height, p.filter_width, p.stride, p.padding,
        dtype=p.dtype, layout="nhwc", bias=True, relu=p.relu, activation=p.activation,
    )  # fmt: skip


def stem_peer(peer: LayerPeer) -> LayerPeer:
    """Turn a peer for convolutions into one for stems, with PyTorch's pooling as a second step."""
    prepared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def filters(p: StemProblem, weight: torch.Tensor) -> torch.Tensor:
        """Convert weights to channels_last once; keep the original too, so that its address is not reused."""
        address = weight.data_ptr()
        if address not in prepared:
            shaped = weight.view(p.filters, p.channels, p.filter_height, p.filter_width)
            prepared[address] = weight, shaped.contiguous(memory_format=torch.channels_last)
        return prepared[address][1]

    def run(p: StemProblem, inputs: Inputs) -> torch.Tensor:
        x = inputs["x"].view(p.batch, p.height, p.width, p.channels).permute(0, 3, 1, 2)
        given = {"x": x, "weight": filters(p, inputs["weight"]), "bias": inputs["bias"]}
        y = peer.run(stem_convolution(p), given)
        return F.max_pool2d(y, *p.pool) if p.pool else y

    return replace(peer, layout="nhwc", run=run)
