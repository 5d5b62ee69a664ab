"""What the gradients of an operation have in common as problems."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic

from escalade.ops.base.checks import require
from escalade.ops.base.problem import P


@dataclass(frozen=True)
class GradientProblem(Generic[P]):
    """A gradient of the operation `forward`, whose tensors are stored and laid out as this one's."""

    forward: P
    dtype: str = ""
    """The dtype; empty: that of `forward`, which otherwise follows."""
    layout: str = ""
    """The layout; empty: that of `forward`, which otherwise follows."""

    def follow(self, operation: str, dtypes: tuple[str, ...]) -> None:
        """Makes dtype and layout the same here and in `forward`; called by `__post_init__`."""
        f: Any = self.forward
        forward = replace(f, dtype=self.dtype or f.dtype, layout=self.layout or f.layout)
        require(operation, "dtype", forward.dtype, dtypes)
        for name, value in (("forward", forward), ("dtype", forward.dtype), ("layout", forward.layout)):
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """Short and stable, that of `forward` (dtype and layout stand apart)."""
        return self.forward.name

    @property
    def batch(self) -> int:
        return self.forward.batch

    @property
    def flops(self) -> int:
        return self.forward.flops
