"""The times of a LeNet's two convolutions, rung by rung: `Variant | Op-Time 1 | Op-Time 2 | Sum of Op-Times`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from escalade.bench.networks.op_times import FORMS, OPERATION
from escalade.bench.peers.catalogue import TITLES
from escalade.measure.records import Record
from escalade.ops import OPERATIONS

HEADER = ("Variant", "Op-Time 1", "Op-Time 2", "Sum of Op-Times")
STORAGES = {"fp32": ("fp32", "tf32"), "fp16": ("fp16",)}
"""The types of the tensors, and those in which products of them may be formed."""
_SYSTEMS = {
    "torch-nchw": "PyTorch (cuDNN), NCHW",
    "torch-nhwc": "PyTorch (cuDNN), channels_last",
    "torch-compile": TITLES["torch-compile"],
}


@dataclass(frozen=True)
class Variant:
    """One way to do both convolutions, in its faster layout for each; microseconds."""

    name: str
    is_peer: bool
    first: float
    second: float

    @property
    def sum(self) -> float:
        return self.first + self.second

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.name, *(f"{time / 1000:.3f} ms" for time in (self.first, self.second, self.sum)))


@dataclass(frozen=True)
class OpTimes:
    """The variants of one table: PyTorch's, then the ladder's from foot to summit."""

    form: str
    """What follows the convolutions; empty for nothing."""
    storage: str
    batch: int
    variants: tuple[Variant, ...]

    @property
    def title(self) -> str:
        form = f" {self.form}" if self.form else ""
        return f"Op times{form}, {self.storage} tensors, {self.batch:,} images"


def op_times(records: Sequence[Record]) -> Iterator[OpTimes]:
    """A table for each form and type of the tensors, of the largest batch that both convolutions were timed on."""
    timed = [r for r in records if r.workload == OPERATION and r.median_us is not None]
    for form, names in FORMS.items():
        for storage, dtypes in STORAGES.items():
            own = [r for r in timed if r.dtype in dtypes]
            for batch in sorted({r.batch for r in own}, reverse=True):
                first, second = ([r for r in own if r.problem == name.format(batch=batch)] for name in names)
                variants = tuple(_variants(first, second))
                if variants:
                    yield OpTimes(form, storage, batch, variants)
                    break


def _variants(first: Sequence[Record], second: Sequence[Record]) -> Iterator[Variant]:
    for system, name in _SYSTEMS.items():
        for dtype in dict.fromkeys(r.dtype for r in first):
            found = _fastest(first, system, "", dtype), _fastest(second, system, "", dtype)
            if found[0] is not None and found[1] is not None:
                yield Variant(name + _products(dtype), True, found[0], found[1])
    for rung in OPERATIONS[OPERATION].ladder:
        for dtype in dict.fromkeys(r.dtype for r in first if r.rung == rung.name):
            found = (
                _fastest(first, "escalade", rung.name, dtype),
                _fastest(second, "escalade", rung.name, dtype),
            )
            if found[0] is not None and found[1] is not None:
                yield Variant(rung.name + _products(dtype), False, found[0], found[1])


def _fastest(records: Sequence[Record], system: str, rung: str, dtype: str) -> float | None:
    own = [r.time for r in records if (r.system, r.rung, r.dtype) == (system, rung, dtype)]
    return min(own, default=None)


def _products(dtype: str) -> str:
    return " (TF32)" if dtype == "tf32" else ""
