"""What every rung of conv2d has to say about a problem before its own limits."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.ladder import Rung


@dataclass(frozen=True)
class Conv2dRung(Rung[Conv2dProblem]):
    @property
    def takes_shortcut(self) -> bool:
        """Whether its kernel goes on from x to a second image."""
        return False

    def supports(self, problem: Conv2dProblem) -> str | None:
        if problem.shortcut_channels and not self.takes_shortcut:
            return f"{self.name} convolves one image; a shortcut of {problem.shortcut_channels} channels is a second"
        return self.limits(problem)

    @abstractmethod
    def limits(self, problem: Conv2dProblem) -> str | None:
        """Like `supports`, for problems of the kind that the rung takes."""
