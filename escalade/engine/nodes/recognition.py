"""Which of PyTorch's operators are graph operators of Escalade's, by what these say of themselves."""

from __future__ import annotations

import torch

from escalade.engine.graph.graph import ATEN, Graph, Node
from escalade.engine.nodes import OPERATORS
from escalade.engine.nodes.aten_call import AtenCall, name_of
from escalade.engine.nodes.base import Recogniser
from escalade.engine.nodes.identity import IDENTITIES

CAPTURED: dict[str, Recogniser] = {
    **{name: recognise for operator in OPERATORS for name, recognise in operator.captured.items()},
    **IDENTITIES,
}
FOLDED: dict[str, Recogniser] = {
    name: recognise for operator in OPERATORS for name, recognise in operator.folded.items()
}


def recognise_captured(node: Node, target: torch._ops.OpOverload, graph: Graph) -> Node | str:
    """The node in Escalade's terms if it has them; as it is otherwise. A string: it gives an existing value."""
    if _is_of_nothing(node, graph):
        return node
    name = name_of(target.name())
    node = _with_plain_numbers(node, graph)
    if _is_double(node, graph):
        same = IDENTITIES.get(name)
        return (None if same is None else same(node, AtenCall(node), graph)) or node
    if name.endswith("_") and name[:-1] in CAPTURED:
        name = name[:-1]  # relu_ is relu of a new value
    call, recognise = AtenCall(node), CAPTURED.get(name)
    known = recognise(node, call, graph) if recognise is not None else None
    others = (operator.recognise_rest(node, call, graph) for operator in OPERATORS) if known is None else ()
    return known or next((other for other in others if other is not None), node)


def recognise_folded(graph: Graph) -> None:
    """Layers whose weights are constants by now, though the model computes them; products with a constant too."""
    for node in graph:
        is_known = node.op == ATEN and not _is_of_nothing(node, graph) and not _is_double(node, graph)
        recognise = FOLDED.get(name_of(node.attributes["target"])) if is_known else None
        if recognise is not None:
            before = set(graph.nodes)
            known = recognise(node, AtenCall(node), graph)
            assert not isinstance(known, str)  # a layer is never one of its inputs
            for added in [other for other in graph if other.name not in before]:
                del graph.nodes[
                    added.name
                ]  # recognisers put what they read behind all that is captured so far
                graph.insert_before(node.name, added)
            graph.nodes[node.name] = known or node


def _is_of_nothing(node: Node, graph: Graph) -> bool:
    """Whether it gives or reads a value without elements: PyTorch knows what comes of that, and kernels have none of
    it to work on."""
    return 0 in node.shape or any(0 in graph.shape_of(name) for name in node.inputs.values())


def _is_double(node: Node, graph: Graph) -> bool:
    """Return whether a node reads or gives float64, which no kernel computes in."""
    return node.dtype == "float64" or any(
        graph.dtype_of(name) is torch.float64 for name in node.inputs.values()
    )


def _with_plain_numbers(node: Node, graph: Graph) -> Node:
    """Return the node with single float64 numbers of the model in fp32, where PyTorch would round them to the type of
    the other operands."""
    if node.dtype == "float64" or not node.is_floating:
        return node
    others = [name for name in node.inputs.values() if graph.shape_of(name)]
    if not any(graph.dtype_of(name).is_floating_point for name in others):
        return node
    numbers = {
        role: graph.add_constant(f"{name}_float32", graph.constants[name].float())
        for role, name in node.inputs.items()
        if name in graph.constants and not graph.shape_of(name) and graph.dtype_of(name) is torch.float64
    }
    return node.with_inputs(**numbers)
