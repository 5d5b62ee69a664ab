"""Python generated per kind of call: straight-line code without lookups or loops.

A call costs the host more time than a small kernel costs the GPU, mostly in loops over lists that never change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Function = Callable[..., Any]


class FunctionSource:
    """The lines of a generated function, and the objects they refer to."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._objects: dict[str, Any] = {}

    def add(self, *lines: str) -> None:
        self.lines += lines

    def name(self, value: Any) -> str:
        """Return the variable of an object in the generated code."""
        for name, known in self._objects.items():
            if known is value:
                return name
        name = f"object{len(self._objects)}"
        self._objects[name] = value
        return name

    def function(self, name: str, parameters: Sequence[str]) -> Function:
        """Compile the lines as the body of a function."""
        body = [f"        {line}" for line in self.lines]
        # Objects are closure variables, which load faster than globals.
        lines = [
            f"def make({', '.join(self._objects)}):",
            f"    def {name}({', '.join(parameters)}):",
            *body,
            f"    return {name}",
        ]
        space: dict[str, Any] = {}
        exec("\n".join(lines), space)
        function: Function = space["make"](**self._objects)
        return function
