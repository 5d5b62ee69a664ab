"""Weights of a model during capture: their values where it reads them, and a check of what it writes to them.

A buffer may hold a repeat count, or whether statistics were initialized. An engine's weights are constant, so a model
that `torch.export` runs on fake tensors may branch on values computed from weights alone. Values that depend on inputs
stay unknown. Writes to weights are only supported if the results stay the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from escalade.engine.capture.model_copy import OriginalModel
from escalade.engine.capture.reader import CaptureError
from escalade.engine.graph.graph import Graph
from escalade.engine.nodes.aten import is_random, unread_inputs
from escalade.engine.nodes.evaluate import compute

_tensor: Any = torch.Tensor
_VALUE_QUERIES: frozenset[Callable[..., Any]] = frozenset(
    {
        *(getattr(_tensor, name) for name in ("item", "tolist", "numpy", "__array__", "is_nonzero", "equal")),
        *(getattr(_tensor, f"__{name}__") for name in ("bool", "int", "float", "complex", "index")),
        *(torch.is_nonzero, torch.equal, torch.allclose, _tensor.allclose),
    }
)
"""Functions that return the values of a tensor rather than a tensor."""
_IN_PLACE_OPERATORS = ("__iadd", "__isub", "__imul", "__idiv", "__itrue", "__ifloor", "__imod", "__ipow", "__iand",
                       "__ior", "__ixor", "__ilshift", "__irshift", "__imatmul")  # fmt: skip
_GET_DATA, _SET_DATA = _tensor.data.__get__, _tensor.data.__set__


class WeightValues(TorchFunctionMode):
    """Returns real values where a model reads those of its weights.

    Also redirects reads and writes of `tensor.data` to `detach`, since `torch.export` traces only the latter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read_names: set[str] = set()
        """Names of the weights whose values the model has read."""
        self._values: dict[int, tuple[torch.Tensor, Callable[[], torch.Tensor], frozenset[str]]] = {}
        """By id of a fake tensor: the tensor, which keeps the id valid, a function that computes its values, and the
        names of the weights that they are computed from."""
        self._writes = False
        """True once the model writes to a tensor. Any other may be a view of it, so no value is known from then on."""

    def set_values(self, fake: torch.Tensor, values: torch.Tensor, name: str = "") -> None:
        """Register the values of a fake tensor, and its name if it is a weight."""
        self._values[id(fake)] = (fake, lambda: values, frozenset({name} - {""}))

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        if function == _GET_DATA:
            return self.__torch_function__(torch.Tensor.detach, types, arguments)
        if function == _SET_DATA and arguments[0].shape == arguments[1].shape:
            self._writes = True
            arguments[0].detach().copy_(arguments[1])
            return None
        call = self._deferred_result(function, arguments, keywords)
        names = self._names_of(arguments, keywords) if call is not None else frozenset()
        if function in _VALUE_QUERIES and call is not None:
            self.read_names |= names
            return call()
        result = function(*arguments, **keywords)
        self._writes |= _may_write(function, keywords)
        if call is not None and isinstance(result, torch.Tensor):
            self._values[id(result)] = (result, call, names)
        return result

    def _names_of(self, arguments: Any, keywords: Any) -> frozenset[str]:
        known = (self._values.get(id(leaf)) for leaf in pytree.tree_leaves((arguments, keywords)))
        return frozenset[str]().union(*(each[2] for each in known if each is not None))

    def _deferred_result(self, function: Any, arguments: Any, keywords: Any) -> Callable[[], Any] | None:
        """Return a function that computes the call on real values; None if it has no tensors, or unknown ones."""
        leaves, structure = pytree.tree_flatten((arguments, keywords))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self._writes or not tensors or not all(map(self._is_known, tensors)):
            return None
        producers = [known[1] if (known := self._values.get(id(leaf))) else None for leaf in leaves]

        def compute() -> Any:
            values = [leaf if make is None else make() for leaf, make in zip(leaves, producers, strict=True)]
            given, named = pytree.tree_unflatten(values, structure)
            with (
                _disable_current_modes(),
                torch._C.DisableTorchFunction(),
                _NoRandomNumbers(),
                torch.no_grad(),
            ):
                return function(*given, **named)

        return compute

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Return True for registered tensors, and for real ones: attributes that are no parameter or buffer."""
        plain = (
            type(tensor) is torch.Tensor and not tensor.is_meta and not torch._is_functional_tensor(tensor)
        )
        return plain or id(tensor) in self._values


def _may_write(function: Any, keywords: Mapping[str, Any]) -> bool:
    """Tell by its name, and `out`, if a function may write to one of its tensors."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.startswith(("__set", *_IN_PLACE_OPERATORS)) or keywords.get("out") is not None


class _NoRandomNumbers(TorchDispatchMode):
    """Rejects random operators, whose results are not known in advance."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise RuntimeError(f"data-dependent: {function} draws random numbers")
        return function(*arguments, **(keywords or {}))


def answer_weight_queries(model: torch.nn.Module, read_names: set[str]) -> None:
    """Let a model copy read its current weight values after `torch.export` replaces them with fake tensors.

    Names of weights whose values it reads are added to `read_names`.
    """
    values = {name: tensor.detach() for name, tensor in named_tensors(model)}
    forward = model.forward

    @functools.wraps(forward)
    def forward_with_values(*arguments: Any, **keywords: Any) -> Any:
        weight_values = WeightValues()
        for name, tensor in named_tensors(model):
            if name in values:
                weight_values.set_values(tensor, values[name], name)
        try:
            with weight_values:
                return forward(*arguments, **keywords)
        finally:
            read_names.update(weight_values.read_names)

    model.forward = forward_with_values  # not a hook: PyTorch skips `always_call` hooks while compiling


def named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer, shared ones under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def check_weight_writes(graph: Graph, written: Mapping[str, str], original: OriginalModel) -> None:
    """Raise if what the model writes to its constants changes the results of its next call; otherwise add a note.

    `written` has the final value of each constant that the model writes to. Results stay the same if they do not depend
    on the old value, as with a counter that is never read, or if writing is idempotent: weights masked at every call.
    """
    if not written:
        return
    relevant = written.keys() & _ancestors(graph, graph.outputs)
    while more := (written.keys() & _ancestors(graph, [written[name] for name in relevant])) - relevant:
        relevant |= more
    shown = {name: graph.weight_names.get(name, name) for name in written}
    constants = graph.constants
    read = constants.keys() & _ancestors(graph, [*graph.outputs, *(written[name] for name in relevant)])
    for name in written:  # a view of it is a separate constant, which the graph does not update
        if any(original.overlap(constants[name], constants[other]) for other in read - {name}):
            raise CaptureError(state_change_message(shown[name]))
    if relevant:
        first = _written_values(graph, {name: written[name] for name in relevant}, {})
        second = _written_values(graph, {name: written[name] for name in relevant}, first or {})
        unstable = [
            name
            for name in relevant
            if first is None or second is None or not _equal(first[name], second[name])
        ]
        if unstable:
            raise CaptureError(state_change_message(shown[min(unstable)]))
    graph.notes.append(
        f"the model writes to its own {', '.join(map(str, shown.values()))} when it runs; the engine returns the same "
        "results, and leaves them unchanged"
    )


def state_change_message(name: str | None) -> str:
    return (
        f"the model changes its own {name} when it runs, and its next results depend on it; compile takes models "
        "without state: pass what changes as an input"
    )


def _ancestors(graph: Graph, values: list[str] | tuple[str, ...]) -> set[str]:
    """Return these values and all that they are computed from."""
    needed = set(values)
    for node in reversed(tuple(graph)):
        if node.name in needed:
            unread = unread_inputs(node)
            needed.update(name for role, name in node.inputs.items() if role not in unread)
    return needed


def _written_values(
    graph: Graph, written: Mapping[str, str], replaced: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor] | None:
    """Compute what is written to each constant, with some constants replaced; None if it depends on inputs."""
    subgraph = replace(graph.copy(), outputs=tuple(written.values()))
    subgraph.remove_dead_code()
    values = {
        **subgraph.constants,
        **{name: tensor for name, tensor in replaced.items() if name in subgraph.constants},
    }
    for node in subgraph:
        if is_random(node) or node.depends_on_batch:
            return None
        if any(name not in values for name in node.inputs.values()):
            return None
        read = {role: values[name] for role, name in node.inputs.items()}
        values[node.name] = compute(node, read, graph.device)
    return (
        {name: values[value] for name, value in written.items()}
        if values.keys() >= {*written.values()}
        else None
    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)
