"""One thread an input, by the places that the forward pass has stored."""

from __future__ import annotations

from escalade.device.recipe import Buffer, Recipe
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.max_pool2d_backward.problem import MaxPool2dBackwardProblem
from escalade.ops.max_pool2d_backward.rungs.arguments import call


class Stored(Rung[MaxPool2dBackwardProblem]):
    def supports(self, problem: MaxPool2dBackwardProblem) -> str | None:
        return (
            None if problem.stored else f"{self.name} takes stored places, and {problem.name} has x instead"
        )

    def configs(self, problem: MaxPool2dBackwardProblem) -> tuple[Config, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: MaxPool2dBackwardProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        buffers = (Buffer("gradient"), Buffer("places"), Buffer("y"))
        return Recipe((call(problem, self.name, buffers, problem.forward.elements, config.threads),))


# Predictions for 64 channels of 112 x 112, 3 x 3 windows with stride 2, batch 256, fp16: 617 MB, 145 us.
STORED = Stored(
    "stored",
    "one thread an input adds up the gradients of windows whose stored place is its own, in a fixed order",
    below="atomics",
    # 205 million threads of 150 instructions (1.1 ms) against an addition in L2 for each of 51 million outputs, and
    # 1.4 GB of sums (0.7 ms).
    predicted_gain=0.7,
)
