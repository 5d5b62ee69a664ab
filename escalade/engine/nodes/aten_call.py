"""A call of one of PyTorch's operators as recognising it sees it: its arguments by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from escalade.engine.graph.graph import Graph, Node, Reference


class AtenCall:
    """The arguments of an operator by name; tensors as the names of their values."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._arguments = node.attributes["arguments"]

    def __call__(self, name: str, default: Any = None) -> Any:
        value = self._arguments.get(name, default)
        return default if value is None else value

    def value(self, name: str) -> str | None:
        """The value that an argument is; None if it is absent or no tensor."""
        found = self._arguments.get(name)
        return self._node.inputs[found.role] if isinstance(found, Reference) else None

    def pair(self, name: str, default: int | Sequence[int]) -> tuple[int, int]:
        """An argument for height and width, which may be given once for both."""
        value = self(name, default)
        if not isinstance(value, int) and not value:
            value = default  # which is what an empty list means
        values = (value,) if isinstance(value, int) else tuple(value)
        return (values[0], values[-1])


def converts(call: AtenCall, x: str, graph: Graph) -> bool:
    """Return whether a call asks for another type than its operand has.

    CUDA's autocast names fp32 in every sum, norm and softmax, also of values that are fp32 already.
    """
    wanted = call("dtype")
    return wanted is not None and wanted is not graph.dtype_of(x)


def name_of(target: str) -> str:
    """The operator's name without its namespace and overload: `add` of `aten::add.Tensor`."""
    return target.removeprefix("aten::").split(".")[0]
