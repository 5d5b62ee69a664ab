"""Fast capture by tracing, for models whose operations do not depend on the batch size.

`torch.export` handles any model, but takes seconds to load and propagates a symbol for the batch through each operator.
Most models only call operators. Here such a model runs three times on fake tensors: with a batch of one, and with two
batch sizes whose multiples are recognizable among all sizes: a large prime, and a large number with many small
divisors. If all runs make the same calls, and none branches on the batch size or computes with it in an unsupported
way, the graph holds for every batch size. Other models are left to `torch.export`.
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
from escalade.engine.capture.example_inputs import ExampleInputs, InputNames
from escalade.engine.capture.fake_tensor import (
    BatchCount,
    BatchSizeFormatted,
    CallRecorder,
    NotTraceable,
    QueryGuard,
    TraceTensor,
)
from escalade.engine.capture.global_state import preserve_global_state
from escalade.engine.capture.model_copy import OriginalModel
from escalade.engine.capture.python_state import StateWatch
from escalade.engine.capture.reader import (
    FxReader,
    WeightCopies,
    has_aliased_writes,
    mutates,
    note_input_writes,
)
from escalade.engine.graph.graph import Batch, Dimension, Graph, dtype_name, map_leaves
from escalade.engine.graph.trees import flatten

# Candidate batch sizes; the first is used that divides none of the model's own sizes. What Python computes from a
# number without calling its methods, such as `math.gcd`, differs between the two kinds.
_PRIME = (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079)
_COMPOSITE = (27720, 55440, 83160, 110880, 166320, 720720)
_MAX_CALLS = 1 << 16


def trace_graph(original: OriginalModel, example: ExampleInputs) -> Graph | None:
    """Trace the model for any batch size, or for the example's if the model formats it; None if tracing fails."""
    graphs = (_trace_interpretation(original, reading) for reading in example.interpretations)
    return next((graph for graph in graphs if graph is not None), None)


def _trace_interpretation(original: OriginalModel, example: ExampleInputs) -> Graph | None:
    if not example.batch:
        return None
    try:
        one = _run_traced(original, example, 1, _MAX_CALLS)
        for batches in (_COMPOSITE, _PRIME):
            large = next(batch for batch in batches if not any(size % batch == 0 for size in one.sizes))
            many = _run_traced(original, example, large, one.call_count)
            if one.normalized(1) != many.normalized(large):
                return None
        return _TraceReader(many, large, original).graph()
    except BatchSizeFormatted:
        from escalade.engine.capture.torch_export import fixed_graph

        return fixed_graph(original, example)
    except Exception:  # if it persists, export reports it
        return None


@dataclass(frozen=True)
class _Run:
    """Record of one run on trace tensors."""

    recorder: CallRecorder
    names: Mapping[torch.fx.Node, tuple[str, str]]
    """Kind ("p" for parameters, "b" for buffers) and name in the model of constants."""
    results: Sequence[TraceTensor]
    structure: pytree.TreeSpec
    arguments: pytree.TreeSpec
    input_names: InputNames

    def normalized(self, batch: int) -> list[Any]:
        """Return the run with sizes per item, to compare runs with different batches."""
        nodes = self.recorder.graph.nodes
        writes = any(map(mutates, nodes))
        # A `contiguous` call copies in some runs only, since a size of 1 may make a tensor contiguous.
        copies = {node for node in nodes if node.target is torch.ops.aten.contiguous.default and not writes}

        def leaf(value: Any) -> Any:
            if isinstance(value, torch.fx.Node):
                return leaf(value.args[0]) if value in copies else value.name
            if isinstance(value, torch.Tensor):
                return (leaf_sizes(value.shape), value.dtype)
            return _per_item(value, batch)

        def leaf_sizes(sizes: Sequence[int]) -> list[Any]:
            return [_per_item(size, batch) for size in sizes]

        calls = [
            (node.name, node.target, map_leaves(leaf, (node.args, node.kwargs, node.meta["val"])))
            for node in nodes
            if node not in copies
        ]
        return [*calls, [leaf(tensor.node) for tensor in self.results], self.structure]

    @property
    def call_count(self) -> int:
        return len(self.recorder.graph.nodes)

    @property
    def sizes(self) -> set[int]:
        """All sizes of the model's weights and values."""
        values = pytree.tree_leaves([node.meta["val"] for node in self.recorder.graph.nodes])
        return {size for value in values for size in value.shape} - {0}


def _per_item(value: Any, batch: int) -> Any:
    """Divide a multiple of the batch by it; return other values unchanged."""
    is_batched = type(value) in (int, BatchCount) and value and int.__mod__(value, batch) == 0
    return int.__floordiv__(value, batch) if is_batched else value


def _run_traced(original: OriginalModel, example: ExampleInputs, batch: int, max_calls: int) -> _Run:
    """Run a model copy with this batch size; global state is restored, so that runs do not affect each other."""
    recorder = CallRecorder(batch, max_calls)

    def trace_input(leaf: torch.Tensor, name: str) -> TraceTensor:
        if type(leaf) is not torch.Tensor and type(leaf) is not torch.nn.Parameter:
            raise NotTraceable("a tensor subclass")
        shape = (batch, *leaf.shape[1:]) if example.is_batched(leaf) else tuple(leaf.shape)
        layout = layout_of(leaf)
        if not is_packed(leaf, layout):
            raise NotTraceable("an input that is not dense")
        meta = empty(shape, leaf.dtype, layout, "meta")
        return recorder.input(name, meta, leaf.device)

    model = original.copy(recorder.constant)
    with preserve_global_state(original.model, autocast=True) as global_state, torch.inference_mode():
        if any(isinstance(module, torch.fx.GraphModule) for module in model.modules()):
            raise NotTraceable("a GraphModule, whose metadata holds more than its operators")
        names = {
            tensor.node: (kind, name)
            for kind, tensors in (("p", model.named_parameters()), ("b", model.named_buffers()))
            for name, tensor in tensors
            if isinstance(tensor, TraceTensor)
        }
        input_names = example.names(model)
        arguments, keywords = example.call(list(map(trace_input, example.tensors, input_names.tensors)))
        weights_before = _weight_ids(model)
        _track_modules(model, recorder)
        # One run is enough: the others make the same calls.
        watch = StateWatch(original, model, global_state.find_change) if batch == 1 else None
        with recorder, QueryGuard(batch), _exporting_flags():
            results = model(*arguments, **keywords)
        if watch is not None:
            watch.record_change()
        if weights_before != _weight_ids(model):
            raise NotTraceable("the model changes its own tensors")
    if any(isinstance(leaf, BatchCount) for leaf in pytree.tree_leaves(results)):
        raise NotTraceable("the model returns its batch size")
    tensors, structure = flatten(results)
    nodes = [tensor.node for tensor in tensors if isinstance(tensor, TraceTensor)]
    if len(nodes) < len(tensors):
        raise NotTraceable("a result from outside the model")
    if has_aliased_writes(recorder.graph, nodes):
        raise NotTraceable("a write in place is seen through another tensor")
    return _Run(recorder, names, tensors, structure, example.structure, input_names)  # type: ignore[arg-type]


def _weight_ids(model: torch.nn.Module) -> list[int]:
    return [
        id(tensor)
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
    ]


def _track_modules(model: torch.nn.Module, recorder: CallRecorder) -> None:
    """Record calls with the path of the module that makes them."""

    def enter(name: str) -> Any:
        return lambda *_: recorder.modules.append(name)

    def leave(*_: Any) -> None:
        recorder.modules.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(enter(name), prepend=True)
        module.register_forward_hook(leave, always_call=True)


@contextmanager
def _exporting_flags() -> Iterator[None]:
    """Set the flags by which a model can tell that it is exported."""
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
    """Converts a recorded run into a graph."""

    def __init__(self, run: _Run, batch: int, original: OriginalModel) -> None:
        """Multiples of `batch` become multiples of the graph's batch size."""
        super().__init__()
        self._run, self._batch, self._original = run, batch, original

    def graph(self) -> Graph:
        run = self._run
        graph = Graph((), {}, {}, ())
        copies = WeightCopies(self._original)
        needed = {argument for node in run.recorder.graph.nodes for argument in node.all_input_nodes}
        needed |= {tensor.node for tensor in run.results}
        weight_names: dict[str, str] = {}
        placeholders = run.recorder.graph.find_nodes(op="placeholder")
        self._add_inputs(
            graph,
            [node for node in placeholders if node not in run.recorder.constants],
            run.input_names.tensors,
        )
        for node in run.recorder.graph.nodes:
            if node in run.recorder.constants:
                if node not in needed:
                    continue
                kind, known = run.names.get(node, ("", ""))
                # Names as torch.export makes them: engine files accept identifiers only.
                name = graph.fresh(re.sub("[^A-Za-z0-9_]", "_", f"{kind}_{known}") if known else "constant")
                graph.constants[name] = copies.of(run.recorder.constants[node])
                self._values[node] = name
                if known:
                    weight_names[name] = known
            elif node.op == "call_function":
                self._call(graph, node)
        graph.weight_names = weight_names
        graph.outputs = tuple(self._value(tensor.node) for tensor in run.results)
        graph.output_types = tuple(dtype_name(tensor.dtype) for tensor in run.results)
        graph.structure, graph.arguments = run.structure, run.arguments
        graph.parameters = run.input_names.parameters
        note_input_writes(graph)
        return graph

    def _dimension(self, size: Any) -> Dimension:
        times = _per_item(size, self._batch)
        return size if times is size else Batch(times)

    def _plain(self, argument: Any) -> Any:
        return self._dimension(argument)

    def _source(self, call: torch.fx.Node) -> str:
        return str(call.meta["source"])
