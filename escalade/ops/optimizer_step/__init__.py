"""A step of an optimiser over all parameters of a model: `optimizer_step` is the operator, `OptimizerStep` the
operation with its ladder, and a `Rule` such as `sgd` or `adam` the formula that it follows."""

from escalade.ops.optimizer_step.op import no_progress, optimizer_step
from escalade.ops.optimizer_step.operation import OPTIMIZER_STEP, OptimizerStep
from escalade.ops.optimizer_step.problem import OptimizerStepProblem
from escalade.ops.optimizer_step.rules import Rule, adam, sgd

__all__ = [
    "OPTIMIZER_STEP",
    "OptimizerStep",
    "OptimizerStepProblem",
    "Rule",
    "adam",
    "no_progress",
    "optimizer_step",
    "sgd",
]
