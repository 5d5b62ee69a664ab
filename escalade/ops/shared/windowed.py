"""Pooling over windows of one size: the problem and its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require_at_least
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.naming import Named, spell_pair
from escalade.ops.base.windows import touched
from escalade.ops.calling.library import Pair
from escalade.ops.shared.images import (
    ResizedImages,
    check_problem,
    empty_images_like,
)

WINDOWS = "{channels}_{height,width}_k{kernel}s{stride}[p{padding}]"
"""Channels, sizes and windows in a problem's name pattern."""


@dataclass(frozen=True)
class WindowedImages(ResizedImages, Named, ABC):
    """First fields of a problem over windows of `kernel` pixels at (oh, ow) * stride - padding.

    As in PyTorch, `ceil_mode` adds a last partial window if it starts inside the image or its left or top padding.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    ceil_mode: bool = False
    dtype: str = "fp32"
    layout: str = "nchw"
    x_pitch: int = 0
    y_pitch: int = 0
    """Elements from pixel to pixel in NHWC if the buffer is a slice of a larger one; 0 if dense."""

    @property
    @abstractmethod
    def rounding(self) -> float: ...

    @property
    def dilations(self) -> tuple[int, int]:
        return (1, 1)

    @property
    def spans(self) -> tuple[int, int]:
        """Extent of a window including dilation."""
        (rows, columns), (down, along) = self.kernel, self.dilations
        return (rows - 1) * down + 1, (columns - 1) * along + 1

    @property
    def output_height(self) -> int:
        return output_size(self.height, self.spans[0], self.stride[0], self.padding[0], self.ceil_mode)

    @property
    def output_width(self) -> int:
        return output_size(self.width, self.spans[1], self.stride[1], self.padding[1], self.ceil_mode)

    @property
    def reaches(self) -> tuple[int, int]:
        """Row and column behind the last window, which may be outside the image."""
        last = ((self.output_height - 1) * self.stride[0], (self.output_width - 1) * self.stride[1])
        return last[0] - self.padding[0] + self.spans[0], last[1] - self.padding[1] + self.spans[1]

    @property
    def flops(self) -> int:
        """Comparisons (max) or additions (mean)."""
        return self.output_elements * self.kernel[0] * self.kernel[1]

    @property
    def bytes(self) -> int:
        outputs = (self.output_height, self.output_width)
        sizes = zip(
            (self.height, self.width), outputs, self.kernel, self.stride, self.padding, self.dilations,
            strict=True,
        )  # fmt: skip
        rows, columns = (touched(*size) for size in sizes)
        read = self.batch * self.channels * rows * columns
        return (read + self.output_elements) * ELEMENT_BYTES[self.dtype]


def windows_per_pixel(p: WindowedImages) -> int:
    """Return the most windows that contain one pixel."""
    down, along = (ceil_div(kernel, stride) for kernel, stride in zip(p.kernel, p.stride, strict=True))
    return down * along if p.dilations == (1, 1) else p.kernel[0] * p.kernel[1]


def output_size(size: int, span: int, stride: int, padding: int, ceil_mode: bool) -> int:
    """Return the output size; works on integers and on symbolic sizes."""
    reach = size + 2 * padding - span
    if not ceil_mode:
        return reach // stride + 1
    windows = (reach + stride - 1) // stride + 1
    # As in PyTorch, the last window must start inside the image or its left padding.
    return windows - 1 if (windows - 1) * stride >= size + padding else windows


def empty_pooled(
    x: torch.Tensor,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    ceil_mode: bool,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return an empty pooling result; sizes of x may be symbolic."""
    if min(*kernel, *stride) < 1:
        raise UnsupportedError(f"kernel {list(kernel)} and stride {list(stride)} must be at least 1")
    size = [output_size(x.shape[2 + d], kernel[d], stride[d], padding[d], ceil_mode) for d in (0, 1)]
    return empty_images_like(x, (*x.shape[:2], *size), dtype)


def check_windows(operation: str, p: WindowedImages) -> None:
    """Check the fields that all window problems share."""
    check_problem(operation, p)
    require_at_least(0, {"padding": min(p.padding)})
    require_at_least(1, {"kernel": min(p.kernel), "stride": min(p.stride), "dilation": min(p.dilations)})
    if any(2 * padding > kernel for padding, kernel in zip(p.padding, p.kernel, strict=True)):
        raise UnsupportedError(
            f"padding {spell_pair(p.padding)} with kernel {spell_pair(p.kernel)}: it must be at most half of the "
            "kernel, or a window would contain only padding"
        )
    if max(*p.spans, *p.stride) >= 2**24:
        raise UnsupportedError(
            f"kernel {spell_pair(p.spans)}, stride {spell_pair(p.stride)}: {operation} supports less than 2^24"
        )
    if p.output_height < 1 or p.output_width < 1:
        raise UnsupportedError(
            f"the kernel has {p.spans[0]}x{p.spans[1]} pixels, but the padded image only "
            f"{p.height + 2 * p.padding[0]}x{p.width + 2 * p.padding[1]}"
        )
    p.check_pitches(operation)
