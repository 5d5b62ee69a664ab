"""Plans of a network, made without running anything: their digests for a card, and the steps that PyTorch computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from escalade.engine.engine import Engine
from escalade.engine.explain import Explanation, Floor, explain_plan
from escalade.engine.graph.forms import STORAGE
from escalade.engine.passes import FusionLevel
from escalade_bench.measure.currency import Made
from escalade_bench.networks.workload import Setting
from escalade_bench.peers.network import FORMATS

_IMAGE = 3
"""Dimensions of an image: channels, height and width."""


def of_batches(setting: Setting, batches: Iterable[int], dtype: str) -> Made:
    """Return the plans of a network's batches."""
    return of_engine(setting, setting.engine(dtype), batches)


def of_engine(setting: Setting, engine: Engine, batches: Iterable[int]) -> Made:
    """Return an engine's plans for batches of a network's inputs."""
    return Made.together(
        Made.of_plan(engine.plan_for(setting.session.card, _input(setting, batch, engine.dtype)))
        for batch in batches
    )


def of_levels(setting: Setting, batches: Iterable[int], dtype: str) -> Made:
    """Return the plans of one image at every level of fusion."""
    engines = [Engine(setting.graph, dtype, setting.device, plans=1, fusion=level) for level in FusionLevel]
    return Made.together(of_engine(setting, engine, (1,)) for engine in engines)


def of_stream(setting: Setting, batches: Iterable[int], dtype: str) -> Made:
    """Return the plans of batches of bytes, which the network normalizes itself."""
    engine, stream, item = setting.stream_engine(dtype)
    images = (torch.empty(n, *item, dtype=torch.uint8, device=setting.device) for n in stream.batches)
    return Made.together(Made.of_plan(engine.plan_for(setting.session.card, each)) for each in images)


def _input(setting: Setting, batch: int, dtype: str) -> torch.Tensor:
    item = setting.workload.inputs(1, setting.size).shape[1:]
    return empty(batch, tuple(item), dtype, setting.workload.layout, setting.device)


def empty(batch: int, item: tuple[int, ...], dtype: str, layout: str, device: torch.device) -> torch.Tensor:
    """Return an input like those that are timed. Its contents are undefined: no plan depends on them."""
    format = FORMATS[layout] if len(item) == _IMAGE else torch.contiguous_format
    return torch.empty(batch, *item, dtype=STORAGE[dtype], device=device, memory_format=format)


def planned(engine: Engine, *inputs: torch.Tensor, floor: Floor | None = None) -> Explanation:
    """Return the plan for inputs like these: of an engine on the CPU, the one that an H200 would run."""
    device = "cuda" if engine.device.type == "cuda" else "twin"
    return explain_plan(engine.plan(*inputs), floor, device=device)


def by_operator(explanation: Explanation) -> dict[str, int]:
    """Return the number of PyTorch's steps per operator: the most frequent first, then by name."""
    counts = Counter(_operator(step.operation) for step in explanation.fallbacks)
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def _operator(operation: str) -> str:
    """Return mul for `aten::mul.Tensor` and `aten::mul_.Tensor`; Escalade's operations keep their names."""
    return operation.removeprefix("aten::").partition(".")[0].removesuffix("_")


def spelled(counts: Mapping[str, int]) -> str:
    """Return `mul 2, silu 1`; empty without any."""
    return ", ".join(f"{operator} {count}" for operator, count in counts.items())
