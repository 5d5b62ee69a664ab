"""Group normalisation of images: `group_norm` is the operator, `GroupNorm` the operation with its ladder."""

from escalade.ops.group_norm.op import group_norm
from escalade.ops.group_norm.operation import GROUP_NORM, GroupNorm
from escalade.ops.group_norm.problem import GroupNormProblem

__all__ = ["GROUP_NORM", "GroupNorm", "GroupNormProblem", "group_norm"]
