"""What is asked of an operation."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar


class Problem(Protocol):
    """What is asked of an operation. Implementations are frozen dataclasses."""

    @staticmethod
    def parse(name: str) -> Any:
        """The problem of that name, in the default dtype and layout."""
        ...

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def layout(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def flops(self) -> int:
        """Operations of the plain algorithm, whatever a rung really does."""
        ...

    @property
    def bytes(self) -> int:
        """The fewest: what the result depends on of each input read once, each output written once."""
        ...

    @property
    def rounding(self) -> float:
        """The relative error to expect of the result's sums when they are taken in order in fp32."""
        ...


def traffic(problem: Problem) -> int:
    """Bytes that estimates count: `traffic` where a problem has it apart from the fewest, otherwise `bytes`."""
    return int(getattr(problem, "traffic", problem.bytes))


P = TypeVar("P", bound=Problem)
