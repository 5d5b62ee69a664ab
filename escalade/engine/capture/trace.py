"""Follows a model with tensors without contents: what it does where that does not depend on its batch.

`torch.export` tells what any model does, and how that depends on its sizes; but it takes seconds to load, and has a
symbol for the batch go through every operator. Most models only call operators. Here such a model runs three times:
with a batch of one, and with two so large that their multiples are seen among all sizes, a prime number and one that
all small numbers divide. If it does the same each time, and neither asks nor computes anything by the batch on the way,
it does so for every batch. All others are left to `torch.export`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from escalade.device.strides import empty, is_packed, layout_of
from escalade.engine.capture.example_inputs import Given, Names
from escalade.engine.capture.fake_tensor import Calls, Count, Hollow, NotFollowed, Questions, Spelled
from escalade.engine.capture.global_state import undisturbed
from escalade.engine.capture.model_copy import Original
from escalade.engine.capture.python_state import Watch
from escalade.engine.capture.reader import Copies, FxReader, dtype_name, mutates, note_changes, tangled
from escalade.engine.graph.graph import Batch, Dimension, Graph, map_leaves
from escalade.engine.graph.trees import flatten

_PRIME = (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079)
_COMPOSITE = (27720, 55440, 83160, 110880, 166320, 720720)
"""Batches to follow a model with, of each kind one that is no factor of any size that the model has itself. What Python
computes of a number without asking it, such as `math.gcd`, differs between them."""
_MOST_CALLS = 1 << 16


def traced(original: Original, given: Given) -> Graph | None:
    """The graph for any batch, or for this one if the model makes a text of it; None if it has to be exported."""
    graphs = (_traced(original, reading) for reading in given.readings)
    return next((graph for graph in graphs if graph is not None), None)


def _traced(original: Original, given: Given) -> Graph | None:
    if not given.batch:
        return None
    try:
        one = _follow(original, given, 1, _MOST_CALLS)
        for batches in (_COMPOSITE, _PRIME):
            large = next(batch for batch in batches if not any(size % batch == 0 for size in one.sizes))
            many = _follow(original, given, large, one.calls)
            if one.described(1) != many.described(large):
                return None
        return _TraceReader(many, large, original).graph()
    except Spelled:
        from escalade.engine.capture.programs import fixed_graph

        return fixed_graph(original, given)
    except Exception:  # whatever it is, export will say it
        return None


@dataclass(frozen=True)
class _Run:
    """What a model did."""

    noted: Calls
    names: Mapping[torch.fx.Node, tuple[str, str]]
    """What constants are in the model, a parameter or a buffer, and what they are called there."""
    results: Sequence[Hollow]
    structure: pytree.TreeSpec
    arguments: pytree.TreeSpec
    called: Names

    def described(self, batch: int) -> list[Any]:
        """All of it for one item, so that runs can be compared."""
        nodes = self.noted.graph.nodes
        writes = any(map(mutates, nodes))
        copies = {node for node in nodes if node.target is torch.ops.aten.contiguous.default and not writes}
        """Copies that one run makes, and another need not where a size of one changes how a tensor lies."""

        def leaf(value: Any) -> Any:
            if isinstance(value, torch.fx.Node):
                return leaf(value.args[0]) if value in copies else value.name
            if isinstance(value, torch.Tensor):
                return (leaf_sizes(value.shape), value.dtype)
            return _per_item(value, batch)

        def leaf_sizes(sizes: Sequence[int]) -> list[Any]:
            return [_per_item(size, batch) for size in sizes]

        said = [
            (node.name, node.target, map_leaves(leaf, (node.args, node.kwargs, node.meta["val"])))
            for node in nodes
            if node not in copies
        ]
        return [*said, [leaf(tensor.node) for tensor in self.results], self.structure]

    @property
    def calls(self) -> int:
        return len(self.noted.graph.nodes)

    @property
    def sizes(self) -> set[int]:
        """All sizes of the model's tensors and values."""
        values = pytree.tree_leaves([node.meta["val"] for node in self.noted.graph.nodes])
        return {size for value in values for size in value.shape} - {0}


def _per_item(value: Any, batch: int) -> Any:
    """A number that grows with the batch as what it is for one item; others as they are."""
    grows = type(value) in (int, Count) and value and int.__mod__(value, batch) == 0
    return int.__floordiv__(value, batch) if grows else value


def _follow(original: Original, given: Given, batch: int, most: int) -> _Run:
    """What the model does with such a batch; what it changes outside of itself is put back, so that another run meets
    none of it."""
    noted = Calls(batch, most)

    def hollow(leaf: torch.Tensor, name: str) -> Hollow:
        if type(leaf) is not torch.Tensor and type(leaf) is not torch.nn.Parameter:
            raise NotFollowed("a tensor of a class of its own")
        shape = (batch, *leaf.shape[1:]) if given.grows(leaf) else tuple(leaf.shape)
        layout = layout_of(leaf)
        if not is_packed(leaf, layout):
            raise NotFollowed("an input that is not dense")
        meta = empty(shape, leaf.dtype, layout, "meta")
        return noted.input(name, meta, leaf.device)

    model = original.copied(noted.constant)
    with undisturbed(original.model, autocast=True) as outside, torch.inference_mode():
        if any(isinstance(module, torch.fx.GraphModule) for module in model.modules()):
            raise NotFollowed("a graph that knows more of its operators than they say")
        names = {
            tensor.node: (kind, name)
            for kind, found in (("p", model.named_parameters()), ("b", model.named_buffers()))
            for name, tensor in found
            if isinstance(tensor, Hollow)
        }
        called = given.names(model)
        arguments, keywords = given.call(list(map(hollow, given.tensors, called.tensors)))
        held = _held(model)
        with _sources(model, noted):
            watch = (
                Watch(original, model, outside.change) if batch == 1 else None
            )  # other batches do the same
            with noted, Questions(batch), _exporting():
                results = model(*arguments, **keywords)
            if watch is not None:
                watch.note()
        if held != _held(model):
            raise NotFollowed("the model changes its own tensors")
    if any(isinstance(leaf, Count) for leaf in pytree.tree_leaves(results)):
        raise NotFollowed("the batch is a result")
    tensors, structure = flatten(results)
    if not all(isinstance(tensor, Hollow) for tensor in tensors):
        raise NotFollowed("a result from outside of the model")
    if tangled(noted.graph):
        raise NotFollowed("a tensor is changed of which there is a view")
    return _Run(noted, names, tensors, structure, given.structure, called)  # type: ignore[arg-type]


def _held(model: torch.nn.Module) -> list[int]:
    """The parameters and buffers of all modules, as they are."""
    return [
        id(tensor)
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
    ]


@contextmanager
def _sources(model: torch.nn.Module, noted: Calls) -> Iterator[None]:
    """Calls are noted with the module that makes them."""

    def enter(name: str) -> Any:
        return lambda *_: noted.modules.append(name)

    def leave(*_: Any) -> None:
        noted.modules.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(enter(name), prepend=True)
        module.register_forward_hook(leave, always_call=True)
    yield


@contextmanager
def _exporting() -> Iterator[None]:
    """Models may ask whether they are captured, and go another way then."""
    flags: Any = torch.compiler
    before = {name: getattr(flags, name) for name in ("_is_compiling_flag", "_is_exporting_flag")}
    try:
        for name in before:
            setattr(flags, name, True)
        yield
    finally:
        for name, value in before.items():
            setattr(flags, name, value)


class _TraceReader(FxReader):
    """The calls of a run."""

    def __init__(self, run: _Run, batch: int, original: Original) -> None:
        """Multiples of `batch` are sizes that grow with the batch."""
        super().__init__()
        self._run, self._batch, self._original = run, batch, original

    def graph(self) -> Graph:
        run = self._run
        graph = Graph((), {}, {}, ())
        copies = Copies(self._original)
        needed = {argument for node in run.noted.graph.nodes for argument in node.all_input_nodes}
        needed |= {tensor.node for tensor in run.results}
        called: dict[str, str] = {}
        placeholders = run.noted.graph.find_nodes(op="placeholder")
        self._take(
            graph, [node for node in placeholders if node not in run.noted.constants], run.called.tensors
        )
        for node in run.noted.graph.nodes:
            if node in run.noted.constants:
                if node not in needed:
                    continue
                kind, known = run.names.get(node, ("", ""))
                # As torch.export calls them: a file takes names of letters, digits and underscores, no digit in front.
                name = graph.fresh(re.sub("[^A-Za-z0-9_]", "_", f"{kind}_{known}") if known else "constant")
                graph.constants[name] = copies.of(run.noted.constants[node])
                self._values[node] = name
                if known:
                    called[name] = known
            elif node.op == "call_function":
                self._call(graph, node)
        graph.called = called
        graph.outputs = tuple(self._value(tensor.node) for tensor in run.results)
        graph.output_types = tuple(dtype_name(tensor.dtype) for tensor in run.results)
        graph.structure, graph.arguments = run.structure, run.arguments
        graph.parameters = run.called.parameters
        note_changes(graph)
        return graph

    def _dimension(self, size: Any) -> Dimension:
        times = _per_item(size, self._batch)
        return size if times is size else Batch(times)

    def _plain(self, argument: Any) -> Any:
        return self._dimension(argument)

    def _source(self, call: torch.fx.Node) -> str:
        return str(call.meta["source"])
