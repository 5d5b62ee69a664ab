"""A network to be measured, and the setting of one run: what every part of `escalade bench` is given."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from escalade.bench.networks.judging import LEAST_ROWS, UNTIMED, Standard, joined, nudged, own_errors
from escalade.bench.peers.network import Budget, Maker
from escalade.bench.peers.registry import SLOW
from escalade.engine.compiler import compile
from escalade.engine.engine import Engine
from escalade.engine.graph.graph import Graph
from escalade.measure.ceilings import Ceilings
from escalade.measure.currency import Made
from escalade.measure.records import Record
from escalade.ops.base.card import H200, Card

Say = Callable[[str], None]
CALIBRATION, CALIBRATION_NUMBER = 16, 9
"""How many inputs FP8's ranges are measured on, and which: none that are judged or timed."""


@dataclass(frozen=True)
class Part:
    """One of the tables of a run."""

    measure: Callable[[Setting, Say], Iterator[list[Record]]]
    """Gives records piece by piece, so that a run that is stopped keeps what it has."""
    usual: bool = True
    """Whether it is measured unasked, or only when it is asked for."""
    needs_gpu: bool = False
    dtypes: tuple[str, ...] = ()
    """The dtypes that it is for; empty: all of the workload's."""
    batches: tuple[int, ...] = ()
    """The batches that it is for and that may be measured apart from each other; empty: it has no such batches."""
    made: Callable[[Setting, Iterable[int], str], Made] | None = None
    """Returns what would run today for these batches and this dtype; None: the plans of the batches."""


@dataclass(frozen=True)
class Stream:
    """Images of bytes from host memory, as a workload wants them measured."""

    normalize: tuple[tuple[float, ...], tuple[float, ...]]
    batches: tuple[int, ...]
    total: int | None = None
    """Images from the first to the last that are timed too, beside the rate of an endless stream."""


@dataclass(frozen=True)
class Workload:
    name: str
    make: Callable[[int, int], nn.Module]
    """Makes the model from a size and a seed: on the CPU, in fp32 and evaluation mode; the same for the same seed."""
    make_inputs: Callable[[int, int, int, torch.device], torch.Tensor]
    """Makes inputs from a count, a size, a seed and a device: in fp32, there."""
    size: int
    """The size of an input, unless another one is asked for."""
    batches: tuple[int, ...]
    dtypes: tuple[str, ...]
    peers: Mapping[str, Maker]
    parts: Mapping[str, Part]
    further_dtypes: tuple[str, ...] = ()
    """Dtypes that are measured only when they are named, and have no peers."""
    smallest: int | None = None
    """The size from which on others may be asked for; None: none may."""
    small_batches: tuple[int, ...] = (1,)
    """Batches on the CPU."""
    slow_batches: tuple[int, ...] = ()
    """The `batches` at which peers that are slow to make take part; empty: all."""
    chunk: int = 16
    """Inputs whose float64 values are in memory at once."""
    classifies: bool = True
    """The largest of its results is its answer."""
    most: float = 1.0
    """How many times the usual most its results may be off, where PyTorch's own are: of weights that no training has
    calmed, rounding errors grow from layer to layer."""
    trials: int = 1
    """How often PyTorch's own error is taken, over inputs that differ by their rounding; the largest counts. Of weights
    that no training has calmed, what a rounding grows into for some image is a matter of chance."""
    layout: str = "nhwc"
    """How images lie where the caller has them."""
    stream: Stream | None = None
    notice: Callable[[], str] = lambda: ""
    """What is worth knowing beforehand about what is measured here."""

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
    """One run: the network, and how it is to be measured."""

    workload: Workload
    model: nn.Module
    graph: Graph
    device: torch.device
    size: int
    batches: tuple[int, ...]
    dtypes: tuple[str, ...]
    peers: Mapping[str, Maker]
    slow_batches: tuple[int, ...]
    seconds: float
    seed: int
    ceilings: Ceilings | None = None
    budget: Budget = field(default_factory=Budget)
    card: Card = H200
    """The card that plans are made for."""
    _engines: dict[str, Engine] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.workload.name

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def engine(self, dtype: str) -> Engine:
        if dtype not in self._engines:
            if dtype == "fp8":
                x = self.inputs(CALIBRATION, CALIBRATION_NUMBER)
                made = compile(self.model, x, dtype=dtype, device=self.device, calibration=[x], plans=1)
            else:
                made = Engine(self.graph, dtype, self.device, plans=1)
            self._engines[dtype] = made
        return self._engines[dtype]

    def inputs(self, count: int, number: int) -> torch.Tensor:
        """Inputs on the device; other numbers give other inputs."""
        return self.workload.inputs(count, self.size, self.seed + number, self.device)

    def reference(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return reference(model, x, self.workload.chunk)

    def known(
        self, model: nn.Module, count: int, number: int, dtypes: Iterable[str]
    ) -> tuple[torch.Tensor, dict[str, Standard]]:
        """Inputs, and by dtype what they should give and how far off PyTorch is: on them, or on some more if they are
        few and it is further off there. Of a run that times nothing there are only the inputs."""
        if self.seconds == UNTIMED:
            return self.inputs(count, number), {dtype: Standard(dtype, (), ()) for dtype in dtypes}
        x = self.inputs(max(count, LEAST_ROWS), number)
        expected = references(model, x, self.workload.chunk)

        def own(dtype: str, rows: int, trial: int) -> tuple[float, ...]:
            given = nudged(x[:rows], dtype, trial)
            return own_errors(model, given, dtype, [y[:rows] for y in expected], self.workload.chunk)

        few = tuple(y[:count] for y in expected)
        taken = list(itertools.product({count, len(x)}, range(self.workload.trials)))
        return x[:count], {
            dtype: Standard(
                dtype,
                few,
                tuple(max(each) for each in zip(*(own(dtype, *one) for one in taken), strict=True)),
                self.workload.most,
            )
            for dtype in dict.fromkeys(dtypes)
        }

    def of_part(self, part: str) -> tuple[str, ...]:
        """The run's dtypes that a part is for; all of them if it has none of those."""
        wanted = self.workload.parts[part].dtypes
        return tuple(dtype for dtype in self.dtypes if dtype in wanted) or self.dtypes

    def among(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """The run's batches that a part is for; the largest if it has none of them."""
        return tuple(batch for batch in wanted if batch in self.batches) or (max(self.batches),)

    def peers_at(self, batch: int, known: Mapping[str, Maker] | None = None) -> dict[str, Maker]:
        """The known peers that take part: the slow ones within the budget, where they are not one batch too many."""
        everyone = not self.slow_batches or batch in self.slow_batches
        return {
            name: self.budget.limited(name, make) if name in SLOW else make
            for name, make in (known or self.peers).items()
            if name in self.peers and (everyone or name not in SLOW)
        }


def reference(model: nn.Module, x: torch.Tensor, chunk: int = 16) -> torch.Tensor:
    """What a model of one result gives in float64, where x is."""
    (expected,) = references(model, x, chunk)
    return expected


def references(model: nn.Module, x: torch.Tensor, chunk: int = 16) -> tuple[torch.Tensor, ...]:
    """All that the model gives in float64, indices too, where x is."""
    exact = copy.deepcopy(model).to(x.device).double()
    with torch.no_grad():
        return tuple(y.double() for y in joined([exact(part.double()) for part in x.split(chunk)]))
