"""What the rungs share that take the weights' gradient with Hopper's own units, in NHWC."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from escalade.device.architecture import WITH_WGMMA
from escalade.ops.base.rung import C, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem

BOX = 64
"""Filters or channels of a row in shared memory: 128 bytes, what the swizzle spans."""
STEP_PIXELS = 16
"""Pixels that one product is over, and a tensor core adds to its sums at once."""
PRODUCT_RATE = 2048
"""Multiplications and additions of a multiprocessor in a cycle."""
STAGE_CYCLES = 60.0
"""Cycles to wait for a stage and to release it."""
MULTIPLE = 8
"""A divisor of channels and filters: rows of tensors are multiples of 16 bytes."""


def refused(rung: str, f: Conv2dProblem) -> str | None:
    """What no rung here takes, whatever the sizes."""
    if f.dtype not in ("fp16", "bf16"):
        return f"{rung} takes fp16 and bf16, not {f.dtype}"
    if f.layout != "nhwc":
        return f"{rung} takes layout nhwc, not {f.layout}"
    if f.groups != 1:
        return f"{rung} takes groups=1, not {f.groups}; direct takes any"
    return None


def narrow(rung: str, f: Conv2dProblem) -> str | None:
    """Rows of tensors that TMA does not take."""
    if f.channels % MULTIPLE or f.filters % MULTIPLE:
        return f"{rung} takes multiples of {MULTIPLE} channels and filters, not {f.channels} and {f.filters}"
    return None


@dataclass(frozen=True)
class HopperRung(Rung[Conv2dWeightGradientProblem, C]):
    """A rung with Hopper's own units, in fp16 and bf16, nhwc, without groups."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return WITH_WGMMA

    def supports(self, problem: Conv2dWeightGradientProblem) -> str | None:
        return refused(self.name, problem.forward) or self.limits(problem.forward)

    @abstractmethod
    def limits(self, forward: Conv2dProblem) -> str | None:
        """What is beyond the rung, like `supports`, among what `refused` lets pass."""
