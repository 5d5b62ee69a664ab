"""A resized image's gradient: `upsample2d_backward` is the operator, `Upsample2dBackward` the operation."""

from escalade.ops.upsample2d_backward.op import upsample2d_backward
from escalade.ops.upsample2d_backward.operation import UPSAMPLE2D_BACKWARD, Upsample2dBackward
from escalade.ops.upsample2d_backward.problem import Upsample2dBackwardProblem

__all__ = ["UPSAMPLE2D_BACKWARD", "Upsample2dBackward", "Upsample2dBackwardProblem", "upsample2d_backward"]
