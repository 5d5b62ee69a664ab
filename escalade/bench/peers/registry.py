"""All peers by name: of operators and layers, of whole networks, and of a step of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from escalade.bench.peers import torch_network
from escalade.bench.peers.catalogue import SLOW
from escalade.bench.peers.cudnn_graph import cudnn_graph_peer
from escalade.bench.peers.jax_network import jitted
from escalade.bench.peers.layer import LayerPeer
from escalade.bench.peers.network import Maker
from escalade.bench.peers.onnxruntime_network import sessions
from escalade.bench.peers.tensorrt_network import engines
from escalade.bench.peers.torch_conv2d import compiled_peer, conv2d_peers
from escalade.bench.peers.torch_operator import compiled_operator
from escalade.bench.peers.triton_conv2d import triton_peer
from escalade.errors import UnsupportedError
from escalade.ops.base.operation import Operation

Known = TypeVar("Known")
COMPILE = torch_network.compile_system(torch_network.MAX_AUTOTUNE)
COMPILE_DEFAULT = torch_network.compile_system(torch_network.DEFAULT)


def operator_peers(operation: Operation[Any], problem: Any, compiled: bool = False) -> tuple[LayerPeer, ...]:
    """PyTorch's operator in every layout, with cuDNN's own fusions where there are some: the peers of a ladder. With
    `compiled` also what PyTorch's compiler makes of it."""
    if operation.name == "conv2d":
        found = conv2d_peers(problem)
        return (*found, compiled_peer()) if compiled and found else found
    plain = (LayerPeer(f"torch-{layout}", layout, operation.peer) for layout in operation.layouts)
    return (*plain, compiled_operator(operation)) if compiled else tuple(plain)


def _torch(operation: Operation[Any], problem: Any) -> list[LayerPeer]:
    """Both layouts in fp32, where either may be faster; tensor cores want nhwc."""
    found = operator_peers(operation, problem)
    if not found:
        raise UnsupportedError(f"PyTorch has no {operation.name} in {problem.dtype}")
    return [peer for peer in found if peer.layout == "nhwc" or problem.dtype == "fp32"]


def _cudnn_graph(operation: Operation[Any], problem: Any) -> list[LayerPeer]:
    return [cudnn_graph_peer(operation, problem)]


def _compiled(operation: Operation[Any], problem: Any) -> list[LayerPeer]:
    if operation.name != "conv2d" or problem.dtype == "fp8":
        raise UnsupportedError("only forward convolutions are compiled, and none in fp8")
    return [compiled_peer()]


def _triton(operation: Operation[Any], problem: Any) -> list[LayerPeer]:
    return [triton_peer(operation, problem)]


LAYERS: dict[str, Callable[[Operation[Any], Any], list[LayerPeer]]] = {
    "cudnn-graph": _cudnn_graph,
    "torch": _torch,
    COMPILE: _compiled,
    "triton": _triton,
}
"""The peers of a single layer; each refuses what it cannot do with an `UnsupportedError`."""

EXPORTED: dict[str, Maker] = {"onnxruntime": sessions, "tensorrt": engines}
"""The peers that read a network as an ONNX model."""

RESNETS: dict[str, Maker] = {
    "torch-eager": partial(torch_network.eager, layouts=("nhwc",)),
    "torch-graph": partial(torch_network.graph, layouts=("nchw", "nhwc")),
    COMPILE: partial(torch_network.compiled, layouts=("nhwc",)),
    COMPILE_DEFAULT: partial(torch_network.compiled, layouts=("nhwc",), mode=torch_network.DEFAULT),
    "jax": jitted,
    **EXPORTED,
}

NETWORKS: dict[str, Maker] = {
    "torch-graph": torch_network.graph,
    COMPILE: torch_network.compiled,
    COMPILE_DEFAULT: partial(torch_network.compiled, mode=torch_network.DEFAULT),
    **EXPORTED,
}
"""The peers of any network, in the layout that Escalade has its inputs in."""


def plain(*layouts: str) -> dict[str, Maker]:
    """PyTorch only, in each of these layouts."""
    return {
        "torch-eager": partial(torch_network.eager, layouts=layouts),
        "torch-graph": partial(torch_network.graph, layouts=layouts),
        COMPILE: partial(torch_network.compiled, layouts=layouts, own_graphs=True),
        COMPILE_DEFAULT: partial(torch_network.compiled, layouts=layouts, mode=torch_network.DEFAULT),
        **EXPORTED,
    }


def chosen(names: Sequence[str], known: Mapping[str, Known]) -> dict[str, Known]:
    """The peers that are named; `all`, `none`, and for no names the ones that are quick to make."""
    if not names:
        return {name: peer for name, peer in known.items() if name not in SLOW}
    if tuple(names) == ("none",):
        return {}
    if tuple(names) == ("all",):
        return dict(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UnsupportedError(
            f"there is no peer {unknown[0]!r} here; there is {', '.join(known)}, or `all` or `none` by itself"
        )
    return {name: known[name] for name in names}
