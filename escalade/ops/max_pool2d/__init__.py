"""The maximum over windows: `max_pool2d` is the operator, `max_pool2d_with_places` what training takes, `MaxPool2d` the
operation with its ladder."""

from escalade.ops.max_pool2d.op import max_pool2d, max_pool2d_with_places
from escalade.ops.max_pool2d.operation import MAX_POOL2D, MaxPool2d
from escalade.ops.max_pool2d.problem import MaxPool2dProblem

__all__ = ["MAX_POOL2D", "MaxPool2d", "MaxPool2dProblem", "max_pool2d", "max_pool2d_with_places"]
