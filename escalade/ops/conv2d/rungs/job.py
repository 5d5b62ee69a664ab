"""A convolution in NHWC with Hopper's units, whatever it is a part of, and the rungs of conv2d that do such."""

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
class Job:
    windows: Windows
    filters: int
    epilogue: Epilogue
    shortcut: Windows | None = None
    placement: Ints = UNPLACED
    y_pitch: int = 0
    """Elements from one pixel of y to the next, if it is a part of a larger buffer; 0: it is dense."""
    any_magnitude: bool = False
    """Whether x is as likely to be tiny as of order one: gradients are, where images are not."""

    @staticmethod
    def of(problem: Conv2dProblem) -> Job:
        shortcut = Windows.of_shortcut(problem) if problem.shortcut_channels else None
        return Job(
            Windows.of(problem), problem.filters, Epilogue.of(problem), shortcut, y_pitch=problem.y_pitch
        )

    @property
    def taps(self) -> int:
        return self.windows.taps[0] * self.windows.taps[1]

    @cached_property
    def reach(self) -> tuple[int, int]:
        """Rows and columns by which a window is larger than its tile, with stride 1."""
        (height, width), dilation = self.windows.taps, self.windows.dilation
        return (height - 1) * dilation[0], (width - 1) * dilation[1]

    @property
    def shortcut_channels(self) -> int:
        return self.shortcut.channels if self.shortcut else 0


@dataclass(frozen=True)
class JobRung(Conv2dRung[C]):
    """A rung that does jobs, of this operation or of another."""

    launches: ClassVar[int] = 1
    """Launches of a job, besides those that depend on weights alone."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return WITH_WGMMA

    def limits(self, problem: Conv2dProblem) -> str | None:
        return self.only_nhwc(problem) or self.job_limits(Job.of(problem))

    @abstractmethod
    def job_limits(self, job: Job) -> str | None:
        """What is beyond the rung in a job, as a sentence; None: nothing."""

    def configs(self, problem: Conv2dProblem) -> tuple[C, ...]:
        return self.job_configs(Job.of(problem))

    @abstractmethod
    def job_configs(self, job: Job) -> tuple[C, ...]:
        """The configs for a job, the cheapest first."""

    def clocks(self, problem: Conv2dProblem, config: C) -> float:
        return self.job_clocks(Job.of(problem), config)

    @abstractmethod
    def job_clocks(self, job: Job, config: C) -> float: ...

    def estimate(self, problem: Conv2dProblem, config: C) -> float:
        return self.card.microseconds(self.clocks(problem, config), problem.traffic, self.launches)

    def recipe(self, problem: Conv2dProblem, config: C) -> Recipe:
        return self.job_recipe(Job.of(problem), config)

    @abstractmethod
    def job_recipe(self, job: Job, config: C) -> Recipe:
        """The launches over x, weight, bias, residual (or the mask), shortcut, shortcut_weight and y."""
