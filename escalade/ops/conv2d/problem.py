"""2D convolution with its epilogue: the problem and its checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require, require_at_least
from escalade.ops.base.dtypes import ELEMENT_BYTES, MULTIPLIED, QUANTIZED
from escalade.ops.base.naming import Codec, Named, NamePattern, spell_pair
from escalade.ops.base.pitch import check_pitches
from escalade.ops.base.windows import touched
from escalade.ops.batch_statistics import BatchStatisticsProblem
from escalade.ops.max_pool2d import require_bytes_for_places
from escalade.ops.shared import activation, prologue
from escalade.ops.shared.images import LAYOUTS

DTYPES = (*MULTIPLIED, *QUANTIZED)
OUTPUTS = ("", "fp16")


@dataclass(frozen=True)
class Conv2dProblem(Named):
    """y = relu(conv2d(x, weight) + conv2d(shortcut, shortcut_weight) + bias + residual); only the first is required.

    `dtype` is the storage type of x, weight, bias, residual and y; `tf32` means fp32 storage with TF32 products.
    Accumulators are fp32, in `int8` s32. Weights are [K][C/groups][R][S] in layout `nchw`, [K][R][S][C/groups] in
    `nhwc`.

    The quantized dtypes `fp8` (e4m3) and `int8` add fp32 inputs `scale` and `scales`, and their bias is fp32:
    y = relu(sum * scale[filter] + bias[filter] + residual * scales[0]) * scales[1]. y is rounded to nearest (ties to
    even) and saturated (at ±448; at -128 and 127), or stored as fp16 with `output="fp16"`.

    The shortcut is a second image of `shortcut_channels` channels (0 for none), convolved with a 1x1 filter without
    padding: the downsampling branch of a ResNet block.

    A `prologue` is an expression applied to x and rounded to the dtype, as a separate kernel would store it. Its
    operands are `x`, the fp32 vectors `gain` and `shift` [C], and `gate` [N][C] in the dtype.

    A `pool` replaces y by the maxima of non-overlapping windows; incomplete windows at the edges are dropped. With
    `places`, the buffer `places` receives the argmax indices as in `MaxPool2dProblem`, behind a ReLU if there is one.
    Gradients need no more than that, so the unpooled result is never written. With `mean` it is their mean.

    An `activation` may use the fp32 vectors `a` and `b` [K]: `relu(x) * a + b`.

    With `epsilon`, for a batch normalization that follows in training, mean and variance of each filter's results are
    written too, and what `BatchStatisticsProblem` computes from them: `mean`, `variance` and `rstd`, and with
    `momentum` also `moved_mean` and `moved_variance`.

    With frames it is a convolution of volumes (NDHWC): x has the `frames` of each volume as consecutive images, y its
    `output_frames`, and the filter spans `filter_frames` of them. The rows of weights are those of all its frames:
    [K][filter_frames * R][S][C]. A residual is supported, a shortcut, pool or prologue is not.
    """

    takes_vectors: ClassVar = True

    NAME: ClassVar = NamePattern(
        "convolution",
        "{channels}to{filters}_{height,width}_k{filter_height,filter_width}s{stride}[p{padding}][d{dilation}][g{groups}]_b{batch}"
        "[_f{frames}k{filter_frames}s{frame_stride}p{frame_padding}d{frame_dilation}]"
        "<_|+|{bias?bias}|{residual?res}|[short{shortcut_channels}s{shortcut_stride}[i{shortcut_size}]]|{relu?relu}"
        "|[out{output}]|[pool{pool}]|{mean?mean}|{places?places}|[eps{epsilon}]|[m{momentum}]>"
        + prologue.IN_NAME
        + activation.IN_NAME,
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
    """Height and width; by default the output size times the stride."""
    output: str = ""
    """Storage type of y; empty for `dtype`."""
    activation: str = ""
    """Expression in `x` that replaces ReLU, such as `x * sigmoid(x)`."""
    prologue: str = ""
    """Expression applied to the input of a 1x1 filter, such as `relu(gain * x + shift)`."""
    x_pitch: int = 0
    y_pitch: int = 0
    """Elements per pixel step in NHWC, for channel slices of larger buffers; 0 if dense."""
    pool: tuple[int, int] = (1, 1)
    """Height and width of the pool's windows."""
    mean: bool = False
    """True for the windows' mean instead of their maximum."""
    places: bool = False
    """True to write the argmax indices as well."""
    epsilon: float | None = None
    momentum: float | None = None
    """Parameters of a batch normalization in training that follows; None without one."""
    frames: int = 1
    """Images per volume."""
    filter_frames: int = 1
    frame_stride: int = 1
    frame_padding: int = 0
    frame_dilation: int = 1

    def __post_init__(self) -> None:
        _check(self)
        _ = self.statistics  # checks its own fields
        _check_pool(self)
        _check_frames(self)
        activation.normalize(self)
        prologue.normalize(self)
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
        **rest: bool | int | float | str | tuple[int, int],
    ) -> Conv2dProblem:
        """Return a problem with square image and filter; `padding` defaults to half the filter."""
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

    @cached_property
    def has_frames(self) -> bool:
        """True for a convolution of volumes."""
        frames = self.frames, self.filter_frames, self.frame_stride, self.frame_padding, self.frame_dilation
        return frames != (1, 1, 1, 0, 1)

    @cached_property
    def output_frames(self) -> int:
        return _output_size(
            self.frames, self.filter_frames, self.frame_stride, self.frame_padding, self.frame_dilation
        )

    @property
    def images(self) -> int:
        """Images of x: those of all volumes, or the batch."""
        return self.batch * self.frames

    @property
    def output_images(self) -> int:
        return self.batch * self.output_frames

    @property
    def weight_rows(self) -> int:
        """Rows of the weights in all frames of the filter."""
        return self.filter_frames * self.filter_height

    @cached_property
    def reach(self) -> tuple[int, int]:
        """Rows and columns spanned by the taps, minus one."""
        return (self.filter_height - 1) * self.dilation[0], (self.filter_width - 1) * self.dilation[1]

    def window(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the rows and columns of x that a tile of outputs reads."""
        return (
            (rows - 1) * self.stride[0] + self.reach[0] + 1,
            (columns - 1) * self.stride[1] + self.reach[1] + 1,
        )

    @property
    def pools(self) -> bool:
        return self.pool != (1, 1)

    @property
    def result_size(self) -> tuple[int, int]:
        """Height and width of y, after pooling."""
        return self.output_height // self.pool[0], self.output_width // self.pool[1]

    @cached_property
    def statistics(self) -> BatchStatisticsProblem | None:
        """The statistics of the results, if they are computed too."""
        if self.epsilon is None:
            if self.momentum is not None:
                raise UnsupportedError(
                    "momentum without epsilon: statistics are computed with both, or without momentum"
                )
            return None
        if self.pools:
            raise UnsupportedError("epsilon with a pool: statistics are computed of unpooled results")
        height, width = self.result_size
        stored = self.stored if self.stored in ("fp16", "bf16") else "fp32"
        return BatchStatisticsProblem(
            self.output_images, self.filters, height, width, stored, self.layout, self.epsilon, self.momentum
        )

    @property
    def result_elements(self) -> int:
        height, width = self.result_size
        return self.output_images * self.filters * height * width

    @cached_property
    def output_pixels(self) -> int:
        return self.output_images * self.output_height * self.output_width

    @property
    def group_channels(self) -> int:
        return self.channels // self.groups

    @property
    def group_filters(self) -> int:
        return self.filters // self.groups

    @cached_property
    def taps(self) -> int:
        return self.weight_rows * self.filter_width

    @cached_property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def is_quantized(self) -> bool:
        return self.dtype in QUANTIZED

    @property
    def dense(self) -> Conv2dProblem:
        """The problem without pitches, by which configs that do not depend on them are cached."""
        return self._unpitched if self.x_pitch or self.y_pitch else self

    @cached_property
    def _unpitched(self) -> Conv2dProblem:
        return replace(self, x_pitch=0, y_pitch=0)

    @property
    def stored(self) -> str:
        """Storage type of y."""
        return self.output or self.dtype

    @property
    def output_bytes(self) -> int:
        return ELEMENT_BYTES[self.stored]

    @property
    def depth(self) -> int:
        """Products per output element."""
        return self.group_channels * self.taps + self.shortcut_channels

    @property
    def flops(self) -> int:
        return 2 * self.output_pixels * self.filters * self.depth

    @property
    def input_elements(self) -> int:
        return self.images * self.channels * self.height * self.width

    @property
    def touched_elements(self) -> int:
        """Elements of x that some filter position reads: a 1x1 filter with stride 2 reads a quarter of them."""
        sizes = (
            (self.height, self.output_height, self.filter_height),
            (self.width, self.output_width, self.filter_width),
        )
        rows, columns = (
            touched(*sizes[d], self.stride[d], self.padding[d], self.dilation[d]) for d in (0, 1)
        )
        frames = self.frames, self.output_frames, self.filter_frames
        images = touched(*frames, self.frame_stride, self.frame_padding, self.frame_dilation)
        return self.batch * images * self.channels * rows * columns

    @property
    def weight_elements(self) -> int:
        return self.filters * self.group_channels * self.taps

    @property
    def shortcut_elements(self) -> int:
        return self.batch * self.shortcut_channels * self.shortcut_size[0] * self.shortcut_size[1]

    @property
    def touched_shortcut_elements(self) -> int:
        height, width = self.shortcut_size
        rows = touched(height, self.output_height, 1, self.shortcut_stride)
        columns = touched(width, self.output_width, 1, self.shortcut_stride)
        return self.batch * self.shortcut_channels * rows * columns

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
        scaled = self.is_quantized
        bias = (self.filters if self.bias else 0) * (4 if scaled else self.element_bytes)
        scales = 4 * (self.filters + 2) if scaled else 0
        return (
            self.element_bytes * (images + weights + residual)
            + self.output_bytes * self.result_elements
            + (self.result_elements if self.places else 0)
            + bias
            + scales
            + 4 * self.filters * len(activation.vectors_of(self.activation))
            + prologue.operand_bytes(self)
        )

    @cached_property
    def traffic(self) -> int:
        """Bytes used by estimates: whole images, since most kernels also read the pixels that strides skip."""
        untouched = self.input_elements - self.touched_elements
        untouched += self.shortcut_elements - self.touched_shortcut_elements
        return self.bytes + self.element_bytes * untouched

    @property
    def products(self) -> int:
        return self.output_elements * self.group_channels * self.taps

    @property
    def rounding(self) -> float:
        """Error of a running fp32 sum: each addition is off by up to 2^-24, which adds up like a random walk."""
        return 2.0**-24 * math.sqrt(1 + self.depth / 6)


def _output_size(size: int, filter_size: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (filter_size - 1) - 1) // stride + 1


def _check(p: Conv2dProblem) -> None:
    require("conv2d", "dtype", p.dtype, DTYPES)
    require("conv2d", "layout", p.layout, LAYOUTS)
    if p.output not in OUTPUTS:
        raise UnsupportedError(f"output {p.output!r}: conv2d stores y in its dtype ('') or in fp16")
    if p.batch < 0:
        raise UnsupportedError(f"batch size {p.batch}: it must be at least 0")
    positive = {
        "groups": p.groups, "channels": p.channels, "height": p.height, "width": p.width, "filters": p.filters,
        "filter height": p.filter_height, "filter width": p.filter_width, "stride": min(p.stride),
        "dilation": min(p.dilation), "frames": p.frames, "filter frames": p.filter_frames,
        "frame stride": p.frame_stride, "frame dilation": p.frame_dilation,
    }  # fmt: skip
    require_at_least(1, positive)
    if min(*p.padding, p.frame_padding) < 0:
        raise UnsupportedError(f"padding {(p.frame_padding, *p.padding)}: it must be at least 0")
    if p.channels % p.groups or p.filters % p.groups:
        raise UnsupportedError(
            f"{p.channels} channels and {p.filters} filters cannot be split into {p.groups} groups"
        )
    if p.output_height < 1 or p.output_width < 1:
        raise UnsupportedError(
            f"the filter covers {p.reach[0] + 1}x{p.reach[1] + 1} pixels, but the padded image has only "
            f"{p.height + 2 * p.padding[0]}x{p.width + 2 * p.padding[1]}"
        )


def _check_frames(p: Conv2dProblem) -> None:
    if p.output_frames < 1:
        raise UnsupportedError(
            f"the filter covers {(p.filter_frames - 1) * p.frame_dilation + 1} frames, but the padded volume has only "
            f"{p.frames + 2 * p.frame_padding}"
        )
    if p.has_frames and (p.pools or p.shortcut_channels or p.prologue):
        raise UnsupportedError("convolutions of volumes support neither pools, shortcuts nor prologues")


def _check_pool(p: Conv2dProblem) -> None:
    if min(p.pool) < 1 or 0 in p.result_size:
        raise UnsupportedError(
            f"pool {spell_pair(p.pool)} over {spell_pair((p.output_height, p.output_width))} pixels: its sides must be "
            "at least 1 and fit into the output"
        )
    if (p.places or p.mean) and not p.pools:
        raise UnsupportedError("places=True and mean=True need a pool; this problem has none")
    if p.places and p.mean:
        raise UnsupportedError("places=True and mean=True: only a maximum has a place")
    if p.places:
        require_bytes_for_places(p.pool)


def _check_prologue(p: Conv2dProblem) -> None:
    if p.prologue and ((p.filter_height, p.filter_width), p.padding, p.groups) != ((1, 1), (0, 0), 1):
        raise UnsupportedError(
            f"prologue {p.prologue!r} with a {p.filter_height}x{p.filter_width} filter, padding {p.padding} and "
            f"groups={p.groups}: prologues are supported for 1x1 filters without padding or groups, which read "
            "each pixel once"
        )
    if p.prologue and p.shortcut_channels:
        raise UnsupportedError(
            f"prologue {p.prologue!r} with a shortcut of {p.shortcut_channels} channels: prologues are supported "
            "without a shortcut"
        )


def _check_shortcut(p: Conv2dProblem) -> None:
    if p.shortcut_channels < 0 or p.shortcut_stride < 1:
        raise UnsupportedError(
            f"shortcut_channels={p.shortcut_channels}, shortcut_stride={p.shortcut_stride}: channels must be at least "
            "0 (0 for no shortcut), the stride at least 1"
        )
    if not p.shortcut_channels:
        if p.shortcut_stride != 1 or p.shortcut_size != (0, 0):
            raise UnsupportedError(
                f"shortcut_stride={p.shortcut_stride}, shortcut_size={p.shortcut_size}: set shortcut_channels too"
            )
        return
    height, width = p.shortcut_size
    reached = (
        _output_size(height, 1, p.shortcut_stride, 0, 1),
        _output_size(width, 1, p.shortcut_stride, 0, 1),
    )
    if reached != (p.output_height, p.output_width):
        raise UnsupportedError(
            f"a {spell_pair(p.shortcut_size)} shortcut with stride {p.shortcut_stride} results in "
            f"{spell_pair(reached)} pixels, but the output has {spell_pair((p.output_height, p.output_width))}"
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
            f"conv2d uses 32-bit counts for the elements per image, the weights and the output pixels of the batch; "
            f"one of them is {largest} here. Split the batch or the image"
        )
