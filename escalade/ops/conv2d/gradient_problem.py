"""What the gradients of a convolution have in common as problems."""

from __future__ import annotations

from dataclasses import dataclass, replace

from escalade.ops.base.checks import require
from escalade.ops.conv2d.problem import Conv2dProblem


@dataclass(frozen=True)
class GradientProblem:
    """A gradient of a convolution `forward`, whose tensors are stored and laid out as this one's."""

    forward: Conv2dProblem
    dtype: str = ""
    """The dtype; empty: the convolution's, which otherwise follows."""
    layout: str = ""
    """The layout; empty: the convolution's, which otherwise follows."""

    def follow(self, operation: str, dtypes: tuple[str, ...]) -> None:
        """Makes dtype and layout the same here and in `forward`; called by `__post_init__`."""
        f = self.forward
        forward = replace(f, dtype=self.dtype or f.dtype, layout=self.layout or f.layout)
        require(operation, "dtype", forward.dtype, dtypes)
        for name, value in (("forward", forward), ("dtype", forward.dtype), ("layout", forward.layout)):
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """Short and stable, the convolution's (dtype and layout stand apart)."""
        return self.forward.name

    @property
    def batch(self) -> int:
        return self.forward.batch

    @property
    def flops(self) -> int:
        return self.forward.flops
