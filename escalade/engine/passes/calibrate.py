"""Calibration for quantized dtypes: ranges of values on real data, chosen by histograms of their magnitudes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from escalade.engine.graph.forms import require_dense
from escalade.engine.graph.graph import KEPT, Batch, CalibratedValue, Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.evaluate import compute, own_arithmetic
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import LARGEST, STORAGE, stored_as
from escalade.terminal_text import counted, preserved_random_state

BINS = 2048
PERCENTILE = 0.9999
"""Share of a value's elements that its range covers with method `percentile`."""
CANDIDATES = 100
"""Ranges that methods `mse` and `entropy` try, equally spaced up to the largest magnitude."""
SMALLEST_SHARE = 2.0**-40
"""Share of the elements assumed for a bin that stored values never reach, whose divergence would be infinite."""
E4M3_NOISE = 2.0**-8 / 3
"""Mean squared relative error of e4m3's three mantissa bits: uniform within 2^-4 of a power of two."""


@dataclass
class Histogram:
    """Counts of magnitudes above 0 in equal bins up to `limit`, a power of two that grows with the largest."""

    counts: torch.Tensor
    limit: float
    largest: float = 0.0
    zeros: int = 0
    """Elements that are 0, which every range stores exactly."""
    pixels: int = 0
    channel_sums: torch.Tensor = field(default_factory=lambda: torch.zeros(0, device="cpu"))
    """Sums of images over all pixels, for `channel_means`."""

    @staticmethod
    def empty() -> Histogram:
        return Histogram(torch.zeros(BINS, dtype=torch.float64, device="cpu"), 0.0)

    @property
    def channel_means(self) -> tuple[float, ...]:
        """Mean of each channel of an image; empty for other values."""
        return tuple((self.channel_sums / max(1, self.pixels)).tolist())

    def add(self, values: torch.Tensor) -> None:
        if values.dim() == 4:
            sums = values.detach().double().sum((0, 2, 3)).cpu()
            self.channel_sums = sums if not self.pixels else self.channel_sums + sums
            self.pixels += values.numel() // values.shape[1]
        magnitudes = values.detach().abs().float().flatten()
        zeros, largest = int((magnitudes == 0).sum()), float(magnitudes.max())
        self.zeros += zeros
        if largest == 0.0:
            return
        self.largest = max(self.largest, largest)
        needed = 2.0 ** math.ceil(math.log2(largest))
        if self.limit == 0.0:
            self.limit = needed
        while self.limit < needed:
            halved = self.counts.view(-1, 2).sum(1)
            self.counts = torch.cat([halved, torch.zeros_like(halved)])
            self.limit *= 2
        self.counts += torch.histc(magnitudes, BINS, 0.0, self.limit).double().cpu()
        self.counts[0] -= zeros

    @property
    def _elements(self) -> float:
        return max(1.0, self.zeros + float(self.counts.sum()))

    @property
    def _centers(self) -> torch.Tensor:
        return (torch.arange(BINS, dtype=torch.float64) + 0.5) * (self.limit / BINS)

    def _noise(self, range: float, dtype: str) -> float:
        """Return the squared error of all elements, stored with this range."""
        centers = self._centers
        beyond = (centers - range).clamp_min(0.0).square()
        if dtype == "fp8":
            within = centers.square() * E4M3_NOISE
        else:
            within = torch.full_like(centers, (range / LARGEST[dtype]) ** 2 / 12)
        return float((self.counts * torch.where(centers > range, beyond, within)).sum())

    def range_by_percentile(self, dtype: str) -> float:
        """Return the smallest range that covers `PERCENTILE` of the elements."""
        covered = (self.counts.cumsum(0) + self.zeros) / self._elements
        index = int((covered < PERCENTILE).sum())
        return min(self.largest, (index + 1) * self.limit / BINS)

    def range_by_error(self, dtype: str) -> float:
        """Return the range with the least mean squared error."""
        return min(self._candidates, key=lambda candidate: self._noise(candidate, dtype))

    def range_by_entropy(self, dtype: str) -> float:
        """Return the range whose codes lose the least information: the least Kullback-Leibler divergence.

        Elements beyond the range count as elements of its last bin, and each code's share of the elements is spread
        evenly over the bins that it represents.
        """
        return min(self._candidates, key=lambda candidate: self._divergence(candidate, dtype))

    @property
    def _candidates(self) -> list[float]:
        return [self.largest * (index + 1) / CANDIDATES for index in range(CANDIDATES)]

    def _divergence(self, range: float, dtype: str) -> float:
        bins = math.ceil(range * BINS / self.limit) if self.limit else 0
        if not bins or not float(self.counts[:bins].sum()):
            return math.inf
        kept = self.counts[:bins]
        wanted = kept.clone()
        wanted[-1] += self.counts[bins:].sum()
        codes = stored_as(self._centers[:bins] * (LARGEST[dtype] / range), STORAGE[dtype]).float()
        _, code_of = codes.unique(return_inverse=True)
        filled = (kept > 0).double()
        totals = torch.zeros(bins, dtype=torch.float64).index_add_(0, code_of, kept)
        shared_by = torch.zeros(bins, dtype=torch.float64).index_add_(0, code_of, filled)
        spread = filled * (totals / shared_by.clamp_min(1.0))[code_of]
        p, q = wanted / wanted.sum(), (spread / spread.sum()).clamp_min(SMALLEST_SHARE)
        return float((p * (p.clamp_min(SMALLEST_SHARE) / q).log()).sum())

    def range_by_maximum(self, dtype: str) -> float:
        return self.largest

    def calibrated(self, range: float, dtype: str) -> CalibratedValue:
        """Return what a range does to the elements."""
        centers = self._centers
        signal, noise = float((self.counts * centers.square()).sum()), self._noise(range, dtype)
        decibels = 10 * math.log10(signal / noise) if signal > 0.0 and noise > 0.0 else math.inf
        saturated = (
            float(self.counts[centers > range].sum()) / self._elements if range < self.largest else 0.0
        )
        return CalibratedValue(self.largest, saturated, decibels)


METHODS: dict[str, Callable[[Histogram, str], float]] = {
    "max": Histogram.range_by_maximum,
    "percentile": Histogram.range_by_percentile,
    "mse": Histogram.range_by_error,
    "entropy": Histogram.range_by_entropy,
}
"""Methods that choose a range, by name."""


MAX_BATCHES = 64  # ranges converge long before


def checked_batches(
    graph: Graph, batches: Iterable[Any], device: torch.device, *, progress: bool = False
) -> Iterator[list[torch.Tensor]]:
    """Yield up to `MAX_BATCHES` batches as lists of inputs on a device; with `progress`, with a bar on stderr."""
    if not isinstance(batches, Iterable):
        raise UnsupportedError(f"calibration is of type {type(batches).__name__}; pass a list of batches")
    seen = 0
    total = min(MAX_BATCHES, len(batches)) if isinstance(batches, Sized) else None
    for batch in tracked(islice(batches, MAX_BATCHES), "measuring ranges", total, progress):
        inputs = (batch,) if isinstance(batch, torch.Tensor) else batch
        if not isinstance(inputs, Sequence) or not all(isinstance(tensor, torch.Tensor) for tensor in inputs):
            raise UnsupportedError(
                f"a calibration batch is of type {type(batch).__name__}; pass a tensor, or a tuple of tensors if the "
                "model takes several"
            )
        if len(inputs) != len(graph.inputs):
            raise UnsupportedError(
                f"calibration batch of {counted(len(inputs), 'tensor')}; the model takes {len(graph.inputs)}"
            )
        require_dense(inputs, "a calibration batch is", "pass dense tensors")
        if any(tensor.is_meta for tensor in inputs):
            raise UnsupportedError("a calibration batch is on the meta device; pass tensors with data")
        seen += 1
        yield [tensor.to(device) for tensor in inputs]
    if not seen:
        raise UnsupportedError("calibration has no batches; pass a few that are representative of the data")


def tracked(items: Iterable[Any], what: str, total: int | None, progress: bool) -> Iterable[Any]:
    """Return the items, with a progress bar on stderr if `progress` is set."""
    if not progress:
        return items
    with preserved_random_state():
        from rich.console import Console
        from rich.progress import track
    return track(items, what, total, console=Console(stderr=True), transient=True)


def histograms(graph: Graph, batches: Iterable[Any], device: torch.device) -> dict[str, Histogram]:
    """Return the magnitudes of every value over these batches of inputs."""
    constants = {name: tensor.to(device) for name, tensor in graph.constants.items()}
    found: dict[str, Histogram] = {}

    def add(node: Node, result: torch.Tensor) -> torch.Tensor:
        if result.is_floating_point() and result.numel():
            if not bool(torch.isfinite(result).all()):
                raise UnsupportedError(
                    f"values are not finite in calibration, first at {node.source or node.name}; check the "
                    "calibration batches, or use fp16"
                )
            found.setdefault(node.name, Histogram.empty()).add(result)
        return result

    for inputs in checked_batches(graph, batches, device):
        evaluate(graph, constants, inputs, add)
    return found


def evaluate(
    graph: Graph,
    constants: Mapping[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    store: Callable[[Node, torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Compute a graph in fp32 with PyTorch; `store` returns each result as its readers see it."""
    concrete = graph.at(_batch(graph, inputs))
    values: dict[str, torch.Tensor] = dict(constants)
    for entry, tensor in zip(concrete.inputs, inputs, strict=True):
        if tuple(tensor.shape) != entry.shape:
            raise UnsupportedError(f"calibration batch has shape {tuple(tensor.shape)}; pass {entry.shape}")
        values[entry.name] = tensor.float() if getattr(torch, entry.dtype).is_floating_point else tensor
    device = inputs[0].device
    with own_arithmetic("fp32", device):
        for node in concrete:
            result = compute(node, {role: values[name] for role, name in node.inputs.items()}, device)
            values[node.name] = store(node, result)
    return [values[name] for name in graph.outputs]


def _batch(graph: Graph, inputs: Sequence[torch.Tensor]) -> int:
    for entry, tensor in zip(graph.inputs, inputs, strict=True):
        if entry.shape and isinstance(entry.shape[0], Batch) and tensor.dim():
            return tensor.shape[0] // entry.shape[0].times
    return 1


def transfer_ranges(measured: Graph, fused: Graph) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
    """Return the ranges and channel means of a fused graph for other input sizes, if it has the same nodes."""
    names = {old.name: new.name for old, new in zip(measured.inputs, fused.inputs, strict=True)}
    same = len(measured.nodes) == len(fused.nodes)
    for old, new in zip(measured, fused):  # noqa: B905
        reads = {role: names.get(name) for role, name in old.inputs.items()}
        same &= operator_of(old) is operator_of(new) and reads == {
            role: name if name in names.values() else None for role, name in new.inputs.items()
        }
        names[old.name] = new.name
    if not same:
        raise UnsupportedError(
            "the ranges were measured with inputs of other sizes, for which the graph differs; compile "
            "it again with calibration batches of this size"
        )
    kept = {name: range for name, range in measured.ranges.items() if name.startswith(KEPT)}
    ranges = kept | {names[name]: range for name, range in measured.ranges.items() if name in names}
    return ranges, {names[name]: means for name, means in measured.means.items() if name in names}
