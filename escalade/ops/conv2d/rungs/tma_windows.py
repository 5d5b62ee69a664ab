"""What Hopper's TMA is told of a convolution: where the windows of its output pixels lie in an NHWC image."""

from __future__ import annotations

from dataclasses import dataclass, replace

from escalade.device.recipe import Buffer, Im2colMap, Ints, TiledMap
from escalade.ops.conv2d.problem import Conv2dProblem

ROW_BYTES = 128
"""What the swizzle spans: a slab of so many bytes of channels is a row of a stage."""
CORNERS = range(-128, 128)
"""The corners that windows of a tensor map of four dimensions may have, relative to the image."""
MOST_TAPS = 256
"""Taps along a side at most: a tap's offset has eight bits."""
MOST_STRIDE = 8
MOST_PIXELS = 256
"""Pixels of a tile at most."""
MN_MAJOR_FILTERS = 64
"""Filters that a copy of MN-major weights brings at once: rows of 128 bytes."""


@dataclass(frozen=True)
class MNMajor:
    """MN-major weights of 16 bits, as they lie for the convolution whose gradient this one is: seen from here
    [channels][taps][filters], and the taps backwards."""

    first: int
    """Bytes to the tap that is the last here."""
    strides: tuple[int, int, int]
    """Bytes from tap to tap along columns and rows, and from channel to channel."""


@dataclass(frozen=True)
class Windows:
    """The windows that a convolution takes of an image. Pairs are height and width."""

    dtype: str
    element_bytes: int
    batch: int
    channels: int
    image: tuple[int, int]
    taps: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    """The padding in front; how far windows reach behind the image follows from the output."""
    dilation: tuple[int, int]
    output: tuple[int, int]
    mn_major: MNMajor | None = None
    """How MN-major weights lie; None: they are K-major, [filters][taps][channels]."""
    pitch: int = 0
    """Elements from one pixel of the image to the next, if it is a part of a larger one; 0: it is dense."""

    @staticmethod
    def of(problem: Conv2dProblem) -> Windows:
        p = problem
        return Windows(
            p.dtype, p.element_bytes, p.batch, p.channels, (p.height, p.width), (p.filter_height, p.filter_width),
            p.stride, p.padding, p.dilation, (p.output_height, p.output_width), pitch=p.x_pitch,
        )  # fmt: skip

    @staticmethod
    def of_shortcut(problem: Conv2dProblem) -> Windows:
        p = problem
        return Windows(
            p.dtype, p.element_bytes, p.batch, p.shortcut_channels, p.shortcut_size, (1, 1),
            (p.shortcut_stride, p.shortcut_stride), (0, 0), (1, 1), (p.output_height, p.output_width),
        )  # fmt: skip

    @property
    def slab(self) -> int:
        """Channels of a stage."""
        return ROW_BYTES // self.element_bytes

    @property
    def slabs(self) -> int:
        """Slabs that the sum of an output pixel goes through."""
        return self.taps[0] * self.taps[1] * -(-self.channels // self.slab)

    @property
    def pixels(self) -> int:
        return self.batch * self.output[0] * self.output[1]

    @property
    def _lower(self) -> tuple[int, int]:
        """The first window's corner, relative to the image's."""
        return -self.padding[0], -self.padding[1]

    @property
    def _upper(self) -> tuple[int, int]:
        """The last window's corner, relative to the image's last pixel."""
        first, second = (
            (self.output[d] - 1) * self.stride[d] - self.padding[d] - (self.image[d] - 1) for d in (0, 1)
        )
        return first, second

    def unsupported(self, rung: str) -> str | None:
        reach = [(taps - 1) * dilation for taps, dilation in zip(self.taps, self.dilation, strict=True)]
        if max(reach) >= MOST_TAPS or not all(corner in CORNERS for corner in (*self._lower, *self._upper)):
            return (
                f"{rung} leaves windows to TMA, whose corners lie within {CORNERS[0]} and {CORNERS[-1]} "
                f"of the image; padding {self.padding} and filters that reach over {reach[0] + 1}x{reach[1] + 1} "
                "pixels are beyond"
            )
        if max(self.stride) > MOST_STRIDE:
            return f"{rung} takes strides up to {MOST_STRIDE}, not {self.stride}"
        if self.pixels >= 2**31 - MOST_PIXELS:
            return f"{rung} counts output pixels in 32 bits; {self.pixels} are too many"
        return None

    def pixel_map(self, buffer: Buffer, pixels: int) -> Im2colMap:
        """A slab of the windows of so many output pixels, which TMA walks over rows and images."""
        return Im2colMap(
            buffer, self.dtype, (self.channels, self.image[1], self.image[0], self.batch),
            (self._lower[1], self._lower[0]), (self._upper[1], self._upper[0]), self.slab, pixels,
            (self.stride[1], self.stride[0]), pitch=self.pitch * self.element_bytes,
        )  # fmt: skip

    def window_map(self, buffer: Buffer, columns: int, rows: int, images: int = 1) -> TiledMap:
        """A slab of the pixels of a window, which may begin and end outside of the image."""
        sizes = self.channels, self.image[1], self.image[0], self.batch
        strides = pixel_strides(self.pitch * self.element_bytes, self.image)
        return TiledMap(buffer, self.dtype, sizes, (self.slab, columns, rows, images), strides=strides)

    def placed_map(self, buffer: Buffer, filters: int, placement: Ints, pixels: int) -> Im2colMap:
        """The tensor map of an image in which the output pixels lie apart: so many of them, which TMA walks alike."""
        step_h, step_w, offset_h, offset_w, height, width = placement.values
        whole = replace(
            self, channels=filters, image=(height, width), taps=(1, 1), stride=(step_h, step_w),
            padding=(-offset_h, -offset_w), dilation=(1, 1), pitch=0,
        )  # fmt: skip
        return whole.pixel_map(buffer, pixels)

    def weight_map(self, buffer: Buffer, filters: int, box: int) -> TiledMap:
        """A slab of one tap of `box` filters, of 64 if MN-major; where channels end before the slab there are zeros."""
        if self.mn_major:
            return TiledMap(
                replace(buffer, offset=buffer.offset + self.mn_major.first), self.dtype,
                (filters, self.taps[1], self.taps[0], self.channels), (MN_MAJOR_FILTERS, 1, 1, self.slab),
                strides=self.mn_major.strides,
            )  # fmt: skip
        return TiledMap(
            buffer,
            self.dtype,
            (self.channels, self.taps[0] * self.taps[1], filters),
            (self.slab, 1, box),
        )

    def shape(self, filters: int) -> Ints:
        """`ConvShape` of kernels/common/conv_shape.cuh."""
        return Ints(
            (
                self.batch, self.channels, *self.image, filters, *self.taps, *self.stride, *self.padding,
                *self.dilation, 1, *self.output,
            )
        )  # fmt: skip


def pixel_strides(pitch: int, size: tuple[int, int]) -> tuple[int, ...]:
    """Bytes from column to column, row to row and image to image, of pixels so many bytes apart; nothing if dense."""
    return (pitch, size[1] * pitch, size[0] * size[1] * pitch) if pitch else ()


def shortcut_shape(shortcut: Windows | None) -> Ints:
    """`ShortcutShape` of kernels/common/conv_shape.cuh."""
    return Ints(
        (0, 0, 0, 1) if shortcut is None else (shortcut.channels, *shortcut.image, shortcut.stride[0])
    )
