"""The peers of a layer, at their best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from escalade import ops
from escalade.bench.ladder import Say
from escalade.bench.layers.sets import Layer
from escalade.bench.peers import Peer, WrongPeer, error_of, peers
from escalade.bench.peers.cudnn_graph import cudnn_graph_peer, frontend
from escalade.bench.peers.stem import convolution, in_two_steps
from escalade.bench.peers.torch_conv2d import compiled_peer
from escalade.errors import UnsupportedError
from escalade.measure.refusal import reason
from escalade.measure.verify import Case


@dataclass(frozen=True)
class Rival:
    """A peer; `note` says more about it once it has run."""

    peer: Peer
    note: Callable[[], str] = str


def _torch(operation: str, problem: Any) -> list[Rival]:
    """Both layouts in fp32, where either may be faster; tensor cores want nhwc."""
    found = peers(ops.operation(operation), problem)
    return [Rival(peer) for peer in found if peer.layout == "nhwc" or problem.dtype == "fp32"]


def _cudnn_graph(operation: str, problem: Any) -> list[Rival]:
    peer, search = cudnn_graph_peer(ops.operation(operation), problem)
    return [Rival(peer, lambda: search.note)]


def _compiled(operation: str, problem: Any) -> list[Rival]:
    if operation != "conv2d" or problem.dtype == "fp8":
        raise UnsupportedError("only forward convolutions are compiled, and none in fp8")
    return [Rival(compiled_peer())]


CHOICES: dict[str, Callable[[str, Any], list[Rival]]] = {
    "cudnn-graph": _cudnn_graph,
    "torch": _torch,
    "compile": _compiled,
}
USUAL = ("cudnn-graph", "torch")


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """Those named, `none`, or the usual ones."""
    for name in names:
        if name not in (*CHOICES, "none"):
            raise UnsupportedError(f"there is no peer {name!r}; there is {', '.join(CHOICES)}, none")
    return () if "none" in names else tuple(dict.fromkeys(names)) or USUAL


def available(names: Sequence[str], note: Say) -> tuple[str, ...]:
    """Without cuDNN's graphs where their package is missing, which is said once."""
    if "cudnn-graph" in names:
        try:
            frontend()
        except UnsupportedError as missing:
            note(f"no cudnn-graph: {missing}")
            return tuple(name for name in names if name != "cudnn-graph")
    return tuple(names)


def candidates(layer: Layer, names: Sequence[str], note: Say) -> list[Rival]:
    """Those that may be able to do a layer. Pooling is a second step of theirs."""
    stem = layer.operation == "stem"
    operation = "conv2d" if stem else layer.operation
    found: list[Rival] = []
    for name in names:
        try:
            problem = convolution(layer.problem) if stem else layer.problem
            rivals = CHOICES[name](operation, problem)
        except UnsupportedError as refused:
            note(f"{layer.problem.name} {layer.problem.dtype}: no {name}: {refused}")
            continue
        if stem:
            rivals = [
                replace(rival, peer=in_two_steps(rival.peer))
                for rival in rivals
                if rival.peer.layout == "nhwc"
            ]
        found += rivals
    return found


def verified(rivals: Sequence[Rival], case: Case, note: Say) -> list[tuple[Rival, float]]:
    """Those that do the problem, and right, with their errors; what becomes of the others is said."""
    found = []
    for rival in rivals:
        problem = replace(case.problem, layout=rival.peer.layout)
        label = f"{problem.name} {problem.dtype}: {rival.peer.system}"
        try:
            error = error_of(rival.peer, problem, case.inputs_in(rival.peer.layout), case.expected)
        except WrongPeer as wrong:
            note(f"{label} is wrong: {wrong}")
            continue
        except Exception as refused:  # a peer may fail in any way: it is left out, and the others go on
            note(f"{label} refuses: {reason(refused)}")
            continue
        found.append((rival, error))
    return found
