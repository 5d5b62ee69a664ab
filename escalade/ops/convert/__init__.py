"""From one layout and element type to another in one pass: what the engine does at its doors."""

from escalade.ops.convert.ladder import Convert
from escalade.ops.convert.problem import ConvertProblem

__all__ = ["Convert", "ConvertProblem"]
