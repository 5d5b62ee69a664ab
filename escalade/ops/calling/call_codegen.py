"""Python written for one kind of call: a line for each thing that it does, with nothing to look up or to loop over.

A call takes the host longer than a small kernel takes the GPU, and most of that is Python going over lists that are the
same every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Function = Callable[..., Any]


class Source:
    """The lines of a function, and the objects that they name."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._objects: dict[str, Any] = {}

    def add(self, *lines: str) -> None:
        self.lines += lines

    def name(self, value: Any) -> str:
        """What the lines call an object."""
        for name, known in self._objects.items():
            if known is value:
                return name
        name = f"object{len(self._objects)}"
        self._objects[name] = value
        return name

    def function(self, called: str, parameters: Sequence[str]) -> Function:
        """The lines as the body of a function."""
        body = [f"        {line}" for line in self.lines]
        # Objects are variables of the function around it: those are read faster than global ones.
        made = [
            f"def make({', '.join(self._objects)}):",
            f"    def {called}({', '.join(parameters)}):",
            *body,
        ]
        space: dict[str, Any] = {}
        exec("\n".join([*made, f"    return {called}"]), space)
        function: Function = space["make"](**self._objects)
        return function
