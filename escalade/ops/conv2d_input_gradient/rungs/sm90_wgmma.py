"""Input gradients by wgmma kernels of conv2d that mask and scatter their results, at any stride."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from escalade.device.recipe import Recipe
from escalade.ops.base.rung import Config
from escalade.ops.conv2d.rungs.wgmma_conv import WgmmaConv, WgmmaConvRung
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.rungs.duality import PerPhase, PhaseLaunches, largest_phase
from escalade.ops.conv2d_input_gradient.rungs.phases import PixelPhase, wgmma_conv


@dataclass(frozen=True)
class WgmmaPerPhase(PerPhase):
    @property
    def inner(self) -> WgmmaConvRung:
        rung = super().inner
        assert isinstance(rung, WgmmaConvRung)
        return rung

    @property
    def scales_across_batch(self) -> bool:
        return self.inner.scales_across_batch

    def _phase_refusal(self, phase: PixelPhase) -> str | None:
        conv = wgmma_conv(phase, mask=False)
        return self.inner.unsupported_form(phase.forward) or self.inner.conv_limits(conv)

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[Config, ...]:
        return _offered(self.inner, wgmma_conv(largest_phase(problem), problem.mask))

    def _config_of(self, problem: Conv2dInputGradientProblem, phase: PixelPhase, config: Config) -> Config:
        """Phases with other windows than the largest use their own best config."""
        conv, largest = wgmma_conv(phase, problem.mask), wgmma_conv(largest_phase(problem), problem.mask)
        alike = (conv.windows.taps, conv.windows.output) == (largest.windows.taps, largest.windows.output)
        return config if alike else _offered(self.inner, conv)[0]

    def flips(self, phase: PixelPhase, config: Config) -> bool:
        return phase.mn_major is None

    def part_estimate(self, problem: Conv2dInputGradientProblem, phase: PixelPhase, config: Config) -> float:
        clocks = self.inner.conv_clocks(
            wgmma_conv(phase, problem.mask), self._config_of(problem, phase, config)
        )
        return self.card.microseconds(clocks, self.moved(problem, phase), self.inner.launches)

    def part(
        self, problem: Conv2dInputGradientProblem, phase: PixelPhase, config: Config, launches: PhaseLaunches
    ) -> Recipe:
        recipe = self.inner.conv_recipe(
            wgmma_conv(phase, problem.mask), self._config_of(problem, phase, config)
        )
        return launches.over(recipe, residual=problem.aux or "mask")


@lru_cache(maxsize=256)
def _offered(rung: WgmmaConvRung, conv: WgmmaConv) -> tuple[Config, ...]:
    return rung.conv_configs(conv)


# Predictions for fp16 at batch 256, with 2 us for the filter. Reading it in place, as `persistent` does, came later and
# should save those 2 us: 1.02 for 64to64_56_k3 with a mask, 1.03 for 64to128_56_k3s2.
RUNGS = (
    WgmmaPerPhase(
        "window",
        "conv2d's window for 64 filters: the window of a tile of dx is copied once and read in place by all taps; TMA "
        "loads the mask and scatters results, also with a stride",
        below="persistent",
        # 64to64_56_k3 with a mask: 130 us of copies and 8 of masks by im2col; 84 and 8 here.
        predicted_gain=1.45,
        convolution="window",
    ),
    WgmmaPerPhase(
        "streamed_window",
        "the same for any number of filters, 64 at a time, by conv2d's streamed_window",
        below="persistent",
        # 64to128_56_k3s2, four phases with 9 taps in all: by im2col 1568 tiles of 128x64 copy 18 k-tiles of 24 KB in
        # 440 cycles each, 54 us, and write dx by quarters of a line, 30 us more than whole lines. Windows copy half of
        # that, so reading dy four times and writing dx, 308 MB, dominates: 73 us.
        predicted_gain=1.2,
        convolution="streamed_window",
    ),
    WgmmaPerPhase(
        "wgmma_split",
        "the same by conv2d's wgmma_split, which masks and scatters results itself: fp32 accuracy by fp16 wgmma; an "
        "infinity becomes NaN",
        below="tensor_core_split",
        # 128to128_28_k3, 59 GFLOP: three fp16 products per product at 200 TFLOP/s are 295 us, against 1.0 ms.
        predicted_gain=3.3,
        convolution="wgmma_split",
    ),
)
