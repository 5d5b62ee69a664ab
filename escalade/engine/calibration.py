"""Options of calibration, and the ranges that follow from them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from escalade import files, parsing
from escalade.engine.graph.graph import KEPT, Graph
from escalade.engine.nodes.convert import FakeQuantize
from escalade.engine.nodes.signature import is_real
from escalade.engine.passes.calibrate import METHODS, checked_batches, histograms, tracked
from escalade.engine.passes.quantize import comes_from
from escalade.engine.passes.sensitivity import Sensitivity
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import QUANTIZED

RANGES_FORMAT = "escalade-ranges"


@dataclass(frozen=True)
class Calibration:
    """Arguments of `compile` for quantized dtypes, described there."""

    batches: Iterable[Any] | str | os.PathLike[str] | None
    method: str
    keep: Mapping[str, Iterable[str]]
    accuracy: float | None
    bias_correction: bool
    progress: bool

    def check(self, dtype: str) -> None:
        """Raise UnsupportedError unless the options are valid and fit the dtype."""
        given = {
            "calibration": self.batches is not None, "keep": self.keep != {}, "accuracy": self.accuracy is not None,
            "bias_correction": self.bias_correction is not False,
        }  # fmt: skip
        for name in (name for name, is_given in given.items() if is_given and dtype not in QUANTIZED):
            raise UnsupportedError(f"{name} is for dtype int8 or fp8; {dtype} is not quantized")
        if self.method not in METHODS:
            raise UnsupportedError(
                f"calibration_method={self.method!r}: pass one of {', '.join(map(repr, METHODS))}"
            )
        is_named = isinstance(self.keep, Mapping) and {*self.keep} <= {"fp16"}
        if not is_named or any(isinstance(layers, str) for layers in self.keep.values()):
            raise UnsupportedError(
                f'keep={self.keep!r}: pass the names of layers that stay in 16 bits, as {{"fp16": ["conv1", "layer4"]}}'
            )
        if self.accuracy is not None and (not is_real(self.accuracy) or not 0 < self.accuracy <= 1):
            raise UnsupportedError(
                f"accuracy={self.accuracy!r}: pass a number above 0 and up to 1, such as 0.99"
            )
        for name in ("bias_correction", "progress"):
            if not isinstance(getattr(self, name), bool):
                raise UnsupportedError(f"{name}={getattr(self, name)!r}: pass True or False")
        needs_batches = {"accuracy": self.accuracy is not None, "bias_correction": self.bias_correction}
        for name in (name for name, is_given in needs_batches.items() if is_given and not self._has_batches):
            raise UnsupportedError(f"{name} needs calibration=batches to measure on")

    @property
    def _has_batches(self) -> bool:
        return self.batches is not None and not isinstance(self.batches, str | os.PathLike)

    def apply(self, graph: Graph, fused: Graph, dtype: str, device: torch.device) -> None:
        """Give a captured graph the ranges of its fused form, with those that the model carries."""
        kept = [layer for layers in self.keep.values() for layer in layers]
        _require_layers(kept, fused, "keep")
        batches: list[list[torch.Tensor]] = []
        if isinstance(self.batches, str | os.PathLike):
            graph.ranges, graph.means = read_ranges(self.batches, fused, dtype)
        else:
            assert self.batches is not None
            checked = checked_batches(fused, self.batches, device, progress=self.progress)
            batches = list(checked) if self.accuracy is not None else batches
            found = histograms(fused, batches or checked, device)
            ranges = {name: METHODS[self.method](each, dtype) for name, each in found.items()}
            ranges |= {name: largest for name, largest in fused.ranges.items() if name in ranges}
            graph.calibrated = {name: found[name].calibrated(range, dtype) for name, range in ranges.items()}
            if self.bias_correction:
                graph.means = {name: each.channel_means for name, each in found.items() if each.pixels}
            graph.ranges = ranges
        graph.ranges = {**graph.ranges, **fused.ranges, **{KEPT + layer: 0.0 for layer in kept}}
        if self.accuracy is not None:
            self._keep_costly(
                graph, replace(fused, ranges=graph.ranges, means=graph.means), dtype, batches, device
            )

    def _keep_costly(
        self, graph: Graph, fused: Graph, dtype: str, batches: list[list[torch.Tensor]], device: torch.device
    ) -> None:
        """Keep the fewest layers in 16 bits that `accuracy` allows, starting with those that cost the most."""
        assert self.accuracy is not None
        trial = Sensitivity(fused, dtype, batches, device)
        costs = trial.costs(lambda items, what, total: tracked(items, what, total, self.progress))
        graph.calibrated = {
            name: replace(seen, cost=costs.get(name)) for name, seen in graph.calibrated.items()
        }
        kept = trial.layers_to_keep(self.accuracy, costs)
        graph.ranges = {**graph.ranges, **{KEPT + layer: 0.0 for layer in kept}}


def _require_layers(names: Iterable[str], fused: Graph, where: str) -> None:
    for name in names:
        if not any(comes_from(node, [name]) for node in fused):
            raise UnsupportedError(f"{where} names {name!r}, which is not a layer that the engine computes")


def require_carried_ranges(graph: Graph, dtype: str) -> None:
    """Refuse a model without calibration, unless it quantizes values itself."""
    if not any(FakeQuantize.matches(node) for node in graph):
        raise UnsupportedError(
            f"dtype {dtype} needs calibration=batches, a few batches of representative inputs to measure the ranges of "
            "the network's values on"
        )


def write_ranges(path: str | os.PathLike[str], captured: Graph, fused: Graph, dtype: str) -> None:
    """Write the ranges of a network as JSON, with the layers of the model that they belong to."""
    values = [
        {
            "name": node.name, "layer": node.source, "operation": node.op, "range": fused.ranges[node.name],
            "means": list(captured.means.get(node.name, ())),
        }
        for node in fused
        if node.name in fused.ranges
    ]  # fmt: skip
    kept = sorted(name.removeprefix(KEPT) for name in captured.ranges if name.startswith(KEPT))
    contents = {"format": RANGES_FORMAT, "version": 1, "dtype": dtype, "kept": kept, "values": values}
    files.replace(files.as_path(path), (json.dumps(contents, indent=1) + "\n").encode())


def read_ranges(
    path: str | os.PathLike[str], fused: Graph, dtype: str
) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
    """Return the ranges and channel means in a file that `write_ranges` wrote, for the values of a fused graph."""
    try:
        given = files.read(files.as_path(path))
        if given is None:
            raise UnsupportedError(f"{path} does not exist; write it with engine.save_ranges")
        text = given.decode()
        contents = parsing.parse_unique(text)
        found = parsing.parse_dataclass(_RangesFile, contents)
        values = [parsing.parse_dataclass(_Value, value) for value in found.values]
    except ValueError as error:
        raise UnsupportedError(
            f"{path} holds no ranges: {error}; write it with engine.save_ranges"
        ) from error
    if (found.format, found.version) != (RANGES_FORMAT, 1):
        raise UnsupportedError(f"{path} holds no ranges of version 1; write it with engine.save_ranges")
    if found.dtype != dtype:
        raise UnsupportedError(
            f"{path} has ranges for {found.dtype}, not for {dtype}; compile with calibration=batches once"
        )
    for value in values:
        if not is_real(value.range) or value.range < 0 or not all(map(is_real, value.means)):
            raise UnsupportedError(f"{path}: the range of {value.name} is not a number >= 0")
    if len({value.name for value in values}) < len(values):
        raise UnsupportedError(f"{path} has a value twice; write it with engine.save_ranges")
    channels = {node.name: node.shape[1] for node in fused if len(node.shape) == 4}
    for value in values:
        if value.means and len(value.means) != channels.get(value.name, len(value.means)):
            raise UnsupportedError(
                f"{path} has {len(value.means)} means of {value.name}, which has {channels[value.name]} channels"
            )
    unknown = sorted({value.name for value in values} - {node.name for node in fused})
    if unknown:
        raise UnsupportedError(
            f"{path} has a range for {unknown[0]}, which this network does not have; compile with calibration=batches"
        )
    _require_layers(found.kept, fused, str(path))
    ranges = {value.name: value.range for value in values} | {KEPT + layer: 0.0 for layer in found.kept}
    return ranges, {value.name: tuple(value.means) for value in values if value.means}


@dataclass(frozen=True)
class _Value:
    name: str
    range: float
    means: list[float]


@dataclass(frozen=True)
class _RangesFile:
    format: str
    version: int
    dtype: str
    kept: list[str]
    values: list[dict[str, Any]]
