"""Base class of the weight-gradient rungs with TMA and wgmma, in NHWC."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from escalade.device.architecture import WITH_WGMMA
from escalade.ops.base.rung import C, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem

BOX = 64
"""Filters or channels per row of shared memory: 128 bytes, the swizzle span."""
STEP_PIXELS = 16
"""K of a wgmma in pixels."""
PRODUCT_RATE = 2048
"""Multiply-adds per cycle and SM."""
STAGE_CYCLES = 60.0
"""Cycles to wait for a stage and to release it."""
MULTIPLE = 8
"""Channels and filters are multiples of 16 bytes for TMA."""


def refused(rung: str, f: Conv2dProblem) -> str | None:
    """Return why no rung here supports the problem, whatever its sizes."""
    if f.dtype not in ("fp16", "bf16"):
        return f"{rung} takes fp16 and bf16, not {f.dtype}"
    if f.layout != "nhwc":
        return f"{rung} takes layout nhwc, not {f.layout}"
    if f.groups != 1:
        return f"{rung} takes groups=1, not {f.groups}; direct takes any"
    return None


def narrow(rung: str, f: Conv2dProblem) -> str | None:
    """Return why TMA does not support the channels or filters."""
    if f.channels % MULTIPLE or f.filters % MULTIPLE:
        return f"{rung} takes multiples of {MULTIPLE} channels and filters, not {f.channels} and {f.filters}"
    return None


@dataclass(frozen=True)
class HopperRung(Rung[Conv2dWeightGradientProblem, C]):
    """Rung with TMA and wgmma for fp16 and bf16, NHWC, one group."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return WITH_WGMMA

    def supports(self, problem: Conv2dWeightGradientProblem) -> str | None:
        return refused(self.name, problem.forward) or self.limits(problem.forward)

    @abstractmethod
    def limits(self, forward: Conv2dProblem) -> str | None:
        """Like `supports`, for what `refused` does not check."""
