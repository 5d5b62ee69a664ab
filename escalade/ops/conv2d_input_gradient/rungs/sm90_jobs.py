"""The gradient by kernels of conv2d for Hopper that mask and place their results themselves, at any stride."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from escalade.device.recipe import Recipe
from escalade.ops.base.rung import Config
from escalade.ops.conv2d.rungs.epilogue import Epilogue
from escalade.ops.conv2d.rungs.wgmma_conv import WgmmaConv, WgmmaConvRung
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.rungs.classes import PixelClass
from escalade.ops.conv2d_input_gradient.rungs.duality import ByClasses, ClassLaunches, largest_class


@dataclass(frozen=True)
class ByJobs(ByClasses):
    @property
    def inner(self) -> WgmmaConvRung:
        rung = super().inner
        assert isinstance(rung, WgmmaConvRung)
        return rung

    @property
    def scales_together(self) -> bool:
        return self.inner.scales_together

    def _class_refusal(self, one: PixelClass) -> str | None:
        if one.forward.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {one.forward.layout}"
        return self.inner.conv_limits(_wgmma_conv(one, mask=False))

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[Config, ...]:
        return _offered(self.inner, _wgmma_conv(largest_class(problem), problem.mask))

    def _config_of(self, problem: Conv2dInputGradientProblem, one: PixelClass, config: Config) -> Config:
        """Classes with other windows than the largest have what suits them best."""
        conv, largest = _wgmma_conv(one, problem.mask), _wgmma_conv(largest_class(problem), problem.mask)
        alike = (conv.windows.taps, conv.windows.output) == (largest.windows.taps, largest.windows.output)
        return config if alike else _offered(self.inner, conv)[0]

    def flips(self, one: PixelClass, config: Config) -> bool:
        return one.mn_major is None

    def part_estimate(self, problem: Conv2dInputGradientProblem, one: PixelClass, config: Config) -> float:
        clocks = self.inner.conv_clocks(_wgmma_conv(one, problem.mask), self._config_of(problem, one, config))
        return self.card.microseconds(clocks, self.moved(problem, one), self.inner.launches)

    def part(
        self, problem: Conv2dInputGradientProblem, one: PixelClass, config: Config, launches: ClassLaunches
    ) -> Recipe:
        recipe = self.inner.conv_recipe(_wgmma_conv(one, problem.mask), self._config_of(problem, one, config))
        return launches.over(recipe, residual=problem.aux or "mask")


def _wgmma_conv(one: PixelClass, mask: bool) -> WgmmaConv:
    f = one.forward
    return WgmmaConv(
        one.windows, f.channels, replace(Epilogue.of(f), mask=mask), placement=one.placed, any_magnitude=True
    )


@lru_cache(maxsize=256)
def _offered(rung: WgmmaConvRung, conv: WgmmaConv) -> tuple[Config, ...]:
    return rung.conv_configs(conv)


# Predictions for fp16 at batch 256, with 2 us for the filter. That windows, like `persistent`, read it as it lies came
# later, and should save just those: 1.02 for 64to64_56_k3 with a mask, 1.03 for 64to128_56_k3s2.
RUNGS = (
    ByJobs(
        "window",
        "conv2d's window for 64 filters: the window of a tile of dx is copied once and all taps read it in place; TMA "
        "brings the mask and places results, with a stride too",
        below="persistent",
        # 64to64_56_k3 with a mask: by im2col 130 us of copies and 8 of masks; 84 and 8 here.
        predicted_gain=1.45,
        convolution="window",
    ),
    ByJobs(
        "streamed_window",
        "the same for any number of filters, 64 at a time, by conv2d's streamed_window",
        below="persistent",
        # 64to128_56_k3s2, four classes with 9 taps between them: by im2col 1568 tiles of 128x64 copy 18 k-tiles of 24 KB
        # in 440 cycles each, 54 us, and write dx a quarter of a line at a time, 30 us more than whole lines; windows
        # copy half of that, so that reading the gradient four times and writing dx, 308 MB, decide: 73 us.
        predicted_gain=1.2,
        convolution="streamed_window",
    ),
    ByJobs(
        "wgmma_split",
        "the same by conv2d's wgmma_split, which masks and places results itself: fp32 accuracy on Hopper's own units; "
        "an infinity becomes NaN",
        below="tensor_core_split",
        # 128to128_28_k3, 59 GFLOP: three fp16 products for one at 200 TFLOP/s are 295 us, against 1.0 ms.
        predicted_gain=3.3,
        convolution="wgmma_split",
    ),
)
