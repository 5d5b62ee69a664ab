"""Elements moved from some strided places to others in one pass: permutations, joints and whatever else only moves."""

from escalade.ops.copy.operation import COPY, Copy
from escalade.ops.copy.problem import MOST_PARTS, CopyProblem, Part

__all__ = ["COPY", "MOST_PARTS", "Copy", "CopyProblem", "Part"]
