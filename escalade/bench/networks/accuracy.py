"""How far a network's answers are from float64's, and whether they are the same answers."""

from __future__ import annotations

from dataclasses import replace

import torch

from escalade.bench.networks.judging import fresh, standard
from escalade.bench.networks.workload import Workload, reference
from escalade.bench.peers.network import tensors
from escalade.engine.engine import Engine
from escalade.errors import EscaladeError
from escalade.measure.records import Record

MARGIN = 0.01
"""How much the largest logit must exceed the next, relative to itself, for an image to count."""


class Accuracy:
    """Inputs and what the network makes of them in float64 on the CPU."""

    def __init__(self, workload: Workload, model: torch.nn.Module, count: int, size: int, seed: int) -> None:
        self._workload = workload
        self._inputs = workload.inputs(count, size, seed)
        self._model = model
        self._expected = reference(model, self._inputs, workload.chunk)

    def check(self, engine: Engine) -> Record:
        """The error over all results, and a note on the answers of images that have a clear one."""
        count, size = len(self._inputs), self._inputs.shape[-1]
        record = Record(
            f"{self._workload.name}_accuracy", f"{size}_n{count}", engine.dtype, "", count, "escalade", ""
        )
        x = self._inputs.to(engine.device)
        own = standard(self._model, x, engine.dtype, self._expected, self._workload.chunk)
        try:
            (results,) = fresh(lambda: engine(x), tensors)
        except (RuntimeError, EscaladeError) as broken:
            return replace(record, failure=f"{type(broken).__name__}: {broken}")
        error, failure = own.judge((results,))
        note = self._answers(results.cpu()) if self._workload.classifies else f"{count} rows of {size}"
        return replace(record, error=error, tolerance=own.tolerance, failure=failure, note=note)

    def _answers(self, logits: torch.Tensor) -> str:
        same = (logits.argmax(1) == self._expected.argmax(1))[self.clear]
        return (
            f"the same top-1 as float64 on {int(same.sum())} of {same.numel()} images with a margin of more than "
            f"{MARGIN:.0%} (of {len(logits)})"
        )

    @property
    def clear(self) -> torch.Tensor:
        """Whether each image has an answer that rounding should not change."""
        first, second = self._expected.topk(2).values.unbind(1)
        return (first - second) > MARGIN * first.abs()
