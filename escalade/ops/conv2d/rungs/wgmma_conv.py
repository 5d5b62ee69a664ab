"""NHWC convolutions for wgmma kernels, and base class of the rungs that run them, for conv2d and its input gradient."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from escalade.device.architecture import WITH_WGMMA
from escalade.device.recipe import Ints, Recipe
from escalade.ops.base.rung import C
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.epilogue import UNPLACED, Epilogue
from escalade.ops.conv2d.rungs.rung import Conv2dRung
from escalade.ops.conv2d.rungs.tma_windows import Windows


@dataclass(frozen=True)
class WgmmaConv:
    """One NHWC convolution as a wgmma kernel sees it: a whole problem, or one sub-pixel phase of an input gradient."""

    windows: Windows
    filters: int
    epilogue: Epilogue
    shortcut: Windows | None = None
    placement: Ints = UNPLACED
    y_pitch: int = 0
    """Elements per pixel step of y, if it is part of a larger buffer; 0 if dense."""
    any_magnitude: bool = False
    """True if x may be tiny as likely as of order one: gradients, unlike images."""

    @staticmethod
    def of(problem: Conv2dProblem) -> WgmmaConv:
        shortcut = Windows.of_shortcut(problem) if problem.shortcut_channels else None
        return WgmmaConv(
            Windows.of(problem), problem.filters, Epilogue.of(problem), shortcut, y_pitch=problem.y_pitch
        )

    @property
    def taps(self) -> int:
        return self.windows.taps[0] * self.windows.taps[1]

    @cached_property
    def reach(self) -> tuple[int, int]:
        """Rows and columns that a window extends beyond its tile, with stride 1."""
        (height, width), dilation = self.windows.taps, self.windows.dilation
        return (height - 1) * dilation[0], (width - 1) * dilation[1]

    @property
    def shortcut_channels(self) -> int:
        return self.shortcut.channels if self.shortcut else 0


@dataclass(frozen=True)
class WgmmaConvRung(Conv2dRung[C]):
    """Rung that runs a `WgmmaConv`, of this operation or of another."""

    launches: ClassVar[int] = 1
    """Launches per convolution, besides those that depend on weights alone."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return WITH_WGMMA

    def limits(self, problem: Conv2dProblem) -> str | None:
        return self.only_nhwc(problem) or self.conv_limits(WgmmaConv.of(problem))

    @abstractmethod
    def conv_limits(self, conv: WgmmaConv) -> str | None:
        """Return the reason why the rung does not support `conv`, or None."""

    def configs(self, problem: Conv2dProblem) -> tuple[C, ...]:
        return self.conv_configs(WgmmaConv.of(problem))

    @abstractmethod
    def conv_configs(self, conv: WgmmaConv) -> tuple[C, ...]:
        """Return the configs, cheapest first."""

    def clocks(self, problem: Conv2dProblem, config: C) -> float:
        return self.conv_clocks(WgmmaConv.of(problem), config)

    @abstractmethod
    def conv_clocks(self, conv: WgmmaConv, config: C) -> float: ...

    def estimate(self, problem: Conv2dProblem, config: C) -> float:
        return self.card.microseconds(self.clocks(problem, config), problem.traffic, self.launches)

    def recipe(self, problem: Conv2dProblem, config: C) -> Recipe:
        return self.conv_recipe(WgmmaConv.of(problem), config)

    @abstractmethod
    def conv_recipe(self, conv: WgmmaConv, config: C) -> Recipe:
        """Return the launches over x, weight, bias, residual (or the mask), shortcut, shortcut_weight and y."""
