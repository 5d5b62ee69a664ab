"""The input gradient as stride-1 convolutions of dy, one per sub-pixel phase of the stride.

Pixel h of x meets tap r in row (h + padding - r * dilation) / stride of y, if that divides. Pixels with the same
remainder, h = i * stride + offset, meet the same taps, each in a row i + constant. So they are a stride-1 convolution
with these taps in reverse. Columns are alike; stride 1 has one phase.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from escalade.device.recipe import Ints
from escalade.ops.base.grid import ceil_div
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.epilogue import UNPLACED, Epilogue
from escalade.ops.conv2d.rungs.preparation import COPY_BYTES
from escalade.ops.conv2d.rungs.wgmma_conv import Frames, MNMajor, WgmmaConv, Windows


@dataclass(frozen=True)
class Axis:
    """A phase along one dimension: the pixels offset, offset + stride, …, and their taps."""

    offset: int
    count: int
    """Pixels of x."""
    size: int
    """Pixels of y."""
    first: int
    """First tap; then every `step`-th."""
    step: int
    taps: int
    """0 if these pixels have no tap; their gradient is zero."""
    dilation: int
    corner: int
    """Pixel of y at which the first pixel meets the last tap, which is the first of the reversed filter."""

    @property
    def last(self) -> int:
        """Last tap: the first of the reversed filter."""
        return self.first + (self.taps - 1) * self.step

    @property
    def lower(self) -> int:
        """Padding before the image."""
        return -self.corner

    @property
    def upper(self) -> int:
        """Padding after the image."""
        return self.count - 1 + self.corner + self.dilation * (self.taps - 1) - (self.size - 1)

    @property
    def padding(self) -> int:
        """Symmetric padding that covers both sides; the wanted results start at `shift`."""
        return max(self.lower, self.upper, 0)

    @property
    def shift(self) -> int:
        return self.padding - self.lower

    @property
    def padded_count(self) -> int:
        """Number of results with `padding`."""
        return self.size + 2 * self.padding - self.dilation * (self.taps - 1)


def axes(
    size: int, output_size: int, taps: int, stride: int, padding: int, dilation: int
) -> tuple[Axis, ...]:
    """Return the phases along one dimension, without empty ones."""
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
class PixelPhase:
    forward: Conv2dProblem
    rows: Axis
    columns: Axis
    frames: Axis | None = None
    """All frames of a volume; None for images. Volumes have phases only if their frame stride is 1."""

    @property
    def taps(self) -> int:
        return self._weight_rows * self.columns.taps

    @property
    def _weight_rows(self) -> int:
        """Rows of taps in all frames of the filter."""
        return self.rows.taps * (self.frames.taps if self.frames else 1)

    @cached_property
    def convolution(self) -> Conv2dProblem:
        """Convolution of dy with the filter of this phase, with symmetric padding and without a residual."""
        f = self.forward
        return replace(
            f, channels=f.filters, height=f.output_height, width=f.output_width, filters=f.channels,
            filter_height=self.rows.taps, filter_width=self.columns.taps, stride=(1, 1),
            padding=(self.rows.padding, self.columns.padding),
            dilation=(self.rows.dilation, self.columns.dilation), residual=False, frames=f.output_frames,
            frame_padding=self.frames.padding if self.frames else 0,
        )  # fmt: skip

    @property
    def whole(self) -> bool:
        """True if the results of the convolution are dx itself."""
        f, c = self.forward, self.convolution
        shifts = self.rows.shift, self.columns.shift, self.frames.shift if self.frames else 0
        sizes = c.output_height, c.output_width, c.output_frames
        return not any(shifts) and sizes == (f.height, f.width, f.frames)

    @property
    def weight_elements(self) -> int:
        return self.forward.weight_elements // self.forward.taps * self.taps

    @property
    def sub_filter(self) -> Ints:
        """`SubFilter` of kernels/conv2d_input_gradient/flip.cu."""
        f, rows, columns = self.forward, self.rows, self.columns
        return Ints(
            (
                f.filters, f.channels, f.weight_rows, f.filter_width,
                rows.first, columns.first, rows.step, columns.step, self._weight_rows, columns.taps,
            )
        )  # fmt: skip

    @property
    def reach(self) -> tuple[int, int]:
        """Rows and columns spanned by the taps, minus one."""
        return self.rows.dilation * (self.rows.taps - 1), self.columns.dilation * (self.columns.taps - 1)

    @property
    def mn_major(self) -> MNMajor | None:
        """Filter of the phase in place, if wgmma and TMA support it as MN-major."""
        f, rows, columns = self.forward, self.rows, self.columns
        tap = f.channels * f.element_bytes
        if f.dtype not in ("fp16", "bf16") or f.layout != "nhwc" or tap % COPY_BYTES:
            return None
        row = f.filter_width * tap
        return MNMajor(
            rows.first * row + columns.first * tap,
            (columns.step * tap, rows.step * row, f.weight_rows * row),
        )

    @property
    def placement(self) -> tuple[int, ...]:
        """Location of the pixels in dx: row and column step and offset, height and width."""
        f = self.forward
        return *f.stride, self.rows.offset, self.columns.offset, f.height, f.width

    @cached_property
    def windows(self) -> Windows:
        """Windows of dy that the pixels read, with exact padding."""
        f, rows, columns, frames = self.forward, self.rows, self.columns, self.frames
        return Windows(
            f.dtype, f.element_bytes, f.batch, f.filters, (f.output_height, f.output_width),
            (rows.taps, columns.taps), (1, 1), (rows.lower, columns.lower), (rows.dilation, columns.dilation),
            (rows.count, columns.count), self.mn_major,
            frames=(
                Frames(frames.size, frames.taps, 1, frames.lower, frames.dilation, frames.count) if frames else None
            ),
        )  # fmt: skip

    @property
    def placed(self) -> Ints:
        """`Placement` for kernels on Hopper that scatter the pixels themselves."""
        return UNPLACED if self.forward.stride == (1, 1) else Ints(self.placement)

    @property
    def elements(self) -> int:
        """Elements of dx."""
        return self.forward.images * self.forward.channels * self.rows.count * self.columns.count

    @property
    def places(self) -> Ints:
        """`Places` of kernels/conv2d_input_gradient/place.cu."""
        source = (self.rows.padded_count, self.columns.padded_count) if self.taps else (0, 0)
        return Ints(
            (
                self.forward.images, self.forward.channels, self.rows.count, self.columns.count, *self.placement,
                self.rows.shift, self.columns.shift, *source,
            )
        )  # fmt: skip


def wgmma_conv(phase: PixelPhase, mask: bool) -> WgmmaConv:
    """Return the convolution of dy that computes the pixels of a phase, with their placement in dx."""
    f = phase.forward
    return WgmmaConv(
        phase.windows,
        f.channels,
        replace(Epilogue.of(f), mask=mask),
        placement=phase.placed,
        any_magnitude=True,
    )


@lru_cache(maxsize=64)  # estimates ask for the phases of one problem once per config
def pixel_phases(forward: Conv2dProblem) -> tuple[PixelPhase, ...]:
    f = forward
    rows = axes(f.height, f.output_height, f.filter_height, f.stride[0], f.padding[0], f.dilation[0])
    columns = axes(f.width, f.output_width, f.filter_width, f.stride[1], f.padding[1], f.dilation[1])
    frames = None
    if f.has_frames:
        sizes = f.frames, f.output_frames, f.filter_frames
        frames = axes(*sizes, f.frame_stride, f.frame_padding, f.frame_dilation)[0]
    return tuple(PixelPhase(f, row, column, frames) for row in rows for column in columns)


def _together(phases: tuple[Axis, ...], taps: int) -> Axis:
    """Merge phases along one dimension: the pixels of the largest, from the first corner, with the whole filter."""
    return Axis(
        0, max(phase.count for phase in phases), phases[0].size, 0, 1, taps, phases[0].dilation,
        min(phase.corner for phase in phases),
    )  # fmt: skip


@dataclass(frozen=True)
class AllPhases:
    """All sub-pixel phases, each with taps, for a single launch."""

    phases: tuple[PixelPhase, ...]

    @staticmethod
    def of(forward: Conv2dProblem) -> AllPhases:
        """Sort phases by taps, descending: the last tiles are then short, and CTAs finish together."""
        return AllPhases(
            tuple(sorted(pixel_phases(forward), key=lambda phase: phase.taps, reverse=True)),
        )

    @cached_property
    def together(self) -> PixelPhase:
        """Common part of all phases: the start of the windows, the whole filter, and a placement without offsets."""
        f = self.phases[0].forward
        rows = _together(tuple(phase.rows for phase in self.phases), f.filter_height)
        columns = _together(tuple(phase.columns for phase in self.phases), f.filter_width)
        return PixelPhase(f, rows, columns)

    def shift(self, phase: PixelPhase) -> tuple[int, int]:
        """Return the offset of a phase's windows from the shared ones."""
        return (
            phase.rows.corner - self.together.rows.corner,
            phase.columns.corner - self.together.columns.corner,
        )

    @property
    def span(self) -> int:
        """Largest side of the union of all windows, minus one."""
        return max(
            shift + far
            for phase in self.phases
            for shift, far in zip(self.shift(phase), phase.reach, strict=True)
        )

    @property
    def struct(self) -> Ints:
        """`Phases` of kernels/conv2d/pixel_classes.cuh."""
        first = self.phases[0]
        values = [first.rows.step, first.columns.step]
        for phase in self.phases:
            rows, columns = phase.rows, phase.columns
            values += [
                rows.taps, columns.taps, rows.last, columns.last, *self.shift(phase), rows.offset, columns.offset,
            ]  # fmt: skip
        return Ints(tuple(values))
