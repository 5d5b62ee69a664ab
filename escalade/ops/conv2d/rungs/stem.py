"""Three-channel, stride-2 convolutions by the `stem` operation."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.recipe import Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.rung import Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.rung import Conv2dRung
from escalade.ops.stem import StemOperation, StemProblem
from escalade.ops.stem.rungs import Streamed, StreamedConfig

RATE = 370e6
"""FLOPs per microsecond: 163 us for 3to64_224_k7s2 at batch 256 on an H200."""


@dataclass(frozen=True)
class AsStem(Conv2dRung[StreamedConfig]):
    dtypes: tuple[str, ...] = ("fp16", "bf16")
    layouts: tuple[str, ...] = ("nhwc",)
    supports_residual = False

    @property
    def inner(self) -> Streamed:
        rung = StemOperation.ladder.rung("streamed").on(self.card)
        assert isinstance(rung, Streamed)
        return rung

    @property
    def architectures(self) -> tuple[str, ...]:
        return self.inner.architectures

    def limits(self, problem: Conv2dProblem) -> str | None:
        p = problem
        if p.dilation != (1, 1):
            return f"{self.name} takes dilation 1, not {p.dilation}"
        if p.batch < 1:
            return f"{self.name} needs a batch of at least 1"
        try:
            return self.inner.supports(_stem(p))
        except UnsupportedError as error:
            return str(error)

    def configs(self, problem: Conv2dProblem) -> tuple[StreamedConfig, ...]:
        return self.inner.configs(_stem(problem))

    def estimate(self, problem: Conv2dProblem, config: StreamedConfig) -> float:
        return max(
            self.card.microseconds(0, problem.traffic),
            self.card.rates.launch_us + problem.flops / (RATE * self.card.speed),
        )

    def recipe(self, problem: Conv2dProblem, config: StreamedConfig) -> Recipe:
        return self.inner.over(_stem(problem), config, weights_nhwc=True, bias=problem.bias)


def _stem(problem: Conv2dProblem) -> StemProblem:
    p = problem
    return StemProblem(
        p.batch, p.channels, p.height, p.width, p.filters, p.filter_height, p.filter_width, p.stride, p.padding,
        source=p.dtype, source_layout="nhwc", relu=p.relu, dtype=p.dtype, activation=p.activation,
    )  # fmt: skip


RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    AsStem(
        "stem",
        "three channels packed with little padding, rows converted and multiplied by different warpgroups, as the "
        "operation `stem` does it",
        below="fused_epilogue",
        # 3to64_224_k7s2 at batch 256: `stem` took 163 us from fp32 images, and half the image's bytes take 18 less,
        # against 645.
        predicted_gain=4.0,
    ),
)
