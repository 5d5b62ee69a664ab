"""The problem protocol."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar


class Problem(Protocol):
    """One instance of an operation: sizes, dtype, layout and settings. Implementations are frozen dataclasses."""

    @staticmethod
    def parse(name: str) -> Any:
        """Return the problem of a name, in the default dtype and layout."""
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
        """FLOPs of the direct algorithm, regardless of the rung."""
        ...

    @property
    def bytes(self) -> int:
        """Minimum traffic: every needed input element read once, every output written once."""
        ...

    @property
    def rounding(self) -> float:
        """Expected relative error of the result's sums if summed sequentially in fp32."""
        ...


def traffic(problem: Problem) -> int:
    """Return the bytes that estimates count: `problem.traffic` if it has one, else the minimum `bytes`."""
    return int(getattr(problem, "traffic", problem.bytes))


P = TypeVar("P", bound=Problem)
