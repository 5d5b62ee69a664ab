"""Measure many networks: create, capture, plan, verify and time each; a failure is recorded as a sentence.

The campaign's units are torchvision's networks, where it is installed, networks of other families, and single layers.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from escalade.engine.graph.forms import STORAGE
from escalade.engine.graph.graph import Graph
from escalade.errors import EscaladeError
from escalade.models import settle
from escalade.tune.refusal import failure_reason, require_device
from escalade_bench.campaign.units import TIMED, Session, Unit, command
from escalade_bench.coverage.catalogue import TORCHVISION, Entry, entries
from escalade_bench.ladder import free
from escalade_bench.measure.currency import Made
from escalade_bench.measure.records import Record
from escalade_bench.networks.data import images, noise
from escalade_bench.networks.parts import over_batches
from escalade_bench.networks.plans import empty, planned, summary
from escalade_bench.networks.workload import Say, Setting, Workload
from escalade_bench.peers.comparison import COVERAGE
from escalade_bench.peers.network import Maker
from escalade_bench.peers.registry import COMPILE_DEFAULT, NETWORKS

SIZE = 224
_SETTLING_IMAGES, _SETTLING_NUMBER = {"cuda": 32, "cpu": 4}, 1
"""Images that BatchNorm statistics are computed from: fewer would leave channels nearly constant and amplify
rounding."""
_MOST = 50.0
"""Factor on the usual largest tolerance where PyTorch is as far off: these weights are not trained."""
_TRIALS = 5  # some random weights amplify rounding chaotically
_CHUNK = 8
_IMAGE = 3
"""Dimensions of an image: channels, height and width."""

_SMALL = 1e-3
"""Largest initial value of a LayerScale, which disables a branch at the start of training."""


@dataclass(frozen=True)
class Coverage:
    """Settings of one run, the same for all networks."""

    workload: str
    session: Session
    batches: tuple[int, ...]
    dtypes: tuple[str, ...]
    peers: Mapping[str, Maker]
    size: int | None = None
    """Side of the images; None for each network's own."""
    timed: bool = True
    """False to only make plans, for an H200."""
    layout: str = "nhwc"
    """Layout of the images."""
    _captured: dict[str, Setting] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.session.device

    def each(
        self, found: Sequence[Entry], budget: float | None, say: Say
    ) -> Iterator[tuple[Entry, list[Record]]]:
        """Yield the records of one network after another.

        With a budget in seconds, no network is started that would exceed it if it took as long as the longest so far.
        """
        start, longest = time.monotonic(), 0.0
        for entry in found:
            began = time.monotonic()
            if budget is not None and began - start + longest > budget:
                return
            for records in self.measure(entry, say):
                yield entry, records
            longest = max(longest, time.monotonic() - began)

    def measure(self, entry: Entry, say: Say) -> Iterator[list[Record]]:
        """Yield the records of one network, batch by batch: ours and its peers'."""
        cases = [(batch, dtype) for dtype in self.dtypes for batch in self.batches]
        try:
            say(f"{entry.name}: making and capturing it")
            workload = self._workload(entry)
            settings = {dtype: self.setting(entry, dtype, workload) for dtype in self.dtypes}
        except Exception as broken:  # constructors, models and capture may raise anything
            yield [self._failed(entry, batch, dtype, broken) for batch, dtype in cases]
            return
        for batch, dtype in cases:
            setting = settings[dtype]
            try:
                if self.timed:
                    engines = {dtype: setting.engine(dtype)}
                    for found in over_batches(setting, entry.name, setting.model, engines, (batch,), say):
                        named = ((record, f"{entry.name}_{record.problem}") for record in found)
                        yield [
                            replace(record, workload=self.workload, problem=name) for record, name in named
                        ]
                else:
                    say(f"{entry.name} batch {batch} {dtype}: planning")
                    plan = planned(setting.engine(dtype), self.input(entry, batch, dtype))
                    yield [replace(self._blank(entry, setting.size, batch, dtype), config=summary(plan))]
            except Exception as broken:  # out of memory, a failed launch: continue with the others
                yield [self._failed(entry, batch, dtype, broken)]
                require_device(self.device, f"since {entry.name} the GPU answers everything with an error")
        free(self.device)

    def _size(self, entry: Entry) -> int:
        return entry.item[-1] if entry.item else self.size or entry.size or SIZE

    def setting(self, entry: Entry, dtype: str, workload: Workload | None = None) -> Setting:
        """Make a network and capture it, once for all dtypes of a workload."""
        chosen = workload or self._workload(entry)
        if chosen.name not in self._captured:
            made = Setting.of(chosen, self.session, self._size(entry))
            self._captured.clear()
            self._captured[chosen.name] = made
        known = self._captured[chosen.name]
        return replace(known, graph=_returning(known.graph, dtype), _engines={})

    def input(self, entry: Entry, batch: int, dtype: str) -> torch.Tensor:
        """Return an input like those that are timed, with undefined contents."""
        item = entry.item or (_IMAGE, self._size(entry), self._size(entry))
        return empty(batch, item, dtype, self.layout, self.device)

    def _workload(self, entry: Entry) -> Workload:
        def inputs(count: int, size: int, seed: int, device: torch.device) -> torch.Tensor:
            if entry.item is None:
                return images(count, size, seed, device)
            # Numbers that 16 bits represent: argmax over them is the same in every dtype.
            return noise(entry.item, count, seed, device).half().float()

        def make(size: int, seed: int) -> nn.Module:
            with torch.device(self.device):  # random numbers are fastest to make there
                model = entry.make().eval()
            if self.timed:  # plans do not depend on weights
                some = _SETTLING_IMAGES[self.device.type]
                enliven(model, inputs(some, size, seed + _SETTLING_NUMBER, self.device))
            return model.cpu()

        return Workload(
            entry.name, make, inputs, SIZE, self.batches, self.dtypes, self.peers, {}, chunk=_CHUNK, most=_MOST,
            trials=_TRIALS, layout=self.layout,
        )  # fmt: skip

    def _blank(self, entry: Entry, size: int, batch: int, dtype: str) -> Record:
        layout = self.layout if entry.item is None or len(entry.item) == _IMAGE else "flat"
        return Record(self.workload, f"{entry.name}_{size}_b{batch}", dtype, layout, batch, "escalade", "")

    def _failed(self, entry: Entry, batch: int, dtype: str, broken: Exception) -> Record:
        """Return the record of a case that could not be measured, with the reason."""
        failure = failure_reason(broken)
        if not isinstance(broken, EscaladeError):
            failure = f"{type(broken).__name__}: {failure}"
        return replace(self._blank(entry, self._size(entry), batch, dtype), failure=failure)


def _returning(graph: Graph, dtype: str) -> Graph:
    """Return the graph with results in the plan's storage dtype, like its peers'."""
    own = str(STORAGE[dtype]).removeprefix("torch.")
    types = (own if getattr(torch, name).is_floating_point else name for name in graph.output_types)
    return replace(graph, output_types=tuple(types))


def left_over(entries: Sequence[Entry]) -> str:
    """Return the expression of `--only` that selects these networks."""
    return "|".join(f"^{entry.name.replace('.', '[.]')}$" for entry in entries)


def enliven(model: nn.Module, x: torch.Tensor) -> None:
    """Replace constant parameters by random ones, and compute BatchNorm statistics from these inputs.

    A zero-initialized classifier (vision transformers) or a branch scaled by 1e-6 (ConvNeXt) would hide errors in
    front of it.
    """
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                    _fill(module, name, parameter)
    settle(model, x)


def _fill(module: nn.Module, name: str, parameter: torch.Tensor) -> None:
    value = abs(float(parameter.flatten()[0]))
    if "Norm" in type(module).__name__ and name == "weight":
        parameter.uniform_(0.5, 1.5)
    elif 0 < value <= _SMALL:
        parameter.uniform_(0.1, 0.5)
    elif value == 0 and isinstance(module, nn.Linear | nn.Conv2d) and name == "weight":
        parameter.normal_(0, 1 / math.sqrt(parameter[0].numel()))
    elif value == 0:
        parameter.normal_(0, 0.1)


PEERS = ("torch-graph", COMPILE_DEFAULT)
LAYERS = "escalade_bench.zoo.layers"
VARIED = "escalade_bench.zoo.varied"
LAYOUTS = ("nhwc", "nchw")
MODULES: dict[str, dict[tuple[str, str], tuple[int, ...]]] = {
    TORCHVISION: {("fp16", "nhwc"): (1, 32), ("tf32", "nhwc"): (1, 32)},
    VARIED: {("fp16", "nhwc"): (1, 8)},
    LAYERS: {("fp16", "nhwc"): (1, 16, 256), ("fp32", "nhwc"): (1, 16, 256), ("tf32", "nchw"): (16,)},
}
"""The modules of the docs, by dtype and layout, with their batches."""
_SECONDS = {TORCHVISION: 35.0, VARIED: 20.0, LAYERS: 6.0}


def units() -> Iterator[Unit]:
    """A unit for each network, dtype and layout: making and capturing it takes longer than to time it in all
    batches."""
    for module, wanted in MODULES.items():
        if module == TORCHVISION and missing():
            continue
        for entry in entries(module):
            for (dtype, layout), batches in wanted.items():
                yield _unit(module, entry, dtype, layout, batches)


def workload_of(module: str, layout: str) -> str:
    """Return the name of a module's records."""
    return COVERAGE + module + _suffix(layout)


def _suffix(layout: str) -> str:
    return "" if layout == LAYOUTS[0] else f"_{layout}"


def _unit(module: str, entry: Entry, dtype: str, layout: str, batches: tuple[int, ...]) -> Unit:
    def coverage(session: Session, batches: tuple[int, ...] = batches) -> Coverage:
        peers = {name: NETWORKS[name] for name in PEERS if name not in session.reused}
        timed = session.device.type == "cuda"
        return Coverage(
            workload_of(module, layout), session, batches, (dtype,), peers, timed=timed, layout=layout
        )

    def made(session: Session, record: Record) -> Made:
        own = coverage(session, (record.batch,))
        key = ("engine", module, entry.name, dtype, layout)
        engine = session.once(key, lambda: own.setting(entry, dtype).engine(dtype))
        return Made.of_plan(engine.plan(own.input(entry, record.batch, dtype)))

    sizes, beside = ",".join(map(str, batches)), ",".join(PEERS)
    how = (*f"-t {dtype} -b {sizes} --layout {layout} --peers {beside}".split(), *TIMED)
    return Unit(
        f"coverage/{module}/{entry.name}/{dtype}{_suffix(layout)}",
        f"{entry.name} of {module} beside PyTorch",
        command("bench", "coverage", f"{module}:{entry.name}", *how),
        _SECONDS[module],
        lambda session, say: coverage(session).measure(entry, say),
        made,
        (*PEERS, *map(str, batches)),
    )


def missing() -> str:
    """Return why torchvision's networks are not among the units; empty if they are."""
    if importlib.util.find_spec(TORCHVISION) is None:
        return f"{TORCHVISION} is not installed: its networks are not among the units"
    return ""
