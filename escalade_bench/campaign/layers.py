"""Units of single layers: each beside its peers, on the way forward and on both ways back."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from functools import partial

from escalade_bench.campaign.units import ANY, SECONDS_EACH, Say, Session, Unit
from escalade_bench.layers.measurement import chosen_for, measure
from escalade_bench.layers.sets import Layer, parts
from escalade_bench.measure.currency import Made
from escalade_bench.measure.records import Record
from escalade_bench.networks.judging import UNTIMED
from escalade_bench.peers.registry import LAYERS, SLOW
from escalade_bench.trial import Settings

_EVERY = (256, 32, 8, 1)
FORWARD: dict[str, dict[str, tuple[int, ...]]] = {
    "fp16": {"resnet50": _EVERY, "resnet18": _EVERY, "stem": (256,), "depthwise": (256,), "untuned": (0,)},
    "tf32": {"resnet18": (256,), "resnet50": (256,)},
    "bf16": {"resnet50": (256,)},
    "fp8": {"resnet50": (256,)},
    "fp32": {"resnet50": (256,)},
}
"""The sets of the docs, by dtype, with their batches; `untuned` has batches of its own."""
BACKWARD: dict[str, dict[str, tuple[int, ...]]] = {
    "fp16": {"resnet50": (256, 32), "resnet18": (256, 32)},
    "tf32": {"resnet50": (256,)},
    "fp32": {"resnet50": (256,)},
}
_SECONDS = 2.0


def units() -> Iterator[Unit]:
    """Every layer once in each direction, dtype and batch, whichever sets have it."""
    names: set[str] = set()
    for direction, wanted in (
        ("forward", FORWARD),
        ("input_gradient", BACKWARD),
        ("weight_gradient", BACKWARD),
    ):
        for dtype, sets in wanted.items():
            for name, batches in sets.items():
                for batch in batches:
                    for part in parts((name,), (batch,), (dtype,), direction):
                        for layer in part.layers:
                            unit = _unit(layer, name, batch, direction)
                            if unit.name not in names:
                                names.add(unit.name)
                                yield unit


def _unit(layer: Layer, name: str, batch: int, direction: str) -> Unit:
    dtype = layer.problem.dtype
    peers = tuple(peer for peer in LAYERS if peer not in SLOW)
    asked = (name, *(("-b", str(batch)) if batch else ()), "-t", dtype, "-d", direction)
    how = ("--peers", ",".join(peers), "--seconds", str(SECONDS_EACH))
    return Unit(
        f"layers/{direction}/{layer.operation}/{layer.problem.name}/{dtype}",
        f"a layer of {name} beside its peers",
        shlex.join(("escalade", "layers", *asked, *how)),
        _SECONDS,
        partial(_measure, layer, direction, peers),
        partial(_made, layer),
        peers,
    )


def _measure(
    layer: Layer, direction: str, peers: Sequence[str], session: Session, say: Say
) -> Iterator[list[Record]]:
    if session.seconds == UNTIMED:
        yield [ANY]
        return
    workload = "layers" if direction == "forward" else f"layers_{direction}"
    settings = Settings(seed=session.seed, seconds_each=session.seconds)
    yield measure(layer, session.device, peers, settings, session.ceilings, workload, say, say)


def _made(layer: Layer, session: Session, record: Record) -> Made:
    chosen = chosen_for(layer, session.device, tune=False)
    return Made.of_rung(chosen.rung, chosen.problem, chosen.config)
