"""Convolution of a few channels with ReLU and pooling: the problem, and its reference in PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require, require_at_least
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import ELEMENT_BYTES, MULTIPLIED, STORAGE
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Tensors
from escalade.ops.base.switches import round_to_tf32, with_cudnn
from escalade.ops.base.windows import touched
from escalade.ops.shared import activation
from escalade.ops.shared.images import MEMORY_FORMAT, FilteredImages, check_problem, empty_images

SOURCES = ("fp32", "fp16", "bf16", "uint8")
MOST_CHANNELS = 8
MOST_FILTERS = 32


@dataclass(frozen=True)
class FewChannelsProblem(FilteredImages, Named):
    """y = max_pool(relu(conv2d(x, weight) + bias)) with stride 1; bias, ReLU and pooling are optional.

    Pooling windows are `pool` by `pool` without overlap; with `ceil_mode` those at the right and lower edges may be
    incomplete. x is stored as `x_type` (uint8 values are used unscaled); weights [K][C][R][S], bias and y as `dtype`
    (`tf32` as fp32). Accumulators are fp32; x and y have `layout`.
    """

    NAME: ClassVar = NamePattern(
        "convolution of few channels",
        "{channels}to{filters}_{height,width}_k{filter_height,filter_width}[p{padding}]_b{batch}"
        "[_{source:uint8|fp32|fp16|bf16}]{bias?_bias}{relu?_relu}[_pool{pool}{ceil_mode?c}]"
        + activation.IN_NAME,
    )

    padding: tuple[int, int] = (0, 0)
    bias: bool = False
    relu: bool = False
    pool: int = 1
    ceil_mode: bool = False
    dtype: str = "fp32"
    layout: str = "nhwc"
    source: str = ""
    """Storage type of x; empty for that of y."""
    activation: str = ""
    """Expression in `x` that replaces ReLU, such as `x * sigmoid(x)`."""

    def __post_init__(self) -> None:
        # Normalize fields, so that equal problems compare equal.
        object.__setattr__(self, "ceil_mode", self.ceil_mode and self.pool > 1)
        if self.source == self.storage:
            object.__setattr__(self, "source", "")
        _check(self)
        activation.normalize(self)

    @property
    def storage(self) -> str:
        """Storage type of weights, bias and y."""
        return "fp32" if self.dtype == "tf32" else self.dtype

    @property
    def x_type(self) -> str:
        """Storage type of x."""
        return self.source or self.storage

    @property
    def conv_height(self) -> int:
        return self.height + 2 * self.padding[0] - self.filter_height + 1

    @property
    def conv_width(self) -> int:
        return self.width + 2 * self.padding[1] - self.filter_width + 1

    @property
    def output_height(self) -> int:
        return self._pooled(self.conv_height)

    @property
    def output_width(self) -> int:
        return self._pooled(self.conv_width)

    def _pooled(self, size: int) -> int:
        return -(-size // self.pool) if self.ceil_mode else size // self.pool

    @property
    def touched_pixels(self) -> int:
        sizes = zip(
            (self.height, self.width), (self.conv_height, self.conv_width), (self.output_height, self.output_width),
            (self.filter_height, self.filter_width), self.padding, strict=True,
        )  # fmt: skip
        return math.prod(
            touched(size, touched(between, outputs, self.pool, self.pool), taps, 1, padding)
            for size, between, outputs, taps, padding in sizes
        )

    @property
    def bytes(self) -> int:
        stored = self.weight_elements + (self.filters if self.bias else 0) + self.output_elements
        return self.touched_elements * ELEMENT_BYTES[self.x_type] + stored * ELEMENT_BYTES[self.storage]


def check_counts(channels: int, filters: int) -> None:
    if channels > MOST_CHANNELS or filters > MOST_FILTERS:
        raise UnsupportedError(
            f"{channels} channels and {filters} filters: few_channels takes up to {MOST_CHANNELS} and "
            f"{MOST_FILTERS}; conv2d takes any number"
        )


def _check(p: FewChannelsProblem) -> None:
    check_problem("few_channels", p, MULTIPLIED)
    require("few_channels", "source", p.x_type, SOURCES)
    if p.x_type not in (p.storage, "uint8", "fp32"):
        raise UnsupportedError(
            f"source {p.x_type} for a convolution in {p.dtype}: few_channels takes images in {p.storage}, fp32 or uint8"
        )
    require_at_least(0, {"padding": min(p.padding)})
    require_at_least(
        1,
        {
            "filters": p.filters, "filter height": p.filter_height, "filter width": p.filter_width,
            "pooling window": p.pool,
        },
    )  # fmt: skip
    check_counts(p.channels, p.filters)
    if p.conv_height < 1 or p.conv_width < 1:
        raise UnsupportedError(
            f"the filter has {p.filter_height}x{p.filter_width} pixels, but the padded image only "
            f"{p.height + 2 * p.padding[0]}x{p.width + 2 * p.padding[1]}"
        )
    if p.output_height < 1 or p.output_width < 1:
        raise UnsupportedError(
            f"a pooling window of {p.pool} does not fit into {p.conv_height}x{p.conv_width}"
        )
    largest = max(p.channels * p.pixels, p.filters * p.conv_height * p.conv_width)
    if largest >= 2**31:
        raise UnsupportedError(
            f"few_channels uses 32-bit counts for the elements of an image; this one has {largest}. Split the image"
        )


# --- the reference


def random_inputs(problem: FewChannelsProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Return normal deviates or uint8 values, weights scaled to keep outputs of order one.

    Weights have three dimensions ([K, C, R * S]): their order does not depend on the layout.
    """
    p = problem
    size = (p.batch, p.channels, p.height, p.width)
    if p.x_type == "uint8":
        x = draw.integers(256, *size, dtype=torch.uint8)
    else:
        x = draw.normal(*size).to(STORAGE[p.x_type])
    storage = STORAGE[p.storage]
    spread = 75.0 if p.x_type == "uint8" else 1.0
    scale = (p.channels * p.taps) ** -0.5 / spread
    inputs = {
        "x": x.contiguous(memory_format=MEMORY_FORMAT[p.layout]),
        "weight": draw.normal(p.filters, p.channels, p.taps, scale=scale).to(storage),
    }
    if p.bias:
        inputs["bias"] = draw.normal(p.filters).to(storage)
    return inputs


def empty_output(problem: FewChannelsProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.batch, p.filters, p.output_height, p.output_width), device)


def _convolve(
    problem: FewChannelsProblem, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    p = problem
    shaped = weight.reshape(p.filters, p.channels, p.filter_height, p.filter_width)
    if p.layout == "nhwc":
        x, shaped = _channels_last(x), _channels_last(shaped)
    return F.conv2d(x, shaped, bias, padding=p.padding)


def _channels_last(images: torch.Tensor) -> torch.Tensor:
    """Return images with channels_last strides even for one channel, where PyTorch cannot tell the layouts apart."""
    _, channels, height, width = images.shape
    laid_out = images.contiguous(memory_format=torch.channels_last)
    return laid_out.as_strided(images.shape, (channels * height * width, 1, channels * width, channels))


def _finish(problem: FewChannelsProblem, y: torch.Tensor) -> torch.Tensor:
    p = problem
    y = activation.apply(p, y)
    return F.max_pool2d(y, p.pool, ceil_mode=p.ceil_mode) if p.pool > 1 else y


def exact(problem: FewChannelsProblem, inputs: Tensors) -> torch.Tensor:
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    return _finish(problem, _convolve(problem, wide["x"], wide["weight"], wide.get("bias")))


def peer(problem: FewChannelsProblem, inputs: Tensors) -> torch.Tensor:
    """Return PyTorch's result in the problem's dtype, with fp32 accumulation as on a GPU."""
    storage = STORAGE[problem.storage]
    x, weight, bias = inputs["x"].to(storage), inputs["weight"], inputs.get("bias")
    if x.is_cuda:
        return _finish(problem, with_cudnn(problem.dtype, lambda: _convolve(problem, x, weight, bias)))
    if problem.dtype == "tf32":
        x, weight = round_to_tf32(x), round_to_tf32(weight)
    y = _convolve(problem, x.float(), weight.float(), None if bias is None else bias.float())
    return _finish(problem, y.to(storage))
