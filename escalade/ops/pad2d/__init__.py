"""Images with more around them: `pad2d` is the operator, `Pad2d` the operation with its ladder."""

from escalade.ops.pad2d.op import pad2d
from escalade.ops.pad2d.operation import PAD2D, Pad2d
from escalade.ops.pad2d.problem import MODES, Pad2dProblem, refusal

__all__ = ["MODES", "PAD2D", "Pad2d", "Pad2dProblem", "pad2d", "refusal"]
