"""The gradient with Hopper's own units: conv2d's persistent kernel, which masks and places its results itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from escalade.device.recipe import Recipe
from escalade.ops.base.card import Card
from escalade.ops.base.rung import Config
from escalade.ops.conv2d import Conv2d
from escalade.ops.conv2d.rungs.epilogue import Epilogue
from escalade.ops.conv2d.rungs.preparation import COPY_BYTES
from escalade.ops.conv2d.rungs.sm90_persistent import PersistentConfig, product
from escalade.ops.conv2d.rungs.tma_windows import MOST_STRIDE
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.rungs.classes import PixelClass
from escalade.ops.conv2d_input_gradient.rungs.duality import ByClasses, ClassLaunches, largest_class

DTYPES = ("fp16", "bf16")
STORED = ("overlapped_store", "swapped_operands")
"""Rungs of conv2d whose results leave through shared memory, and masks come that way: by TMA, which walks
over images in steps of up to `MOST_STRIDE`."""
SPLIT = ("cluster_split_k",)
"""Rungs of conv2d whose blocks share sums; with a stride, a class may have less to sum up than there are blocks."""


APART = 1.2
"""How much longer a class takes whose pixels lie apart: an H200 took 1.2 to 1.35 times the estimate for filters of 3x3
with a stride of 2 at batch 256."""


@dataclass(frozen=True)
class Persistent(ByClasses):
    def _class_refusal(self, one: PixelClass) -> str | None:
        f = one.forward
        if f.dtype not in DTYPES:
            return f"{self.name} takes {' and '.join(DTYPES)}, not {f.dtype}"
        if f.filters * f.element_bytes % COPY_BYTES:
            return f"{self.name} copies {COPY_BYTES} bytes at once; {f.filters} filters are no multiple"
        return super()._class_refusal(one) or one.windows.unsupported(self.name)

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[Config, ...]:
        largest = largest_class(problem)
        convolution = largest.convolution
        stride = max(problem.forward.stride)
        names = (STORED if stride <= MOST_STRIDE else ()) + (SPLIT if stride == 1 else ())
        rungs = [self.inner, *(Conv2d.ladder.rung(name).on(self.card) for name in names)]
        offered = dict.fromkeys(config for rung in rungs for config in rung.configs(convolution))
        whole_lines = [config for config in offered if stride == 1 and _writes_lines(config)]

        def clocks(config: Config) -> float:
            return _clocks(largest, config, self.card) + self.card.rates.clock * self.flip_estimate(
                problem, config
            )

        return tuple(sorted(whole_lines or offered, key=clocks))

    def flips(self, one: PixelClass, config: Config) -> bool:
        assert isinstance(config, PersistentConfig)
        return one.mn_major is None or not config.takes_mn_major

    def part_estimate(self, problem: Conv2dInputGradientProblem, one: PixelClass, config: Config) -> float:
        apart = 1.0 if one.whole else APART
        return apart * self.card.microseconds(_clocks(one, config, self.card), self.moved(problem, one))

    def part(
        self, problem: Conv2dInputGradientProblem, one: PixelClass, config: Config, launches: ClassLaunches
    ) -> Recipe:
        assert isinstance(config, PersistentConfig)
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
            residual=problem.companion or "mask",
            placement=one.placed,
            lane=launches.lane,
        )
        return Recipe((call,))


def _clocks(one: PixelClass, config: Config, card: Card) -> float:
    assert isinstance(config, PersistentConfig)
    return config.cost(one.windows.pixels, one.forward.channels, one.windows.slabs, card)


def _writes_lines(config: Config) -> bool:
    """Whether results leave as whole lines: quarters of a line straight from registers take half as long again to
    write."""
    return isinstance(config, PersistentConfig) and (config.buffers > 0 or config.parts > 1)


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
