"""Report of calibration's choices for the layers of a quantized engine."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from escalade.engine.graph.graph import Graph
from escalade.engine.passes.estimates import Estimates
from escalade.engine.passes.quantize import quantize_convolutions
from escalade.ops.base.card import Card
from escalade.terminal_text import as_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

ASSUMED_BATCH = 32
"""Batch size of a report before the first plan."""


@dataclass(frozen=True)
class CalibratedLayer:
    """One value of a quantized network: the result of a layer. Figures that a file does not store are None."""

    name: str
    source: str
    """The module of the model that it comes from."""
    operation: str
    products: str
    """Dtype that the layer multiplies in."""
    stored: str
    """Dtype that the result is stored in."""
    range: float
    """Largest magnitude that is stored without saturation."""
    largest: float | None
    """Largest magnitude seen in calibration."""
    saturated: float | None
    """Share of the elements beyond the range."""
    snr_db: float | None
    """Ratio of the value's power to that of the quantization error, in decibels."""
    cost: float | None
    """Relative error of the network's results if only this layer is quantized; measured with `accuracy=`."""


@dataclass(frozen=True)
class CalibrationReport:
    """The layers of a quantized network in order: `str()` returns a table, `to_json()` everything."""

    dtype: str
    layers: tuple[CalibratedLayer, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from escalade.narrow_tables import Table

        table = Table(title=f"calibration for {self.dtype}")
        for column in (
            "layer",
            "operation",
            "products",
            "stored",
            "range",
            "largest",
            "saturated",
            "SNR",
            "cost",
        ):
            table.add_column(column)
        for layer in self.layers:
            figures = (
                _figure(layer.range, "{:.4g}"), _figure(layer.largest, "{:.4g}"), _figure(layer.saturated, "{:.3%}"),
                _figure(layer.snr_db, "{:.1f} dB"), _figure(layer.cost, "{:.2%}"),
            )  # fmt: skip
            table.add_row(layer.source or layer.name, layer.operation, layer.products, layer.stored, *figures)
        yield table

    def __str__(self) -> str:
        return as_text(self)


def _figure(value: float | None, pattern: str) -> str:
    return "" if value is None or math.isinf(value) else pattern.format(value)


def report(captured: Graph, optimized: Graph, dtype: str, batch: int, card: Card) -> CalibrationReport:
    """Return the report of an optimized graph, quantized for a batch size on a card."""
    quantized = optimized.at(batch)
    quantize_convolutions(quantized, dtype, Estimates(card))
    layers = []
    for node in (quantized.nodes[node.name] for node in optimized if node.name in optimized.ranges):
        seen = captured.calibrated.get(node.name)
        layers.append(
            CalibratedLayer(
                node.name, node.source or "", node.op, node.attributes.get("quantized") or "fp16",
                node.attributes.get("store") or "fp16", optimized.ranges[node.name],
                *((seen.largest, seen.saturated, seen.snr_db, seen.cost) if seen else (None,) * 4),
            )
        )  # fmt: skip
    return CalibrationReport(dtype, tuple(layers))
