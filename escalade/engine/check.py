"""Validate a graph (names, operators, attributes, dtypes, shapes) before anything is built from it.

A graph from `torch.export` is sound by construction, but a file may hold anything. Every node is checked against what
its operator really returns, so that no kernel runs on memory of another size. Nothing is computed or allocated: PyTorch
operators run on the `meta` device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from escalade.engine.graph.arguments import ELEMENT_TYPES, LARGEST_INT, MAX_PARTS, schema_mismatch
from escalade.engine.graph.aten import OperatorError, require_matching_sizes, require_pure, resolve_operator
from escalade.engine.graph.graph import ATEN, Batch, Graph, Node, Reference, Shape, fixed_shape
from escalade.engine.nodes import BY_NAME, operator_of
from escalade.engine.nodes.aten import results_of
from escalade.engine.nodes.base import Operator
from escalade.engine.nodes.convert import Normalize
from escalade.engine.nodes.signature import RESULT, Role, Signature, SizeError, Sizes, is_real, is_whole
from escalade.errors import UnsupportedError
from escalade.terminal_text import counted

MAX_NODES = 2**14
MAX_DIMENSIONS = 16
MAX_ELEMENTS_PER_ITEM = 2**31 - 1
"""Limit for a value, per item of the batch: kernels index with 32 bits."""
MAX_FOLDED = 2**27
"""Elements that constant folding may compute, in addition to `MAX_FOLDING_RATIO` times those of the constants."""
MAX_FOLDING_RATIO = 64


class GraphError(UnsupportedError):
    """An inconsistent graph."""


@dataclass(frozen=True)
class _Spec:
    sizes: Sizes
    dtype: torch.dtype

    @property
    def is_floating(self) -> bool:
        return self.dtype.is_floating_point


def check_graph(graph: Graph) -> None:
    """Check everything that does not depend on the batch size, then the sizes at two batch sizes."""
    _check_names(graph)
    _check_inputs(graph)
    for node in graph:
        _check_node(graph, node)
    _check_outputs(graph)
    _check_normalization(graph)
    least, most = graph.batches
    if not graph.is_batched:
        free = [node.name for node in graph if node.depends_on_batch]
        _require(not free, f"{', '.join(free)} depend on the batch size, but no input is batched")
        check_sizes(graph, 1)
    else:  # from 2 on: batch size 1 broadcasts, which would hide errors
        for batch in (max(least, 2), max(least, 2) + 1):
            if most is None or batch <= most:
                check_sizes(graph, batch)
    _check_folding(graph)


def check_sizes(graph: Graph, batch: int) -> None:
    """Check that every node has the dtype and shape that its operator returns at this batch size."""
    values = {
        name: _Spec(tuple(tensor.shape), _canonical(tensor.dtype)) for name, tensor in graph.constants.items()
    }
    for entry in graph.inputs:
        values[entry.name] = _Spec(fixed_shape(entry.shape, batch), _canonical(getattr(torch, entry.dtype)))
    for node in graph.at(batch):
        declared = _Spec(node.shape, _canonical(getattr(torch, node.dtype)))  # type: ignore[arg-type]
        inputs = {role: values[name] for role, name in node.inputs.items()}
        try:
            for value in (declared, *inputs.values()):
                _require_bounded(value.sizes, batch)
            if node.op == ATEN:
                _check_operator(node, declared, inputs, batch)
            else:
                _check_fit(operator_of(node), node, declared, inputs)
        except (SizeError, OperatorError) as error:
            raise GraphError(
                f"node {node.name} ({operator_of(node).title(node)}) is invalid: {error}"
            ) from error
        values[node.name] = declared


def _canonical(dtype: torch.dtype) -> torch.dtype:
    """Map all floating dtypes but float64 to float32: both mean the plan's own dtype."""
    return torch.float32 if dtype.is_floating_point and dtype is not torch.float64 else dtype


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise GraphError(sentence)


def _check_names(graph: Graph) -> None:
    names = [*(entry.name for entry in graph.inputs), *graph.constants, *graph.nodes]
    for name in names:
        _require(
            type(name) is str and name.isidentifier() and len(name) < 1000,
            f"a value is named {name!r}; names consist of letters, digits and underscores",
        )
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    _require(not twice, f"more than one value is named {', '.join(sorted(twice))}")
    _require(len(graph.nodes) <= MAX_NODES, f"{len(graph.nodes)} nodes; the limit is {MAX_NODES}")
    known = {entry.name for entry in graph.inputs} | graph.constants.keys()
    for key, node in graph.nodes.items():
        _require(key == node.name, f"node {node.name} is stored under the name {key}")
        missing = sorted(str(name) for name in node.inputs.values() if name not in known)
        _require(not missing, f"node {node.name} reads {', '.join(missing)}, which no earlier node computes")
        known.add(key)
    missing = sorted(str(name) for name in graph.outputs if name not in known)
    _require(not missing, f"the outputs name {', '.join(missing)}, which no node computes")


def _check_inputs(graph: Graph) -> None:
    for entry in graph.inputs:
        _require_type(entry.name, entry.dtype)
        _require(
            not getattr(torch, entry.dtype).is_complex,
            f"input {entry.name} is complex; inputs must be real",
        )
        _require_shape(entry.name, entry.shape)
        _require(
            all(type(size) is int for size in entry.shape[1:]),
            f"input {entry.name} has a batch dimension other than its first",
        )
    for name, tensor in graph.constants.items():
        _require_type(name, str(tensor.dtype).removeprefix("torch."))
        _require_shape(name, tuple(tensor.shape))
    _require_leaves("arguments", graph.arguments, len(graph.inputs))
    arguments = pytree.tree_unflatten(range(len(graph.inputs)), graph.arguments)
    _require(
        type(arguments) is tuple
        and [type(part) for part in arguments] == [tuple, dict]
        and all(type(name) is str for name in arguments[1]),
        "the arguments are not a tuple and a dict of keywords",
    )
    named = [*filter(None, graph.parameters), *arguments[1]]
    _require(
        len(graph.parameters) <= len(arguments[0]) and len({*named}) == len(named),
        f"the names of the positional arguments are {', '.join(map(repr, graph.parameters))}; there are "
        f"{len(arguments[0])} arguments, with distinct names",
    )
    _require_leaves("outputs", graph.structure, len(graph.outputs))
    least, most = graph.batches
    _require(
        is_whole(least, 1) and (most is None or is_whole(most, least + 1, LARGEST_INT)),
        f"batch sizes {least} to {most} are not a valid range",
    )
    for name, largest in graph.ranges.items():
        _require(
            type(name) is str and is_real(largest) and largest >= 0, f"the range of {name} is {largest!r}"
        )


def _require_leaves(what: str, structure: pytree.TreeSpec, number: int) -> None:
    _require(
        structure.num_leaves == number,
        f"the structure of the {what} has {structure.num_leaves} tensors; the graph has {number}",
    )


def _check_outputs(graph: Graph) -> None:
    _require(
        len(graph.output_types) == len(graph.outputs),
        f"{counted(len(graph.outputs), 'output')} with {counted(len(graph.output_types), 'dtype')}",
    )
    for name, dtype in zip(graph.outputs, graph.output_types, strict=True):
        _require_type(name, dtype)
        own, returned = graph.dtype_of(name), getattr(torch, dtype)
        _require(
            _canonical(own) == _canonical(returned),
            f"output {name} is {own} and would be returned as {returned}",
        )


def _require_type(name: str, dtype: Any) -> None:
    _require(dtype in ELEMENT_TYPES, f"{name} has dtype {dtype!r}; supported are {', '.join(ELEMENT_TYPES)}")


def _require_shape(name: str, shape: Shape) -> None:
    _require(
        type(shape) is tuple and len(shape) <= MAX_DIMENSIONS and all(_is_size(size) for size in shape),
        f"{name} has shape {shape!r}; shapes are up to {MAX_DIMENSIONS} whole numbers below 2^31",
    )


def _is_size(size: Any) -> bool:
    return is_whole(size.times, 1) if type(size) is Batch else is_whole(size)


def _check_node(graph: Graph, node: Node) -> None:
    """Check what does not depend on the shapes of a node's inputs."""
    _require_type(node.name, node.dtype)
    _require_shape(node.name, node.shape)
    if node.op == ATEN:
        _check_call(node)
        return
    known = {name: operator.signature for name, operator in BY_NAME.items()}
    kind = known.get(node.op)
    if kind is None:
        named = [name for name, signature in known.items() if signature is not None]
        raise GraphError(
            f"node {node.name} has operator {node.op!r}; supported are {', '.join((*named, ATEN))}"
        )
    needed = {role for role, each in kind.inputs.items() if not each.optional}
    _require(
        bool(node.inputs) and needed <= node.inputs.keys() and all(kind.role(role) for role in node.inputs),
        f"node {node.name} ({node.op}) has the inputs {', '.join(node.inputs)}; it takes "
        f"{', '.join((*kind.inputs, *(['x0', 'x1', '…'] if kind.repeated else [])))}",
    )
    _require(
        node.attributes.keys() == kind.attributes.keys(),
        f"node {node.name} ({node.op}) has the attributes {', '.join(map(str, node.attributes))}; it takes "
        f"{', '.join(kind.attributes) or 'none'}",
    )
    for name, expected in kind.attributes.items():
        found = node.attributes[name]
        _require(
            expected.holds(found),
            f"{name} of node {node.name} ({node.op}) is {found!r}; it must be {expected.words}",
        )
    values = [node.name, *(name for name in node.inputs.values() if name not in graph.constants)]
    _require(
        all(graph.dtype_of(name) is not torch.float64 for name in values),
        f"node {node.name} ({node.op}) has float64 values, which only PyTorch's operators support; compile the model "
        "again",
    )
    for role, name in node.inputs.items():
        _require(
            name in graph.constants or not _role(kind, role).constant,
            f"{role} of node {node.name} ({node.op}) is computed; it must be a constant",
        )


def _role(kind: Signature, name: str) -> Role:
    role = kind.role(name)
    assert role is not None, f"{name} was checked before"
    return role


def _check_call(node: Node) -> None:
    """Check that a PyTorch operator has no side effects, and that its arguments match its schema and the inputs."""
    known = {"target", "arguments", "result"}
    _require(
        {"target", "arguments"} <= node.attributes.keys() <= known
        and type(node.attributes["target"]) is str
        and isinstance(node.attributes["arguments"], Mapping),
        f"node {node.name} has no operator with arguments",
    )
    if "result" in node.attributes:
        _require(
            is_whole(node.attributes["result"], 0, MAX_PARTS),
            f"node {node.name} has result {node.attributes['result']!r}; it must be a number of up to {MAX_PARTS}",
        )
    arguments = node.attributes["arguments"]
    try:
        operator = require_pure(node.attributes["target"], arguments)
    except OperatorError as error:
        raise GraphError(f"node {node.name}: {error}") from error
    wrong = schema_mismatch(operator, arguments)
    _require(wrong is None, f"node {node.name}: {wrong}")
    roles = {
        leaf.role for argument in arguments.values() for leaf in _leaves(argument) if type(leaf) is Reference
    }
    _require(
        roles == node.inputs.keys(),
        f"node {node.name} has the inputs {', '.join(node.inputs)} and uses {', '.join(map(str, roles))}",
    )


def _leaves(argument: Any) -> Sequence[Any]:
    return argument if type(argument) is tuple else (argument,)


def _check_normalization(graph: Graph) -> None:
    """Check that normalization is the only reader of an input image."""
    inputs = {entry.name for entry in graph.inputs}
    for node in graph:
        if Normalize.matches(node):
            image = node.inputs["x"]
            _require(
                image in inputs and graph.only_user(image) is node,
                f"node {node.name} normalizes {image}, which is not an input that it alone reads",
            )


def _require_bounded(sizes: Sizes, batch: int) -> None:
    most = MAX_ELEMENTS_PER_ITEM * batch
    if math.prod(sizes) > most:
        raise SizeError(f"shape {list(sizes)} has more than {most} elements")


def _check_fit(operator: Operator, node: Node, declared: _Spec, inputs: Mapping[str, _Spec]) -> None:
    """Check the shapes and dtypes of a node of one of our operators."""
    kind = operator.signature
    assert kind is not None, f"{operator.name} is never saved"
    for role, value in inputs.items():
        _require_dimensions(role, _role(kind, role), value)
    expected = _expected_sizes(operator, node, inputs, declared.sizes)
    found = {role: value.sizes for role, value in inputs.items()} | {RESULT: declared.sizes}
    for role, sizes in found.items():
        if expected.get(role, sizes) != sizes:
            raise SizeError(f"{role} has shape {list(sizes)}; expected {list(expected[role])}")
    if kind.masks:
        _check_masks(declared, inputs)
        return
    first = next(iter(inputs.values()))
    dtype = first.dtype
    for value in inputs.values():
        if value.is_floating != first.is_floating:
            raise SizeError("its inputs mix floating-point and other dtypes")
        dtype = torch.promote_types(dtype, value.dtype)
    if kind.floating and not first.is_floating:
        raise SizeError(f"it takes floating-point inputs, not {dtype}")
    _require_result(declared, _Spec(declared.sizes, torch.int64 if kind.indices else dtype))


def _expected_sizes(
    operator: Operator, node: Node, inputs: Mapping[str, _Spec], result: Sizes
) -> dict[str, Sizes]:
    """Return the shapes that the result and some of the inputs must have, given those they have."""
    kind = operator.signature
    assert kind is not None, f"{operator.name} is never saved"
    found = {role: value.sizes for role, value in inputs.items()} | {RESULT: result}
    expected = dict(operator.sizes(found, node.attributes))
    if RESULT not in expected:
        expected[RESULT] = _computed_sizes(operator, node, inputs)
    for role in inputs:
        along = _role(kind, role).along
        if along is not None:
            expected[role] = (expected[RESULT][along],)
    return expected


def _computed_sizes(operator: Operator, node: Node, inputs: Mapping[str, _Spec]) -> Sizes:
    """Return the shape of the result that PyTorch computes from tensors without contents."""
    try:
        with torch.no_grad():
            return tuple(operator.compute(node, _hollow(inputs.items())).shape)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise SizeError(str(error).partition("\n")[0]) from error


def _hollow(inputs: Iterable[tuple[str, _Spec]]) -> dict[str, torch.Tensor]:
    return {role: torch.empty(value.sizes, dtype=value.dtype, device="meta") for role, value in inputs}


def _check_masks(declared: _Spec, inputs: Mapping[str, _Spec]) -> None:
    """Check an operator that also reads uint8 and bool, and may return bool."""
    for value in inputs.values():
        if not value.is_floating and value.dtype not in (torch.bool, torch.uint8):
            raise SizeError(f"it takes floating-point, uint8 and bool inputs, not {value.dtype}")
    if not declared.is_floating and declared.dtype != torch.bool:
        raise SizeError(f"it returns floating-point or bool, not {declared.dtype}")


def _require_dimensions(role: str, expected: Role, value: _Spec) -> None:
    least, most = expected.dimensions
    if not least <= len(value.sizes) <= most:
        expected_rank = f"{least}" if least == most else f"{least} to {most}"
        raise SizeError(f"{role} has {counted(len(value.sizes), 'dimension')}; expected {expected_rank}")


def _require_result(declared: _Spec, real: _Spec) -> None:
    if declared != real:
        raise SizeError(
            f"it returns {real.dtype} {list(real.sizes)}; the graph declares {declared.dtype} {list(declared.sizes)}"
        )


def _check_operator(node: Node, declared: _Spec, inputs: Mapping[str, _Spec], batch: int) -> None:
    target, arguments = node.attributes["target"], node.attributes["arguments"]
    results = _results(_OperatorCall(target, repr(arguments), tuple(inputs.items()), arguments))
    for result in results:
        _require_bounded(result.sizes, batch)
    number = node.attributes.get("result", None if _has_several_results(resolve_operator(target)) else 0)
    if number is None or number >= len(results):
        raise SizeError(f"it returns {counted(len(results), 'result')}; the graph reads number {number}")
    _require_result(declared, results[number])


@dataclass(frozen=True)
class _OperatorCall:
    """A PyTorch operator with its arguments, hashable for the cache."""

    target: str
    arguments_repr: str
    """Distinguishes arguments that compare equal: 1, 1.0 and True."""
    inputs: tuple[tuple[str, _Spec], ...]
    arguments: Mapping[str, Any] = field(compare=False)


@lru_cache(4096)  # networks repeat their layers, and each graph is checked at two batch sizes
def _results(call: _OperatorCall) -> tuple[_Spec, ...]:
    """Return the dtypes and shapes of an operator's results, computed on the meta device."""
    operator = resolve_operator(call.target)
    arguments = dict(call.arguments)
    sizes = {
        name: dict(call.inputs)[argument.role].sizes
        for name, argument in arguments.items()
        if type(argument) is Reference
    }
    if _splits_tensor(operator):
        numbers = [leaf for argument in arguments.values() for leaf in _leaves(argument) if type(leaf) is int]
        if max((*numbers, *(size for found in sizes.values() for size in found)), default=0) > MAX_PARTS:
            raise SizeError(f"it may split a tensor into more than {MAX_PARTS}")
    if any(argument.name == "device" for argument in operator._schema.arguments):
        arguments["device"] = torch.device("meta")
    require_matching_sizes(call.target, sizes, arguments)
    results = results_of(call.target, arguments, _hollow(call.inputs))
    for result in results:
        if result.device.type != "meta" or result.layout != torch.strided:
            raise SizeError(f"it returns a tensor on {result.device} in layout {result.layout}")
    return tuple(_Spec(tuple(result.shape), _canonical(result.dtype)) for result in results)


def _has_several_results(operator: torch._ops.OpOverload) -> bool:
    return len(operator._schema.returns) > 1 or _returns_list(operator)


def _returns_list(operator: torch._ops.OpOverload) -> bool:
    return str(operator._schema.returns[0].type) == "List[Tensor]"


def _splits_tensor(operator: torch._ops.OpOverload) -> bool:
    return _returns_list(operator) and str(operator._schema.arguments[0].type) == "Tensor"


def _check_folding(graph: Graph) -> None:
    """Bound the work of constant folding: a small file could otherwise ask for huge results when it is loaded."""
    constant = set(graph.constants)
    elements = 0
    for node in graph:
        if constant.issuperset(node.inputs.values()) and not node.depends_on_batch:
            constant.add(node.name)
            elements += math.prod(node.shape)  # type: ignore[arg-type]
    most = MAX_FOLDED + MAX_FOLDING_RATIO * sum(tensor.numel() for tensor in graph.constants.values())
    _require(
        elements <= most,
        f"constant folding would compute {elements} elements; the limit for these constants is {most}",
    )
