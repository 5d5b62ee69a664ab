"""Parts common to all networks: accuracy, batches, a stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import nn

from escalade.engine.engine import Engine
from escalade.errors import EscaladeError
from escalade_bench.ladder import free
from escalade_bench.measure.records import Record
from escalade_bench.networks.data import normalised
from escalade_bench.networks.judging import Standard, fresh, standard
from escalade_bench.networks.measurement import Case, measure
from escalade_bench.networks.streaming import measure_stream
from escalade_bench.networks.workload import Say, Setting, reference
from escalade_bench.peers.network import Task, tensors

MARGIN = 0.01
"""Smallest relative margin of the largest logit over the next, for an image whose top-1 counts."""
_ACCURACY_INPUTS = {"cuda": 64, "cpu": 2}


class Accuracy:
    """Inputs and their results in float64, by which engines are judged."""

    def __init__(self, setting: Setting, model: nn.Module, x: torch.Tensor) -> None:
        self.name, self._classifies = setting.name, setting.workload.classifies
        self._chunk, self._model, self.x = setting.workload.chunk, model, x

    @cached_property
    def expected(self) -> torch.Tensor:
        return reference(self._model, self.x, self._chunk)

    def standard(self, dtype: str, device: torch.device | None = None) -> Standard:
        """Return the expected results and PyTorch's error, as it computes on a device."""
        return standard(self._model, self.x.to(device or self.x.device), dtype, self.expected, self._chunk)

    def results(self, engine: Engine) -> torch.Tensor:
        """Return an engine's results in memory that was filled with NaN."""
        x = self.x.to(engine.device)
        (results,) = fresh(lambda: engine(x), tensors)
        return results

    def check(self, engine: Engine) -> Record:
        """Return the error over all results, with a note on the top-1 agreement of images with a clear margin."""
        count, dtype = len(self.x), engine.dtype
        problem = f"{self.x.shape[-1]}_n{count}"
        record = Record(f"{self.name}_accuracy", problem, dtype, "", count, "escalade", "")
        own = self.standard(dtype, engine.device)
        try:
            results = self.results(engine)
        except (RuntimeError, EscaladeError) as broken:
            return replace(record, failure=f"{type(broken).__name__}: {broken}")
        error, failure = own.judge((results,))
        note = self.note(results.cpu())
        return replace(record, error=error, tolerance=own.tolerance, failure=failure, note=note)

    def note(self, logits: torch.Tensor) -> str:
        """Describe the results in a user's terms: the top-1 classes of a classifier."""
        if not self._classifies:
            return f"{len(logits)} rows of {self.x.shape[-1]}"
        same = (logits.argmax(1) == self.expected.cpu().argmax(1))[self.clear]
        return (
            f"the same top-1 as float64 on {int(same.sum())} of {same.numel()} images with a margin of more than "
            f"{MARGIN:.0%} (of {len(logits)})"
        )

    @property
    def clear(self) -> torch.Tensor:
        """Return True for each image whose top-1 class rounding should not change."""
        first, second = self.expected.cpu().topk(2).values.unbind(1)
        return (first - second) > MARGIN * first.abs()


def accuracy(setting: Setting, say: Say) -> Iterator[list[Record]]:
    say(f"{setting.name}: float64 on the CPU")
    count = _ACCURACY_INPUTS[setting.device.type]
    x = setting.workload.inputs(count, setting.size, setting.session.seed + 4)
    judged = Accuracy(setting, setting.model, x)
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
