"""The gradient with Hopper's own units: conv2d's persistent kernel, which masks and places its results itself, class by
class of pixels or all classes in one launch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from escalade.device.architecture import WITH_WGMMA
from escalade.device.recipe import KernelCall, Recipe, Workspace
from escalade.ops.base.card import Card
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d import Conv2d, Conv2dProblem
from escalade.ops.conv2d.rungs.activation_costs import activation_cost
from escalade.ops.conv2d.rungs.epilogue import Epilogue
from escalade.ops.conv2d.rungs.preparation import COPY_BYTES, rounded
from escalade.ops.conv2d.rungs.sm90_persistent import PersistentConfig, product
from escalade.ops.conv2d.rungs.tma_windows import MOST_STRIDE, MOST_TAPS, ROW_BYTES
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.rungs.classes import AllClasses, PixelClass, pixel_classes
from escalade.ops.conv2d_input_gradient.rungs.duality import (
    ByClasses,
    ClassLaunches,
    flip,
    largest_class,
    too_many_classes,
)

DTYPES = ("fp16", "bf16")
STORED = ("overlapped_store", "swapped_operands")
"""Rungs of conv2d whose results leave through shared memory, and masks come that way: by TMA, which walks
over images in steps of up to `MOST_STRIDE`."""
SPLIT = ("cluster_split_k",)
"""Rungs of conv2d whose blocks share sums; with a stride, a class may have less to sum up than there are blocks."""


APART = 1.2
"""How much longer a class takes whose pixels lie apart: an H200 took 1.2 to 1.35 times the estimate for filters of 3x3
with a stride of 2 at batch 256."""
MOST_SHARED_SUMS = 64 * 128
"""Sums of a warpgroup at most where blocks share those of several classes: places take the registers of more."""


@dataclass(frozen=True)
class Persistent(ByClasses[PersistentConfig]):
    def _class_refusal(self, one: PixelClass) -> str | None:
        f = one.forward
        if f.dtype not in DTYPES:
            return f"{self.name} takes {' and '.join(DTYPES)}, not {f.dtype}"
        if f.filters * f.element_bytes % COPY_BYTES:
            return f"{self.name} copies {COPY_BYTES} bytes at once; {f.filters} filters are no multiple"
        return super()._class_refusal(one) or one.windows.unsupported(self.name)

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[PersistentConfig, ...]:
        largest = largest_class(problem)
        convolution = largest.convolution
        stride = max(problem.forward.stride)
        names = (STORED if stride <= MOST_STRIDE else ()) + (SPLIT if stride == 1 else ())
        rungs = [self.inner, *(Conv2d.ladder.rung(name).on(self.card) for name in names)]
        offered = dict.fromkeys(config for rung in rungs for config in rung.configs(convolution))
        whole_lines = [config for config in offered if stride == 1 and _writes_lines(config)]

        def clocks(config: PersistentConfig) -> float:
            return _clocks(largest, config, self.card) + self.card.rates.clock * self.flip_estimate(
                problem, config
            )

        return tuple(sorted(whole_lines or offered, key=clocks))

    def flips(self, one: PixelClass, config: PersistentConfig) -> bool:
        return one.mn_major is None or not config.takes_mn_major

    def part_estimate(
        self, problem: Conv2dInputGradientProblem, one: PixelClass, config: PersistentConfig
    ) -> float:
        apart = 1.0 if one.whole else APART
        return apart * self.card.microseconds(_clocks(one, config, self.card), self.moved(problem, one))

    def part(
        self,
        problem: Conv2dInputGradientProblem,
        one: PixelClass,
        config: PersistentConfig,
        launches: ClassLaunches,
    ) -> Recipe:
        f = problem.forward
        windows = replace(one.windows, mn_major=None) if self.flips(one, config) else one.windows
        call = product(
            windows,
            f.channels,
            config,
            replace(Epilogue.of(f), mask=problem.mask),
            self.card,
            x="gradient",
            weight=launches.weight,
            residual=problem.aux or "mask",
            placement=one.placed,
            lane=launches.lane,
        )
        return Recipe((call,))


def _clocks(one: PixelClass, config: Config, card: Card) -> float:
    assert isinstance(config, PersistentConfig)
    return config.cost(one.windows.pixels, one.forward.channels, one.windows.k_tiles, card)


def _writes_lines(config: Config) -> bool:
    """Whether results leave as whole lines: quarters of a line straight from registers take half as long again to
    write."""
    return isinstance(config, PersistentConfig) and (config.buffers > 0 or config.parts > 1)


@dataclass(frozen=True)
class OneLaunch(Rung[Conv2dInputGradientProblem, PersistentConfig]):
    """All classes of pixels by one launch, whose tiles belong to a class each."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return WITH_WGMMA

    def supports(self, problem: Conv2dInputGradientProblem) -> str | None:
        f = problem.forward
        if f.dtype not in (*DTYPES, "tf32"):
            return f"{self.name} takes {', '.join(DTYPES)} and tf32, not {f.dtype}"
        if f.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {f.layout}"
        if f.filters * f.element_bytes % COPY_BYTES:
            return f"{self.name} copies {COPY_BYTES} bytes at once; {f.filters} filters are no multiple"
        if f.groups != 1:
            return f"{self.name} takes groups=1, not {f.groups}; direct takes any"
        sentence = too_many_classes(self.name, f)
        if sentence is not None:
            return sentence
        classes = pixel_classes(f)
        if len(classes) == 1:
            return f"{self.name} is for several classes of pixels; with one, persistent has one launch too"
        if not all(one.taps for one in classes):
            return f"{self.name} convolves, but no tap of the filter meets some of the pixels"
        if f.batch * f.height * f.width >= 2**31:
            return f"{self.name} counts pixels in 32 bits; {f.batch * f.height * f.width} are too many"
        every = AllClasses.of(f)
        if every.span >= MOST_TAPS:
            return f"{self.name} takes windows of {MOST_TAPS} pixels at most, not {every.span + 1}"
        sentence = every.together.windows.unsupported(self.name)
        if sentence is None and not self.configs(problem):
            return f"no tile of {self.name} suits {problem.name}"
        return sentence

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[PersistentConfig, ...]:
        """The configs of conv2d for as many tiles as all classes have; blocks that share sums have a k-tile each in every
        class."""
        every = AllClasses.of(problem.forward)
        most, least = (_as_many(every, every.classes[at]) for at in (0, -1))
        stored = not problem.aux or max(problem.forward.stride) <= MOST_STRIDE
        asked = {"persistent": most, **dict.fromkeys(STORED if stored else (), most), SPLIT[0]: least}
        offered = dict.fromkeys(
            config
            for name, convolution in asked.items()
            for config in Conv2d.ladder.rung(name).on(self.card).configs(convolution)
            if _has_registers(config)
        )
        return tuple(sorted(offered, key=lambda config: self.estimate(problem, config)))

    def _flips(self, every: AllClasses, config: PersistentConfig) -> bool:
        return every.together.mn_major is None or not config.takes_mn_major

    def estimate(self, problem: Conv2dInputGradientProblem, config: PersistentConfig) -> float:
        f, every = problem.forward, AllClasses.of(problem.forward)
        k_tiles = [one.windows.k_tiles for one in every.classes]
        pixels, count = every.together.windows.pixels, len(k_tiles)
        # With a tile for each block, those with the most taps take longest; with several, all have as many of each.
        alone = config.tiles(pixels, f.channels, count) <= self.card.clusters_at_once(config.splits)
        is_thin = f.filters * f.element_bytes % ROW_BYTES != 0
        clocks = config.cost(
            pixels, f.channels, max(k_tiles) if alone else ceil_div(sum(k_tiles), count), self.card,
            thin=ceil_div(f.taps, count) if is_thin else 0, special=activation_cost(f.activation)[1], classes=count,
        )  # fmt: skip
        flipped = 2 * f.element_bytes * f.weight_elements
        flips = self.card.microseconds(0, flipped) if self._flips(every, config) else 0.0
        return flips + APART * self.card.microseconds(clocks, problem.bytes)

    def recipe(self, problem: Conv2dInputGradientProblem, config: PersistentConfig) -> Recipe:
        f, every = problem.forward, AllClasses.of(problem.forward)
        windows, weight = every.together.windows, "weight"
        steps: tuple[KernelCall, ...] = ()
        rooms: tuple[Workspace, ...] = ()
        if self._flips(every, config):
            windows, weight = replace(windows, mn_major=None), "flipped"
            steps = (flip(every.together, weight, 0),)
            rooms = (Workspace(weight, f.element_bytes * f.weight_elements),)
        if f.dtype == "tf32":
            conversion = rounded(weight, f.channels * f.taps, f.filters)
            weight = conversion.name
            steps, rooms = (*steps, conversion.step), (*rooms, conversion.workspace)
        call = product(
            windows,
            f.channels,
            config,
            replace(Epilogue.of(f), mask=problem.mask),
            self.card,
            x="gradient",
            weight=weight,
            residual=problem.aux or "mask",
            placement=every.together.placed,
            classes=every.struct,
        )
        return Recipe((*steps, call), rooms)

    def tolerance(self, problem: Conv2dInputGradientProblem, peer_error: float) -> float:
        """What the convolution's rung rounds beyond a plain sum is allowed here too."""
        inner = Conv2d.ladder.rung("persistent")
        return max(
            super().tolerance(problem, peer_error),
            inner.tolerance(largest_class(problem).convolution, peer_error),
        )


def _has_registers(config: Config) -> bool:
    assert isinstance(config, PersistentConfig)
    return config.parts == 1 or math.prod(config.warpgroup_tile) <= MOST_SHARED_SUMS


def _as_many(every: AllClasses, one: PixelClass) -> Conv2dProblem:
    """A convolution with the taps of a class and the tiles of all: as many images for each of them."""
    height, width = (size + far for size, far in zip(every.together.windows.output, one.reach, strict=True))
    return replace(
        one.convolution,
        batch=one.forward.batch * len(every.classes),
        height=height,
        width=width,
        padding=(0, 0),
    )


PERSISTENT = Persistent(
    "persistent",
    "conv2d's persistent kernel for Hopper, which reads the filter as it lies, and whose sums go through the mask and "
    "straight to their places in dx: one launch for each class of pixels",
    below="tma_wgmma",
    # 128to128_28_k3 at batch 256 with a mask: reading y and the mask and writing y again, 154 MB, takes 37 us more than
    # the 93 of product and filter; the mask now comes under the products. The filter read as it lies, which wgmma takes
    # in 16 bits, came later and should save the 2 us of turning it around: 1.02 more.
    predicted_gain=1.35,
    convolution="persistent",
)

# For 64to128_128_k2s2p0_b16_bias in fp16, 4.3 GFLOP and 50 MB: each of four launches reads the gradient, 17 MB, and has
# a beginning and an end of 1.5 us and 2500 cycles: 36 us by estimate. One launch reads it once: 12 us at a copy's rate,
# and 4 to begin, to end and for pixels apart. Layers of a few images gain what the launches take: of
# 128to256_16_k4s2p1_b8, 1 us of bytes and products, 24 us become 6.
ONE_LAUNCH = OneLaunch(
    "one_launch",
    "the classes of pixels of a stride in one launch: tiles belong to a class, with taps, windows and places of its "
    "own, and what they read is still in L2 for the next class",
    below="persistent",
    predicted_gain=2.2,
)
