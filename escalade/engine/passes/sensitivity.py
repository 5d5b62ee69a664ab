"""The choice of layers that stay in 16 bits, by what their quantization does to the results of calibration batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from escalade.engine.graph.graph import KEPT, Graph, Node
from escalade.engine.passes.calibrate import evaluate
from escalade.engine.passes.quantize import layer_names, quantize_convolutions, quantized_weights
from escalade.ops.base.dtypes import STORAGE, stored_as

Track = Callable[[Iterable[str], str, int], Iterable[str]]
"""Shows progress over names."""


def agreement(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return how well results agree, up to 1.

    For rows of two or more numbers, as from a classifier, it is the share of rows with the same argmax. For
    other results it is one less their relative error.
    """
    if expected.dim() == 2 and expected.shape[1] > 1:
        return float((found.argmax(1) == expected.argmax(1)).double().mean())
    return 1 - relative_error([found], [expected])


def relative_error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    difference = sum(
        float((a.double() - b.double()).square().sum()) for a, b in zip(found, expected, strict=True)
    )
    size = sum(float(b.double().square().sum()) for b in expected)
    return (difference / size) ** 0.5 if size else float(difference > 0)


class Sensitivity:
    """Results of a fused graph with some of its layers quantized, computed by PyTorch."""

    def __init__(
        self, fused: Graph, dtype: str, batches: Sequence[Sequence[torch.Tensor]], device: torch.device
    ) -> None:
        self._fused, self._dtype, self._batches, self._device = fused, dtype, batches, device
        self._expected = [self._results(fused, batch) for batch in batches]
        self.layers = {
            name: layer_names(fused.nodes[name])[0]
            for name, node in self._quantized(fused.ranges).nodes.items()
            if node.attributes.get("quantized") and quantized_weights(node)
        }
        """Layers of the model that are quantized, by the names of their nodes."""

    def costs(self, track: Track) -> dict[str, float]:
        """Return for each node the relative error of the first batch's results if it alone is quantized."""
        return {
            name: relative_error(
                self._results(self._quantized(self._fused.ranges, [name]), self._batches[0]),
                self._expected[0],
            )
            for name in track(self.layers, "trying layers", len(self.layers))
        }

    def agreement(self, kept: Iterable[str]) -> float:
        """Return the least agreement of a result over all batches, with these layers in 16 bits."""
        graph = self._quantized({**self._fused.ranges, **{KEPT + layer: 0.0 for layer in kept}})
        shares: dict[int, list[tuple[float, int]]] = {}
        for batch, expected in zip(self._batches, self._expected, strict=True):
            for index, (found, right) in enumerate(zip(self._results(graph, batch), expected, strict=True)):
                shares.setdefault(index, []).append((agreement(found, right), len(batch[0])))
        means = [
            sum(share * items for share, items in each) / sum(n for _, n in each) for each in shares.values()
        ]
        return min(means, default=1.0)

    def layers_to_keep(self, accuracy: float, costs: Mapping[str, float]) -> tuple[str, ...]:
        """Return the shortest prefix of the costliest layers whose exclusion reaches this agreement."""
        order = list(
            dict.fromkeys(self.layers[name] for name in sorted(costs, key=costs.__getitem__, reverse=True))
        )
        fewest, enough = 0, len(order)  # with all of them nothing is quantized
        while fewest < enough:
            middle = (fewest + enough) // 2
            if self.agreement(order[:middle]) >= accuracy:
                enough = middle
            else:
                fewest = middle + 1
        return tuple(order[:enough])

    def _quantized(self, ranges: Mapping[str, float], only: Sequence[str] | None = None) -> Graph:
        graph = replace(self._fused.copy(), ranges=ranges)
        quantize_convolutions(graph, self._dtype, only=only)
        graph.remove_dead_code()
        return graph

    def _results(self, graph: Graph, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        storage = STORAGE[self._dtype]
        constants = {name: tensor.to(self._device) for name, tensor in graph.constants.items()}
        for node in graph:
            for role in quantized_weights(node) if node.attributes.get("quantized") else ():
                name = node.inputs[role]
                constants[name] = stored_as(constants[name], storage).float()

        def store(node: Node, result: torch.Tensor) -> torch.Tensor:
            return stored_as(result, storage).float() if node.attributes.get("store") else result

        found = evaluate(graph, constants, batch, store)
        return [result for result in found if result.is_floating_point()]
