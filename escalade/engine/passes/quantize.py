"""Quantization: convolutions with inputs, weights and results of one byte (e4m3 or s8), scaled by measured ranges.

A mean over the pixels of an image reads bytes, too.

A value v is stored as v / scale, where scale maps the largest magnitude seen in calibration to the largest number of
the dtype. Weights have one scale per filter. The epilogue multiplies accumulators by one factor per filter, and divides
the result by its own scale. A stem multiplies in 16 bits and stores bytes: its weights include the scale.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from escalade.engine.graph.graph import KEPT, Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.base import activation_of, with_activation, with_channels
from escalade.engine.nodes.conv2d import Conv2d
from escalade.engine.nodes.convert import Quantize
from escalade.engine.nodes.pools import AdaptiveAvgPool2d
from escalade.engine.nodes.stem import Stem
from escalade.engine.passes.estimates import Estimates
from escalade.engine.passes.precision import fastest_layers
from escalade.ops.base.dtypes import LARGEST, STORAGE, stored_as
from escalade.ops.base.grid import ceil_div
from escalade.ops.expressions import Expression
from escalade.ops.shared.quantized_input import CHANNEL_UNIT

SMALLEST_SCALE = 2.0**-100  # scale of values that were all zero
SMALLEST_HALF, LARGEST_HALF = 2.0**-8, 2.0**15
"""Bounds of a stem's scaled weights in 16 bits; those up to 64 times smaller than the lower one keep all their bits."""

GRID_SAMPLE = 16
"""Number of weights per filter that are tested against each possible step before all are."""
GRID_ERROR = 1e-3
"""Distance from a multiple, in steps, that rounding to fp32 explains: 127 codes times a few units of 2^-24, and more
after a BatchNorm has been folded."""

MOST_PADDING = 1.5
"""Channels with padding, in multiples of those without."""
MOST_TAPS = 49
"""Taps of a depthwise filter that is quantized: windows of larger ones may not fit into shared memory."""


def quantize_convolutions(
    graph: Graph, dtype: str, estimates: Estimates | None = None, only: Collection[str] | None = None
) -> None:
    """Quantize convolutions that kernels support, and store values that only such convolutions read in bytes.

    With `estimates`, for a graph with fixed sizes, those that are faster in 8 bits. `only` names the convolutions to
    quantize. A graph without ranges is left as it is.
    """
    _Quantization(graph, graph.ranges, dtype, estimates, only).apply()


def quantized_weights(node: Node) -> dict[str, str]:
    """Return the roles of a node's weights, each with that of its input; empty if no kernel multiplies it in 8 bits."""
    if not Conv2d.matches(node) or (node.attributes["groups"] != 1 and not _is_depthwise(node)):
        return {}
    inputs = {"weight": "x", "shortcut_weight": "shortcut"}
    return {weight: value for weight, value in inputs.items() if weight in node.inputs}


def _is_depthwise(node: Node) -> bool:
    """Return True for one filter per group; the node does not show if a group has several channels."""
    groups = node.attributes["groups"]
    return groups > 1 and groups == node.shape[1] and node.attributes["dilation"] == (1, 1)


def layer_names(node: Node) -> list[str]:
    """Return the layers of the model that a node comes from, or its own name."""
    return [source.strip() for source in (node.source or node.name).split(",")]


def comes_from(node: Node, layers: Iterable[str]) -> bool:
    """Return True if a node comes from one of these layers of the model, or from inside one."""
    sources = layer_names(node)
    return any(source == layer or source.startswith(f"{layer}.") for layer in layers for source in sources)


def _values(node: Node) -> dict[str, str]:
    return {role: node.inputs[role] for role in operator_of(node).values if role in node.inputs}


def _steps(weight: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the scale of each filter, chosen so that its codes use the full range."""
    return weight.flatten(1).abs().amax(1) / LARGEST[dtype]


def _grid(weight: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the scale per filter for integers: the filter's own step if its weights are multiples of one.

    The weights of a model that was quantized before keep their codes.
    """
    rows, steps = weight.flatten(1), _steps(weight, dtype)
    largest, is_open = steps * LARGEST[dtype], steps > 0
    sample = rows[:, :: max(1, rows.shape[1] // GRID_SAMPLE)]
    for most in range(int(LARGEST[dtype]), 0, -1):
        step = largest / most
        fits = is_open & _are_multiples(sample, step)
        if not bool(fits.any()):
            continue
        fits[fits.clone()] = _are_multiples(rows[fits], step[fits])
        steps, is_open = torch.where(fits, step, steps), is_open & ~fits
    return steps


def _are_multiples(rows: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return per row True if its numbers are multiples of its step, up to fp32 rounding."""
    codes = rows / step.view(-1, 1)
    return (codes - codes.round()).abs().amax(1) < GRID_ERROR


def _padded_channels(channels: int) -> int:
    return ceil_div(channels, CHANNEL_UNIT) * CHANNEL_UNIT


@dataclass
class _Quantization:
    graph: Graph
    ranges: Mapping[str, float]
    dtype: str
    estimates: Estimates | None = None
    only: Collection[str] | None = None
    copies: dict[str, str] = field(default_factory=dict)
    """Quantized copy of each value that other nodes read in 16 bits."""

    def apply(self) -> None:
        graph = self.graph
        self.kept = [name.removeprefix(KEPT) for name in self.ranges if name.startswith(KEPT)]
        plain, padded = graph.copy(), self._paddable()
        while True:
            for values in padded:
                self._pad(values)
            self._select(plain, padded)
            rejected = [values for values in padded if not self._layers_of(values) <= self.quantized]
            if not rejected or self.only is not None:
                break
            graph.nodes, graph.constants = plain.copy().nodes, dict(plain.constants)
            padded = [values for values in padded if values not in rejected]
        for node in [node for node in graph if node.name in self.quantized | self.in_bytes]:
            if Stem.matches(node):
                self._store_stem_in_bytes(node)
            else:
                self._quantize(node)
        for node in [node for node in graph if self._reads_bytes(node)]:
            if (value := node.inputs["x"]) in self.in_bytes:
                scale = graph.add_constant(
                    f"{node.name}_scale", torch.tensor([self._scale(value)], device="cpu")
                )
                graph.nodes[node.name] = node.with_inputs(scale=scale).with_attributes(quantized=self.dtype)

    def _paddable(self) -> list[frozenset[str]]:
        """Return sets of values with the same odd number of channels, to which convolutions may add zeros.

        All layers that write or read a value of a set are convolutions that could be quantized.
        """
        sets: dict[str, set[str]] = {}
        for node in self.graph:
            if not Conv2d.matches(node) or node.shape[1] % CHANNEL_UNIT == 0:  # type: ignore[operator]
                continue
            roles = ("x", "residual") if _is_depthwise(node) else ("residual",)
            joined = {node.name, *(node.inputs[role] for role in roles if role in node.inputs)}
            joined = joined.union(*(sets.get(name, ()) for name in joined))
            sets |= dict.fromkeys(joined, joined)
        distinct = {frozenset(values) for values in sets.values()}
        return sorted(filter(self._is_paddable, distinct), key=min)

    def _is_paddable(self, values: frozenset[str]) -> bool:
        graph = self.graph
        if not values <= graph.nodes.keys() or not values.isdisjoint(graph.outputs):
            return False
        channels = graph.nodes[next(iter(values))].shape[1]
        layers = [graph.nodes[name] for name in self._layers_of(values)]
        return (
            isinstance(channels, int)
            and _padded_channels(channels) <= MOST_PADDING * channels
            and all(
                quantized_weights(layer) and layer.inputs.keys() <= {"x", "weight", "bias", "residual"}
                for layer in layers
            )
        )

    def _layers_of(self, values: frozenset[str]) -> set[str]:
        """Return the nodes that write or read values."""
        return {*values, *(reader.name for value in values for reader in self.graph.readers(value))}

    def _pad(self, values: frozenset[str]) -> None:
        """Add filters of zeros to the layers that write values, and channels of zeros to those that read them."""
        graph = self.graph
        for name in self._layers_of(values):
            node = graph.nodes[name]
            is_depthwise = _is_depthwise(node)
            weight = graph.constants[node.inputs["weight"]]
            filters, channels = weight.shape[:2]
            more_filters = _padded_channels(filters) - filters if name in values else 0
            reads = node.inputs["x"] in values and not is_depthwise
            more_channels = _padded_channels(channels) - channels if reads else 0
            given = {"weight": F.pad(weight, (0, 0, 0, 0, 0, more_channels, 0, more_filters))}
            if "bias" in node.inputs:
                given["bias"] = F.pad(graph.constants[node.inputs["bias"]], (0, more_filters))
            wide = with_channels(node, filters + more_filters).with_inputs(
                **graph.add_constants(f"{name}_padded", given)
            )
            graph.nodes[name] = wide.with_attributes(groups=filters + more_filters) if is_depthwise else wide

    def _select(self, plain: Graph, padded: Collection[frozenset[str]]) -> None:
        """Choose the layers to quantize, and the values to store in bytes."""
        graph = self.graph
        self.quantized = {node.name for node in graph if self._is_quantizable(node)}
        if self.estimates is not None:
            self.quantized = self._fastest(plain, padded, self.estimates)
        self.in_bytes = self._stored_in_bytes()

    def _fastest(self, plain: Graph, padded: Collection[frozenset[str]], estimates: Estimates) -> set[str]:
        """Return the layers that take less time in 8 bits."""
        graph = self.graph
        writers = [node.name for node in graph if self._is_scalable_stem(node) and node.name in self.ranges]
        flexible = [node.name for node in graph if self._reads_bytes(node)]
        joined = [self._layers_of(values) for values in padded]
        return fastest_layers(graph, plain, self.dtype, estimates, self.quantized, writers, flexible, joined)

    def _scale(self, value: str) -> float:
        return max(self.ranges[value] / LARGEST[self.dtype], SMALLEST_SCALE)

    def _is_quantizable(self, node: Node) -> bool:
        weights = quantized_weights(node)
        shapes = [self.graph.constants[node.inputs[role]].shape for role in weights]
        if weights and node.attributes["groups"] > 1:
            filters, channels, *taps = shapes[0]
            if channels > 1 or not 1 < math.prod(taps) <= MOST_TAPS or "shortcut" in node.inputs:
                return False
            shapes = [torch.Size((filters,))]
        sizes = [size for shape in shapes for size in shape[:2]]
        measured = {*_values(node).values()}
        return (
            bool(weights)
            and (self.only is None or node.name in self.only)
            and not comes_from(node, self.kept)
            and all(size % CHANNEL_UNIT == 0 for size in sizes)
            and measured <= self.ranges.keys()
        )

    def _stored_in_bytes(self) -> set[str]:
        return {
            node.name
            for node in self.graph
            if (node.name in self.quantized or self._is_scalable_stem(node))
            and node.name in self.ranges
            and self._is_only_read_in_bytes(node)
        }

    def _is_scalable_stem(self, node: Node) -> bool:
        return Stem.matches(node) and self.only is None

    def _is_only_read_in_bytes(self, node: Node) -> bool:
        readers = [other for other in self.graph if node.name in other.inputs.values()]
        is_internal = bool(readers) and node.name not in self.graph.outputs
        return is_internal and all(
            other.name in self.quantized or self._reads_bytes(other) for other in readers
        )

    def _reads_bytes(self, node: Node) -> bool:
        """Return True for a mean, which converts bytes as it adds them up."""
        if not AdaptiveAvgPool2d.is_nhwc_mean(node):
            return False
        channels = self.graph.shape_of(node.inputs["x"])[1]
        return isinstance(channels, int) and channels % CHANNEL_UNIT == 0

    def _store_stem_in_bytes(self, node: Node) -> None:
        """Scale the result: by weights and bias, or after another activation than ReLU.

        Weights and biases that would leave the normal numbers of 16 bits are not scaled either.
        """
        factor, stored = 1 / self._scale(node.name), node.with_attributes(store=self.dtype)
        weight, bias = (
            float(self.graph.constants[node.inputs[role]].abs().max()) * factor for role in ("weight", "bias")
        )
        if node.attributes.get("activation") or weight < SMALLEST_HALF or max(weight, bias) > LARGEST_HALF:
            scaled = Expression.parse(f"y * {factor!r}").substitute({"y": activation_of(node)})
            self.graph.nodes[node.name] = with_activation(stored, scaled)
            return
        constants = {
            role: self.graph.add_constant(
                f"{node.name}_{role}_{self.dtype}", self.graph.constants[node.inputs[role]] * factor
            )
            for role in ("weight", "bias")
        }
        self.graph.nodes[node.name] = replace(stored, inputs={**node.inputs, **constants})

    def _quantize(self, node: Node) -> None:
        values = _values(node)
        scales = {role: self._scale(value) for role, value in values.items()}
        inputs = dict(node.inputs)
        for role, value in values.items():
            if value not in self.in_bytes:
                inputs[role] = self._copy(value, before=node.name)
        is_stored = node.name in self.in_bytes
        inputs |= self._constants(node, scales, 1 / self._scale(node.name) if is_stored else 1.0)
        quantized = node.with_attributes(quantized=self.dtype, store=self.dtype if is_stored else None)
        self.graph.nodes[node.name] = replace(quantized, inputs=inputs)

    def _copy(self, value: str, before: str) -> str:
        """Return a quantized copy of a value, created before its first reader."""
        if value not in self.copies:
            factor = torch.tensor([1 / self._scale(value)], device="cpu")
            inputs = {"x": value, "factor": self.graph.add_constant(f"{value}_factor", factor)}
            store, shape = {"store": self.dtype}, self.graph.shape_of(value)
            copy = Quantize.node(f"{value}_{self.dtype}", inputs, store, shape)
            self.copies[value] = self.graph.add(copy, before)
        return self.copies[value]

    def _mean_error(
        self, weight: torch.Tensor, scaled: torch.Tensor, step: torch.Tensor, value: str, is_depthwise: bool
    ) -> torch.Tensor:
        """Return the mean error per filter that weight rounding causes in the result, ignoring image borders."""
        if value not in self.graph.means:
            return torch.zeros_like(step)
        errors = stored_as(scaled, STORAGE[self.dtype]).double() * step.view(-1, 1, 1, 1) - weight
        means = torch.zeros(self.graph.shape_of(value)[1], dtype=torch.float64, device=weight.device)  # type: ignore[arg-type]
        known = self.graph.means[value]
        means[: len(known)] = torch.tensor(known, dtype=torch.float64)  # padded channels are zero
        return errors.sum((1, 2, 3)) * means if is_depthwise else (errors.sum((2, 3)) * means).sum(1)

    def _constants(
        self, node: Node, input_scales: Mapping[str, float], result_scale: float
    ) -> dict[str, str]:
        """Add the scaled weights, a factor per filter, the fp32 bias, and the scales of residual and result."""
        graph, inputs_of = self.graph, quantized_weights(node)
        weights = {role: graph.constants[node.inputs[role]].double() for role in inputs_of}
        # Products of both inputs are summed in one accumulator, so they need a common scale.
        steps = _grid if self.dtype == "int8" and len(weights) == 1 else _steps
        unit = torch.stack(
            [steps(weight, self.dtype) * input_scales[inputs_of[role]] for role, weight in weights.items()]
        ).amax(0)
        unit = unit.clamp_min(SMALLEST_SCALE)
        scaled_weights = {
            role: graph.add_constant(
                f"{node.name}_{role}_{self.dtype}",
                (weight * input_scales[inputs_of[role]] / unit.view(-1, 1, 1, 1)).float(),
            )
            for role, weight in weights.items()
        }
        scales = torch.tensor([input_scales.get("residual", 0.0), result_scale], device="cpu")
        bias = graph.constants[node.inputs["bias"]] if "bias" in node.inputs else torch.zeros_like(unit)
        for role, name in scaled_weights.items():
            step = unit / input_scales[inputs_of[role]]
            value, is_depthwise = node.inputs[inputs_of[role]], node.attributes["groups"] > 1
            bias = bias - self._mean_error(weights[role], graph.constants[name], step, value, is_depthwise)
        return scaled_weights | {
            "bias": graph.add_constant(f"{node.name}_bias_{self.dtype}", bias.float()),
            "scale": graph.add_constant(f"{node.name}_scale", unit.float()),
            "scales": graph.add_constant(f"{node.name}_scales", scales),
        }
