"""The problem protocol, and the base of gradient problems."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from escalade.ops.base.checks import require


class Problem(Protocol):
    """One instance of an operation: sizes, dtype, layout and settings. Implementations are frozen dataclasses."""

    @staticmethod
    def parse(name: str) -> Any:
        """Return the problem of a name, in the default dtype and layout."""
        ...

    def __hash__(self) -> int: ...

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


@dataclass(frozen=True)
class GradientProblem(Generic[P]):
    """A gradient of the operation `forward`, with its dtype and layout."""

    forward: P
    dtype: str = ""
    """If given, overrides that of `forward`, as does `layout`."""
    layout: str = ""

    def follow(self, operation: str, dtypes: tuple[str, ...]) -> None:
        """Make dtype and layout agree with `forward`; called by `__post_init__`."""
        f: Any = self.forward
        forward = replace(f, dtype=self.dtype or f.dtype, layout=self.layout or f.layout)
        require(operation, "dtype", forward.dtype, dtypes)
        for name, value in (("forward", forward), ("dtype", forward.dtype), ("layout", forward.layout)):
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """The name of `forward`; dtype and layout are not part of a name."""
        return self.forward.name

    @property
    def batch(self) -> int:
        return self.forward.batch

    @property
    def flops(self) -> int:
        return self.forward.flops
