"""Sets of layers, mostly convolutions, in any dtype and batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from escalade import ops
from escalade.errors import UnsupportedError
from escalade.ops.base.problem import Problem
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.stem.operation import STEM
from escalade.ops.stem.problem import StemProblem
from escalade.tune.sweep import UNTUNED

DIRECTIONS = {
    "forward": "conv2d",
    "input_gradient": "conv2d_input_gradient",
    "weight_gradient": "conv2d_weight_gradient",
}
"""The directions of a convolution, and the operation of each."""
IMAGE_CHANNELS = 4
"""Most channels of an input that is taken for an image, which needs no gradient."""


@dataclass(frozen=True)
class Layer:
    """A problem of an operation, and its number in a network."""

    operation: str
    problem: Any
    count: int = 1

    @property
    def key(self) -> tuple[str, Problem]:
        return self.operation, self.problem


def _conv(
    channels: int, filters: int, size: int, filter_size: int, stride: int = 1, **rest: Any
) -> Conv2dProblem:
    return Conv2dProblem.square(
        channels, filters, size, filter_size, stride=stride, layout="nhwc", bias=True, **rest
    )


def _counted(problems: Iterable[Conv2dProblem]) -> tuple[Layer, ...]:
    """Return each problem once with its count, in the order of first occurrence."""
    counts: dict[Conv2dProblem, int] = {}
    for problem in problems:
        counts[problem] = counts.get(problem, 0) + 1
    return tuple(Layer("conv2d", problem, count) for problem, count in counts.items())


def _resnet(depths: Sequence[int], bottleneck: bool, batch: int, dtype: str) -> tuple[Layer, ...]:
    """Return the convolutions of a ResNet with BatchNorm folded into biases and residuals added in the epilogue."""
    rest: dict[str, Any] = {"batch": batch, "dtype": dtype}
    found = [_conv(3, 64, 224, 7, 2, relu=True, **rest)]
    channels, size = 64, 56
    for stage, depth in enumerate(depths):
        width = 64 << stage
        filters = 4 * width if bottleneck else width
        for position in range(depth):
            stride = 2 if stage and not position else 1
            after = size // stride
            if stride > 1 or channels != filters:
                found.append(_conv(channels, filters, size, 1, stride, **rest))
            if bottleneck:
                found.append(_conv(channels, width, size, 1, relu=True, **rest))
                found.append(_conv(width, width, size, 3, stride, relu=True, **rest))
                found.append(_conv(width, filters, after, 1, residual=True, relu=True, **rest))
            else:
                found.append(_conv(channels, width, size, 3, stride, relu=True, **rest))
                found.append(_conv(width, width, after, 3, residual=True, relu=True, **rest))
            channels, size = filters, after
    return _counted(found)


def stem(batch: int, dtype: str) -> tuple[Layer, ...]:
    """Return the first convolution of a ResNet, alone and with its pooling, which are two steps of peers."""
    first = Layer("conv2d", _conv(3, 64, 224, 7, 2, relu=True, batch=batch, dtype=dtype))
    if dtype not in STEM.dtypes:
        return (first,)
    source = "fp32" if dtype == "tf32" else dtype
    pooled = StemProblem(
        batch, 3, 224, 224, 64, 7, 7, (2, 2), (3, 3), source, "nhwc", pool=(3, 2, 1), dtype=dtype
    )
    return first, Layer("stem", pooled)


def depthwise(batch: int, dtype: str) -> tuple[Layer, ...]:
    """Return MobileNetV2's and ConvNeXt's depthwise convolutions, and one with a very large filter."""
    mobilenet = (
        (32, 112, 1), (96, 112, 2), (144, 56, 1), (144, 56, 2), (192, 28, 1), (192, 28, 2), (384, 14, 1),
        (576, 14, 1), (576, 14, 2), (960, 7, 1),
    )  # fmt: skip
    rest: dict[str, Any] = {"batch": batch, "dtype": dtype}
    found = [_conv(c, c, size, 3, stride, groups=c, relu=True, **rest) for c, size, stride in mobilenet]
    found += [
        _conv(c, c, size, 7, groups=c, **rest) for c, size in ((96, 56), (192, 28), (384, 14), (768, 7))
    ]
    found.append(_conv(256, 256, 56, 31, groups=256, **rest))
    return _counted(found)


def untuned(batch: int, dtype: str) -> tuple[Layer, ...]:
    """Return problems without an entry in any table, at their own batches."""
    return tuple(Layer("conv2d", replace(problem, dtype=dtype, layout="nhwc")) for problem in UNTUNED)


SETS: dict[str, Callable[[int, str], tuple[Layer, ...]]] = {
    "resnet18": partial(_resnet, (2, 2, 2, 2), False),
    "resnet50": partial(_resnet, (3, 4, 6, 3), True),
    "stem": stem,
    "depthwise": depthwise,
    "untuned": untuned,
}


def named(name: str, batch: int, dtype: str) -> tuple[Layer, ...]:
    """Return the layers of a set, or the one convolution with that name (and its own batch)."""
    if name in SETS:
        return SETS[name](batch, dtype)
    try:
        problem = Conv2dProblem.parse(name, dtype, "nhwc")
        ops.operation("conv2d").require_work(problem)
        return (Layer("conv2d", problem),)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{name!r} is neither a set of layers ({', '.join(SETS)}) nor a convolution: {error}"
        ) from None


def in_direction(layers: Sequence[Layer], direction: str) -> tuple[Layer, ...]:
    """Return these layers, or the gradients of the convolutions among them; images have no input gradient."""
    if direction == "forward":
        return tuple(layers)
    if direction not in DIRECTIONS:
        raise UnsupportedError(f"there is no direction {direction!r}; there is {', '.join(DIRECTIONS)}")
    operation = ops.operation(DIRECTIONS[direction])
    counts: dict[Any, int] = {}
    for layer in layers:
        forward = layer.problem
        if layer.operation != "conv2d":
            continue
        if direction == "input_gradient" and forward.channels <= IMAGE_CHANNELS:
            continue
        plain = replace(forward, bias=False, residual=False, relu=False)
        problem = replace(operation.parse(plain.name), dtype=plain.dtype, layout=plain.layout)
        counts[problem] = counts.get(problem, 0) + layer.count
    return tuple(Layer(operation.name, problem, count) for problem, count in counts.items())


@dataclass(frozen=True)
class Part:
    """A set in one dtype and batch."""

    name: str
    title: str
    layers: tuple[Layer, ...]


def parts(
    names: Sequence[str], batches: Sequence[int], dtypes: Sequence[str], direction: str
) -> tuple[Part, ...]:
    """Return every set in every dtype and batch that has layers."""
    found: dict[tuple[Layer, ...], Part] = {}  # a set with its own batches is the same at every other
    for dtype, batch, name in itertools.product(dtypes, batches, names):
        members = in_direction(named(name, batch, dtype), direction)
        title = f"{name}, {direction.replace('_', ' ')}, {dtype}"
        if all(layer.problem.batch == batch for layer in members):
            title += f", batch {batch}"
        if members:
            found.setdefault(members, Part(name, title, members))
    return tuple(found.values())
