"""The peers of a layer, at their best."""

from __future__ import annotations

from collections.abc import Sequence

from escalade import ops
from escalade.bench.layers.sets import Layer
from escalade.bench.peers.layer import LayerPeer, stem_convolution, stem_peer
from escalade.bench.peers.registry import LAYERS
from escalade.bench.trial import refusal
from escalade.errors import UnsupportedError
from escalade.measure.records import Record


def candidates(layer: Layer, names: Sequence[str]) -> tuple[list[LayerPeer], list[Record]]:
    """The peers that may be able to do a layer, and records of those that refuse it; pooling is a second step of
    theirs."""
    stem = layer.operation == "stem"
    operation = ops.operation("conv2d" if stem else layer.operation)
    found: list[LayerPeer] = []
    refused: list[Record] = []
    for name in names:
        try:
            problem = stem_convolution(layer.problem) if stem else layer.problem
            peers = LAYERS[name](operation, problem)
        except UnsupportedError as why:
            refused.append(refusal(ops.operation(layer.operation), layer.problem, name, str(why)))
            continue
        if stem:
            peers = [stem_peer(peer) for peer in peers if peer.layout == "nhwc"]
        found += peers
    return found, refused
