"""Batch normalization."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from escalade.device.program import Program
from escalade.device.recipe import Argument, Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, full_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import kernel_call, launch
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors, in_float64
from escalade.ops.base.pitch import check_pitches, pitched_roles, pitches, unsupported_pitch
from escalade.ops.base.problem import traffic
from escalade.ops.base.rung import Rung, ThreadsConfig, first_that
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned, library, operator
from escalade.ops.shared import activation, channels, pointwise
from escalade.ops.shared.channels import (
    SIZES,
    ChannelTile,
    channel_packers,
    channels_innermost,
    check_channelwise,
    vectors_of_x,
)
from escalade.ops.shared.images import (
    LAYOUTS,
    Images,
    empty_images,
    empty_images_like,
    form_of,
    shape_of,
    stored_images,
)
from escalade.ops.shared.pointwise import ElementPerThread

# --- the problem


DEFAULT_EPSILON = 1e-5


@dataclass(frozen=True)
class BatchNormProblem(Images, Named):
    """y = relu((x - mean) / sqrt(variance + epsilon) * weight + bias + residual), residual and relu optional.

    weight, bias, mean and variance are fp32 vectors of one number per channel; x, residual and y have the `dtype`. y
    may alias x or the residual.
    """

    NAME: ClassVar = NamePattern(
        "batch normalization",
        SIZES + "[_eps{epsilon}]<_|+|{residual?res}|{relu?relu}>" + activation.IN_NAME,
    )

    relu: bool = False
    residual: bool = False
    dtype: str = "fp32"
    layout: str = "nchw"
    epsilon: float = DEFAULT_EPSILON
    activation: str = ""
    """An activation instead of ReLU: an expression in `x`, such as `x * sigmoid(x)`."""
    x_pitch: int = 0
    residual_pitch: int = 0
    y_pitch: int = 0
    """Elements from pixel to pixel in NHWC if the buffer is a slice of a larger one; 0 if dense."""

    rounding = 2.0**-24 * math.sqrt(5)
    """Scale, difference, product and sums are each rounded once."""

    def __post_init__(self) -> None:
        check_channelwise("batch_norm", self)
        activation.normalize(self)
        if not 0 <= self.epsilon < math.inf:
            raise UnsupportedError(f"epsilon is {self.epsilon}: it must be finite and at least 0")
        check_pitches(self, **dict.fromkeys(("x", "residual", "y"), self.channels))

    @property
    def flops(self) -> int:
        """Subtraction, multiplication, addition; then the epilogue."""
        return self.elements * (3 + self.residual + self.relu)

    @property
    def bytes(self) -> int:
        return self.elements * (2 + self.residual) * ELEMENT_BYTES[self.dtype] + 16 * self.channels


# --- rungs


START_US = 1.3
"""Latency of a launch besides its own: four statistics of every channel are read and combined into two. Measured on the
batch norms of DenseNet-121 of 28 x 28 pixels and more."""
_X, _Y = Buffer("x"), Buffer("y")
_RESIDUAL = Buffer("residual", optional=True)


@dataclass(frozen=True)
class PacksConfig(pointwise.PacksConfig):
    turns: int = 1
    """Iterations of a thread over the same channels (rows of channels only)."""
    backwards: bool = False
    """Process the last rows first, which the previous launch read last (rows of channels only)."""


def _program(source: str, problem: BatchNormProblem, **scope: object) -> Program:
    return channels.program(f"batch_norm/{source}.cu", problem, activation.constants_of(problem), **scope)


@dataclass(frozen=True)
class Naive(ElementPerThread[BatchNormProblem]):
    def recipe(self, problem: BatchNormProblem, config: ThreadsConfig) -> Recipe:
        grid = blocks(problem.elements, config.threads)
        return launch(_program("naive", problem), grid, config.threads, *_array_arguments(problem))


def _array_arguments(problem: BatchNormProblem) -> tuple[Argument, ...]:
    """Return the arguments of kernels that see one long array."""
    return (
        _X, Buffer("weight"), Buffer("bias"), Buffer("mean"), Buffer("variance"), _RESIDUAL, _Y,
        float(problem.epsilon), problem.channels, problem.pixels, Int64(problem.elements),
    )  # fmt: skip


@dataclass(frozen=True)
class Scaled(ElementPerThread[BatchNormProblem]):
    """One element per thread, after a launch that computes the scales."""

    def recipe(self, problem: BatchNormProblem, config: ThreadsConfig) -> Recipe:
        scale = kernel_call(
            Program.of("batch_norm/scaled_prepare.cu"),
            blocks(problem.channels, config.threads),
            config.threads,
            Buffer("weight"), Buffer("variance"), Buffer("scale"), float(problem.epsilon), problem.channels,
        )  # fmt: skip
        apply = kernel_call(
            _program("scaled", problem),
            blocks(problem.elements, config.threads),
            config.threads,
            _X, Buffer("scale"), Buffer("bias"), Buffer("mean"), _RESIDUAL, _Y, problem.channels, problem.pixels,
            Int64(problem.elements),
        )  # fmt: skip
        return Recipe((scale, apply), (Workspace("scale", 4 * problem.channels),))


@dataclass(frozen=True)
class Vectorized(Rung[BatchNormProblem, PacksConfig]):
    """Up to 16 bytes per access; scales are computed where they are used."""

    def supports(self, problem: BatchNormProblem) -> str | None:
        vector = full_vector(problem.dtype)
        if not channels_innermost(problem) and problem.pixels < vector:
            return (
                f"a pack of {vector} elements may span two planes but not more, and planes have {problem.pixels}; "
                "use the rung `scaled`"
            )
        return unsupported_pitch(self.name, problem, pitched_roles(BatchNormProblem))

    def configs(self, problem: BatchNormProblem) -> tuple[PacksConfig, ...]:
        """Default to the most packs per thread that leave enough CTAs for rows, to one pack for planes.

        Rows take small CTAs: 256_56_b64 in fp16 took 52 us with 128 threads and 58 with 256 and four turns, with a
        residual 74 us against 117. Planes of 1 GB in fp32 took 506 us with one pack and 521 with four.
        """
        by_rows = channels_innermost(problem)
        sizes, each = ((128, 256, 512), (4, 2, 1)) if by_rows else ((256, 128, 512), (1, 2, 4))
        every = [PacksConfig(threads, packs) for threads in sizes for packs in each]
        if by_rows:
            every += [PacksConfig(256, packs, turns) for packs in (4, 2) for turns in (2, 4, 8)]
        busy = self.card.busy_blocks
        return first_that(lambda config: _pieces(problem, config) >= busy, every, PacksConfig(packs=1))

    def estimate(self, problem: BatchNormProblem, config: PacksConfig) -> float:
        return START_US + self.card.microseconds(0, traffic(problem))

    def recipe(self, problem: BatchNormProblem, config: PacksConfig) -> Recipe:
        call = _over_rows if channels_innermost(problem) else _over_planes
        return Recipe((call(problem, config),))


def _pieces(problem: BatchNormProblem, config: PacksConfig) -> int:
    """Return the CTAs at one turn each."""
    if not channels_innermost(problem):
        return blocks(problem.elements // full_vector(problem.dtype), config.threads * config.packs)
    rows = ChannelTile.of(problem, config.threads)
    return blocks(problem.batch * problem.pixels, rows.height * config.packs) * rows.across


def _over_rows(problem: BatchNormProblem, config: PacksConfig) -> KernelCall:
    rows = ChannelTile.of(problem, config.threads)
    program = _program(
        "vectorised_rows", problem, config=config, vector=rows.vector, pitched=bool(pitches(problem))
    )
    count = problem.batch * problem.pixels
    return kernel_call(
        program,
        (blocks(count, rows.height * config.packs * config.turns), rows.across),
        config.threads,
        _X, Buffer("weight"), Buffer("bias"), Buffer("mean"), Buffer("variance"), _RESIDUAL, _Y,
        float(problem.epsilon), problem.channels, rows.width, Int64(count), config.turns,
        *(pitch or problem.channels for pitch in (problem.x_pitch, problem.residual_pitch, problem.y_pitch)),
    )  # fmt: skip


def _over_planes(problem: BatchNormProblem, config: PacksConfig) -> KernelCall:
    vector = full_vector(problem.dtype)
    program = _program("vectorised_planes", problem, config=config, vector=vector)
    return kernel_call(program, _pieces(problem, config), config.threads, *_array_arguments(problem))


# Predictions are for 64 channels, 56 x 56, batch 256, fp16: 51.4 M elements, 206 MB, 49 us at 4.24 TB/s. 132 SMs issue
# 2.9e13 thread instructions per second. naive: about 80 per element (two divisions for the channel, a square root, a
# division), 142 us; scaled: about 50, 90 us and a launch; vectorised: DRAM bound, 52 us.
RUNGS: tuple[Rung[BatchNormProblem], ...] = (
    Naive("naive", "one element per thread, with a square root and a division for each", None, None),
    Scaled("scaled", "weight / sqrt(variance + epsilon) is computed once per channel", "naive", 1.5),
    Vectorized("vectorised", "up to 16 bytes per access, several in flight per thread", "scaled", 1.7),
)


# --- the reference


def random_inputs(problem: BatchNormProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Channels with different statistics, such that y is of order one."""
    p = problem
    size, each = (p.batch, p.channels, p.height, p.width), (1, p.channels, 1, 1)
    mean = draw.normal(p.channels)
    variance = draw.uniform(p.channels).add_(0.5)
    x = draw.normal(*size).mul_(variance.sqrt().view(each)).add_(mean.view(each))
    inputs = {
        "x": stored_images(p, x),
        "weight": draw.normal(p.channels),
        "bias": draw.normal(p.channels),
        "mean": mean,
        "variance": variance,
    }
    if p.residual:
        inputs["residual"] = draw.stored(p, *size)
    return inputs


def empty_output(problem: BatchNormProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.batch, p.channels, p.height, p.width), device)


def peer(problem: BatchNormProblem, inputs: Tensors) -> torch.Tensor:
    """Normalize with PyTorch, in the dtype of the inputs."""
    y = torch.batch_norm(  # F.batch_norm of PyTorch 2.11 rejects an eps of zero
        inputs["x"], inputs["weight"], inputs["bias"], inputs["mean"], inputs["variance"],
        False, 0.0, problem.epsilon, torch.backends.cudnn.enabled,
    )  # fmt: skip
    return activation.apply(problem, y, inputs["residual"] if problem.residual else None)


# --- the operation


class BatchNormOperation(Operation[BatchNormProblem]):
    name = "batch_norm"
    problem = BatchNormProblem
    in_pytorch = Reference(random_inputs, empty_output, in_float64(peer), peer)
    ladder = Ladder("batch_norm", RUNGS)
    problems = (
        BatchNormProblem(32, 64, 112, 112, relu=True),
        BatchNormProblem(256, 64, 112, 112, relu=True),
        BatchNormProblem(32, 64, 56, 56, relu=True),
        BatchNormProblem(32, 64, 56, 56, relu=True, residual=True),
        BatchNormProblem(256, 64, 56, 56),
        BatchNormProblem(256, 64, 56, 56, relu=True),
        BatchNormProblem(256, 64, 56, 56, relu=True, residual=True),
        BatchNormProblem(32, 512, 7, 7, relu=True, residual=True),
        BatchNormProblem(256, 512, 7, 7, relu=True, residual=True),
    )
    """ResNet-18: its first and its last stage."""
    small_problems = (
        BatchNormProblem(2, 8, 6, 6, relu=True),
        BatchNormProblem(3, 16, 7, 7, relu=True, residual=True),  # packs over two planes; a tail in nchw
        BatchNormProblem(1, 3, 5, 9),  # one channel per thread in nhwc
        BatchNormProblem(
            2, 24, 4, 4, relu=True, residual=True, epsilon=1e-3
        ),  # 3 packs per row: idle threads
        BatchNormProblem(5, 40, 1, 1),  # alike in both layouts
        BatchNormProblem(2, 6, 3, 2),  # planes smaller than a pack of fp16
        BatchNormProblem(1, 2056, 2, 4),  # wider than a CTA
        BatchNormProblem(2, 64, 24, 24, residual=True),
        BatchNormProblem(
            2, 20, 5, 5, relu=True, residual=True, layout="nhwc", x_pitch=32, residual_pitch=24, y_pitch=40
        ),
    )
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("vectorised", "scaled")


BATCH_NORM = BatchNormOperation()


# --- the PyTorch operator


Optional = torch.Tensor | None


def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = DEFAULT_EPSILON,
    relu: bool = False,
    residual: torch.Tensor | None = None,
    *,
    rung: str | None = None,
) -> torch.Tensor:
    """relu(batch_norm(x) + residual), residual and relu optional; otherwise torch.nn.functional.batch_norm.

    With `training` the batch's own statistics are used, and the running ones, if given, are updated in place by
    `momentum` (with the unbiased variance). x is [N, C, H, W], NCHW or channels_last; `rung` names a rung of the ladder
    of `batch_norm`, with `training` of `batch_norm_training`.
    """
    run = torch.ops.escalade.batch_norm if torch.compiler.is_compiling() else _batch_norm
    return run(x, weight, bias, running_mean, running_var, training, momentum, eps, relu, residual, rung)


def _plan(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    eps: float = DEFAULT_EPSILON,
    relu: bool = False,
    residual: torch.Tensor | None = None,
    rung: str | None = None,
) -> CallPlan:
    return CallPlan(
        BATCH_NORM,
        lambda: empty_images_like(x, x.shape),
        lambda: BatchNormProblem(*shape_of(x), relu, residual is not None, *form_of(x), eps),
        channel_packers(x, "bias", "mean", "variance", weight=1.0),
    )


# --- inference


def _setup_inference(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, weight, _, mean, variance, ctx.eps, relu, residual, _ = inputs
    ctx.has_residual = residual is not None
    ctx.save_for_backward(x, weight, mean, variance, output if relu else None)


def _backward_inference(ctx, gradient):  # type: ignore[no-untyped-def]
    x, weight, mean, variance, y = ctx.saved_tensors
    if y is not None:
        gradient = torch.ops.aten.threshold_backward(gradient, y, 0)
    # The saved statistics are not read, but some of PyTorch's kernels require them.
    grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
        gradient, x, weight, mean, variance, mean, variance, False, ctx.eps, list(ctx.needs_input_grad[:3])
    )
    grad_residual = gradient if ctx.has_residual else None
    return grad_x, grad_weight, grad_bias, None, None, None, None, grad_residual, None


# --- both, with PyTorch's interface


def _batch_norm(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    running_mean: Optional,
    running_var: Optional,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = DEFAULT_EPSILON,
    relu: bool = False,
    residual: Optional = None,
    rung: str | None = None,
) -> torch.Tensor:
    if not training:
        if running_mean is None or running_var is None:
            raise UnsupportedError("batch_norm without training needs running_mean and running_var")
        return INFERENCE(x, weight, bias, running_mean, running_var, eps, relu, residual, rung)
    y, _, _, *moved = operator("batch_norm_training")(
        x, weight, bias, running_mean, running_var, momentum, eps, relu, residual, rung
    )
    if running_mean is not None and running_var is not None:
        torch._foreach_copy_([running_mean, running_var], moved)
    return y


INFERENCE = define_planned(
    "batch_norm_inference", _plan, f"{vectors_of_x('weight', 'bias', 'mean', 'variance')}, residual: N C H W",
    setup=_setup_inference, backward=_backward_inference,
)  # fmt: skip
library.define(
    "batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "bool training=False, float momentum=0.1, float eps=1e-05, bool relu=False, Tensor? residual=None, "
    "str? rung=None) -> Tensor"
)
library.impl("batch_norm", _batch_norm, "CompositeImplicitAutograd")
