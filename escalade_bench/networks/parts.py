"""Parts common to all networks: accuracy, batches, a stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from escalade.engine.engine import Engine
from escalade.errors import EscaladeError
from escalade_bench.ladder import free
from escalade_bench.measure.records import Record
from escalade_bench.networks.judging import Standard, fresh, standard
from escalade_bench.networks.measurement import Case, measure
from escalade_bench.networks.streaming import measure_stream
from escalade_bench.networks.workload import Say, Setting, Workload, reference
from escalade_bench.peers.network import Task, tensors

MARGIN = 0.01
"""Smallest relative margin of the largest logit over the next, for an image whose top-1 counts."""
_ACCURACY_INPUTS = {"cuda": 64, "cpu": 2}


class Accuracy:
    """Inputs and their results in float64 on the CPU, to compare engines with."""

    def __init__(self, workload: Workload, model: nn.Module, count: int, size: int, seed: int) -> None:
        self._workload, self._model = workload, model
        self._inputs = workload.inputs(count, size, seed)
        self._expected = reference(model, self._inputs, workload.chunk)

    def check(self, engine: Engine) -> Record:
        """Return the error over all results, with a note on the top-1 agreement of images with a clear margin."""
        count, size, dtype = len(self._inputs), self._inputs.shape[-1], engine.dtype
        record = Record(
            f"{self._workload.name}_accuracy", f"{size}_n{count}", dtype, "", count, "escalade", ""
        )
        x = self._inputs.to(engine.device)
        own = standard(self._model, x, dtype, self._expected, self._workload.chunk)
        try:
            (results,) = fresh(lambda: engine(x), tensors)
        except (RuntimeError, EscaladeError) as broken:
            return replace(record, failure=f"{type(broken).__name__}: {broken}")
        error, failure = own.judge((results,))
        note = self.note(results.cpu())
        return replace(record, error=error, tolerance=own.tolerance, failure=failure, note=note)

    def note(self, logits: torch.Tensor) -> str:
        """Describe the results in a user's terms: the top-1 classes of a classifier."""
        if not self._workload.classifies:
            return f"{len(logits)} rows of {self._inputs.shape[-1]}"
        same = (logits.argmax(1) == self._expected.argmax(1))[self.clear]
        return (
            f"the same top-1 as float64 on {int(same.sum())} of {same.numel()} images with a margin of more than "
            f"{MARGIN:.0%} (of {len(logits)})"
        )

    @property
    def clear(self) -> torch.Tensor:
        """Return True for each image whose top-1 class rounding should not change."""
        first, second = self._expected.topk(2).values.unbind(1)
        return (first - second) > MARGIN * first.abs()


def accuracy(setting: Setting, say: Say) -> Iterator[list[Record]]:
    say(f"{setting.name}: float64 on the CPU")
    count = _ACCURACY_INPUTS[setting.device.type]
    judged = Accuracy(setting.workload, setting.model, count, setting.size, setting.session.seed + 4)
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
    """Measure a model in every batch and dtype, together with its peers."""
    for batch in sizes:
        say(f"{workload} batch {batch}: float64")
        x, standards = setting.known(model, batch, 2, tuple(engines))
        for dtype, engine in engines.items():
            task = Task(model, x, dtype, setting.workload.layout)
            case = Case(workload, task, standards[dtype], setting.session.seconds, setting.session.ceilings)
            peers = {} if dtype in setting.workload.further_dtypes else setting.peers_at(batch)
            yield measure(case, engine, peers, say)
            free(setting.device)


def normalised(images: torch.Tensor, normalize: tuple[tuple[float, ...], tuple[float, ...]]) -> torch.Tensor:
    """Return bytes normalized by means and deviations in fp32, as a compiled engine does."""
    mean, deviation = (
        torch.tensor(values, dtype=torch.float64, device=images.device).view(-1, 1, 1) for values in normalize
    )
    return ((images.double() / 255 - mean) / deviation).float()


def stream(setting: Setting, say: Say) -> Iterator[list[Record]]:
    def known(images: torch.Tensor, dtype: str) -> Standard:
        x = normalised(images.to(setting.device), wanted.normalize)
        expected = reference(setting.model, x, setting.workload.chunk)
        return standard(setting.model, x, dtype, expected, setting.workload.chunk)

    for dtype in setting.dtypes_with_peers:
        engine, wanted, item = setting.stream_engine(dtype)
        for batch in wanted.batches:
            right = partial(known, dtype=dtype)
            yield measure_stream(setting.name, engine, batch, item, setting.session, say, right, wanted.total)
            free(setting.device)
