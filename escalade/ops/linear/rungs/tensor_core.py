"""Fully connected layer on tensor cores: a 1x1 convolution over the rows by conv2d's rungs."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.recipe import Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d import Conv2d, Conv2dProblem
from escalade.ops.linear.problem import LinearProblem
from escalade.ops.linear.rungs.arguments import refuses_pixels


def as_convolution(problem: LinearProblem) -> Conv2dProblem:
    """Return the layer as a convolution of one-pixel images, over the same buffers."""
    return Conv2dProblem(
        problem.batch, problem.in_features, 1, 1, problem.out_features, 1, 1,
        dtype=problem.dtype, layout="nhwc", bias=problem.bias, relu=problem.relu, activation=problem.activation,
    )  # fmt: skip


@dataclass(frozen=True)
class AsPointwiseConvolution(Rung[LinearProblem]):
    convolution: str
    """Name of the rung of conv2d."""

    @property
    def _rung(self) -> Rung[Conv2dProblem]:
        return Conv2d.ladder.rung(self.convolution).on(self.card)

    @property
    def architectures(self) -> tuple[str, ...]:
        return self._rung.architectures

    def supports(self, problem: LinearProblem) -> str | None:
        if problem.pixels > 1:
            return refuses_pixels(self.name, problem)
        try:
            refusal = self._rung.supports(as_convolution(problem))
        except UnsupportedError as error:
            refusal = str(error)
        return refusal and f"as a 1x1 convolution, {refusal}"

    def configs(self, problem: LinearProblem) -> tuple[Config, ...]:
        return self._rung.configs(as_convolution(problem))

    def recipe(self, problem: LinearProblem, config: Config) -> Recipe:
        return self._rung.recipe(as_convolution(problem), config)

    def tolerance(self, problem: LinearProblem, peer_error: float) -> float:
        return self._rung.tolerance(as_convolution(problem), peer_error)


# Predictions are for 25088to4096 at batch 32, 6.6 GFLOP and 206 MB of fp16 weights.
TENSOR_CORE = AsPointwiseConvolution(
    "tensor_core",
    "products by mma.sync in fp16, bf16 or TF32, as a 1x1 convolution over the rows: conv2d's fused_epilogue",
    below="tiled",
    # The weights at 2.8 TB/s, 75 us, plus the split-K reduction, 10 us, against 260 us.
    predicted_gain=3.0,
    convolution="fused_epilogue",
)
TENSOR_CORE_SPLIT = AsPointwiseConvolution(
    "tensor_core_split",
    "fp32 accuracy on tensor cores, as a 1x1 convolution over the rows: conv2d's tensor_core_split",
    below="tiled",
    # 411 MB of fp32 weights at 2.8 TB/s, 147 us, against 280 us.
    predicted_gain=1.9,
    convolution="tensor_core_split",
)
