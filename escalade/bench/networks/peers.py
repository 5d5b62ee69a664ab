"""The systems that a network is compared with, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from escalade.bench.networks import torch_peers
from escalade.bench.networks.contender import Contender, Entry
from escalade.bench.networks.jax_peer import jax_network
from escalade.errors import UnsupportedError

PEERS: dict[str, Callable[[Entry], list[Contender]]] = {
    "torch-eager": torch_peers.eager,
    "torch-graph": torch_peers.graph,
    "torch-compile": torch_peers.compiled,
    "jax": jax_network,
}
SLOW = ("torch-compile",)
"""It takes more than a minute for every batch size and dtype, so it takes part only when it is named."""


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """Those named; `all`, `none`, and for no names the ones that are quick to make."""
    if not names:
        return tuple(name for name in PEERS if name not in SLOW)
    if tuple(names) == ("none",):
        return ()
    if tuple(names) == ("all",):
        return tuple(PEERS)
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise UnsupportedError(
            f"there is no peer {unknown[0]!r}; there is {', '.join(PEERS)}, or `all` or `none` by itself"
        )
    return tuple(dict.fromkeys(names))
