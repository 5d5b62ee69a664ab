"""How far a network's answers are from float64's, and whether they are the same answers."""

from __future__ import annotations

from dataclasses import replace

from escalade.bench.networks.contender import TOLERANCE
from escalade.bench.networks.measure import judge
from escalade.bench.networks.workloads import images, reference
from escalade.bench.store import Record
from escalade.engine.engine import Engine
from escalade.errors import EscaladeError
from escalade.models import ResNet

MARGIN = 0.01
"""By how much of itself the largest logit must exceed the next for an image to count."""


class Accuracy:
    """Images and what the network says about them in float64 on the CPU."""

    def __init__(self, workload: str, model: ResNet, count: int, size: int, seed: int) -> None:
        self._workload = workload
        self._images = images(count, size, seed)
        self._expected = reference(model, self._images)
        first, second = self._expected.topk(2).values.unbind(1)
        self._clear = (first - second) > MARGIN * first.abs()

    def check(self, engine: Engine) -> Record:
        """The error over all logits, and a note on the answers of images that have a clear one."""
        count = len(self._images)
        size = self._images.shape[-1]
        record = Record(
            f"{self._workload}_accuracy", f"{size}_n{count}", engine.dtype, "", count, "escalade", ""
        )
        try:
            logits = engine(self._images.to(engine.device)).cpu()
        except (RuntimeError, EscaladeError) as broken:
            return replace(record, failure=f"{type(broken).__name__}: {broken}")
        error, failure = judge(logits, self._expected, engine.dtype)
        same = (logits.argmax(1) == self._expected.argmax(1))[self._clear]
        note = (
            f"the same top-1 as float64 on {int(same.sum())} of {same.numel()} images with a margin of more than "
            f"{MARGIN:.0%} (of {count})"
        )
        return replace(record, error=error, tolerance=TOLERANCE[engine.dtype], failure=failure, note=note)
