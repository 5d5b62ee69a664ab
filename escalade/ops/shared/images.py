"""What operations on batches of images share: sizes, names, layouts, and how tensors of PyTorch reach them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from escalade.device.strides import MEMORY_FORMAT, aligned, layout_of, packed
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require, require_at_least
from escalade.ops.base.dtypes import DTYPES, STORAGE, dtype_of
from escalade.ops.base.problem import Problem
from escalade.ops.calling.call import Lay

LAYOUTS = ("nchw", "nhwc")


# --- problems


@dataclass(frozen=True)
class Images:
    """The fields with which a problem on images begins."""

    batch: int
    channels: int
    height: int
    width: int

    @property
    def pixels(self) -> int:
        """Pixels of one image."""
        return self.height * self.width

    @property
    def elements(self) -> int:
        return self.batch * self.channels * self.pixels


@dataclass(frozen=True)
class FilteredImages(Images, ABC):
    """The fields with which a problem begins that convolves images, and what follows from the sizes on the way."""

    filters: int
    filter_height: int
    filter_width: int

    @property
    @abstractmethod
    def conv_height(self) -> int:
        """The height of the convolution's result, before any pooling."""

    @property
    @abstractmethod
    def conv_width(self) -> int: ...

    @property
    @abstractmethod
    def output_height(self) -> int: ...

    @property
    @abstractmethod
    def output_width(self) -> int: ...

    @property
    @abstractmethod
    def touched_pixels(self) -> int:
        """Pixels of one image that the result depends on."""

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
        """Operations of the convolution."""
        return 2 * self.conv_elements * self.channels * self.taps

    @property
    def rounding(self) -> float:
        """A running sum of n independent terms, each addition off by up to 2^-24 of it: a random walk."""
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
    """Checks what every problem over images must be."""
    require(operation, "dtype", p.dtype, dtypes)
    require(operation, "layout", p.layout, layouts)
    require_at_least(0, {"batch": p.batch})
    require_at_least(1, {"channels": p.channels, "height": p.height, "width": p.width})


def require_32_bits(operation: str, image_elements: int) -> None:
    """Images are counted in 64 bits, what is inside one in 32."""
    if image_elements >= 2**31:
        raise UnsupportedError(
            f"{operation} counts the elements of one image in 32 bits; here there are {image_elements}. Split the image"
        )


# --- tensors


def empty_images(problem: Problem, size: tuple[int, int, int, int], device: torch.device) -> torch.Tensor:
    """Room for the result of a problem, as [N, C, H, W]."""
    return torch.empty(
        size, dtype=STORAGE[problem.dtype], device=device, memory_format=MEMORY_FORMAT[problem.layout]
    )


def stored_images(problem: Problem, values: torch.Tensor) -> torch.Tensor:
    """Values [N, C, H, W] in the dtype and layout of a problem."""
    return values.to(STORAGE[problem.dtype]).contiguous(memory_format=MEMORY_FORMAT[problem.layout])


def empty_beside(x: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """Room for a result beside x, which may be fake and have symbols for sizes."""
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=MEMORY_FORMAT[layout_of(x)])


def check_images(operation: str, x: torch.Tensor) -> None:
    if x.dim() != 4:
        raise UnsupportedError(f"x has {x.dim()} dimensions; {operation} takes 4: [N, C, H, W]")
    dtype_of(operation, x)


def laying(layout: str) -> Lay:
    """Return what packs images, and weights of 4 dimensions, in that layout, and all else in row-major order."""

    def lay(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else packed(tensor, layout if tensor.dim() == 4 else "flat")

    return lay


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return x packed in that layout from an aligned address, copied if it is not."""
    return aligned(packed(x, layout))
