"""Images at another size: `upsample2d` is the operator, `Upsample2d` the operation with its ladder."""

from escalade.ops.upsample2d.op import upsample2d
from escalade.ops.upsample2d.operation import UPSAMPLE2D, Upsample2d
from escalade.ops.upsample2d.problem import MODES, Upsample2dProblem, fits

__all__ = ["MODES", "UPSAMPLE2D", "Upsample2d", "Upsample2dProblem", "fits", "upsample2d"]
