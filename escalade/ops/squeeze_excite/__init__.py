"""Gates of squeeze-and-excite: `squeeze_excite` is the operator, `SqueezeExcite` the operation with its ladder."""

from escalade.ops.squeeze_excite.op import squeeze_excite
from escalade.ops.squeeze_excite.operation import SQUEEZE_EXCITE, SqueezeExcite
from escalade.ops.squeeze_excite.problem import SqueezeExciteProblem

__all__ = ["SQUEEZE_EXCITE", "SqueezeExcite", "SqueezeExciteProblem", "squeeze_excite"]
