"""The gradient with Hopper's own units: conv2d's persistent kernel, which masks and places its results itself."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.recipe import Recipe
from escalade.ops.conv2d import Conv2d
from escalade.ops.conv2d.hopper_persistent import UNPLACED, Ends, PersistentConfig, placed, product
from escalade.ops.conv2d.hopper_windows import Windows
from escalade.ops.conv2d.prepare import COPY_BYTES
from escalade.ops.conv2d_input_gradient.classes import PixelClass
from escalade.ops.conv2d_input_gradient.duality import ByClasses, largest_class
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.ladder import Config

DTYPES = ("fp16", "bf16")
WHOLE_IMAGES = ("overlapped_store", "swapped_operands", "cluster_split_k")
"""Rungs of conv2d with configs for results that lie side by side: with a stride they do not, and some classes may have
less to sum up than blocks of a cluster would share."""


@dataclass(frozen=True)
class Persistent(ByClasses):
    def _class_refusal(self, one: PixelClass) -> str | None:
        f = one.forward
        if f.dtype not in DTYPES:
            return f"{self.name} takes {' and '.join(DTYPES)}, not {f.dtype}"
        if f.filters * f.element_bytes % COPY_BYTES:
            return f"{self.name} copies {COPY_BYTES} bytes at once; {f.filters} filters are no multiple"
        return super()._class_refusal(one) or _windows(one).unsupported(self.name)

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[Config, ...]:
        convolution = largest_class(problem).convolution
        windows = _windows(largest_class(problem))
        rungs = [self.inner]
        if problem.forward.stride == (1, 1):
            rungs += [Conv2d.ladder.rung(name) for name in WHOLE_IMAGES]
        offered = dict.fromkeys(config for rung in rungs for config in rung.configs(convolution))

        def cost(config: Config) -> float:
            assert isinstance(config, PersistentConfig)
            return config.cost(windows.pixels, convolution.filters, windows.slabs)

        return tuple(sorted(offered, key=cost))

    def part(
        self,
        problem: Conv2dInputGradientProblem,
        one: PixelClass,
        config: Config,
        number: int,
        flipped: str,
        lane: int,
    ) -> Recipe:
        assert isinstance(config, PersistentConfig)
        f = problem.forward
        offset = (one.rows.offset, one.columns.offset)
        call = product(
            _windows(one),
            f.channels,
            config,
            Ends(f.dtype, mask=problem.mask),
            x="gradient",
            weight=flipped,
            residual="mask",
            placement=UNPLACED if f.stride == (1, 1) else placed(f.stride, offset, (f.height, f.width)),
            lane=lane,
        )
        return Recipe((call,))


def _windows(one: PixelClass) -> Windows:
    """Of the output's gradient that the pixels of a class see: exactly these, whatever lies around the image."""
    f, rows, columns = one.forward, one.rows, one.columns
    return Windows(
        f.dtype, f.element_bytes, f.batch, f.filters, (f.output_height, f.output_width),
        (rows.taps, columns.taps), (1, 1), (rows.lower, columns.lower), (rows.dilation, columns.dilation),
        (rows.count, columns.count),
    )  # fmt: skip


PERSISTENT = Persistent(
    "persistent",
    "conv2d's persistent kernel for Hopper, whose sums go through the mask and straight to their places in dx: one "
    "launch for each class of pixels",
    below="tma_wgmma",
    # 128to128_28_k3 at batch 256 with a mask: reading y and the mask and writing y again, 154 MB, takes 37 us more than
    # the 93 of product and filter; the mask now comes under the products.
    predicted_gain=1.35,
    convolution="persistent",
)
