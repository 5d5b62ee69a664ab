"""Operations on batches of images: sizes, checks, layouts, and conversion of PyTorch tensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from escalade.device.strides import MEMORY_FORMAT, aligned, empty, layout_of, packed
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require, require_at_least
from escalade.ops.base.dtypes import DTYPES, STORAGE, multiplied_as
from escalade.ops.base.pitch import check_pitches, pitch_of
from escalade.ops.base.problem import Problem

LAYOUTS = ("nchw", "nhwc")


# --- volumes, whose frames are stored as images


def as_volumes(images: torch.Tensor, frames: int) -> torch.Tensor:
    """Return images as volumes (NCDHW) of `frames` images each; a view."""
    return images.unflatten(0, (-1, frames)).transpose(1, 2)


def as_images(volumes: torch.Tensor) -> torch.Tensor:
    """Return the frames of volumes as images; a view if the volumes are dense in NDHWC."""
    return volumes.transpose(1, 2).flatten(0, 1)


# --- problems


@dataclass(frozen=True)
class Images:
    """First fields of a problem on images."""

    batch: int
    channels: int
    height: int
    width: int

    @property
    def pixels(self) -> int:
        """Pixels per image."""
        return self.height * self.width

    @property
    def elements(self) -> int:
        return self.batch * self.channels * self.pixels


@dataclass(frozen=True)
class ResizedImages(Images, ABC):
    """First fields of a problem from images to images of another size, either of which may have a pitch."""

    @property
    @abstractmethod
    def output_height(self) -> int: ...

    @property
    @abstractmethod
    def output_width(self) -> int: ...

    @property
    def output_elements(self) -> int:
        return self.batch * self.channels * self.output_height * self.output_width

    def check_pitches(self, operation: str) -> None:
        """Check the pitches of x and y, and that no image exceeds what kernels can index."""
        check_pitches(self, x=self.channels, y=self.channels)
        pitch = max(self.channels, pitch_of(self, "x"), pitch_of(self, "y"))
        require_32_bits(operation, pitch * max(self.pixels, self.output_height * self.output_width))


@dataclass(frozen=True)
class FilteredImages(ResizedImages, ABC):
    """First fields of a problem that convolves images, and derived sizes."""

    filters: int
    filter_height: int
    filter_width: int

    @property
    @abstractmethod
    def conv_height(self) -> int:
        """Height of the convolution's result, before pooling."""

    @property
    @abstractmethod
    def conv_width(self) -> int: ...

    @property
    @abstractmethod
    def touched_pixels(self) -> int:
        """Pixels per image that the result depends on."""

    @property
    def taps(self) -> int:
        return self.filter_height * self.filter_width

    @property
    def touched_elements(self) -> int:
        return self.batch * self.channels * self.touched_pixels

    @property
    def weight_elements(self) -> int:
        return self.filters * self.channels * self.taps

    @property
    def conv_elements(self) -> int:
        return self.batch * self.filters * self.conv_height * self.conv_width

    @property
    def output_elements(self) -> int:
        return self.batch * self.filters * self.output_height * self.output_width

    @property
    def flops(self) -> int:
        """FLOPs of the convolution."""
        return 2 * self.conv_elements * self.channels * self.taps

    @property
    def rounding(self) -> float:
        """Random walk of a running sum: each of n additions is off by up to 2^-24 of the partial sum."""
        return 2.0**-24 * math.sqrt(1 + self.channels * self.taps / 6)


class ImageProblem(Problem, Protocol):
    @property
    def channels(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...


def check_problem(
    operation: str, p: ImageProblem, dtypes: tuple[str, ...] = DTYPES, layouts: tuple[str, ...] = LAYOUTS
) -> None:
    """Check the fields that all image problems share."""
    require(operation, "dtype", p.dtype, dtypes)
    require(operation, "layout", p.layout, layouts)
    require_at_least(0, {"batch": p.batch})
    require_at_least(1, {"channels": p.channels, "height": p.height, "width": p.width})


def require_32_bits(operation: str, image_elements: int) -> None:
    """Raise for images of 2^31 elements: kernels index within an image in 32 bits, between images in 64."""
    if image_elements >= 2**31:
        raise UnsupportedError(
            f"{operation} supports images of fewer than 2^31 elements; this one has {image_elements}. Split the image"
        )


# --- tensors


def empty_images(problem: Problem, size: tuple[int, int, int, int], device: torch.device) -> torch.Tensor:
    """Return an empty [N, C, H, W] result of a problem."""
    return torch.empty(
        size, dtype=STORAGE[problem.dtype], device=device, memory_format=MEMORY_FORMAT[problem.layout]
    )


def stored_images(problem: Problem, values: torch.Tensor) -> torch.Tensor:
    """Convert [N, C, H, W] values to a problem's dtype and layout."""
    return values.to(STORAGE[problem.dtype]).contiguous(memory_format=MEMORY_FORMAT[problem.layout])


def empty_images_like(x: torch.Tensor, size: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return empty images with x's device, layout and, unless one is given, dtype. Sizes may be symbolic."""
    return empty(size, dtype or x.dtype, layout_of(x), x.device)


def shape_of(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the shape of images, for a problem's first fields."""
    n, c, h, w = x.shape
    return n, c, h, w


def form_of(x: torch.Tensor, tf32: bool = False) -> tuple[str, str]:
    """Return the dtype and the layout of a problem on x."""
    return multiplied_as(x, tf32), layout_of(x)


def pack_aligned(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return x packed in that layout at an aligned address, copied if necessary."""
    return aligned(packed(x, layout))
