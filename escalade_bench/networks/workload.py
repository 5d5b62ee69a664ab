"""A network to measure, and the setting of one run, which every part of `escalade bench` gets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from escalade.device.timing import on_gpu
from escalade.engine.capture.export import capture
from escalade.engine.compiler import compile
from escalade.engine.engine import Engine
from escalade.engine.graph.graph import Graph
from escalade.ops.base.dtypes import QUANTIZED
from escalade_bench.campaign.units import Session
from escalade_bench.measure.currency import Made
from escalade_bench.measure.records import Record
from escalade_bench.networks.judging import LEAST_ROWS, Standard, joined, own_errors
from escalade_bench.peers.network import Budget, Maker
from escalade_bench.peers.registry import SLOW
from escalade_bench.trial import Say

CALIBRATION, CALIBRATION_NUMBER = 16, 9
"""Number and seed of the calibration inputs for 8-bit dtypes, which are neither verified nor timed."""


@dataclass(frozen=True)
class Part:
    """One table of a run."""

    measure: Callable[[Setting, Say], Iterator[list[Record]]]
    """Yields records one by one, so that an interrupted run keeps those it has."""
    usual: bool = True
    """False to measure it only if requested by name."""
    needs_gpu: bool = False
    dtypes: tuple[str, ...] = ()
    """Dtypes of the part; empty for all of the workload's."""
    batches: tuple[int, ...] = ()
    """Batches that may be measured separately; empty if there are none."""
    made: Callable[[Setting, Iterable[int], str], Made] | None = None
    """Returns the digests of today's plans for batches and a dtype; None for the plans of the batches."""


@dataclass(frozen=True)
class Stream:
    """A stream of uint8 images from host memory."""

    normalize: tuple[tuple[float, ...], tuple[float, ...]]
    batches: tuple[int, ...]
    total: int | None = None
    """Images that are also timed from the first to the last, beside the rate of an endless stream."""


@dataclass(frozen=True)
class Workload:
    name: str
    make: Callable[[int, int], nn.Module]
    """Creates the model from a size and a seed: on the CPU, in fp32 and evaluation mode, deterministically."""
    make_inputs: Callable[[int, int, int, torch.device], torch.Tensor]
    """Creates fp32 inputs from a count, a size, a seed and a device."""
    size: int
    """The default size of an input."""
    batches: tuple[int, ...]
    dtypes: tuple[str, ...]
    peers: Mapping[str, Maker]
    parts: Mapping[str, Part]
    further_dtypes: tuple[str, ...] = ()
    """Dtypes that are measured only if they are named, and have no peers."""
    smallest: int | None = None
    """The smallest other size; None if there are no others."""
    small_batches: tuple[int, ...] = (1,)
    """Batches on the CPU."""
    slow_batches: tuple[int, ...] = ()
    """Batches at which slow peers are measured; empty for all."""
    chunk: int = 16
    """Inputs per forward pass in float64."""
    classifies: bool = True
    """True for classifiers: the largest result is the predicted class."""
    most: float = 1.0
    """Factor on the usual largest tolerance, where PyTorch's results are as far off: with untrained weights, rounding
    errors grow from layer to layer."""
    trials: int = 1
    """Number of measurements of PyTorch's own error, over inputs that differ by rounding; the largest counts. With
    untrained weights, the growth of rounding errors is chaotic."""
    layout: str = "nhwc"
    """Layout of the caller's images."""
    stream: Stream | None = None
    notice: Callable[[], str] = lambda: ""
    """Returns a note for the user before the run."""

    def model(self, size: int | None = None, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make(size or self.size, seed).eval()

    def inputs(
        self, count: int, size: int | None = None, seed: int = 0, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        return self.make_inputs(count, size or self.size, seed, torch.device(device))


@dataclass(frozen=True)
class Setting:
    """Settings of one run: the network, devices, batches, dtypes and peers."""

    workload: Workload
    model: nn.Module
    graph: Graph
    session: Session
    size: int
    batches: tuple[int, ...]
    dtypes: tuple[str, ...]
    peers: Mapping[str, Maker]
    slow_batches: tuple[int, ...]
    budget: Budget = field(default_factory=Budget)
    _engines: dict[str, Engine] = field(default_factory=dict)
    _references: dict[
        tuple[nn.Module, int, tuple[int, ...]],
        tuple[torch.Tensor, tuple[torch.Tensor, ...], dict[str, dict[int, tuple[float, ...]]]],
    ] = field(default_factory=dict)
    """By model, number and counts: inputs, results in float64, and PyTorch's errors by dtype and count."""

    @classmethod
    def of(cls, workload: Workload, session: Session, size: int | None = None, **others: Any) -> Setting:
        """Make and capture a network; batches, dtypes and peers are the workload's unless they are among `others`."""
        size = size or workload.size
        model = workload.model(size, session.seed)
        graph = capture(model, (workload.inputs(2, size, session.seed),))
        usual = {name: getattr(workload, name) for name in ("batches", "dtypes", "peers", "slow_batches")}
        return cls(workload, model, graph, session, size, **usual | others)

    @property
    def name(self) -> str:
        return self.workload.name

    @property
    def device(self) -> torch.device:
        return self.session.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtypes_with_peers(self) -> tuple[str, ...]:
        """The run's dtypes that every fusion level, and a stream of bytes, can be compiled in."""
        return tuple(dtype for dtype in self.dtypes if dtype not in self.workload.further_dtypes)

    def engine(self, dtype: str) -> Engine:
        if dtype not in self._engines:
            if dtype in QUANTIZED:
                x = self.inputs(CALIBRATION, CALIBRATION_NUMBER)
                made = compile(self.model, x, dtype=dtype, device=self.device, calibration=[x], plans=1)
            else:
                made = Engine(self.graph, dtype, self.device, plans=1)
            self._engines[dtype] = made
        return self._engines[dtype]

    def stream_engine(self, dtype: str) -> tuple[Engine, Stream, tuple[int, ...]]:
        """Return an engine that normalizes bytes itself, its stream, and the shape of one item."""
        stream = self.workload.stream
        assert stream is not None
        x = self.inputs(1, 0)
        engine = compile(self.model, x, dtype=dtype, device=self.device, normalize=stream.normalize, plans=1)
        return engine, stream, tuple(x.shape[1:])

    def inputs(self, count: int, number: int) -> torch.Tensor:
        """Return inputs on the device; each number gives different ones."""
        return self.workload.inputs(count, self.size, self.session.seed + number, self.device)

    def known(
        self, model: nn.Module, count: int, number: int, dtypes: Iterable[str]
    ) -> tuple[torch.Tensor, dict[str, Standard]]:
        """Return inputs, and by dtype the expected results and PyTorch's error.

        Both are computed once for the largest batch of the run, or for `LEAST_ROWS` inputs.
        """
        most = max(count, LEAST_ROWS, *(self.batches if count in self.batches else ()))
        counts = tuple(sorted({count, most, *(batch for batch in self.batches if batch <= most)}))
        key = model, number, counts
        with on_gpu():
            if key not in self._references:
                self._references.clear()
                x = self.inputs(most, number)
                self._references[key] = x, references(model, x, self.workload.chunk), {}
            x, expected, own = self._references[key]
            for dtype in dtypes:
                if dtype not in own:
                    own[dtype] = own_errors(
                        model, x, dtype, expected, self.workload.chunk, self.workload.trials, counts
                    )
        few = tuple(y[:count] for y in expected)
        return x[:count], {
            dtype: Standard(
                dtype, few, tuple(map(max, own[dtype][count], own[dtype][most])), self.workload.most
            )
            for dtype in dict.fromkeys(dtypes)
        }

    def of_part(self, part: str) -> tuple[str, ...]:
        """Return the run's dtypes that a part is for; all of them if it has none of those."""
        wanted = self.workload.parts[part].dtypes
        return tuple(dtype for dtype in self.dtypes if dtype in wanted) or self.dtypes

    def among(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Return the run's batches that a part is for; the largest if it has none of those."""
        return tuple(batch for batch in wanted if batch in self.batches) or (max(self.batches),)

    def peers_at(self, batch: int, known: Mapping[str, Maker] | None = None) -> dict[str, Maker]:
        """Return the peers at a batch: slow ones within the budget, and only at `slow_batches`."""
        everyone = not self.slow_batches or batch in self.slow_batches
        return {
            name: self.budget.limited(name, make) if name in SLOW else make
            for name, make in (known or self.peers).items()
            if name in self.peers and (everyone or name not in SLOW)
        }


def reference(model: nn.Module, x: torch.Tensor, chunk: int = 16) -> torch.Tensor:
    """Return the one result of a model in float64, on the device of x."""
    (expected,) = references(model, x, chunk)
    return expected


def references(model: nn.Module, x: torch.Tensor, chunk: int = 16) -> tuple[torch.Tensor, ...]:
    """Return all results of a model in float64, indices too, on the device of x."""
    exact = copy.deepcopy(model).to(x.device).double()
    with torch.no_grad():
        return tuple(y.double() for y in joined([exact(part.double()) for part in x.split(chunk)]))
