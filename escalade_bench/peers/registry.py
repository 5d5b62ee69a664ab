"""Table of all peers: names in records, strongest setup, requirements, and the functions that make them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from escalade.errors import UnsupportedError
from escalade.ops.base.operation import Operation
from escalade_bench.peers import cudnn_graph, jax_network, layer, torch_network
from escalade_bench.peers.layer import LayerPeer
from escalade_bench.peers.network import Maker, NetworkPeer
from escalade_bench.peers.torch_network import COMPILE, COMPILE_DEFAULT

Known = TypeVar("Known")
LayerMaker = Callable[[Operation[Any], Any], list[LayerPeer]]


@dataclass(frozen=True)
class Peer:
    """Another system that computes the same workloads."""

    title: str
    systems: tuple[str, ...]
    """Names in the records; several if layouts have separate names. The last is the name for `--peers`."""
    what: str
    """The setup that is measured."""
    takes_part: str
    """The benchmarks that include it."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Optional packages, each with the command that installs it."""
    slow: bool = False
    """True if making it takes up to minutes: it runs only when named."""
    layer: LayerMaker | None = None
    """Makes peers for one layer; raises `UnsupportedError` for problems it cannot compute."""
    network: Callable[..., list[NetworkPeer]] | None = None
    """Makes peers for a whole network."""

    @property
    def refusal(self) -> str:
        """The missing package and its install command; empty if all packages are installed."""
        for package, install in self.needs.items():
            if importlib.util.find_spec(package) is None:
                return f"needs the package {package}, which is not installed: {install}"
        return ""


_TRITON = {"triton": "it comes with PyTorch for GPUs"}
PEERS = (
    Peer("cuDNN's graph API", ("cudnn-graph",),
         "a convolution with its epilogue, or a gradient, by the fastest plan of all that are offered",
         "layers in three directions", {"cudnn": cudnn_graph.INSTALL}, layer=cudnn_graph.cudnn_graph_peers),
    Peer("PyTorch's operator", ("torch-nchw", "torch-nhwc", "torch-flat", "torch"),
         "cuDNN chosen by measurement, in NCHW and in channels_last, in a CUDA graph", "ladders, layers, calls",
         layer=layer.torch_peers),
    Peer("cuDNN's fused call", ("cudnn-fused-nchw", "cudnn-fused-nhwc"),
         "convolution, bias, residual and ReLU in one call of PyTorch's", "ladders, layers"),
    Peer("PyTorch eager", ("torch-eager",), "the model as it is, channels_last", "networks, training",
         network=torch_network.eager),
    Peer("PyTorch, CUDA graph", ("torch-graph",),
         "BatchNorm folded, one CUDA graph, the faster of NCHW and channels_last", "networks, coverage, training",
         network=torch_network.graph),
    Peer("torch.compile max-autotune", (COMPILE,),
         "weights frozen, Triton's and cuDNN's kernels searched for the fastest, captured into one CUDA graph",
         "ladders, layers, networks, training", _TRITON, slow=True, layer=layer.compiled_peers,
         network=torch_network.compiled),
    Peer("torch.compile, default mode", (COMPILE_DEFAULT,), "weights frozen, captured into one CUDA graph",
         "networks, coverage, training", _TRITON, slow=True,
         network=partial(torch_network.compiled, system=COMPILE_DEFAULT)),
    Peer("JAX", ("jax",), "BatchNorm folded, NHWC, jitted by XLA", "ResNets, by the clock",
         {"jax": jax_network.INSTALL}, network=jax_network.jitted),
)  # fmt: skip
TITLES = {system: peer.title for peer in PEERS for system in peer.systems}
SLOW = tuple(system for peer in PEERS if peer.slow for system in peer.systems)
"""Systems that run only when named."""
LAYERS = {peer.systems[-1]: peer.layer for peer in PEERS if peer.layer}
_NETWORKS = {peer.systems[-1]: peer.network for peer in PEERS if peer.network}


def plain(*layouts: str, own_graphs: bool = True) -> dict[str, Maker]:
    """Return PyTorch's peers of a network, each in these layouts."""
    found: dict[str, Maker] = {
        name: partial(make, layouts=layouts) for name, make in _NETWORKS.items() if name != "jax"
    }
    return {**found, COMPILE: partial(_NETWORKS[COMPILE], layouts=layouts, own_graphs=own_graphs)}


RESNETS: dict[str, Maker] = {
    **plain("nhwc", own_graphs=False),
    "torch-graph": partial(torch_network.graph, layouts=("nchw", "nhwc")),
    "jax": jax_network.jitted,
}
NETWORKS: dict[str, Maker] = {name: _NETWORKS[name] for name in ("torch-graph", COMPILE, COMPILE_DEFAULT)}
"""Peers of any network, in the layout of Escalade's inputs."""


def chosen(names: Sequence[str], known: Mapping[str, Known]) -> dict[str, Known]:
    """Return the named peers: `all`, `none`, or without names those that are quick to make."""
    if not names:
        return {name: peer for name, peer in known.items() if name not in SLOW}
    if tuple(names) == ("none",):
        return {}
    if tuple(names) == ("all",):
        return dict(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UnsupportedError(
            f"there is no peer {unknown[0]!r} here; known: {', '.join(known)}; or pass `all` or `none` alone"
        )
    return {name: known[name] for name in names}
