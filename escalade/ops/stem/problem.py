"""First layer of a network: the problem, and its reference in PyTorch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require, require_at_least
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import ELEMENT_BYTES, MULTIPLIED, QUANTIZED, STORAGE, stored_as
from escalade.ops.base.naming import Codec, Named, NamePattern
from escalade.ops.base.operation import Tensors
from escalade.ops.base.switches import round_to_tf32, with_cudnn
from escalade.ops.base.windows import touched
from escalade.ops.shared import activation
from escalade.ops.shared.images import LAYOUTS, FilteredImages, check_problem

SOURCES = ("uint8", "fp32", "fp16", "bf16")
MOST_CHANNELS = 4
Pool = tuple[int, int, int]
"""Kernel, stride and padding, each the same for both sides."""


@dataclass(frozen=True)
class StemProblem(FilteredImages, Named):
    """y = max_pool(relu(conv2d(x * scale + shift, weight) + bias)); normalization, ReLU and pooling are optional.

    x is the image as the caller has it: `source` and `source_layout`. Pixels are normalized in fp32 and rounded to
    `dtype`, the storage type of weights [K][C][R][S], bias and y (`tf32` as fp32); padding is zero *after*
    normalization. Accumulators are fp32. y is NHWC. With an `output` of fp8 or int8, y is rounded from `dtype` to that
    type and saturated; weights and bias include its scale.
    """

    NAME: ClassVar = NamePattern(
        "stem",
        "{channels}to{filters}_{height,width}_k{filter_height,filter_width}s{stride}[p{padding}]"
        "_{source:uint8|fp32|fp16|bf16}_{source_layout:nchw|nhwc}_b{batch}{normalise?_norm}{relu?_relu}[_pool{pool}]"
        "[_out{output:fp8|int8}]" + activation.IN_NAME,
        {"padding": lambda p: (p.filter_height // 2, p.filter_width // 2)},
        pool=Codec(
            r"\d+s\d+p\d+",
            lambda text: tuple(map(int, re.split("[sp]", text))),
            "{0[0]}s{0[1]}p{0[2]}".format,
        ),
    )

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    source: str = "fp32"
    source_layout: str = "nchw"
    normalise: bool = False
    relu: bool = True
    pool: Pool | None = None
    dtype: str = "fp16"
    layout: str = "nhwc"
    activation: str = ""
    """Expression in `x` that replaces ReLU, such as `x * sigmoid(x)`."""
    output: str = ""
    """Storage type of y, fp8 or int8; empty for that of weights and bias."""

    def __post_init__(self) -> None:
        _check(self)
        activation.normalize(self)

    @property
    def conv_height(self) -> int:
        return (self.height + 2 * self.padding[0] - self.filter_height) // self.stride[0] + 1

    @property
    def conv_width(self) -> int:
        return (self.width + 2 * self.padding[1] - self.filter_width) // self.stride[1] + 1

    @property
    def output_height(self) -> int:
        return self._pooled(self.conv_height)

    @property
    def output_width(self) -> int:
        return self._pooled(self.conv_width)

    def _pooled(self, size: int) -> int:
        if self.pool is None:
            return size
        kernel, stride, padding = self.pool
        return (size + 2 * padding - kernel) // stride + 1

    @property
    def storage(self) -> str:
        """Storage type of weights and bias."""
        return "fp32" if self.dtype == "tf32" else self.dtype

    @property
    def stored(self) -> str:
        """Storage type of y."""
        return self.output or self.storage

    @property
    def touched_pixels(self) -> int:
        kernel, step, edge = self.pool or (1, 1, 0)
        sizes = zip(
            (self.height, self.width), (self.conv_height, self.conv_width), (self.output_height, self.output_width),
            (self.filter_height, self.filter_width), self.stride, self.padding, strict=True,
        )  # fmt: skip
        return math.prod(
            touched(size, touched(between, outputs, kernel, step, edge), taps, stride, padding)
            for size, between, outputs, taps, stride, padding in sizes
        )

    @property
    def bytes(self) -> int:
        image = self.touched_elements * ELEMENT_BYTES[self.source]
        result = self.output_elements * ELEMENT_BYTES[self.stored]
        weights = (self.weight_elements + self.filters) * ELEMENT_BYTES[self.storage]
        return image + weights + result + (8 * self.channels if self.normalise else 0)


def _check(p: StemProblem) -> None:
    check_problem("stem", p, MULTIPLIED, ("nhwc",))
    require("stem", "source", p.source, SOURCES)
    require("stem", "source layout", p.source_layout, LAYOUTS)
    require("stem", "output", p.output, ("", *QUANTIZED))
    require_at_least(0, {"padding": min(p.padding)})
    require_at_least(
        1,
        {
            "filters": p.filters, "filter height": p.filter_height, "filter width": p.filter_width,
            "stride": min(p.stride),
        },
    )  # fmt: skip
    if p.channels > MOST_CHANNELS:
        raise UnsupportedError(
            f"{p.channels} channels: stem takes 1 to {MOST_CHANNELS}; conv2d takes any number"
        )
    if p.conv_height < 1 or p.conv_width < 1:
        raise UnsupportedError(
            f"the filter has {p.filter_height}x{p.filter_width} pixels, but the padded image only "
            f"{p.height + 2 * p.padding[0]}x{p.width + 2 * p.padding[1]}"
        )
    if p.pool is not None:
        kernel, stride, padding = p.pool
        require_at_least(1, {"pooling kernel": kernel, "pooling stride": stride})
        if not 0 <= 2 * padding <= kernel:
            raise UnsupportedError(
                f"pooling padding {padding}: it must be between 0 and half the kernel of {kernel}"
            )
        if p.output_height < 1 or p.output_width < 1:
            raise UnsupportedError(
                f"a pooling window of {kernel} does not fit into {p.conv_height}x{p.conv_width}"
            )
    largest = max(
        p.channels * p.pixels,
        p.filters * p.conv_height * p.conv_width,
        p.weight_elements,
        p.height + 2 * p.padding[0],
        p.width + 2 * p.padding[1],
    )
    if largest >= 2**31:
        raise UnsupportedError(
            f"stem uses 32-bit counts for the elements of an image and the weights; one of them is {largest} here. "
            "Split the image"
        )


# --- the reference


def random_inputs(problem: StemProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Return x and weights with three dimensions, in memory order; normalized pixels and outputs are of order one."""
    p = problem
    pixels = p.height * p.width
    size = (p.batch, p.channels, pixels) if p.source_layout == "nchw" else (p.batch, pixels, p.channels)
    if p.source == "uint8":
        x = draw.integers(256, *size, dtype=torch.uint8)
    else:
        x = draw.normal(*size).to(STORAGE[p.source])
    storage = STORAGE[p.storage]
    spread = 75.0 if p.source == "uint8" and not p.normalise else 1.0
    length = p.channels * p.taps
    largest = 40.0 if p.output else 1.0  # of outputs: a few of them saturate in int8
    inputs = {
        "x": x,
        "weight": draw.normal(p.filters, p.channels, p.taps, scale=largest * length**-0.5 / spread).to(
            storage
        ),
        "bias": draw.normal(p.filters, scale=largest).to(storage),
    }
    if p.normalise:
        unit = 1 / 75.0 if p.source == "uint8" else 1.0
        inputs["scale"] = (1 + 0.1 * draw.normal(p.channels)) * unit
        inputs["shift"] = draw.normal(p.channels) - (1.7 if p.source == "uint8" else 0.0)
    return inputs


def empty_output(problem: StemProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return torch.empty(
        (p.batch, p.filters, p.output_height, p.output_width),
        dtype=STORAGE[p.stored], device=device, memory_format=torch.channels_last,
    )  # fmt: skip


def _pixels(problem: StemProblem, inputs: Tensors, dtype: torch.dtype) -> torch.Tensor:
    """Return the image as [N, C, H, W], normalized, in `dtype`."""
    p = problem
    if p.source_layout == "nchw":
        x = inputs["x"].reshape(p.batch, p.channels, p.height, p.width)
    else:
        x = inputs["x"].reshape(p.batch, p.height, p.width, p.channels).permute(0, 3, 1, 2)
    x = x.to(dtype)
    if not p.normalise:
        return x
    return x * inputs["scale"].to(dtype)[:, None, None] + inputs["shift"].to(dtype)[:, None, None]


def _convolve(
    problem: StemProblem, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    p = problem
    shaped = weight.reshape(p.filters, p.channels, p.filter_height, p.filter_width)
    return F.conv2d(x, shaped, bias, p.stride, p.padding)


def _finish(problem: StemProblem, y: torch.Tensor) -> torch.Tensor:
    y = activation.apply(problem, y)
    return F.max_pool2d(y, *problem.pool) if problem.pool else y


def exact(problem: StemProblem, inputs: Tensors) -> torch.Tensor:
    x = _pixels(problem, inputs, torch.float64)
    return _finish(problem, _convolve(problem, x, inputs["weight"].double(), inputs["bias"].double()))


def peer(problem: StemProblem, inputs: Tensors) -> torch.Tensor:
    """Return PyTorch's result in the problem's dtype, with fp32 accumulation as on a GPU."""
    return stored_as(_computed(problem, inputs), STORAGE[problem.stored])


def _computed(problem: StemProblem, inputs: Tensors) -> torch.Tensor:
    storage = STORAGE[problem.storage]
    x, weight, bias = _pixels(problem, inputs, torch.float32).to(storage), inputs["weight"], inputs["bias"]
    if x.is_cuda:
        x = x.contiguous(memory_format=torch.channels_last)
        return _finish(problem, with_cudnn(problem.dtype, lambda: _convolve(problem, x, weight, bias)))
    if problem.dtype == "tf32":
        x, weight = round_to_tf32(x), round_to_tf32(weight)
    return _finish(problem, _convolve(problem, x.float(), weight.float(), bias.float()).to(storage))
