"""A tensor from one layout and element type to another in one pass: what the engine does at its doors."""

from escalade.ops.convert.operation import CONVERT, Convert
from escalade.ops.convert.problem import ConvertProblem, reach

__all__ = ["CONVERT", "Convert", "ConvertProblem", "reach"]
