"""Gradients of group normalization, for training steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, STORAGE, widest_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import kernel_call
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.rung import Rung
from escalade.ops.expressions import Expression
from escalade.ops.shared.channels import SIZES, channels_innermost
from escalade.ops.shared.images import (
    LAYOUTS,
    Images,
    check_problem,
    empty_images,
    require_32_bits,
    stored_images,
)
from escalade.ops.shared.pointwise import PacksConfig
from escalade.ops.shared.rows import check_dtypes

# --- the problem


@dataclass(frozen=True)
class GroupNormBackwardProblem(Images, Named):
    """Gradients of y = (x - mean) * rstd * weight + bias, where mean and rstd (reciprocal standard deviation) are those
    of a group of channels of an image.

    Buffers `gradient` (dy), x and the gradient of x, `y`, have the dtypes `gradient`, `dtype` and `output`. The fp32
    vectors `weight`, which is optional, and the results `weight_gradient` and `bias_gradient` have one number per
    channel, and the fp32 buffers `mean` and `rstd` are [batch][groups].

    `function` is the gradient of an activation behind the norm: an expression in `gradient` and in `x`, the
    activation's input, which is recomputed from x, for which an optional `bias` is read.
    """

    NAME: ClassVar = NamePattern(
        "gradients of group normalization",
        SIZES
        + r"_g{groups}{weight?_weight}{bias?_bias}[_from{gradient:fp32|fp16|bf16}][_to{output:fp32|fp16|bf16}]"
        r"[\[{function:text}\]]",
    )

    groups: int
    weight: bool = True
    dtype: str = "fp32"
    layout: str = "nhwc"
    gradient: str = ""
    """Dtype of dy; empty if it is that of x."""
    output: str = ""
    """Dtype of dx; empty if it is that of x."""
    function: str = ""
    bias: bool = False

    def __post_init__(self) -> None:
        check_problem("group_norm_backward", self)
        require_32_bits("group_norm_backward", self.channels * self.pixels)
        check_dtypes("group_norm_backward", gradient=self.gradient, output=self.output)
        if self.groups < 1 or self.channels % self.groups:
            raise UnsupportedError(
                f"{self.groups} groups of {self.channels} channels: the number of groups must divide that of channels"
            )
        if self.batch * self.channels >= 2**24:
            raise UnsupportedError(
                f"{self.batch} images of {self.channels} channels: group_norm_backward supports fewer than 2^24 "
                "planes; split the batch"
            )
        if self.function:
            expression = Expression.parse(self.function)
            if set(expression.inputs) != {"gradient", "x"} or len(expression.results) != 1:
                raise UnsupportedError(
                    f"function {self.function!r}: it must be one expression in gradient and x, such as "
                    "gradient * sigmoid(x)"
                )
            object.__setattr__(self, "function", expression.text)

    @property
    def read(self) -> str:
        """Dtype of dy."""
        return self.gradient or self.dtype

    @property
    def result(self) -> str:
        """Dtype of dx."""
        return self.output or self.dtype

    @property
    def count(self) -> int:
        """Elements of a group of an image."""
        return self.channels // self.groups * self.pixels

    @property
    def flops(self) -> int:
        """Two sums with a subtraction and a multiplication; then five more per element."""
        return 9 * self.elements

    @property
    def bytes(self) -> int:
        """x and dy read once, and dx written."""
        return self._bytes(1)

    @property
    def traffic(self) -> int:
        """Traffic of two passes, which both read x and dy."""
        return self._bytes(2)

    def _bytes(self, passes: int) -> int:
        read, written = ELEMENT_BYTES[self.dtype] + ELEMENT_BYTES[self.read], ELEMENT_BYTES[self.result]
        vectors = 4 * (2 + self.weight) * self.channels + 8 * self.batch * self.groups
        return (passes * read + written) * self.elements + vectors

    @property
    def rounding(self) -> float:
        """256 parallel running sums, each a random walk of its rounding errors; then five more roundings."""
        return 2.0**-24 * math.sqrt(6 + max(self.count, self.batch * self.pixels) / 256 / 6)


# --- rungs


_PARAMETERS = Buffer("weight", optional=True), Buffer("bias", optional=True)
_STATISTICS = Buffer("mean"), Buffer("rstd")
_RESULTS = Buffer("weight_gradient"), Buffer("bias_gradient")
_PARTIAL, _COEFFICIENTS, _BY_CHANNEL = Buffer("partial"), Buffer("coefficients"), Buffer("by_channel")
_LAUNCHES = 3
_START_US = 1.3  # latency of each launch besides its own, as of batch_norm_backward
_BUSY_BLOCKS = 4  # CTAs per SM of the first launch, at least, if there are enough rows
_MERGE_WARPS = 8
"""Most warps of a CTA that adds up the sums of a group."""


def _program(source: str, problem: GroupNormBackwardProblem, **scope: Any) -> Program:
    generated: dict[str, Constant] = {}
    if problem.function:
        expression = Expression.parse(problem.function)
        generated = {"EXPRESSION_X": expression.inputs.index("x"), **expression.constants(problem.read)}
    return Program.of(f"group_norm_backward/{source}.cu", constants=generated, problem=problem, **scope)


def _width(packs: int, threads: int) -> int:
    """Return the packs of a row per CTA: of those that divide the row, the most that use nine of ten threads."""
    divisors = [width for width in range(1, min(packs, threads) + 1) if packs % width == 0]
    return max(divisors, key=lambda width: (min(threads // width * width, 0.9 * threads), width))


@dataclass(frozen=True)
class SplitConfig(PacksConfig):
    share: int = 8
    """Accesses per thread and tensor of the first launch, if there are enough."""


@dataclass(frozen=True)
class Split(Rung[GroupNormBackwardProblem, SplitConfig]):
    """Sums per channel of an image; coefficients per group of an image and gradients of the parameters; then dx."""

    wide: bool
    """True for accesses of up to 16 bytes, several in flight; False for single elements."""

    def configs(self, problem: GroupNormBackwardProblem) -> tuple[SplitConfig, ...]:
        if not self.wide:
            return (SplitConfig(256, 1, problem.pixels), SplitConfig(128, 1, problem.pixels))
        sizes = ((128, 4), (128, 2), (256, 4), (256, 2), (512, 4))
        return tuple(SplitConfig(*size, share) for share in (16, 8) for size in sizes)

    def estimate(self, problem: GroupNormBackwardProblem, config: SplitConfig) -> float:
        return _LAUNCHES * _START_US + self.card.microseconds(0, problem.traffic, _LAUNCHES)

    def _vector(self, problem: GroupNormBackwardProblem, length: int) -> int:
        """Return the elements per access, 16 bytes of the widest dtype, which divide a length."""
        dtypes = (problem.dtype, problem.read, problem.result)
        return min(widest_vector(dtype, length) for dtype in dtypes) if self.wide else 1

    def recipe(self, problem: GroupNormBackwardProblem, config: SplitConfig) -> Recipe:
        p = problem
        if channels_innermost(p):
            vector = self._vector(p, p.channels)
            outer, rows, packs = p.batch, p.pixels, p.channels // vector
        else:
            vector = self._vector(p, p.pixels)
            outer, rows, packs = p.batch * p.channels, p.pixels // vector, 1
        width = _width(packs, config.threads)
        height, across = config.threads // width, packs // width
        enough = ceil_div(outer * across * rows, self.card.multiprocessors * _BUSY_BLOCKS)
        share = min(rows, height * config.share, max(height, enough))
        splits = ceil_div(rows, share)
        sums = kernel_call(
            _program("sums", p, config=config, vector=vector),
            (outer * splits, across),
            config.threads,
            Buffer("gradient"), Buffer("x"), *_PARAMETERS, *_STATISTICS, _PARTIAL, width, rows, splits, share,
        )  # fmt: skip
        warps = min(_MERGE_WARPS, p.channels // p.groups)
        coefficients = kernel_call(
            _program("coefficients", p, config=config, merge_warps=warps),
            p.batch * p.groups,
            32 * warps,
            _PARTIAL, Buffer("weight", optional=True), *_STATISTICS, _COEFFICIENTS, _BY_CHANNEL, splits,
        )  # fmt: skip
        vector = self._vector(p, p.channels * p.pixels)
        per_image, merging = blocks(p.channels * p.pixels // vector, config.threads), ceil_div(p.channels, 32)
        apply = kernel_call(
            _program("apply", p, config=config, vector=vector),
            merging + p.batch * per_image,
            config.threads,
            Buffer("gradient"), Buffer("x"), *_PARAMETERS, _COEFFICIENTS, _BY_CHANNEL, Buffer("y"), *_RESULTS,
            p.batch, merging, per_image,
        )  # fmt: skip
        workspaces = (
            Workspace(_PARTIAL.name, 8 * p.batch * p.channels * splits),
            Workspace(_COEFFICIENTS.name, 16 * p.batch * p.groups),
            Workspace(_BY_CHANNEL.name, 8 * p.batch * p.channels),
        )
        return Recipe((sums, coefficients, apply), workspaces)


# Predictions are for 320 channels in 32 groups, 64 x 64, batch 8, fp16, NHWC: 21 MB per tensor, five of them moved.
NAIVE = Split(
    "naive", "single elements; one CTA per image and 256 channels for the sums", None, None, wide=False
)

SPLIT = Split(
    "split",
    "up to 16 bytes per access, several in flight; many CTAs share each sum",
    below="naive",
    # naive: 16 CTAs with 1 KiB in flight each read 42 MB, 1 us per turn: 2.6 ms. split: 105 MB, 25 us, and three
    # launches.
    predicted_gain=80.0,
    wide=True,
)


# --- the reference


def random_inputs(problem: GroupNormBackwardProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Standard normal gradients, and images whose channels have a mean and a spread of their own."""
    p = problem
    shape, each = (p.batch, p.channels, p.height, p.width), (p.batch, p.channels, 1, 1)
    x = draw.normal(*shape) * (1 + draw.normal(*each).abs()) + draw.normal(*each)
    inputs = {
        "gradient": stored_images(replace(p, dtype=p.read), draw.normal(*shape)),
        "x": stored_images(p, x),
    }
    if p.weight:
        inputs["weight"] = 1 + 0.3 * draw.normal(p.channels)
    if p.bias:
        inputs["bias"] = 0.3 * draw.normal(p.channels)
    groups = inputs["x"].double().reshape(p.batch, p.groups, p.count)
    inputs["mean"] = groups.mean(-1).float()
    inputs["rstd"] = (groups.var(-1, correction=0) + 1e-5).rsqrt().float()
    return inputs


def empty_output(problem: GroupNormBackwardProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(replace(p, dtype=p.result), (p.batch, p.channels, p.height, p.width), device)


def gradients(
    problem: GroupNormBackwardProblem, inputs: Tensors, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, weight and bias, computed in a dtype. x may have any rank."""
    p = problem
    wide = {name: tensor.to(dtype) for name, tensor in inputs.items()}
    grouped = (p.batch, p.groups, p.channels // p.groups, p.pixels)
    x, gradient = (wide[name].reshape(grouped) for name in ("x", "gradient"))
    mean, rstd = (wide[name].reshape(p.batch, p.groups, 1, 1) for name in ("mean", "rstd"))
    weight, bias = (
        wide[name].reshape(1, p.groups, -1, 1) if name in wide else None for name in ("weight", "bias")
    )
    normalized = (x - mean) * rstd
    if p.function:
        before = normalized if weight is None else normalized * weight
        before = before if bias is None else before + bias
        gradient = Expression.parse(p.function).evaluate({"gradient": gradient, "x": before})[0]
    scaled = gradient if weight is None else gradient * weight
    means = (one.mean((2, 3), keepdim=True) for one in (scaled, scaled * normalized))
    dx = (scaled - next(means) - normalized * next(means)) * rstd
    sums = ((gradient * normalized).sum((0, 3)).flatten(), gradient.sum((0, 3)).flatten())
    return dx.reshape(inputs["x"].shape), *sums


def exact(problem: GroupNormBackwardProblem, inputs: Tensors) -> torch.Tensor:
    return gradients(problem, inputs)[0]


def peer(problem: GroupNormBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """PyTorch's gradients of the activation and of the norm, in fp32."""
    p = problem
    wide = {name: tensor.float() for name, tensor in inputs.items()}
    gradient, x, weight = wide["gradient"].contiguous(), wide["x"].contiguous(), wide.get("weight")
    if p.function:
        y = torch.ops.aten.native_group_norm(
            x, weight, wide.get("bias"), p.batch, p.channels, p.pixels, p.groups, 1e-5
        )[0]
        gradient = Expression.parse(p.function).evaluate({"gradient": gradient, "x": y.view(x.shape)})[0]
    found: tuple[torch.Tensor, ...] = torch.ops.aten.native_group_norm_backward(
        gradient, x, wide["mean"], wide["rstd"], weight, p.batch, p.channels, p.pixels, p.groups,
        [True, p.weight, False],
    )  # fmt: skip
    return found[0].to(STORAGE[p.result])


# --- the operation


SILU = "gradient*sigmoid(x)*(1+x*(1-sigmoid(x)))"


class GroupNormBackwardOperation(Operation[GroupNormBackwardProblem]):
    name = "group_norm_backward"
    problem = GroupNormBackwardProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("group_norm_backward", (NAIVE, SPLIT))
    problems = (
        GroupNormBackwardProblem(8, 320, 64, 64, 32, bias=True, function=SILU),
        GroupNormBackwardProblem(8, 640, 32, 32, 32),
        GroupNormBackwardProblem(8, 1280, 8, 8, 32, bias=True, function=SILU),
        GroupNormBackwardProblem(32, 256, 56, 56, 32),
        GroupNormBackwardProblem(8, 64, 256, 256, 64, weight=False),
    )
    """The norms of a diffusion model's U-Net, of a ResNet with groups, and of style transfer (one channel per
    group)."""
    small_problems = (
        GroupNormBackwardProblem(2, 32, 5, 7, 4),
        GroupNormBackwardProblem(3, 20, 4, 6, 5, weight=False),  # groups of 4 channels
        GroupNormBackwardProblem(2, 48, 9, 8, 4, bias=True, function=SILU),  # packs over two groups
        GroupNormBackwardProblem(2, 16, 40, 40, 16),  # several splits; one channel per group
        GroupNormBackwardProblem(3, 5, 1, 1, 1),  # alike in both layouts
        GroupNormBackwardProblem(19, 8, 2, 2, 2),  # more images than warps
        GroupNormBackwardProblem(1, 256, 12, 12, 8),  # more splits than lanes
        GroupNormBackwardProblem(1, 2056, 2, 3, 8, function="gradient*(x>0)"),  # wider than a CTA
        GroupNormBackwardProblem(
            2, 6, 7, 4, 3, gradient="fp16", output="fp32"
        ),  # packs over pixels, over planes
        GroupNormBackwardProblem(2, 24, 6, 4, 1, gradient="fp32", output="bf16", function=SILU),
    )
    dtypes = DTYPES
    layouts = LAYOUTS
    weights_change = True
    order = ("split", "naive")

    def extra_outputs(
        self, problem: GroupNormBackwardProblem, device: torch.device
    ) -> dict[str, torch.Tensor]:
        return {one.name: torch.empty(problem.channels, device=device) for one in _RESULTS}

    def extra_references(self, problem: GroupNormBackwardProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        _, *found = gradients(problem, inputs)
        return {buffer.name: one for buffer, one in zip(_RESULTS, found, strict=True)}


GROUP_NORM_BACKWARD = GroupNormBackwardOperation()
