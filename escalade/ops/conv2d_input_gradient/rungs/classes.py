"""The input's gradient as convolutions of the output's: one for each class of pixels that a stride treats alike.

Pixel h of x meets tap r in row (h + padding - r * dilation) / stride of y, where that divides. Pixels whose h has the
same remainder by the stride, h = i * stride + offset, meet the same taps, each in a row i + (some number): theirs is a
convolution of stride 1 with the filter of these taps, backwards. Columns are the same; a stride of 1 has one class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from escalade.device.recipe import Ints
from escalade.ops.base.grid import ceil_div
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.epilogue import UNPLACED
from escalade.ops.conv2d.rungs.preparation import COPY_BYTES
from escalade.ops.conv2d.rungs.tma_windows import MNMajor, Windows


@dataclass(frozen=True)
class Axis:
    """A class along one dimension: the pixels offset, offset + stride, …, and the taps that they meet."""

    offset: int
    count: int
    """Pixels of x."""
    size: int
    """Pixels of y."""
    first: int
    """The first tap; every `step`-th from there on."""
    step: int
    taps: int
    """0: no tap meets these pixels, and their gradient is zero."""
    dilation: int
    corner: int
    """The pixel of y that the first pixel meets with the last tap, the first of the filter that runs backwards."""

    @property
    def last(self) -> int:
        """The last tap, which is the first of the filter that runs backwards."""
        return self.first + (self.taps - 1) * self.step

    @property
    def lower(self) -> int:
        """The padding that the convolution has in front."""
        return -self.corner

    @property
    def upper(self) -> int:
        """The padding that the convolution has behind."""
        return self.count - 1 + self.corner + self.dilation * (self.taps - 1) - (self.size - 1)

    @property
    def padding(self) -> int:
        """The padding on both sides alike, so that nothing is missing; of the results, those from `shift` on are
        wanted."""
        return max(self.lower, self.upper, 0)

    @property
    def shift(self) -> int:
        return self.padding - self.lower

    @property
    def padded_count(self) -> int:
        """The number of results with `padding`."""
        return self.size + 2 * self.padding - self.dilation * (self.taps - 1)


def axes(
    size: int, output_size: int, taps: int, stride: int, padding: int, dilation: int
) -> tuple[Axis, ...]:
    """The classes along one dimension, those without pixels left out."""
    common = math.gcd(stride, dilation)
    step = stride // common
    found = []
    for offset in range(min(stride, size)):
        count = ceil_div(size - offset, stride)
        meeting = (r for r in range(min(step, taps)) if (offset + padding - r * dilation) % stride == 0)
        first = next(meeting, -1)
        if first < 0:
            found.append(Axis(offset, count, output_size, 0, step, 0, 1, 0))
            continue
        met = ceil_div(taps - first, step)
        last = first + (met - 1) * step
        corner = (offset + padding - last * dilation) // stride
        found.append(Axis(offset, count, output_size, first, step, met, dilation // common, corner))
    return tuple(found)


@dataclass(frozen=True)
class PixelClass:
    forward: Conv2dProblem
    rows: Axis
    columns: Axis

    @property
    def taps(self) -> int:
        return self.rows.taps * self.columns.taps

    @property
    def convolution(self) -> Conv2dProblem:
        """The convolution of the output's gradient with the filter of this class, padded alike on both sides,
        without what is added to it."""
        f = self.forward
        return replace(
            f, channels=f.filters, height=f.output_height, width=f.output_width, filters=f.channels,
            filter_height=self.rows.taps, filter_width=self.columns.taps, stride=(1, 1),
            padding=(self.rows.padding, self.columns.padding),
            dilation=(self.rows.dilation, self.columns.dilation), residual=False,
        )  # fmt: skip

    @property
    def whole(self) -> bool:
        """Whether the results of the convolution are dx as it lies in memory."""
        f, c = self.forward, self.convolution
        return (self.rows.shift, self.columns.shift) == (0, 0) and (c.output_height, c.output_width) == (
            f.height,
            f.width,
        )

    @property
    def weight_elements(self) -> int:
        return self.forward.weight_elements // self.forward.taps * self.taps

    @property
    def sub_filter(self) -> Ints:
        """`SubFilter` of kernels/conv2d_input_gradient/flip.cu."""
        f, rows, columns = self.forward, self.rows, self.columns
        return Ints(
            (
                f.filters, f.channels, f.filter_height, f.filter_width,
                rows.first, columns.first, rows.step, columns.step, rows.taps, columns.taps,
            )
        )  # fmt: skip

    @property
    def reach(self) -> tuple[int, int]:
        """Rows and columns that the taps span, less one."""
        return self.rows.dilation * (self.rows.taps - 1), self.columns.dilation * (self.columns.taps - 1)

    @property
    def mn_major(self) -> MNMajor | None:
        """The filter of the class as it lies, where wgmma takes it that way and TMA brings it."""
        f, rows, columns = self.forward, self.rows, self.columns
        tap = f.channels * f.element_bytes
        if f.dtype not in ("fp16", "bf16") or f.layout != "nhwc" or tap % COPY_BYTES:
            return None
        row = f.filter_width * tap
        return MNMajor(
            rows.first * row + columns.first * tap,
            (columns.step * tap, rows.step * row, f.filter_height * row),
        )

    @property
    def placement(self) -> tuple[int, ...]:
        """The places of the class's pixels in dx: steps, offsets and the size of the whole, along rows and columns."""
        f = self.forward
        return *f.stride, self.rows.offset, self.columns.offset, f.height, f.width

    @property
    def windows(self) -> Windows:
        """The windows of the output's gradient that the pixels see: exactly these, whatever lies around the image."""
        f, rows, columns = self.forward, self.rows, self.columns
        return Windows(
            f.dtype, f.element_bytes, f.batch, f.filters, (f.output_height, f.output_width),
            (rows.taps, columns.taps), (1, 1), (rows.lower, columns.lower), (rows.dilation, columns.dilation),
            (rows.count, columns.count), self.mn_major,
        )  # fmt: skip

    @property
    def placed(self) -> Ints:
        """The places to which kernels for Hopper bring the pixels themselves."""
        return UNPLACED if self.forward.stride == (1, 1) else Ints(self.placement)

    @property
    def elements(self) -> int:
        """Elements of dx in the class."""
        return self.forward.batch * self.forward.channels * self.rows.count * self.columns.count

    @property
    def places(self) -> Ints:
        """`Places` of kernels/conv2d_input_gradient/place.cu."""
        source = (self.rows.padded_count, self.columns.padded_count) if self.taps else (0, 0)
        return Ints(
            (
                self.forward.batch, self.forward.channels, self.rows.count, self.columns.count, *self.placement,
                self.rows.shift, self.columns.shift, *source,
            )
        )  # fmt: skip


def pixel_classes(forward: Conv2dProblem) -> tuple[PixelClass, ...]:
    f = forward
    rows = axes(f.height, f.output_height, f.filter_height, f.stride[0], f.padding[0], f.dilation[0])
    columns = axes(f.width, f.output_width, f.filter_width, f.stride[1], f.padding[1], f.dilation[1])
    return tuple(PixelClass(f, one, other) for one in rows for other in columns)


def _together(classes: tuple[Axis, ...], taps: int) -> Axis:
    """Classes along one dimension as one: as many pixels as the largest has, from the first corner of all on, and the
    whole filter."""
    return Axis(
        0, max(one.count for one in classes), classes[0].size, 0, 1, taps, classes[0].dilation,
        min(one.corner for one in classes),
    )  # fmt: skip


@dataclass(frozen=True)
class AllClasses:
    """All classes of pixels, each met by some tap, for a launch that has the convolutions of all of them."""

    classes: tuple[PixelClass, ...]

    @staticmethod
    def of(forward: Conv2dProblem) -> AllClasses:
        """The classes of a convolution, those with the most taps first: what comes last is then short, and blocks end
        together."""
        return AllClasses(
            tuple(sorted(pixel_classes(forward), key=lambda one: one.taps, reverse=True)),
        )

    @cached_property
    def together(self) -> PixelClass:
        """What all have in common: windows to begin from, the whole filter, and places without offsets."""
        f = self.classes[0].forward
        rows = _together(tuple(one.rows for one in self.classes), f.filter_height)
        columns = _together(tuple(one.columns for one in self.classes), f.filter_width)
        return PixelClass(f, rows, columns)

    def shift(self, one: PixelClass) -> tuple[int, int]:
        """Pixels from the windows that all begin from to those of a class."""
        return one.rows.corner - self.together.rows.corner, one.columns.corner - self.together.columns.corner

    @property
    def span(self) -> int:
        """Pixels that the windows of all span along a side at most, less one."""
        return max(
            shift + far for one in self.classes for shift, far in zip(self.shift(one), one.reach, strict=True)
        )

    @property
    def struct(self) -> Ints:
        """`PixelClasses` of kernels/conv2d/pixel_classes.cuh."""
        first = self.classes[0]
        values = [first.rows.step, first.columns.step]
        for one in self.classes:
            rows, columns = one.rows, one.columns
            values += [
                rows.taps, columns.taps, rows.last, columns.last, *self.shift(one), rows.offset, columns.offset,
            ]  # fmt: skip
        return Ints(tuple(values))
