"""One thread an input, which finds the maxima of its windows again."""

from __future__ import annotations

from escalade.device.recipe import Buffer, Recipe
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.max_pool2d_backward.problem import MaxPool2dBackwardProblem
from escalade.ops.max_pool2d_backward.rungs.arguments import call


class Gathered(Rung[MaxPool2dBackwardProblem]):
    def supports(self, problem: MaxPool2dBackwardProblem) -> str | None:
        return (
            f"{self.name} reads x, and {problem.name} has stored places instead" if problem.stored else None
        )

    def configs(self, problem: MaxPool2dBackwardProblem) -> tuple[Config, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: MaxPool2dBackwardProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        buffers = (Buffer("gradient"), Buffer("x"), Buffer("y"))
        return Recipe((call(problem, self.name, buffers, problem.forward.elements, config.threads),))


# Predictions for 64 channels of 112 x 112, 3 x 3 windows with stride 2, batch 256, fp16: 925 MB, 218 us.
GATHERED = Gathered(
    "gathered",
    "one thread an input finds the maxima of its windows again and adds up what is its own, in a fixed order",
    below="atomics",
    # 205 million threads of 400 instructions (2.9 ms), for each maximum is found nine times, against 51 million of 250
    # with an addition in L2 each (0.5 ms), and 1.4 GB more of sums (0.5 ms): what it buys is the same bits every time.
    predicted_gain=0.4,
)
