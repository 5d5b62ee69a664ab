"""Histograms of the magnitudes of a value during calibration, and ranges chosen by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from escalade.engine.graph.graph import CalibratedValue
from escalade.ops.base.dtypes import LARGEST

BINS = 2048
PERCENTILE = 0.9999
"""Share of a value's elements that its range covers with method `percentile`."""
CANDIDATES = 100
"""Ranges that method `mse` tries, equally spaced up to the largest magnitude."""
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

    @staticmethod
    def empty() -> Histogram:
        return Histogram(torch.zeros(BINS, dtype=torch.float64, device="cpu"), 0.0)

    def add(self, values: torch.Tensor) -> None:
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
        candidates = [self.largest * (index + 1) / CANDIDATES for index in range(CANDIDATES)]
        return min(candidates, key=lambda candidate: self._noise(candidate, dtype))

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
}
"""Methods that choose a range, by name."""
