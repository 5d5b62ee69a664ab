"""What a run can measure of any network: its accuracy, its batches, the phases of one image, a stream."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from escalade.bench.ladder import free
from escalade.bench.networks.accuracy import Accuracy
from escalade.bench.networks.judging import Standard, standard
from escalade.bench.networks.measurement import Case, measure
from escalade.bench.networks.phases import measure_phases
from escalade.bench.networks.streaming import measure_stream
from escalade.bench.networks.workload import Say, Setting
from escalade.bench.peers.network import Task
from escalade.engine import compile
from escalade.engine.engine import Engine
from escalade.measure.records import Record

_ACCURACY_INPUTS = {"cuda": 64, "cpu": 2}


def accuracy(setting: Setting, say: Say) -> Iterator[list[Record]]:
    say(f"{setting.name}: float64 on the CPU")
    count = _ACCURACY_INPUTS[setting.device.type]
    judged = Accuracy(setting.workload, setting.model, count, setting.size, setting.seed + 4)
    yield [judged.check(setting.engine(dtype)) for dtype in setting.dtypes]


def batches(setting: Setting, say: Say) -> Iterator[list[Record]]:
    engines = {dtype: setting.engine(dtype) for dtype in setting.dtypes}
    yield from over_batches(setting, setting.name, setting.model, engines, setting.batches, say)


def over_batches(
    setting: Setting,
    workload: str,
    model: nn.Module,
    engines: dict[str, Engine],
    sizes: tuple[int, ...],
    say: Say,
) -> Iterator[list[Record]]:
    """A model on every batch and dtype, beside the peers that take part there."""
    for batch in sizes:
        say(f"{workload} batch {batch}: float64")
        x, standards = setting.known(model, batch, 2, tuple(engines))
        for dtype, engine in engines.items():
            task = Task(model, x, dtype, setting.workload.layout)
            case = Case(workload, task, standards[dtype], setting.seconds, setting.ceilings)
            peers = {} if dtype in setting.workload.further_dtypes else setting.peers_at(batch)
            yield measure(case, engine, peers, say)
            free(setting.device)


def _with_peers(setting: Setting) -> tuple[str, ...]:
    """The dtypes of the run that every fusion level, and a stream of bytes, can be compiled in."""
    return tuple(dtype for dtype in setting.dtypes if dtype not in setting.workload.further_dtypes)


def phases(setting: Setting, say: Say) -> Iterator[list[Record]]:
    dtypes = _with_peers(setting)
    x, known = setting.known(setting.model, 1, 3, (*dtypes, "fp32"))
    for dtype in dtypes:
        task = Task(setting.model, x, dtype)
        standards = {name: known[name] for name in (dtype, "fp32")}
        yield measure_phases(setting.name, setting.graph, task, standards, setting.seconds, say)
        free(setting.device)


def normalised(images: torch.Tensor, normalize: tuple[tuple[float, ...], tuple[float, ...]]) -> torch.Tensor:
    """Bytes as an engine that was compiled with these means and deviations takes them, in fp32."""
    mean, deviation = (
        torch.tensor(values, dtype=torch.float64, device=images.device).view(-1, 1, 1) for values in normalize
    )
    return ((images.double() / 255 - mean) / deviation).float()


def stream(setting: Setting, say: Say) -> Iterator[list[Record]]:
    wanted = setting.workload.stream
    assert wanted is not None
    example = setting.inputs(1, 0)
    item = tuple(example.shape[1:])

    def known(images: torch.Tensor, dtype: str) -> Standard:
        x = normalised(images.to(setting.device), wanted.normalize)
        expected = setting.reference(setting.model, x)
        return standard(setting.model, x, dtype, expected, setting.workload.chunk)

    for dtype in _with_peers(setting):
        engine = compile(
            setting.model, example, dtype=dtype, device=setting.device, normalize=wanted.normalize, plans=1
        )
        for batch in wanted.batches:
            yield measure_stream(
                setting.name, engine, batch, item, setting.seconds, setting.seed, say,
                partial(known, dtype=dtype), wanted.total,
            )  # fmt: skip
            free(setting.device)
