"""The operations, by name."""

from __future__ import annotations

from escalade.errors import UnsupportedError
from escalade.ops.conv2d import Conv2d, conv2d
from escalade.ops.ladder import Config, Ladder, Operation, Problem, Rung

OPERATIONS: dict[str, Operation] = {operation.name: operation for operation in (Conv2d(),)}


def operation(name: str) -> Operation:
    if name not in OPERATIONS:
        raise UnsupportedError(f"there is no operation {name!r}; there is {', '.join(OPERATIONS)}")
    return OPERATIONS[name]


__all__ = ["OPERATIONS", "Config", "Ladder", "Operation", "Problem", "Rung", "conv2d", "operation"]
