"""NHWC convolutions for wgmma kernels: TMA tensor maps for their windows, and the base class of rungs that also run
those of the input gradient."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from escalade.device.architecture import WITH_WGMMA
from escalade.device.recipe import Buffer, Im2colMap, Ints, Recipe, TiledMap
from escalade.ops.base.rung import C
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.epilogue import UNPLACED, Epilogue
from escalade.ops.conv2d.rungs.rung import Conv2dRung

ROW_BYTES = 128
"""Bytes of channels per row of a stage: the swizzle span, and one k-tile."""
CORNERS = range(-128, 128)
"""Window corners, relative to the image, that an im2col map with four dimensions can encode."""
FRAME_CORNERS = range(-16, 16)
"""The same for an im2col map with five dimensions."""
MOST_TAPS = 256
"""Largest filter side: the offset of a tap has eight bits."""
FRAME_TAPS = 32
"""The same for an im2col map with five dimensions: five bits."""
MOST_STRIDE = 8
MOST_PIXELS = 256
"""Largest tile in pixels."""
PERMUTED_FILTERS = 64
"""Filters of a permuted group of weights."""
MN_MAJOR_FILTERS = 64
"""Filters per copy of MN-major weights: rows of 128 bytes."""


@dataclass(frozen=True)
class MNMajor:
    """16-bit MN-major weights as stored for the forward convolution: [channels][taps][filters] for its gradient, with
    taps in reverse."""

    first: int
    """Byte offset of the forward convolution's last tap."""
    strides: tuple[int, int, int]
    """Strides in bytes: column tap, row tap, channel."""


@dataclass(frozen=True)
class Frames:
    """Windows of a convolution of volumes along their frames."""

    count: int
    taps: int
    stride: int
    padding: int
    dilation: int
    output: int

    @staticmethod
    def of(problem: Conv2dProblem) -> Frames | None:
        p = problem
        if not p.has_frames:
            return None
        return Frames(
            p.frames, p.filter_frames, p.frame_stride, p.frame_padding, p.frame_dilation, p.output_frames
        )

    @property
    def upper(self) -> int:
        """First frame of the last window, relative to the last frame."""
        return (self.output - 1) * self.stride - self.padding - (self.count - 1)


@dataclass(frozen=True)
class Windows:
    """Windows of a convolution over an image. Pairs are height and width."""

    dtype: str
    element_bytes: int
    batch: int
    channels: int
    image: tuple[int, int]
    taps: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    """Padding at the top and left; the rest follows from the output size."""
    dilation: tuple[int, int]
    output: tuple[int, int]
    mn_major: MNMajor | None = None
    """Strides of MN-major weights; None for K-major weights [filters][taps][channels]."""
    pitch: int = 0
    """Elements per pixel step, if the image is part of a larger one; 0 if dense."""
    frames: Frames | None = None
    """The third dimension of volumes; `batch` is their number."""

    @staticmethod
    def of(problem: Conv2dProblem) -> Windows:
        p = problem
        return Windows(
            p.dtype, p.element_bytes, p.batch, p.channels, (p.height, p.width), (p.filter_height, p.filter_width),
            p.stride, p.padding, p.dilation, (p.output_height, p.output_width), pitch=p.x_pitch,
            frames=Frames.of(p),
        )  # fmt: skip

    @staticmethod
    def of_shortcut(problem: Conv2dProblem) -> Windows:
        p = problem
        return Windows(
            p.dtype, p.element_bytes, p.batch, p.shortcut_channels, p.shortcut_size, (1, 1),
            (p.shortcut_stride, p.shortcut_stride), (0, 0), (1, 1), (p.output_height, p.output_width),
        )  # fmt: skip

    @property
    def k_tile(self) -> int:
        """Channels per k-tile."""
        return ROW_BYTES // self.element_bytes

    @property
    def weight_rows(self) -> int:
        """Rows of taps in all frames of the filter."""
        return self.taps[0] * (self.frames.taps if self.frames else 1)

    @property
    def k_tiles(self) -> int:
        """k-tiles per output tile."""
        return self.weight_rows * self.taps[1] * -(-self.channels // self.k_tile)

    @property
    def output_images(self) -> int:
        return self.batch * (self.frames.output if self.frames else 1)

    @property
    def pixels(self) -> int:
        return self.output_images * self.output[0] * self.output[1]

    @property
    def _lower(self) -> tuple[int, int]:
        """Corner of the first window, relative to the image."""
        return -self.padding[0], -self.padding[1]

    @property
    def _upper(self) -> tuple[int, int]:
        """Corner of the last window, relative to the last pixel of the image."""
        first, second = (
            (self.output[d] - 1) * self.stride[d] - self.padding[d] - (self.image[d] - 1) for d in (0, 1)
        )
        return first, second

    def unsupported(self, rung: str) -> str | None:
        reach = [(taps - 1) * dilation for taps, dilation in zip(self.taps, self.dilation, strict=True)]
        corners, least, most = [*self._lower, *self._upper], CORNERS, MOST_TAPS
        stride = max(self.stride)
        if self.frames:
            corners += [-self.frames.padding, self.frames.upper]
            reach.append((self.frames.taps - 1) * self.frames.dilation)
            least, most, stride = FRAME_CORNERS, FRAME_TAPS, max(stride, self.frames.stride)
        if max(reach) >= most or not all(corner in least for corner in corners):
            return (
                f"{rung} uses TMA, whose window corners are limited to {least[0]}..{least[-1]} relative to the "
                f"image; padding {self.padding} with a filter of {reach[0] + 1}x{reach[1] + 1} pixels exceeds them"
            )
        if stride > MOST_STRIDE:
            return f"{rung} takes strides up to {MOST_STRIDE}, not {stride}"
        if self.pixels >= 2**31 - MOST_PIXELS:
            return f"{rung} counts output pixels in 32 bits, not {self.pixels}"
        return None

    def pixel_map(self, buffer: Buffer, pixels: int) -> Im2colMap:
        """Return the map of one k-tile for `pixels` output pixels, which TMA walks over rows, frames and images."""
        f = self.frames
        return Im2colMap(
            buffer, self.dtype,
            (self.channels, self.image[1], self.image[0], *((f.count,) if f else ()), self.batch),
            (self._lower[1], self._lower[0], *((-f.padding,) if f else ())),
            (self._upper[1], self._upper[0], *((f.upper,) if f else ())), self.k_tile, pixels,
            (self.stride[1], self.stride[0], *((f.stride,) if f else ())), pitch=self.pitch * self.element_bytes,
        )  # fmt: skip

    def window_map(
        self, buffer: Buffer, columns: int, rows: int, images: int = 1, row_bytes: int = ROW_BYTES
    ) -> TiledMap:
        """Return the map of one k-tile of a window, which may extend beyond the image."""
        sizes = self.channels, self.image[1], self.image[0], self.batch
        strides = pixel_strides(self.pitch * self.element_bytes, self.image)
        box = (row_bytes // self.element_bytes, columns, rows, images)
        return TiledMap(buffer, self.dtype, sizes, box, row_bytes, strides)

    def placed_map(self, buffer: Buffer, filters: int, placement: Ints, pixels: int) -> Im2colMap:
        """Return the map for storing `pixels` output pixels that are spread over a larger image by `placement`."""
        step_h, step_w, offset_h, offset_w, height, width = placement.values
        whole = replace(
            self, channels=filters, image=(height, width), taps=(1, 1), stride=(step_h, step_w),
            padding=(-offset_h, -offset_w), dilation=(1, 1), pitch=0,
        )  # fmt: skip
        return whole.pixel_map(buffer, pixels)

    def weight_map(self, buffer: Buffer, filters: int, box: int, permuted: bool = False) -> TiledMap:
        """Return the map of one k-tile and tap of `box` filters (64 if MN-major); missing channels are zero-filled.

        Permuted, row 8j + q of 64 is filter 8q + j: a lane's accumulators are those of 16 adjacent filters. Taps and
        channels are one dimension then, so channels of the next tap take the place of missing ones. Their products are
        zero too, because missing channels of pixels are zero-filled.
        """
        if permuted:
            depth = self.weight_rows * self.taps[1] * self.channels
            row = depth * self.element_bytes
            return TiledMap(
                buffer, self.dtype, (depth, 8, 8, filters // PERMUTED_FILTERS),
                (self.k_tile, 8, 8, box // PERMUTED_FILTERS), strides=(8 * row, row, PERMUTED_FILTERS * row),
            )  # fmt: skip
        if self.mn_major:
            return TiledMap(
                replace(buffer, offset=buffer.offset + self.mn_major.first), self.dtype,
                (filters, self.taps[1], self.weight_rows, self.channels), (MN_MAJOR_FILTERS, 1, 1, self.k_tile),
                strides=self.mn_major.strides,
            )  # fmt: skip
        return TiledMap(
            buffer,
            self.dtype,
            (self.channels, self.weight_rows * self.taps[1], filters),
            (self.k_tile, 1, box),
        )

    def shape(self, filters: int) -> Ints:
        """`ConvShape` of kernels/common/conv_shape.cuh; of volumes, with all images of y and all rows of taps."""
        return Ints(
            (
                self.output_images, self.channels, *self.image, filters, self.weight_rows, self.taps[1], *self.stride,
                *self.padding, *self.dilation, 1, *self.output,
            )
        )  # fmt: skip


def pixel_strides(pitch: int, size: tuple[int, int]) -> tuple[int, ...]:
    """Return the column, row and image strides for a pixel pitch in bytes; empty if dense."""
    return (pitch, size[1] * pitch, size[0] * size[1] * pitch) if pitch else ()


def shortcut_shape(shortcut: Windows | None) -> Ints:
    """`ShortcutShape` of kernels/common/conv_shape.cuh."""
    return Ints(
        (0, 0, 0, 1) if shortcut is None else (shortcut.channels, *shortcut.image, shortcut.stride[0])
    )


@dataclass(frozen=True)
class WgmmaConv:
    """One NHWC convolution as a wgmma kernel sees it: a whole problem, or one sub-pixel phase of an input gradient."""

    windows: Windows
    filters: int
    epilogue: Epilogue
    shortcut: Windows | None = None
    placement: Ints = UNPLACED
    y_pitch: int = 0
    """Elements per pixel step of y, if it is part of a larger buffer; 0 if dense."""
    any_magnitude: bool = False
    """True if x may be tiny as likely as of order one: gradients, unlike images."""

    @staticmethod
    def of(problem: Conv2dProblem) -> WgmmaConv:
        shortcut = Windows.of_shortcut(problem) if problem.shortcut_channels else None
        return WgmmaConv(
            Windows.of(problem), problem.filters, Epilogue.of(problem), shortcut, y_pitch=problem.y_pitch
        )

    @property
    def taps(self) -> int:
        return self.windows.weight_rows * self.windows.taps[1]

    @cached_property
    def reach(self) -> tuple[int, int]:
        """Rows and columns that a window extends beyond its tile, with stride 1."""
        (height, width), dilation = self.windows.taps, self.windows.dilation
        return (height - 1) * dilation[0], (width - 1) * dilation[1]

    @property
    def shortcut_channels(self) -> int:
        return self.shortcut.channels if self.shortcut else 0


@dataclass(frozen=True)
class WgmmaConvRung(Conv2dRung[C]):
    """Rung that runs a `WgmmaConv`, of this operation or of another."""

    layouts: tuple[str, ...] = ("nhwc",)
    launches: ClassVar[int] = 1
    """Launches per convolution, besides those that depend on weights alone."""

    architectures = WITH_WGMMA

    def limits(self, problem: Conv2dProblem) -> str | None:
        return self.conv_limits(WgmmaConv.of(problem))

    @abstractmethod
    def conv_limits(self, conv: WgmmaConv) -> str | None:
        """Return the reason why the rung does not support `conv`, or None."""

    def configs(self, problem: Conv2dProblem) -> tuple[C, ...]:
        return self.conv_configs(WgmmaConv.of(problem))

    @abstractmethod
    def conv_configs(self, conv: WgmmaConv) -> tuple[C, ...]:
        """Return the configs, cheapest first."""

    def clocks(self, problem: Conv2dProblem, config: C) -> float:
        return self.conv_clocks(WgmmaConv.of(problem), config)

    @abstractmethod
    def conv_clocks(self, conv: WgmmaConv, config: C) -> float: ...

    def estimate(self, problem: Conv2dProblem, config: C) -> float:
        return self.card.microseconds(self.clocks(problem, config), problem.traffic, self.launches)

    def recipe(self, problem: Conv2dProblem, config: C) -> Recipe:
        return self.conv_recipe(WgmmaConv.of(problem), config)

    @abstractmethod
    def conv_recipe(self, conv: WgmmaConv, config: C) -> Recipe:
        """Return the launches over x, weight, bias, residual (or the mask), shortcut, shortcut_weight and y."""
