"""Values side by side along a dimension: where they can be written in their places, nothing is done for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.engine.graph.graph import Graph, Node, Reference
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import Layouts, Operator, Recognised, Recogniser, Tensors
from escalade.engine.nodes.lowering import Concatenated, Forms, Lowered, Moved
from escalade.engine.nodes.movement import SOURCES, lower_moved
from escalade.engine.nodes.sequences import dimension_of_image
from escalade.engine.nodes.signature import INDEX, RESULT, ROWS, Attributes, Signature, SizeError, Sizes


class Concatenate(Operator):
    """y = x0, x1, … side by side along `dimension`."""

    name = "concatenate"
    signature = Signature({}, {"dimension": INDEX}, repeated=ROWS)
    values = SOURCES

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return dict.fromkeys(("cat", "concat", "concatenate"), self._recognise)

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        tensors, dimension = call("tensors", ()), call("dim", 0)
        if not node.is_floating or not isinstance(dimension, int):
            return None
        if not all(isinstance(one, Reference) for one in tensors):
            return None
        names = [node.inputs[one.role] for one in tensors]
        alike = all(
            len(graph.shape_of(name)) == len(node.shape)
            and graph.dtype_of(name).is_floating_point
            and name not in graph.constants
            for name in names
        )
        if not alike:
            return None
        if len(names) == 1:
            return names[0]
        inputs: dict[str, str | None] = {f"x{number}": name for number, name in enumerate(names)}
        return self.instead_of(node, inputs, dimension=dimension % len(node.shape))

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        joined = self.concatenated(node)
        return torch.cat([inputs[role] for role in joined.roles], joined.dimension)

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        result, at = sizes[RESULT], attributes["dimension"]
        parts = {role: size for role, size in sizes.items() if role != RESULT}
        if set(parts) != {f"x{number}" for number in range(len(parts))}:
            raise SizeError(f"the parts are {', '.join(parts)}; they are numbered from x0")
        if at >= len(result) or any(len(size) != len(result) for size in parts.values()):
            raise SizeError(f"parts of other dimensions than {list(result)}, or no dimension {at}")
        whole = sum(size[at] for size in parts.values())
        return {
            RESULT: (*result[:at], whole, *result[at + 1 :]),
            **{role: (*result[:at], size[at], *result[at + 1 :]) for role, size in parts.items()},
        }

    def as_image(self, node: Node) -> Attributes:
        return {**node.attributes, "dimension": dimension_of_image(node.attributes["dimension"])}

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        """Channels lie innermost in NHWC; along other dimensions images stay as they are."""
        return super().layouts(node, given) if node.attributes["dimension"] == 1 else Layouts.of_all(given)

    def moved(self, node: Node, inputs: Tensors, result: torch.Tensor) -> list[Moved]:
        """Each part to its place; of parts that are there already, with `moved`, no more than those it names."""
        joined = self.concatenated(node)
        first, found = 0, []
        for role in joined.roles:
            part = inputs[role]
            if role in node.attributes.get("moved", joined.roles):
                place = result.narrow(joined.dimension, first, part.shape[joined.dimension])
                found.append(Moved(part, place))
            first += part.shape[joined.dimension]
        return found

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        """What cannot be written where it belongs is copied, all of it at once."""
        return lower_moved(self, node, forms)

    def concatenated(self, node: Node) -> Concatenated:
        roles = tuple(f"x{number}" for number in range(len(node.inputs)))
        return Concatenated(node.attributes["dimension"], roles)
