"""The maximum over windows as a problem."""

from __future__ import annotations

import re
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import match_name, require_at_least
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.base.pitch import check_pitches, read_pitches, spell_pitches
from escalade.ops.base.windows import touched
from escalade.ops.shared.images import (
    Images,
    check_problem,
    pair_pattern,
    read_pair,
    read_sizes,
    require_32_bits,
    spell_pair,
)

_NAME = re.compile(
    rf"(?P<channels>\d+)_{pair_pattern('size')}_k{pair_pattern('kernel')}s{pair_pattern('stride')}"
    rf"(p{pair_pattern('padding')})?_b(?P<batch>\d+)(?P<ceil>_ceil)?"
)


@dataclass(frozen=True)
class MaxPool2dProblem(Images):
    """y[oh, ow] = max of x over the window of `kernel` pixels at (oh, ow) * stride - padding.

    What the padding adds is less than every number. With `ceil_mode` a last window that reaches past the
    padded image counts too, if it begins inside the image or its padding on the left and above.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    ceil_mode: bool = False
    dtype: str = "fp32"
    layout: str = "nchw"
    x_pitch: int = 0
    y_pitch: int = 0
    """Elements from pixel to pixel in NHWC, of parts of larger buffers; 0: dense."""

    def __post_init__(self) -> None:
        _check(self)

    @staticmethod
    def parse(name: str, dtype: str = "fp32", layout: str = "nchw") -> MaxPool2dProblem:
        """The problem of a name such as `64_112_k3s2p1_b256`."""
        plain, apart = read_pitches(name)
        found = match_name(
            _NAME,
            plain,
            "pooling; the form is 64_112_k3s2p1_b256: channels, image size (112 or 112x96), "
            "k kernel s stride, optional p padding, _b batch, _ceil, and _xpitch64 where pixels lie apart",
        )
        return MaxPool2dProblem(
            *read_sizes(found), read_pair(found, "kernel"), read_pair(found, "stride"), read_pair(found, "padding"),
            bool(found["ceil"]), dtype, layout, **apart,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (dtype and layout stand apart)."""
        padding = f"p{spell_pair(self.padding)}" if self.padding != (0, 0) else ""
        return (
            f"{self.channels}_{spell_pair((self.height, self.width))}_k{spell_pair(self.kernel)}"
            f"s{spell_pair(self.stride)}{padding}_b{self.batch}{'_ceil' if self.ceil_mode else ''}{spell_pitches(self)}"
        )

    @property
    def output_height(self) -> int:
        return output_size(self.height, self.kernel[0], self.stride[0], self.padding[0], self.ceil_mode)

    @property
    def output_width(self) -> int:
        return output_size(self.width, self.kernel[1], self.stride[1], self.padding[1], self.ceil_mode)

    @property
    def output_elements(self) -> int:
        return self.batch * self.channels * self.output_height * self.output_width

    @property
    def flops(self) -> int:
        """Comparisons of the maxima."""
        return self.output_elements * self.kernel[0] * self.kernel[1]

    @property
    def bytes(self) -> int:
        rows = touched(self.height, self.output_height, self.kernel[0], self.stride[0], self.padding[0])
        columns = touched(self.width, self.output_width, self.kernel[1], self.stride[1], self.padding[1])
        read = self.batch * self.channels * rows * columns
        return (read + self.output_elements) * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """Nothing is computed: a maximum is one of the inputs."""
        return 0.0


def output_size(size: int, kernel: int, stride: int, padding: int, ceil_mode: bool) -> int:
    """The size of the result, of integers, or of the symbols that stand for them while a program is traced."""
    reach = size + 2 * padding - kernel
    if not ceil_mode:
        return reach // stride + 1
    windows = (reach + stride - 1) // stride + 1
    # The last window has to begin inside the image or the padding before it.
    return windows - 1 if (windows - 1) * stride >= size + padding else windows


def _check(p: MaxPool2dProblem) -> None:
    check_problem("max_pool2d", p)
    require_at_least(0, {"padding": min(p.padding)})
    require_at_least(1, {"kernel": min(p.kernel), "stride": min(p.stride)})
    if any(2 * padding > kernel for padding, kernel in zip(p.padding, p.kernel, strict=True)):
        raise UnsupportedError(
            f"padding of {spell_pair(p.padding)} for a kernel of {spell_pair(p.kernel)}: it must be at most half, "
            "or a window would lie in the padding alone"
        )
    if max(*p.kernel, *p.stride) >= 2**24:
        raise UnsupportedError(
            f"kernel {spell_pair(p.kernel)}, stride {spell_pair(p.stride)}: max_pool2d takes less than 2^24"
        )
    if p.output_height < 1 or p.output_width < 1:
        raise UnsupportedError(
            f"the kernel has {p.kernel[0]}x{p.kernel[1]} pixels, but the image with its padding only "
            f"{p.height + 2 * p.padding[0]}x{p.width + 2 * p.padding[1]}"
        )
    check_pitches(p, x=p.channels, y=p.channels)
    apart = max(p.channels, p.x_pitch, p.y_pitch)
    require_32_bits("max_pool2d", apart * max(p.pixels, p.output_height * p.output_width))
