"""New weights for the plans of an engine, written into the memory of the old ones.

A plan depends on the structure of its graph, not on the values of its weights. So the passes run again on the captured
graph with new weights. If they produce the same graph, its constants (folded BatchNorm, reordered and padded filters)
take the place of the old ones, in all forms that kernels read. Everything is computed before anything is written, so a
refused update changes nothing. Addresses stay the same, so captured CUDA graphs remain valid.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from escalade.engine.cached_plan import CachedPlan
from escalade.engine.capture.export import AnySize
from escalade.engine.capture.model_copy import unwrapped
from escalade.engine.capture.weights import named_tensors
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.networks import Network
from escalade.engine.plan.constants import ConstantCache, check_finite_weights, equal_bits, write_tensor
from escalade.errors import UnsupportedError

_SHOWN_KEYS = 3


class SourceModel:
    """The caller's model, which is not kept alive, and the copy of it that captures for other sizes use."""

    def __init__(self, model: torch.nn.Module, captured: AnySize) -> None:
        self._model = weakref.ref(model)
        self._captured = captured

    @property
    def kept(self) -> dict[str, torch.Tensor]:
        """The copy of the model's weights, by name."""
        return self._captured.weights

    def current(self) -> dict[str, torch.Tensor]:
        """Return the model's parameters and buffers as they are now, by name."""
        model = self._model()
        if model is None:
            raise UnsupportedError(
                "the model that this engine was compiled from no longer exists; keep a reference to it, or pass new "
                "weights to engine.load_state_dict"
            )
        found = dict(named_tensors(unwrapped(model)))
        require_entries(found, {name: tuple(kept.shape) for name, kept in self.kept.items()}, "the model")
        return found


def require_entries(given: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], what: str) -> None:
    """Refuse weights that differ in names or shapes from those that the engine was compiled with."""
    missing, unexpected = shapes.keys() - given.keys(), given.keys() - shapes.keys()
    if missing or unexpected:
        found = (("has no", missing), ("has an unknown", unexpected))
        raise UnsupportedError(
            f"{what} {' and '.join(f'{verb} {_shown(names)}' for verb, names in found if names)}; weights must have "
            "the names that they had when the model was compiled"
        )
    for name, shape in shapes.items():
        tensor = given[name]
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            raise UnsupportedError(f"{name} of {what} is {_kind(tensor)}; pass a tensor with data")
        if tuple(tensor.shape) != shape:
            raise UnsupportedError(
                f"{name} of {what} has shape {tuple(tensor.shape)}; the engine was compiled for {shape}. Compile the "
                "changed model again"
            )


def _kind(value: object) -> str:
    return "on the meta device" if isinstance(value, torch.Tensor) else f"of type {type(value).__name__}"


def _shown(names: Iterable[str]) -> str:
    found = sorted(names)
    more = len(found) - _SHOWN_KEYS
    return ", ".join(found[:_SHOWN_KEYS]) + (f" and {more} more" if more > 0 else "")


class WeightUpdate:
    """Tensors with their new values, none of them written yet."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, name: str, old: torch.Tensor, new: torch.Tensor) -> None:
        if old is new:
            return
        _, known = self._values.setdefault(id(old), (old, new))
        # Weights that two names share, and equal constants of several sizes, are one tensor.
        if known is not new and not equal_bits(known, new):
            raise UnsupportedError(
                f"{name} was the same tensor as another weight, or equal to it, when the model was compiled, and is "
                "not now; compile the model again"
            )

    def add_constants(self, old: Graph, new: Graph) -> None:
        for name, tensor in old.constants.items():
            self.add(old.weight_names.get(name, name), tensor, new.constants[name])

    def write(self) -> None:
        for old, new in self._values.values():
            write_tensor(old, new)


def weight_update(
    networks: Sequence[Network],
    plans: Sequence[CachedPlan],
    caches: Iterable[ConstantCache],
    specialize: Callable[..., Graph],
    weights: Mapping[str, torch.Tensor],
    kept: Mapping[str, torch.Tensor],
) -> WeightUpdate:
    """Compute the new values of everything that depends on weights, which are given by name."""
    update = WeightUpdate()
    for name in kept.keys() & weights.keys():
        update.add(name, kept[name], _like(weights[name], kept[name]))
    optimized: dict[tuple[Network, str], Graph] = {}
    for network in networks:
        captured = with_weights(network.captured, weights, kept)
        update.add_constants(network.captured, captured)
        for images in network.known_layouts:
            optimized[network, images] = again = network.optimize(captured, images)
            _require_same(network.optimized(images), again)
            update.add_constants(network.optimized(images), again)
    for plan in plans:
        made_for = plan.specialized
        assert made_for is not None, "only calls that are not cached have none"
        source = optimized[plan.network, made_for.images]
        again = specialize(source, plan.batch, made_for.place, made_for.avoid)
        _require_same(made_for.graph, again)
        update.add_constants(made_for.graph, again)
        for name in made_for.graph.constants:
            for cache in caches:
                for old, new in cache.reconvert(made_for.graph, name, again):
                    update.add(name, old, new)
    return update


def with_weights(
    graph: Graph, weights: Mapping[str, torch.Tensor], kept: Mapping[str, torch.Tensor]
) -> Graph:
    """Return a captured graph with new weights, given by their names in the model."""
    constants = dict(graph.constants)
    names = {name: key for name, key in graph.weight_names.items() if name in constants and key in weights}
    for key in graph.fixed_weights & weights.keys():
        old = kept.get(key)
        if old is None or not equal_bits(old.detach(), _like(weights[key], old)):
            raise UnsupportedError(
                f"the model read the values of its {key} when it was captured, and may compute something else with "
                "others; compile the model again"
            )
    for name, key in names.items():
        constants[name] = _like(weights[key], constants[name])
    for name, (source, derive) in graph.derived.items():
        if name not in constants:
            continue
        if derive is None:
            raise UnsupportedError(
                f"this engine comes from a file, which does not store how {name} was computed from the model's "
                "weights; compile the model with the new weights and save it again"
            )
        constants[name] = derive(constants[source])
    made = replace(graph, constants=constants)
    check_finite_weights(made)
    return made


def _like(values: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return values in the dtype, on the device and with the strides of `old`."""
    values = values.detach()
    if (values.dtype, values.device, values.stride()) == (old.dtype, old.device, old.stride()):
        return values
    # Strides of 0 repeat an element; a tensor with all elements can be read in its place.
    like = old.detach() if all(old.stride()) else old.detach().contiguous()
    return torch.empty_like(like).copy_(values)


def _require_same(old: Graph, new: Graph) -> None:
    """Reject weights that lead to another graph: zeros or equal numbers may be compiled into kernels."""
    if _structure(old) == _structure(new) and old.nodes == new.nodes:
        return
    changed = [node for node in (*new, *old) if old.nodes.get(node.name) != new.nodes.get(node.name)]
    raise UnsupportedError(
        f"the plan of {_layer_name(changed)} depends on the values of its weights (numbers that are all equal or zero, "
        "or that exceed a type's range, are compiled into kernels); compile the model again"
    )


def _structure(graph: Graph) -> Any:
    constants = {name: (tensor.shape, tensor.dtype) for name, tensor in graph.constants.items()}
    return graph.inputs, graph.outputs, constants


def _layer_name(nodes: Sequence[Node]) -> str:
    return next((node.source or node.name for node in nodes), "the network")
