"""Base of gradient problems."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic

from escalade.ops.base.checks import require
from escalade.ops.base.problem import P


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
