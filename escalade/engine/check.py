"""Whether a graph is what it says: names, kinds, attributes, types and sizes, before anything is made of it.

What `torch.export` gives is sound by its making. What a file holds is anything: every node is checked here against
what its operation really yields, so that no kernel is launched over memory of another size. Nothing is computed and
nothing allocated on the way: PyTorch's operators are asked on its `meta` device, which has sizes but no contents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from escalade.engine.nodes.signature import RESULT, Role, Signature, SizeError, Sizes, is_real, is_whole
from escalade.errors import UnsupportedError

MOST_NODES = 2**14
MOST_DIMENSIONS = 16
MOST_ELEMENTS = 2**31 - 1
"""Elements of a value at most, for each item of the batch."""
MOST_FOLDED = 2**27
"""Elements that may be computed from constants alone, beyond `MOST_GROWTH` times those of the constants."""
MOST_GROWTH = 64


class GraphError(UnsupportedError):
    """A graph that does not hold together."""


@dataclass(frozen=True)
class _Value:
    sizes: Sizes
    dtype: torch.dtype

    @property
    def is_floating(self) -> bool:
        return self.dtype.is_floating_point


def check_graph(graph: Graph) -> None:
    """Everything that can be said of a graph before its batch size is known."""
    _check_names(graph)
    _check_inputs(graph)
    for node in graph:
        _check_node(graph, node)
    _check_outputs(graph)
    _check_normalisation(graph)
    least, most = graph.batches
    if not graph.is_batched:
        free = [node.name for node in graph if node.depends_on_batch]
        _require(not free, f"{', '.join(free)} depend on a batch that no input has")
        check_sizes(graph, 1)
    else:  # one is the batch that PyTorch's own rules make exceptions of
        for batch in (max(least, 2), max(least, 2) + 1):
            if most is None or batch <= most:
                check_sizes(graph, batch)
    _check_folding(graph)


def check_sizes(graph: Graph, batch: int) -> None:
    """Every node's type and sizes are those that its operation gives at this batch size."""
    values = {
        name: _Value(tuple(tensor.shape), _kept(tensor.dtype)) for name, tensor in graph.constants.items()
    }
    for given in graph.inputs:
        values[given.name] = _Value(fixed_shape(given.shape, batch), _kept(getattr(torch, given.dtype)))
    for node in graph.at(batch):
        declared = _Value(node.shape, _kept(getattr(torch, node.dtype)))  # type: ignore[arg-type]
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
                f"node {node.name} ({operator_of(node).title(node)}) cannot be: {error}"
            ) from error
        values[node.name] = declared


def _kept(dtype: torch.dtype) -> torch.dtype:
    """All floating types but float64 stand for one, the plan's own."""
    return torch.float32 if dtype.is_floating_point and dtype is not torch.float64 else dtype


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise GraphError(sentence)


def _check_names(graph: Graph) -> None:
    names = [*(given.name for given in graph.inputs), *graph.constants, *graph.nodes]
    for name in names:
        _require(
            type(name) is str and name.isidentifier() and len(name) < 1000,
            f"a value is called {name!r}; names are letters, digits and underscores",
        )
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    _require(not twice, f"more than one value is called {', '.join(sorted(twice))}")
    _require(len(graph.nodes) <= MOST_NODES, f"{len(graph.nodes)} nodes; a graph has up to {MOST_NODES}")
    known = {given.name for given in graph.inputs} | graph.constants.keys()
    for key, node in graph.nodes.items():
        _require(key == node.name, f"node {node.name} is kept under the name {key}")
        missing = sorted(str(name) for name in node.inputs.values() if name not in known)
        _require(not missing, f"node {node.name} reads {', '.join(missing)}, which nothing before it makes")
        known.add(key)
    missing = sorted(str(name) for name in graph.outputs if name not in known)
    _require(not missing, f"the outputs name {', '.join(missing)}, which no node makes")


def _check_inputs(graph: Graph) -> None:
    for given in graph.inputs:
        _require_type(given.name, given.dtype)
        _require(
            not getattr(torch, given.dtype).is_complex,
            f"input {given.name} is complex; inputs are real numbers",
        )
        _require_shape(given.name, given.shape)
        _require(
            all(type(size) is int for size in given.shape[1:]),
            f"input {given.name} has a batch beyond its first dimension",
        )
    for name, tensor in graph.constants.items():
        _require_type(name, str(tensor.dtype).removeprefix("torch."))
        _require_shape(name, tuple(tensor.shape))
    _require_leaves("arguments", graph.arguments, len(graph.inputs))
    given = pytree.tree_unflatten(range(len(graph.inputs)), graph.arguments)
    _require(
        type(given) is tuple
        and [type(part) for part in given] == [tuple, dict]
        and all(type(name) is str for name in given[1]),
        "the arguments are not a tuple and a dict by name",
    )
    named = [*filter(None, graph.parameters), *given[1]]
    _require(
        len(graph.parameters) <= len(given[0]) and len({*named}) == len(named),
        f"the arguments in order are called {', '.join(map(repr, graph.parameters))}; they are {len(given[0])}, each "
        "of another name",
    )
    _require_leaves("outputs", graph.structure, len(graph.outputs))
    least, most = graph.batches
    _require(
        is_whole(least, 1) and (most is None or is_whole(most, least + 1, LARGEST_INT)),
        f"batches of {least} to {most}: those are no sizes of a batch",
    )
    for name, largest in graph.ranges.items():
        _require(
            type(name) is str and is_real(largest) and largest >= 0, f"the range of {name} is {largest!r}"
        )


def _require_leaves(what: str, structure: pytree.TreeSpec, number: int) -> None:
    _require(
        structure.num_leaves == number,
        f"the {what} are a structure of {structure.num_leaves} tensors; the graph has {number}",
    )


def _check_outputs(graph: Graph) -> None:
    _require(
        len(graph.output_types) == len(graph.outputs),
        f"{len(graph.outputs)} outputs with {len(graph.output_types)} types",
    )
    for name, dtype in zip(graph.outputs, graph.output_types, strict=True):
        _require_type(name, dtype)
        own, given = graph.dtype_of(name), getattr(torch, dtype)
        _require(_kept(own) == _kept(given), f"output {name} is {own} and would be returned as {given}")


def _require_type(name: str, dtype: Any) -> None:
    _require(
        dtype in ELEMENT_TYPES,
        f"{name} is of type {dtype!r}; a graph's values are {', '.join(ELEMENT_TYPES)}",
    )


def _require_shape(name: str, shape: Shape) -> None:
    _require(
        type(shape) is tuple and len(shape) <= MOST_DIMENSIONS and all(_is_size(size) for size in shape),
        f"{name} has sizes {shape!r}; sizes are up to {MOST_DIMENSIONS} whole numbers below 2^31",
    )


def _is_size(size: Any) -> bool:
    return is_whole(size.times, 1) if type(size) is Batch else is_whole(size)


def _check_node(graph: Graph, node: Node) -> None:
    """What can be said of a node by itself."""
    _require_type(node.name, node.dtype)
    _require_shape(node.name, node.shape)
    if node.op == ATEN:
        _check_call(node)
        return
    known = {name: operator.signature for name, operator in BY_NAME.items()}
    kind = known.get(node.op)
    if kind is None:
        named = [name for name, signature in known.items() if signature is not None]
        raise GraphError(f"node {node.name} is of kind {node.op!r}; there are {', '.join((*named, ATEN))}")
    needed = {role for role, given in kind.inputs.items() if not given.optional}
    _require(
        bool(node.inputs) and needed <= node.inputs.keys() and all(kind.role(role) for role in node.inputs),
        f"node {node.name} ({node.op}) has the inputs {', '.join(node.inputs)}; it takes "
        f"{', '.join((*kind.inputs, *(['x0', 'x1', '…'] if kind.repeated else [])))}",
    )
    _require(
        node.attributes.keys() == kind.attributes.keys(),
        f"node {node.name} ({node.op}) has the attributes {', '.join(map(str, node.attributes))}; they are "
        f"{', '.join(kind.attributes) or 'none'}",
    )
    for name, expected in kind.attributes.items():
        found = node.attributes[name]
        _require(
            expected.holds(found),
            f"{name} of node {node.name} ({node.op}) is {found!r}; it is {expected.words}",
        )
    values = [node.name, *(name for name in node.inputs.values() if name not in graph.constants)]
    _require(
        all(graph.dtype_of(name) is not torch.float64 for name in values),
        f"node {node.name} ({node.op}) has values in float64, which only PyTorch's operators compute; compile the "
        "model again",
    )
    for role, name in node.inputs.items():
        _require(
            name in graph.constants or not _role(kind, role).constant,
            f"{role} of node {node.name} ({node.op}) is computed; it is a constant",
        )


def _role(kind: Signature, name: str) -> Role:
    role = kind.role(name)
    assert role is not None, f"{name} has passed as an input"
    return role


def _check_call(node: Node) -> None:
    """A call of PyTorch's: an operator that may be called, and arguments that can be told from a graph's own."""
    known = {"target", "arguments", "result"}
    _require(
        {"target", "arguments"} <= node.attributes.keys() <= known
        and type(node.attributes["target"]) is str
        and isinstance(node.attributes["arguments"], Mapping),
        f"node {node.name} names no operator with arguments",
    )
    if "result" in node.attributes:
        _require(
            is_whole(node.attributes["result"], 0, MAX_PARTS), f"node {node.name} takes no result by number"
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
    """The items of a list, or the one value that an argument is."""
    return argument if type(argument) is tuple else (argument,)


def _check_normalisation(graph: Graph) -> None:
    """It is the first thing that happens to an image, and the only one."""
    given = {entry.name for entry in graph.inputs}
    for node in graph:
        if operator_of(node).is_image_scaling:
            image = node.inputs["x"]
            _require(
                image in given and graph.only_user(image) is node,
                f"node {node.name} normalises {image}, which is no image that it alone reads",
            )


def _require_bounded(sizes: Sizes, batch: int) -> None:
    most = MOST_ELEMENTS * batch
    if math.prod(sizes) > most:
        raise SizeError(f"sizes of {list(sizes)} are more than {most} elements")


def _check_fit(operator: Operator, node: Node, declared: _Value, inputs: Mapping[str, _Value]) -> None:
    """The sizes and types are those that the operator gives."""
    kind = operator.signature
    assert kind is not None, f"no file holds {operator.name}"
    for role, value in inputs.items():
        _require_dimensions(role, _role(kind, role), value)
    found = {role: value.sizes for role, value in inputs.items()} | {RESULT: declared.sizes}
    expected = operator.sizes(found, node.attributes)
    for role, sizes in found.items():
        if expected.get(role, sizes) != sizes:
            raise SizeError(f"{role} has sizes {list(sizes)} where {list(expected[role])} belong")
    if kind.masks:
        _check_masks(declared, inputs)
        return
    given = next(iter(inputs.values()))
    dtype = given.dtype
    for value in inputs.values():
        if value.is_floating != given.is_floating:
            raise SizeError("its inputs are of different types")
        dtype = torch.promote_types(dtype, value.dtype)
    if kind.floating and not given.is_floating:
        raise SizeError(f"it is for floating-point numbers, not for {dtype}")
    _require_result(declared, _Value(declared.sizes, dtype))


def _check_masks(declared: _Value, inputs: Mapping[str, _Value]) -> None:
    """Numbers of floating point, bytes and truth values, of which a number or a truth value is made."""
    for value in inputs.values():
        if not value.is_floating and value.dtype not in (torch.bool, torch.uint8):
            raise SizeError(f"it takes floating-point numbers, bytes and truth values, not {value.dtype}")
    if not declared.is_floating and declared.dtype != torch.bool:
        raise SizeError(f"it gives floating-point numbers or truth values, not {declared.dtype}")


def _require_dimensions(role: str, expected: Role, value: _Value) -> None:
    least, most = expected.dimensions
    if not least <= len(value.sizes) <= most:
        words = f"{least}" if least == most else f"{least} to {most}"
        raise SizeError(f"{role} has {len(value.sizes)} dimensions; it has {words}")


def _require_result(declared: _Value, real: _Value) -> None:
    if declared != real:
        raise SizeError(
            f"it gives {real.dtype} {list(real.sizes)}, and the graph says {declared.dtype} {list(declared.sizes)}"
        )


def _check_operator(node: Node, declared: _Value, inputs: Mapping[str, _Value], batch: int) -> None:
    target, arguments = node.attributes["target"], node.attributes["arguments"]
    results = _results(_Call(target, repr(arguments), tuple(inputs.items()), arguments))
    for result in results:
        _require_bounded(result.sizes, batch)
    number = node.attributes.get("result", None if _gives_several(resolve_operator(target)) else 0)
    if number is None or number >= len(results):
        raise SizeError(f"it gives {len(results)} results, and the graph takes number {number}")
    _require_result(declared, results[number])


@dataclass(frozen=True)
class _Call:
    """An operator, its arguments, and what the tensors among them are."""

    target: str
    spelt: str
    """The arguments, with every type told: 1 is neither 1.0 nor True."""
    inputs: tuple[tuple[str, _Value], ...]
    arguments: Mapping[str, Any] = field(compare=False)


@lru_cache(4096)  # layers are alike, and so are the graphs of two batch sizes
def _results(call: _Call) -> tuple[_Value, ...]:
    """What an operator gives for tensors without contents."""
    operator = resolve_operator(call.target)
    arguments = dict(call.arguments)
    sizes = {
        name: dict(call.inputs)[argument.role].sizes
        for name, argument in arguments.items()
        if type(argument) is Reference
    }
    if _takes_apart(operator):
        numbers = [leaf for argument in arguments.values() for leaf in _leaves(argument) if type(leaf) is int]
        if max((*numbers, *(size for found in sizes.values() for size in found)), default=0) > MAX_PARTS:
            raise SizeError(f"it would take a tensor apart into more than {MAX_PARTS}")
    if any(argument.name == "device" for argument in operator._schema.arguments):
        arguments["device"] = torch.device("meta")
    tensors = {
        role: torch.empty(value.sizes, dtype=value.dtype, device="meta") for role, value in call.inputs
    }
    require_matching_sizes(call.target, sizes, arguments)
    results = results_of(call.target, arguments, tensors)
    for result in results:
        if result.device.type != "meta" or result.layout != torch.strided:
            raise SizeError(f"it gives a tensor on {result.device} in layout {result.layout}")
    return tuple(_Value(tuple(result.shape), _kept(result.dtype)) for result in results)


def _gives_several(operator: torch._ops.OpOverload) -> bool:
    return len(operator._schema.returns) > 1 or _gives_list(operator)


def _gives_list(operator: torch._ops.OpOverload) -> bool:
    return str(operator._schema.returns[0].type) == "List[Tensor]"


def _takes_apart(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator takes one tensor apart into a list of them."""
    return _gives_list(operator) and str(operator._schema.arguments[0].type) == "Tensor"


def _check_folding(graph: Graph) -> None:
    """Constants may be few and what is computed of them much; it is computed when an engine is made."""
    constant = set(graph.constants)
    elements = 0
    for node in graph:
        if constant.issuperset(node.inputs.values()) and not node.depends_on_batch:
            constant.add(node.name)
            elements += math.prod(node.shape)  # type: ignore[arg-type]
    most = MOST_FOLDED + MOST_GROWTH * sum(tensor.numel() for tensor in graph.constants.values())
    _require(
        elements <= most,
        f"{elements} numbers are computed from constants alone; with these constants up to {most} may be",
    )
