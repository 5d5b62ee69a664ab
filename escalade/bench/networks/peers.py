"""The systems that a network is compared with, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from escalade.bench.networks import torch_peers
from escalade.bench.networks.contender import Maker
from escalade.bench.networks.jax_peer import jax_network
from escalade.errors import UnsupportedError

RESNETS: dict[str, Maker] = {
    "torch-eager": partial(torch_peers.eager, layouts=("nhwc",)),
    "torch-graph": partial(torch_peers.graph, layouts=("nchw", "nhwc")),
    "torch-compile": partial(torch_peers.compiled, layouts=("nhwc",)),
    "jax": jax_network,
}


def plain(*layouts: str) -> dict[str, Maker]:
    """PyTorch only, in each of these layouts."""
    return {
        "torch-eager": partial(torch_peers.eager, layouts=layouts),
        "torch-graph": partial(torch_peers.graph, layouts=layouts),
        "torch-compile": partial(torch_peers.compiled, layouts=layouts, own_graphs=True),
    }


SLOW = ("torch-compile",)
"""It takes up to two minutes for every batch size and dtype, so it takes part only when it is named."""


def chosen(names: Sequence[str], known: Mapping[str, Maker]) -> dict[str, Maker]:
    """Those named; `all`, `none`, and for no names the ones that are quick to make."""
    if not names:
        return {name: make for name, make in known.items() if name not in SLOW}
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
