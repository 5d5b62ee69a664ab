"""One layer: our rung and config chosen, it and its peers verified, all of them timed in turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from escalade import ops
from escalade.device.program import Program
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card
from escalade.ops.base.rung import Config, Rung
from escalade.ops.choose.choice import choose
from escalade.tune import search, verification
from escalade_bench.ladder import Say, free, measure_jobs
from escalade_bench.layers.sets import Layer
from escalade_bench.measure.ceilings import Ceilings
from escalade_bench.measure.figures import with_gains
from escalade_bench.measure.records import Record
from escalade_bench.peers.layer import LayerPeer, stem_convolution, stem_peer
from escalade_bench.peers.registry import LAYERS
from escalade_bench.trial import Settings, refusal


@dataclass(frozen=True)
class Chosen:
    """The rung and config that run a layer."""

    rung: Rung[Any]
    config: Config
    problem: Any
    why: str


def chosen_for(layer: Layer, device: torch.device, tune: bool, seed: int = 0) -> Chosen:
    """Return the choice of a call; with `tune`, the fastest of all configs of all preferred rungs, by measurement."""
    if not tune:
        found = choose(ops.operation(layer.operation), layer.problem, device)
        return Chosen(found.rung, found.config, found.problem, found.why)
    entry = search.fastest(ops.operation(layer.operation), layer.problem, device, seed)
    rung = ops.operation(layer.operation).ladder.rung(entry.rung).on(Card.of(device))
    config = next(c for c in rung.configs(layer.problem) if c.as_dict() == entry.config)
    return Chosen(rung, config, layer.problem, "the fastest of all configs of the preferred rungs")


def programs(layers: Iterable[Layer], device: torch.device, tune: bool) -> list[Program]:
    """Return the programs to compile. A layer that no rung takes is reported by the measurement."""
    found: dict[Program, None] = {}
    for layer in layers:
        if tune:
            wanted: Sequence[Program] = search.programs(
                ops.operation(layer.operation), (layer.problem,), Card.of(device)
            )
        else:
            try:
                chosen = chosen_for(layer, device, tune=False)
            except UnsupportedError:
                continue
            wanted = chosen.rung.recipe(chosen.problem, chosen.config).programs
        found.update(dict.fromkeys(wanted))
    return list(found)


def candidates(layer: Layer, names: Sequence[str]) -> tuple[list[LayerPeer], list[Record]]:
    """Return the peers that may be able to run a layer, and records of those that refuse it.

    Pooling is a second step of theirs.
    """
    stem = layer.operation == "stem"
    operation = ops.operation("conv2d" if stem else layer.operation)
    found: list[LayerPeer] = []
    refused: list[Record] = []
    for name in names:
        try:
            peers = LAYERS[name](operation, stem_convolution(layer.problem) if stem else layer.problem)
        except UnsupportedError as why:
            refused.append(refusal(ops.operation(layer.operation), layer.problem, name, str(why)))
            continue
        found += [stem_peer(peer) for peer in peers if peer.layout == "nhwc"] if stem else peers
    return found, refused


def measure(
    layer: Layer,
    device: torch.device,
    peers: Sequence[str],
    settings: Settings,
    ceilings: Ceilings | None,
    workload: str,
    say: Say,
    note: Say,
) -> list[Record]:
    """Return a record of ours (a failure if it is wrong) and one per peer; none if no rung of ours runs the layer.

    `say` gets progress, `note` what was left out.
    """
    operation, problem = ops.operation(layer.operation), layer.problem
    label = f"{problem.name} {problem.dtype}"
    say(f"{label}: {'tuning' if settings.tune else 'choosing'}")
    try:
        chosen = chosen_for(layer, device, settings.tune, settings.seed)
    except UnsupportedError as why:
        note(f"{label}: {why}")
        return []
    say(f"{label}: verifying {chosen.rung.name} and peers")
    offered, refused = candidates(layer, peers) if device.type == "cuda" else ([], [])
    settings = replace(settings, tune=False, weights_stay=not operation.weights_change)
    jobs = [verification.Job(chosen.problem, chosen.rung, chosen.config)]
    records = measure_jobs(operation, problem, device, jobs, offered, settings, ceilings, say, note)
    free(device)
    remark = chosen.why
    if chosen.problem.layout != problem.layout:
        remark += f"; in layout {chosen.problem.layout}, not counting the conversion"

    def filed(r: Record) -> Record:
        note = r.note if r.is_peer or r.failure else "; ".join(filter(None, (remark, r.note)))
        return replace(r, workload=workload, note=note)

    return [filed(record) for record in with_gains(records + refused, operation.ladder)]
