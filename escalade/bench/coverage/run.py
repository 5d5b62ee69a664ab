"""One network after another: made, captured, planned, verified and timed; what fails is a sentence in its record."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from escalade.bench.coverage.catalogue import Entry
from escalade.bench.coverage.fallbacks import planned
from escalade.bench.coverage.weights import enliven
from escalade.bench.ladder import free
from escalade.bench.networks.measurement import summary
from escalade.bench.networks.parts import over_batches
from escalade.bench.networks.planned import empty
from escalade.bench.networks.resnets import images
from escalade.bench.networks.workload import Say, Setting, Workload
from escalade.bench.peers.network import Budget, Maker
from escalade.engine.capture.export import capture
from escalade.engine.graph.forms import STORAGE
from escalade.engine.graph.graph import Graph
from escalade.errors import EscaladeError
from escalade.measure.ceilings import Ceilings
from escalade.measure.records import Record
from escalade.measure.refusal import reason

SIZE = 224
_SETTLING_IMAGES, _SETTLING_NUMBER = {"cuda": 32, "cpu": 4}, 1
"""Channels that few images leave almost constant would be blown up by BatchNorm, and rounding errors with them."""
_MOST = 50.0
"""How many times the usual most is allowed where PyTorch is as far off: these weights are no trained network's."""
_TRIALS = 3
_CHUNK = 8
_IMAGE = 3
"""The sizes of an image: its channels, height and width."""


class LostDevice(EscaladeError):
    """The GPU does nothing more in this process; the sentence says since when."""


@dataclass(frozen=True)
class Coverage:
    """One run: how each network is measured."""

    workload: str
    device: torch.device
    batches: tuple[int, ...]
    dtypes: tuple[str, ...]
    peers: Mapping[str, Maker]
    seconds: float
    seed: int
    size: int | None = None
    """The size of images; None: each network's own."""
    ceilings: Ceilings | None = None
    timed: bool = True
    """Whether plans are also run; if not, they are an H200's."""
    layout: str = "nhwc"
    """How images lie where the caller has them."""
    _captured: dict[str, tuple[nn.Module, Graph]] = field(default_factory=dict)

    def each(self, found: Sequence[Entry], clock: Clock, say: Say) -> Iterator[tuple[Entry, list[Record]]]:
        """The records of one network after another, as long as there is time."""
        for entry in found:
            if not clock.allows_another():
                return
            began = time.monotonic()
            for records in self.measure(entry, say):
                yield entry, records
            clock.took(time.monotonic() - began)

    def measure(self, entry: Entry, say: Say) -> Iterator[list[Record]]:
        """The records of one network, piece by piece: of ours for every batch and dtype, and of the peers there."""
        try:
            say(f"{entry.name}: making and capturing it")
            workload = self._workload(entry)
            settings = {dtype: self.setting(entry, dtype, workload) for dtype in self.dtypes}
        except Exception as broken:  # a constructor, a model or its capture may fail in any way
            yield [self.failed(entry, batch, dtype, broken) for batch, dtype in self.cases()]
            return
        for batch, dtype in self.cases():
            setting = settings[dtype]
            try:
                if self.timed:
                    engines = {dtype: setting.engine(dtype)}
                    for found in over_batches(setting, entry.name, setting.model, engines, (batch,), say):
                        yield [self._filed(entry, record) for record in found]
                else:
                    yield [self._planned(entry, setting, batch, dtype, say)]
            except Exception as broken:  # out of memory, a launch that fails: the others go on
                yield [self.failed(entry, batch, dtype, broken)]
                self._require_device(entry)
        free(self.device)

    def _size(self, entry: Entry) -> int:
        return entry.item[-1] if entry.item else self.size or entry.size or SIZE

    def cases(self) -> list[tuple[int, str]]:
        """Batches and dtypes, in the order in which a network is measured in them."""
        return [(batch, dtype) for dtype in self.dtypes for batch in self.batches]

    def setting(self, entry: Entry, dtype: str, workload: Workload | None = None) -> Setting:
        """Make a network and capture it, once for all dtypes of a workload."""
        chosen, size = workload or self._workload(entry), self._size(entry)
        if chosen.name not in self._captured:
            model = chosen.model(size, self.seed)
            self._captured.clear()
            self._captured[chosen.name] = model, capture(model, (chosen.inputs(2, size, self.seed),))
        model, graph = self._captured[chosen.name]
        return Setting(
            chosen, model, _returning(graph, dtype), self.device, size, self.batches, self.dtypes, self.peers, (),
            self.seconds, self.seed, self.ceilings, Budget(),
        )  # fmt: skip

    def input(self, entry: Entry, batch: int, dtype: str) -> torch.Tensor:
        """Return an input like those that are timed, with undefined contents."""
        item = entry.item or (_IMAGE, self._size(entry), self._size(entry))
        return empty(batch, item, dtype, self.layout, self.device)

    def _planned(self, entry: Entry, setting: Setting, batch: int, dtype: str, say: Say) -> Record:
        say(f"{entry.name} batch {batch} {dtype}: planning")
        plan = planned(setting.engine(dtype), self.input(entry, batch, dtype))
        return replace(self._blank(entry, setting.size, batch, dtype), config=summary(plan))

    def _workload(self, entry: Entry) -> Workload:
        def inputs(count: int, size: int, seed: int, device: torch.device) -> torch.Tensor:
            return (
                _random(count, entry.item, seed, device)
                if entry.item
                else images(count, size, seed).to(device)
            )

        def make(size: int, seed: int) -> nn.Module:
            with torch.device(self.device):  # where random numbers are quickest to make
                model = entry.make().eval()
            if self.timed:  # a plan is the same for all weights
                some = _SETTLING_IMAGES[self.device.type]
                enliven(model, inputs(some, size, seed + _SETTLING_NUMBER, self.device))
            return model.cpu()

        return Workload(
            entry.name,
            make,
            inputs,
            SIZE,
            self.batches,
            self.dtypes,
            self.peers,
            {},
            chunk=_CHUNK,
            most=_MOST,
            trials=_TRIALS,
            layout=self.layout,
        )

    def _blank(self, entry: Entry, size: int, batch: int, dtype: str) -> Record:
        layout = self.layout if entry.item is None or len(entry.item) == _IMAGE else "flat"
        return Record(self.workload, f"{entry.name}_{size}_b{batch}", dtype, layout, batch, "escalade", "")

    def _filed(self, entry: Entry, record: Record) -> Record:
        return replace(record, workload=self.workload, problem=f"{entry.name}_{record.problem}")

    def failed(self, entry: Entry, batch: int, dtype: str, broken: Exception) -> Record:
        """The record of a case that could not be measured, and why."""
        failure = reason(broken)
        if not isinstance(broken, EscaladeError):
            failure = f"{type(broken).__name__}: {failure}"
        return replace(self._blank(entry, self._size(entry), batch, dtype), failure=failure)

    def _require_device(self, entry: Entry) -> None:
        """A kernel that has gone wrong may leave a GPU that answers everything with an error: then nothing that comes
        after it says anything."""
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise LostDevice(
                f"since {entry.name} the GPU answers everything with: {reason(error)}"
            ) from error


def _returning(graph: Graph, dtype: str) -> Graph:
    """The graph with results of the type that the plan stores values in, as its peers' are."""
    own = str(STORAGE[dtype]).removeprefix("torch.")
    types = (own if getattr(torch, name).is_floating_point else name for name in graph.output_types)
    return replace(graph, output_types=tuple(types))


def _random(count: int, item: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    """Numbers that 16 bits hold: the largest of several is the same one in every dtype."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(count, *item, generator=generator, device=device).half().float()


class Clock:
    """The seconds that a run may take, and whether there is time for another network."""

    def __init__(self, seconds: float | None) -> None:
        self._limit = seconds
        self._began = time.monotonic()
        self._longest = 0.0

    @property
    def spent(self) -> float:
        return time.monotonic() - self._began

    def allows_another(self) -> bool:
        """Whether one that takes as long as the longest so far would still end in time."""
        return self._limit is None or self.spent + self._longest <= self._limit

    def took(self, seconds: float) -> None:
        self._longest = max(self._longest, seconds)


def left_over(entries: Sequence[Entry]) -> str:
    """What a run that was stopped has not measured, as `--only` takes it."""
    return "|".join(f"^{entry.name.replace('.', '[.]')}$" for entry in entries)
