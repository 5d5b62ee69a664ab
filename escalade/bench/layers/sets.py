"""Sets of layers, mostly convolutions, in the dtype and batch that are asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
"""Channels up to which the input is taken for an image, whose gradient nobody asks for."""


@dataclass(frozen=True)
class Layer:
    """A problem of an operation, and how many times a network has it."""

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
    """Each once, in the order in which they come first."""
    counts: dict[Conv2dProblem, int] = {}
    for problem in problems:
        counts[problem] = counts.get(problem, 0) + 1
    return tuple(Layer("conv2d", problem, count) for problem, count in counts.items())


def _resnet(depths: Sequence[int], bottleneck: bool, batch: int, dtype: str) -> tuple[Layer, ...]:
    """A batch norm is a bias by now, and the convolution that ends a block adds what went around it."""
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


def resnet18(batch: int, dtype: str) -> tuple[Layer, ...]:
    return _resnet((2, 2, 2, 2), False, batch, dtype)


def resnet50(batch: int, dtype: str) -> tuple[Layer, ...]:
    return _resnet((3, 4, 6, 3), True, batch, dtype)


def stem(batch: int, dtype: str) -> tuple[Layer, ...]:
    """The first convolution of a ResNet; and with its pooling, as one operation of ours and two steps of the peers'."""
    first = Layer("conv2d", _conv(3, 64, 224, 7, 2, relu=True, batch=batch, dtype=dtype))
    if dtype not in STEM.dtypes:
        return (first,)
    source = "fp32" if dtype == "tf32" else dtype
    pooled = StemProblem(
        batch, 3, 224, 224, 64, 7, 7, (2, 2), (3, 3), source, "nhwc", pool=(3, 2, 1), dtype=dtype
    )
    return first, Layer("stem", pooled)


def depthwise(batch: int, dtype: str) -> tuple[Layer, ...]:
    """MobileNetV2's, ConvNeXt's, and one with a filter as large as they come."""
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
    """Problems that no table has an entry for, at batches of their own."""
    return tuple(Layer("conv2d", replace(problem, dtype=dtype, layout="nhwc")) for problem in UNTUNED)


SETS: dict[str, Callable[[int, str], tuple[Layer, ...]]] = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "stem": stem,
    "depthwise": depthwise,
    "untuned": untuned,
}


def named(name: str, batch: int, dtype: str) -> tuple[Layer, ...]:
    """The layers of a set, or of the one convolution that the name spells (with a batch of its own)."""
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
    """These layers, or the gradients of those that are convolutions and have one that is wanted."""
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
    """Every set in every dtype and batch that has it."""
    found: dict[tuple[Layer, ...], Part] = {}  # a set with batches of its own is the same at every other
    for dtype, batch, name in itertools.product(dtypes, batches, names):
        members = in_direction(named(name, batch, dtype), direction)
        title = f"{name}, {direction.replace('_', ' ')}, {dtype}"
        if all(layer.problem.batch == batch for layer in members):
            title += f", batch {batch}"
        if members:
            found.setdefault(members, Part(name, title, members))
    return tuple(found.values())
