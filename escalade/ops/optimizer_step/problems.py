"""The problems of optimizer_step: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from itertools import pairwise

from escalade.ops.optimizer_step.problem import OptimizerStepProblem
from escalade.ops.optimizer_step.rules import Rule, adam, sgd

MOMENTUM = sgd(momentum=0.9, weight_decay=1e-4)
ADAMW = adam(weight_decay=1e-2, decoupled=True)


def of(rule: Rule, sizes: tuple[int, ...], copy: str = "", checked: bool = False) -> OptimizerStepProblem:
    """The problem of a rule."""
    return OptimizerStepProblem(sizes, rule.expression, rule.state, copy, checked)


def _resnet18() -> tuple[int, ...]:
    """The elements of each parameter, in the order of the model's."""
    sizes = [64 * 3 * 49, 64, 64]
    for channels, filters in pairwise((64, 64, 128, 256, 512)):
        for inputs in (channels, filters):
            sizes += [filters * inputs * 9, filters, filters, filters * filters * 9, filters, filters]
            if inputs != filters:
                sizes += [filters * inputs, filters, filters]
    return (*sizes, 512 * 1000, 1000)


def _autoencoder() -> tuple[int, ...]:
    channels = (3, 256, 128, 128, 256, 3)
    return tuple(size for before, after in pairwise(channels) for size in (after * before * 9, after))


RESNET18, AUTOENCODER = _resnet18(), _autoencoder()

PROBLEMS = (
    of(MOMENTUM, AUTOENCODER),
    of(ADAMW, AUTOENCODER),
    of(MOMENTUM, RESNET18),
    of(ADAMW, RESNET18),
    of(ADAMW.scaled(), RESNET18, "fp16", checked=True),
)
"""A convolutional autoencoder's parameters and ResNet-18's, the last with a loss scale and fp16 weights."""

SMALL_PROBLEMS = (
    of(sgd(), (1, 9, 4100)),
    of(sgd(momentum=0.9, dampening=0.1, weight_decay=1e-4, maximize=True), (2049, 64)),
    of(ADAMW.scaled(), (64, 3, 1027), "fp16", checked=True),
    of(adam(weight_decay=1e-2, amsgrad=True), (36,)),
)
"""Small problems that between them have tensors of several chunks, of a part of one and of a part of a pack; no state
and three; a copy and a check."""
