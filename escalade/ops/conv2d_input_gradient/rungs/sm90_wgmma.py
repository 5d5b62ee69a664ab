"""Input gradients by wgmma kernels of conv2d that mask and scatter their results: per sub-pixel phase at any stride, or
all phases in one launch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

from escalade.device.architecture import WITH_WGMMA
from escalade.device.recipe import Buffer, KernelCall, Recipe, Workspace
from escalade.ops.base.card import Card
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config
from escalade.ops.batch_norm_backward import merge_sums
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from escalade.ops.conv2d.rungs.epilogue import activation_cost
from escalade.ops.conv2d.rungs.preparation import COPY_BYTES, rounded
from escalade.ops.conv2d.rungs.sm90_persistent import PersistentConfig, partial_sums, product
from escalade.ops.conv2d.rungs.wgmma_conv import MOST_STRIDE, MOST_TAPS, ROW_BYTES, WgmmaConv, WgmmaConvRung
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.rungs.duality import (
    PerPhase,
    PhaseLaunches,
    flip,
    largest_phase,
    too_many_phases,
)
from escalade.ops.conv2d_input_gradient.rungs.phases import AllPhases, PixelPhase, pixel_phases, wgmma_conv
from escalade.ops.conv2d_input_gradient.rungs.rung import InputGradientRung


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


DTYPES = ("fp16", "bf16")
STORED = ("overlapped_store", "swapped_operands")
"""Rungs of conv2d that stage results and masks in shared memory for TMA, whose traversal stride is at most
`MOST_STRIDE`."""
SPLIT = ("cluster_split_k",)
"""Split-K rungs of conv2d; with a stride, a phase may have fewer k-tiles than CTAs."""


NORM_CYCLES_PER_RESULT = {"none": 0.1, "x": 0.22, "output": 0.35}
"""Extra cycles per result and SM for the sums of a normalization, by its mask: measured on 256to64_56, on 64to256_56
and 128to128_28_k3, and on 256to64_56 and 1024to256_14, at batch 64."""
NORM_PER_PANEL = {"none": 0.0, "x": 0.07, "output": 0.2}
"""Extra time of such a launch per staging tile of a warpgroup beyond the first: loads for the sums of a tile delay the
stores of the one before. Fitted on seven layers of ResNet-50 at batch 64; 192x64 took 1.2 times as long as 64x64."""
APART = 1.2
"""Factor for a phase with non-adjacent pixels: an H200 took 1.2 to 1.35 times the estimate for 3x3 filters with stride
2 at batch 256."""
MOST_MASKED_SUMS = 64 * 192
"""Largest warpgroup tile with the mask of a normalization's output: its values need registers, too."""
MOST_SPLIT_SUMS = 64 * 128
"""Largest warpgroup tile with split-K over several phases: placements need registers."""


@dataclass(frozen=True)
class Persistent(PerPhase[PersistentConfig]):
    dtypes: tuple[str, ...] = field(default=DTYPES, kw_only=True)
    supports_norm = True

    def limits(self, problem: Conv2dInputGradientProblem) -> str | None:
        if problem.norm and not all(phase.whole for phase in pixel_phases(problem.forward)):
            return f"{self.name} computes sums for a normalization with one phase, not with several"
        reason = super().limits(problem)
        if reason is None and not self.configs(problem):
            return f"{self.name} has no tile for {problem.name}"
        return reason

    def _phase_refusal(self, phase: PixelPhase) -> str | None:
        f = phase.forward
        if f.filters * f.element_bytes % COPY_BYTES:
            return f"{self.name} takes filters in multiples of {COPY_BYTES} bytes, not {f.filters}"
        return super()._phase_refusal(phase) or phase.windows.unsupported(self.name)

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[PersistentConfig, ...]:
        largest = largest_phase(problem)
        convolution = largest.convolution
        stride = max(problem.forward.stride)
        names = (STORED if stride <= MOST_STRIDE else ()) + (SPLIT if stride == 1 else ())
        rungs = [self.inner, *(Conv2dOperation.ladder.rung(name).on(self.card) for name in names)]
        offered = dict.fromkeys(config for rung in rungs for config in rung.configs(convolution))
        whole_lines = [config for config in offered if stride == 1 and _writes_lines(config)]

        def clocks(config: PersistentConfig) -> float:
            return _clocks(largest, config, self.card) + self.card.rates.clock * self.flip_estimate(
                problem, config
            )

        found = sorted(whole_lines or offered, key=clocks)
        if problem.norm:
            found = [config for config in found if self._sums(problem, config)]
        return tuple(found)

    def _sums(self, problem: Conv2dInputGradientProblem, config: PersistentConfig) -> bool:
        """Return True if the kernel can sum results over pixels: all tiles of a CTA have the same filters."""
        if problem.norm == "output" and math.prod(config.warpgroup_tile) > MOST_MASKED_SUMS:
            return False
        staged = config.buffers > 0 and config.cluster == 1 and config.parts == 1
        return staged and ceil_div(problem.forward.channels, config.filters) <= self.card.multiprocessors

    def flips(self, phase: PixelPhase, config: PersistentConfig) -> bool:
        return phase.mn_major is None or not config.supports_mn_major

    def part_estimate(
        self, problem: Conv2dInputGradientProblem, phase: PixelPhase, config: PersistentConfig
    ) -> float:
        apart = 1.0 if phase.whole else APART
        clocks, moved = _clocks(phase, config, self.card), self.moved(problem, phase)
        if not problem.norm:
            return apart * self.card.microseconds(clocks, moved)
        results = phase.elements / self.card.multiprocessors
        sums = NORM_CYCLES_PER_RESULT[problem.norm] * results / self.card.rates.clock
        uneven = 1 + NORM_PER_PANEL[problem.norm] * (config.panels - 1)
        return uneven * self.card.microseconds(clocks, moved) + self.card.microseconds(0, 0) + sums

    def part(
        self,
        problem: Conv2dInputGradientProblem,
        phase: PixelPhase,
        config: PersistentConfig,
        launches: PhaseLaunches,
    ) -> Recipe:
        conv, channels = wgmma_conv(phase, problem.mask), problem.forward.channels
        if self.flips(phase, config):
            conv = replace(conv, windows=replace(conv.windows, mn_major=None))
        call = product(conv, config, self.card, norm=problem.norm)
        recipe = launches.over(Recipe((call,)), residual=problem.aux or "mask")
        if not problem.norm:
            return recipe
        merge, partial = merge_sums(channels, partial_sums(call, channels, config), "norm_rstd")
        return Recipe((*recipe.steps, merge), (partial,))


def _clocks(phase: PixelPhase, config: Config, card: Card) -> float:
    assert isinstance(config, PersistentConfig)
    return config.cost(phase.windows.pixels, phase.forward.channels, phase.windows.k_tiles, card)


def _writes_lines(config: Config) -> bool:
    """Return True if results are stored as whole lines; quarters of a line from registers take 1.5 times as long."""
    return isinstance(config, PersistentConfig) and (config.buffers > 0 or config.parts > 1)


@dataclass(frozen=True)
class OneLaunch(InputGradientRung[PersistentConfig]):
    """All sub-pixel phases in one launch; each tile belongs to one phase."""

    dtypes: tuple[str, ...] = ("fp16", "bf16", "tf32")
    layouts: tuple[str, ...] = ("nhwc",)

    architectures = WITH_WGMMA

    def limits(self, problem: Conv2dInputGradientProblem) -> str | None:
        f = problem.forward
        if f.filters * f.element_bytes % COPY_BYTES:
            return f"{self.name} takes filters in multiples of {COPY_BYTES} bytes, not {f.filters}"
        if reason := too_many_phases(self.name, f):
            return reason
        phases = pixel_phases(f)
        if len(phases) == 1:
            return f"{self.name} needs several sub-pixel phases; persistent takes one"
        if not all(phase.taps for phase in phases):
            return f"{self.name} needs a tap for every pixel; some have none"
        if f.batch * f.height * f.width >= 2**31:
            return f"{self.name} counts pixels in 32 bits, not {f.batch * f.height * f.width}"
        all_phases = AllPhases.of(f)
        if all_phases.span >= MOST_TAPS:
            return f"{self.name} takes windows of {MOST_TAPS} pixels at most, not {all_phases.span + 1}"
        reason = all_phases.together.windows.unsupported(self.name)
        if reason is None and not self.configs(problem):
            return f"{self.name} has no tile for {problem.name}"
        return reason

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[PersistentConfig, ...]:
        """Return conv2d's configs for the tiles of all phases; with split-K, every CTA has a k-tile in every phase."""
        all_phases = AllPhases.of(problem.forward)
        most, least = (_as_many(all_phases, all_phases.phases[at]) for at in (0, -1))
        stored = not problem.aux or max(problem.forward.stride) <= MOST_STRIDE
        asked = {"persistent": most, **dict.fromkeys(STORED if stored else (), most), SPLIT[0]: least}
        offered = dict.fromkeys(
            config
            for name, convolution in asked.items()
            for config in Conv2dOperation.ladder.rung(name).on(self.card).configs(convolution)
            if _has_registers(config)
        )
        return tuple(sorted(offered, key=lambda config: self.estimate(problem, config)))

    def _flips(self, all_phases: AllPhases, config: PersistentConfig) -> bool:
        return all_phases.together.mn_major is None or not config.supports_mn_major

    def estimate(self, problem: Conv2dInputGradientProblem, config: PersistentConfig) -> float:
        f, all_phases = problem.forward, AllPhases.of(problem.forward)
        k_tiles = [phase.windows.k_tiles for phase in all_phases.phases]
        pixels, count = all_phases.together.windows.pixels, len(k_tiles)
        # With one tile per CTA, the phase with the most taps decides; with several, every CTA has tiles of all phases.
        alone = config.tiles(pixels, f.channels, count) <= self.card.max_active_clusters(config.splits)
        is_thin = f.filters * f.element_bytes % ROW_BYTES != 0
        clocks = config.cost(
            pixels, f.channels, max(k_tiles) if alone else ceil_div(sum(k_tiles), count), self.card,
            thin=ceil_div(f.taps, count) if is_thin else 0, special=activation_cost(f.activation)[1], phases=count,
        )  # fmt: skip
        flipped = 2 * f.element_bytes * f.weight_elements
        flips = self.card.microseconds(0, flipped) if self._flips(all_phases, config) else 0.0
        return flips + APART * self.card.microseconds(clocks, problem.bytes)

    def recipe(self, problem: Conv2dInputGradientProblem, config: PersistentConfig) -> Recipe:
        f, all_phases = problem.forward, AllPhases.of(problem.forward)
        conv, weight = wgmma_conv(all_phases.together, problem.mask), "weight"
        steps: tuple[KernelCall, ...] = ()
        workspaces: tuple[Workspace, ...] = ()
        if self._flips(all_phases, config):
            conv, weight = replace(conv, windows=replace(conv.windows, mn_major=None)), "flipped"
            steps = (flip(all_phases.together, weight, 0),)
            workspaces = (Workspace(weight, f.element_bytes * f.weight_elements),)
        if f.dtype == "tf32":
            conversion = rounded(weight, f.channels * f.taps, f.filters)
            weight = conversion.name
            steps, workspaces = (*steps, conversion.step), (*workspaces, conversion.workspace)
        tensors = {"x": "gradient", "weight": weight, "residual": problem.aux or "mask"}
        products = Recipe((product(conv, config, self.card, phases=all_phases.struct),)).remap(
            {name: Buffer(buffer) for name, buffer in tensors.items()}
        )
        return Recipe((*steps, *products.steps), workspaces)

    def tolerance(self, problem: Conv2dInputGradientProblem, peer_error: float) -> float:
        """At least that of the convolution's rung."""
        inner = Conv2dOperation.ladder.rung("persistent")
        return max(
            super().tolerance(problem, peer_error),
            inner.tolerance(largest_phase(problem).convolution, peer_error),
        )


def _has_registers(config: Config) -> bool:
    assert isinstance(config, PersistentConfig)
    return config.parts == 1 or math.prod(config.warpgroup_tile) <= MOST_SPLIT_SUMS


def _as_many(all_phases: AllPhases, phase: PixelPhase) -> Conv2dProblem:
    """Return a convolution with the taps of one phase and the tiles of all: a larger batch."""
    height, width = (
        size + far for size, far in zip(all_phases.together.windows.output, phase.reach, strict=True)
    )
    return replace(
        phase.convolution,
        batch=phase.forward.batch * len(all_phases.phases),
        height=height,
        width=width,
        padding=(0, 0),
    )


PERSISTENT = Persistent(
    "persistent",
    "conv2d's persistent kernel, which reads the filter in place, applies the mask and scatters results to dx: one "
    "launch per sub-pixel phase",
    below="tma_wgmma",
    # 128to128_28_k3 at batch 256 with a mask: reading y and the mask and writing y again, 154 MB, takes 37 us more than
    # the 93 of product and filter; now the mask is loaded during the products. Reading the filter in place (16-bit
    # wgmma) came later and should save the 2 us of flipping it: 1.02 more.
    predicted_gain=1.35,
    convolution="persistent",
)

# 64to128_128_k2s2p0_b16_bias in fp16, 4.3 GFLOP and 50 MB: each of four launches reads dy, 17 MB, and takes 1.5 us and
# 2500 cycles to start and end: 36 us by estimate. One launch reads it once: 12 us at copy bandwidth, plus 4 to start,
# end and scatter. Small batches gain the launch overhead: 128to256_16_k4s2p1_b8, 1 us of traffic and products, drops
# from 24 us to 6.
ONE_LAUNCH = OneLaunch(
    "one_launch",
    "all sub-pixel phases of a stride in one launch: each tile belongs to a phase with its own taps, windows and "
    "placement, and finds its inputs in L2 after the previous phase",
    below="persistent",
    predicted_gain=2.2,
)
