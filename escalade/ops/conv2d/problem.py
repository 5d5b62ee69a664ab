"""The two-dimensional convolution as a problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require, require_at_least
from escalade.ops.base.dtypes import ELEMENT_BYTES, MULTIPLIED
from escalade.ops.base.naming import Codec, Named, NamePattern, spell_pair
from escalade.ops.base.pitch import check_pitches
from escalade.ops.base.windows import touched
from escalade.ops.max_pool2d import require_bytes_for_places
from escalade.ops.shared import activation, prologue
from escalade.ops.shared.images import LAYOUTS

DTYPES = (*MULTIPLIED, "fp8")
OUTPUTS = ("", "fp16")


@dataclass(frozen=True)
class Conv2dProblem(Named):
    """y = relu(conv2d(x, weight) + conv2d(shortcut, shortcut_weight) + bias + residual), all but the first optional.

    `dtype` is what x, weight, bias, residual and y are stored as, and how products are formed: `tf32`
    is stored in fp32. Sums are fp32 always. In layout `nchw` weights are [K][C/groups][R][S], in
    `nhwc` [K][R][S][C/groups]; x, y, the residual and the shortcut follow the layout.

    In `fp8` (e4m3) x, weight, residual, shortcut and its weight are stored as multiples of units that only the caller
    knows, and three more inputs in fp32 bring them together: y = relu(sum * scale[filter] + bias[filter] + residual *
    scales[0]) * scales[1], where the sum is that of both convolutions and bias is fp32 too. y is rounded to nearest
    and stays within ±448; with `output` fp16 it is stored so.

    The shortcut is a second image of `shortcut_channels` channels (0: there is none) that a 1x1 filter without
    padding takes to the size of y, as where the blocks of a ResNet change size.

    With a `prologue`, x is what that makes of it, rounded to the dtype, as a step in front would have stored it: an
    expression in `x`, in `gain` and `shift`, fp32 vectors of a number a channel, and in `gate`, [N][C] in the dtype.

    With a `pool`, y is the maximum of each window of so many rows and columns of that, side by side; what is left at
    the edges is nobody's. With `places`, the result has a second part, buffer `places`, as `MaxPool2dProblem` has it,
    behind a ReLU if there is one: all that gradients need, so that what the maxima are of is never written.
    """

    NAME: ClassVar = NamePattern(
        "convolution",
        "{channels}to{filters}_{height,width}_k{filter_height,filter_width}s{stride}[p{padding}][d{dilation}][g{groups}]_b{batch}"
        "<_|+|{bias?bias}|{residual?res}|[short{shortcut_channels}s{shortcut_stride}[i{shortcut_size}]]|{relu?relu}"
        "|[out{output}]|[pool{pool}]|{places?places}>" + prologue.IN_NAME + activation.IN_NAME,
        {
            "padding": lambda p: (p.filter_height // 2, p.filter_width // 2),
            "shortcut_size": lambda p: getattr(p, "_usual_shortcut_size", (0, 0)),
        },
        output=Codec("16", lambda text: f"fp{text}", lambda output: output.removeprefix("fp")),
    )

    batch: int
    channels: int
    height: int
    width: int
    filters: int
    filter_height: int
    filter_width: int
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    dtype: str = "fp32"
    layout: str = "nchw"
    bias: bool = False
    residual: bool = False
    relu: bool = False
    shortcut_channels: int = 0
    shortcut_stride: int = 1
    shortcut_size: tuple[int, int] = (0, 0)
    """Height and width; unless given, the output's times the stride."""
    output: str = ""
    """What y is stored as; empty: the dtype."""
    activation: str = ""
    """What takes ReLU's place, if anything: an expression in `x`, such as `x * sigmoid(x)`."""
    prologue: str = ""
    """What is done with x in front of the products of a 1x1 filter, if anything: `relu(gain * x + shift)`."""
    x_pitch: int = 0
    y_pitch: int = 0
    """Elements from pixel to pixel in NHWC, of parts of larger buffers; 0: dense."""
    pool: tuple[int, int] = (1, 1)
    """Rows and columns of a window of which y is the maximum."""
    places: bool = False
    """Whether the place of each maximum in its window is written too."""

    def __post_init__(self) -> None:
        _check(self)
        _check_pool(self)
        activation.settle(self)
        prologue.settle(self)
        _check_prologue(self)
        if self.shortcut_channels and self.shortcut_size == (0, 0):
            object.__setattr__(self, "shortcut_size", self._usual_shortcut_size)
        _check_shortcut(self)
        check_pitches(self, x=self.channels, y=self.filters)
        _check_counts(self)

    @staticmethod
    def square(
        channels: int,
        filters: int,
        size: int,
        filter_size: int,
        *,
        batch: int = 1,
        stride: int = 1,
        padding: int | None = None,
        dtype: str = "fp32",
        layout: str = "nchw",
        **rest: bool | int | str | tuple[int, int],
    ) -> Conv2dProblem:
        """The usual case; the padding defaults to half the filter."""
        pad = filter_size // 2 if padding is None else padding
        return Conv2dProblem(
            batch, channels, size, size, filters, filter_size, filter_size,
            (stride, stride), (pad, pad), dtype=dtype, layout=layout, **rest,  # type: ignore[arg-type]
        )  # fmt: skip

    @cached_property
    def output_height(self) -> int:
        return _output_size(
            self.height, self.filter_height, self.stride[0], self.padding[0], self.dilation[0]
        )

    @cached_property
    def output_width(self) -> int:
        return _output_size(self.width, self.filter_width, self.stride[1], self.padding[1], self.dilation[1])

    @property
    def pools(self) -> bool:
        """Whether y is the maxima of windows."""
        return self.pool != (1, 1)

    @property
    def result_size(self) -> tuple[int, int]:
        """Height and width of y: the output's, or of its windows."""
        return self.output_height // self.pool[0], self.output_width // self.pool[1]

    @property
    def result_elements(self) -> int:
        height, width = self.result_size
        return self.batch * self.filters * height * width

    @property
    def output_pixels(self) -> int:
        return self.batch * self.output_height * self.output_width

    @property
    def group_channels(self) -> int:
        return self.channels // self.groups

    @property
    def group_filters(self) -> int:
        return self.filters // self.groups

    @property
    def taps(self) -> int:
        return self.filter_height * self.filter_width

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def stored(self) -> str:
        """What y is stored as."""
        return self.output or self.dtype

    @property
    def output_bytes(self) -> int:
        """Bytes of an element of y."""
        return ELEMENT_BYTES[self.stored]

    @property
    def depth(self) -> int:
        """The products in a sum."""
        return self.group_channels * self.taps + self.shortcut_channels

    @property
    def flops(self) -> int:
        return 2 * self.output_pixels * self.filters * self.depth

    @property
    def input_elements(self) -> int:
        return self.batch * self.channels * self.height * self.width

    @property
    def touched_elements(self) -> int:
        """Elements of x that some window touches: a 1x1 filter with a stride of 2 needs a quarter of them."""
        rows = touched(
            self.height,
            self.output_height,
            self.filter_height,
            self.stride[0],
            self.padding[0],
            self.dilation[0],
        )
        columns = touched(
            self.width,
            self.output_width,
            self.filter_width,
            self.stride[1],
            self.padding[1],
            self.dilation[1],
        )
        return self.batch * self.channels * rows * columns

    @property
    def weight_elements(self) -> int:
        return self.filters * self.group_channels * self.taps

    @property
    def shortcut_elements(self) -> int:
        return self.batch * self.shortcut_channels * self.shortcut_size[0] * self.shortcut_size[1]

    @property
    def touched_shortcut_elements(self) -> int:
        """Elements of the shortcut's input that its 1x1 filters touch."""
        height, width = self.shortcut_size
        rows = touched(height, self.output_height, 1, self.shortcut_stride)
        return (
            self.batch
            * self.shortcut_channels
            * rows
            * touched(width, self.output_width, 1, self.shortcut_stride)
        )

    @property
    def _usual_shortcut_size(self) -> tuple[int, int]:
        return self.output_height * self.shortcut_stride, self.output_width * self.shortcut_stride

    @property
    def output_elements(self) -> int:
        return self.output_pixels * self.filters

    @cached_property
    def bytes(self) -> int:
        images = self.touched_elements + self.touched_shortcut_elements
        weights = self.weight_elements + self.filters * self.shortcut_channels
        residual = self.output_elements if self.residual else 0
        scaled = self.dtype == "fp8"
        bias = (self.filters if self.bias else 0) * (4 if scaled else self.element_bytes)
        scales = 4 * (self.filters + 2) if scaled else 0
        return (
            self.element_bytes * (images + weights + residual)
            + self.output_bytes * self.result_elements
            + (self.result_elements if self.places else 0)
            + bias
            + scales
            + prologue.operand_bytes(self)
        )

    @cached_property
    def traffic(self) -> int:
        """Bytes that estimates count: whole images, since most kernels read what lies between the pixels too."""
        untouched = self.input_elements - self.touched_elements
        untouched += self.shortcut_elements - self.touched_shortcut_elements
        return self.bytes + self.element_bytes * untouched

    @property
    def rounding(self) -> float:
        """A running sum of n independent terms, each addition off by up to 2^-24 of it: a random walk."""
        return 2.0**-24 * math.sqrt(1 + self.depth / 6)


def _output_size(size: int, filter_size: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (filter_size - 1) - 1) // stride + 1


def _check(p: Conv2dProblem) -> None:
    require("conv2d", "dtype", p.dtype, DTYPES)
    require("conv2d", "layout", p.layout, LAYOUTS)
    if p.output not in OUTPUTS:
        raise UnsupportedError(f"output {p.output!r}: conv2d stores y in its dtype ('') or in fp16")
    if p.batch < 0:
        raise UnsupportedError(f"a batch of {p.batch}: it cannot be negative")
    positive = {
        "channels": p.channels, "height": p.height, "width": p.width, "filters": p.filters,
        "filter height": p.filter_height, "filter width": p.filter_width, "stride": min(p.stride),
        "dilation": min(p.dilation), "groups": p.groups,
    }  # fmt: skip
    require_at_least(1, positive)
    if min(p.padding) < 0:
        raise UnsupportedError(f"padding of {p.padding}: it cannot be negative")
    if p.channels % p.groups or p.filters % p.groups:
        raise UnsupportedError(
            f"{p.channels} channels and {p.filters} filters cannot be split into {p.groups} groups"
        )
    if p.output_height < 1 or p.output_width < 1:
        reach = tuple(
            d * (f - 1) + 1 for d, f in zip(p.dilation, (p.filter_height, p.filter_width), strict=True)
        )
        raise UnsupportedError(
            f"the filter reaches over {reach[0]}x{reach[1]} pixels, but the image with its padding has only "
            f"{p.height + 2 * p.padding[0]}x{p.width + 2 * p.padding[1]}"
        )


def _check_pool(p: Conv2dProblem) -> None:
    if min(p.pool) < 1 or 0 in p.result_size:
        raise UnsupportedError(
            f"a pool of {spell_pair(p.pool)} over {spell_pair((p.output_height, p.output_width))} pixels: windows have "
            "at least one pixel, and at least one of them fits"
        )
    if p.places and not p.pools:
        raise UnsupportedError("places are those of the maxima of a pool, and there is none")
    if p.places:
        require_bytes_for_places(p.pool)


def _check_prologue(p: Conv2dProblem) -> None:
    if p.prologue and ((p.filter_height, p.filter_width), p.padding, p.groups) != ((1, 1), (0, 0), 1):
        raise UnsupportedError(
            f"a prologue of {p.prologue!r} in front of a filter of {p.filter_height}x{p.filter_width} with a padding "
            f"of {p.padding} in {p.groups} groups: it is for 1x1 filters without padding in one group, which read a "
            "pixel once"
        )
    if p.prologue and p.shortcut_channels:
        raise UnsupportedError(
            f"a prologue of {p.prologue!r} and a shortcut of {p.shortcut_channels} channels: it is for convolutions "
            "of one image"
        )


def _check_shortcut(p: Conv2dProblem) -> None:
    if p.shortcut_channels < 0 or p.shortcut_stride < 1:
        raise UnsupportedError(
            f"a shortcut of {p.shortcut_channels} channels with stride {p.shortcut_stride}: there is none with 0 "
            "channels, and the stride must be at least 1"
        )
    if not p.shortcut_channels:
        if p.shortcut_stride != 1 or p.shortcut_size != (0, 0):
            raise UnsupportedError(
                f"a shortcut with stride {p.shortcut_stride} and size {p.shortcut_size} but no channels"
            )
        return
    height, width = p.shortcut_size
    reached = (
        _output_size(height, 1, p.shortcut_stride, 0, 1),
        _output_size(width, 1, p.shortcut_stride, 0, 1),
    )
    if reached != (p.output_height, p.output_width):
        raise UnsupportedError(
            f"a shortcut of {spell_pair(p.shortcut_size)} pixels with stride {p.shortcut_stride} gives "
            f"{spell_pair(reached)}; it must give the output's {spell_pair((p.output_height, p.output_width))}"
        )


def _check_counts(p: Conv2dProblem) -> None:
    largest = max(
        max(p.channels, p.x_pitch) * p.height * p.width,
        p.shortcut_channels * p.shortcut_size[0] * p.shortcut_size[1],
        p.shortcut_channels * p.filters,
        max(p.filters, p.y_pitch) * p.output_height * p.output_width,
        p.weight_elements,
        p.output_pixels,
        p.height + 2 * p.padding[0],
        p.width + 2 * p.padding[1],
    )
    if largest >= 2**31:
        raise UnsupportedError(
            f"conv2d counts the elements of one image, of the weights, and the output pixels of the whole batch in "
            f"32 bits; here one of them is {largest}. Split the batch or the image"
        )
