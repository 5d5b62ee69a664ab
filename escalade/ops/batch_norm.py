"""Batch normalisation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from escalade.device.program import Constant, Program
from escalade.device.recipe import Argument, Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, dtype_of, full_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference
from escalade.ops.base.pitch import check_pitches, pitched_roles, pitches, unsupported_pitch
from escalade.ops.base.problem import traffic
from escalade.ops.base.rung import Rung, ThreadsConfig
from escalade.ops.calling.call import CallPlan, prepare
from escalade.ops.calling.library import define_planned, library, operator, require_alike
from escalade.ops.shared import activation, channels, pointwise
from escalade.ops.shared.channels import (
    SIZES,
    ChannelTile,
    channel_packer,
    channels_innermost,
    check_channel_vectors,
    check_channelwise,
)
from escalade.ops.shared.images import (
    LAYOUTS,
    Images,
    check_images,
    empty_images,
    empty_images_like,
    layout_of,
    packer,
    stored_images,
)
from escalade.ops.shared.pointwise import ElementPerThread

# --- the problem


DEFAULT_EPSILON = 1e-5


@dataclass(frozen=True)
class BatchNormProblem(Images, Named):
    """y = relu((x - mean) / sqrt(variance + epsilon) * weight + bias + residual), residual and relu optional.

    weight, bias, mean and variance are fp32 and one a channel, whatever `dtype` x, residual and y are
    stored as. y may be x or the residual.
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
    """What takes ReLU's place, if anything: an expression in `x`, such as `x * sigmoid(x)`."""
    x_pitch: int = 0
    residual_pitch: int = 0
    y_pitch: int = 0
    """Elements from pixel to pixel in NHWC, of parts of larger buffers; 0: dense."""

    def __post_init__(self) -> None:
        check_channelwise("batch_norm", self)
        activation.normalize(self)
        if not 0 <= self.epsilon < math.inf:
            raise UnsupportedError(f"epsilon of {self.epsilon}: it is a finite number of at least 0")
        check_pitches(self, **dict.fromkeys(("x", "residual", "y"), self.channels))

    @property
    def flops(self) -> int:
        """x - mean, times the scale, plus the bias; then the epilogue."""
        return self.elements * (3 + self.residual + self.relu)

    @property
    def bytes(self) -> int:
        return self.elements * (2 + self.residual) * ELEMENT_BYTES[self.dtype] + 16 * self.channels

    @property
    def rounding(self) -> float:
        """Scale, difference, product and sums are rounded once each."""
        return 2.0**-24 * math.sqrt(5)


# --- rungs, normalise: normalisation with known statistics: the rungs of batch_norm


_MOST_TURNS = 4
START_US = 1.3
"""Microseconds from a launch to the first results, besides its own: four statistics of every channel are read and made
into two. By the batch norms of DenseNet-121 from 28 pixels in the square on."""
_X, _Y = Buffer("x"), Buffer("y")
_RESIDUAL = Buffer("residual", optional=True)


@dataclass(frozen=True)
class PacksConfig(pointwise.PacksConfig):
    turns: int = 1
    """How often a thread does so with the same channels (rows of channels only)."""
    backwards: bool = False
    """Whether the last rows come first, behind a launch that has read the first ones first (rows of channels only)."""


def _constants(problem: BatchNormProblem) -> dict[str, Constant]:
    return {
        **channels.constants(problem),
        "HAS_RESIDUAL": problem.residual,
        **activation.constants_of(problem),
    }


@dataclass(frozen=True)
class Naive(ElementPerThread[BatchNormProblem]):
    """An element a thread, everything anew for each."""

    def recipe(self, problem: BatchNormProblem, config: ThreadsConfig) -> Recipe:
        call = KernelCall(
            Program.of("batch_norm/naive.cu", "batch_norm_naive", _constants(problem)),
            (blocks(problem.elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            _array_arguments(problem),
            overlap=True,
        )
        return Recipe((call,))


def _array_arguments(problem: BatchNormProblem) -> tuple[Argument, ...]:
    """The arguments of the kernels that see one long array."""
    return (
        _X, Buffer("weight"), Buffer("bias"), Buffer("mean"), Buffer("variance"), _RESIDUAL, _Y,
        float(problem.epsilon), problem.channels, problem.pixels, Int64(problem.elements),
    )  # fmt: skip


@dataclass(frozen=True)
class Scaled(ElementPerThread[BatchNormProblem]):
    """An element a thread, after a launch that makes the scales."""

    def recipe(self, problem: BatchNormProblem, config: ThreadsConfig) -> Recipe:
        block = (config.threads, 1, 1)
        scale = KernelCall(
            Program.of("batch_norm/scaled_prepare.cu", "batch_norm_scaled_prepare"),
            (blocks(problem.channels, config.threads), 1, 1),
            block,
            (Buffer("weight"), Buffer("variance"), Buffer("scale"), float(problem.epsilon), problem.channels),
            overlap=True,
        )
        apply = KernelCall(
            Program.of("batch_norm/scaled.cu", "batch_norm_scaled", _constants(problem)),
            (blocks(problem.elements, config.threads), 1, 1),
            block,
            (
                _X, Buffer("scale"), Buffer("bias"), Buffer("mean"), _RESIDUAL, _Y,
                problem.channels, problem.pixels, Int64(problem.elements),
            ),
            overlap=True,
        )  # fmt: skip
        return Recipe((scale, apply), (Workspace("scale", 4 * problem.channels),))


@dataclass(frozen=True)
class Vectorised(Rung[BatchNormProblem, PacksConfig]):
    """A thread takes up to 16 bytes an access; the scales are made where they are used."""

    def supports(self, problem: BatchNormProblem) -> str | None:
        vector = full_vector(problem.dtype)
        if not channels_innermost(problem) and problem.pixels < vector:
            return (
                f"a pack of {vector} elements may lie in two planes, not in more, and these have {problem.pixels}; "
                "the rung `scaled` takes any"
            )
        return unsupported_pitch(self.name, problem, pitched_roles(BatchNormProblem))

    def configs(self, problem: BatchNormProblem) -> tuple[PacksConfig, ...]:
        """Offers as many packs a thread as leave enough blocks to go round, then as many turns."""
        every = [PacksConfig(threads, packs) for threads in (256, 512, 128) for packs in (4, 2, 1)]
        if channels_innermost(problem):
            every += [PacksConfig(256, packs, turns) for packs in (4, 2) for turns in (2, 4, 8)]
        default = next(
            (c for c in every if _pieces(problem, c) >= self.card.busy_blocks), PacksConfig(packs=1)
        )
        if channels_innermost(problem):
            spare = _pieces(problem, default) // (2 * self.card.busy_blocks)
            default = PacksConfig(default.threads, default.packs, max(1, min(spare, _MOST_TURNS)))
        return (default, *(config for config in every if config != default))

    def estimate(self, problem: BatchNormProblem, config: PacksConfig) -> float:
        return START_US + self.card.microseconds(0, traffic(problem))

    def recipe(self, problem: BatchNormProblem, config: PacksConfig) -> Recipe:
        call = _over_rows if channels_innermost(problem) else _over_planes
        return Recipe((call(problem, config),))


def _pieces(problem: BatchNormProblem, config: PacksConfig) -> int:
    """Blocks, were each to do one turn."""
    if not channels_innermost(problem):
        return blocks(problem.elements // full_vector(problem.dtype), config.threads * config.packs)
    rows = ChannelTile.of(problem, config.threads)
    return blocks(problem.batch * problem.pixels, rows.height * config.packs) * rows.across


def _over_rows(problem: BatchNormProblem, config: PacksConfig) -> KernelCall:
    rows = ChannelTile.of(problem, config.threads)
    constants = {
        **_constants(problem), "VECTOR": rows.vector, "PACKS": config.packs, "THREADS": config.threads,
        "PITCHED": bool(pitches(problem)), "BACKWARDS": config.backwards,
    }  # fmt: skip
    count = problem.batch * problem.pixels
    return KernelCall(
        Program.of("batch_norm/vectorised_rows.cu", "batch_norm_vectorised_rows", constants),
        (blocks(count, rows.height * config.packs * config.turns), rows.across, 1),
        (config.threads, 1, 1),
        (
            _X, Buffer("weight"), Buffer("bias"), Buffer("mean"), Buffer("variance"), _RESIDUAL, _Y,
            float(problem.epsilon), problem.channels, rows.width, Int64(count), config.turns,
            *(pitch or problem.channels for pitch in (problem.x_pitch, problem.residual_pitch, problem.y_pitch)),
        ),
        overlap=True,
    )  # fmt: skip


def _over_planes(problem: BatchNormProblem, config: PacksConfig) -> KernelCall:
    vector = full_vector(problem.dtype)
    constants = {
        **_constants(problem), "VECTOR": vector, "PACKS": config.packs, "THREADS": config.threads,
        "STRADDLING": problem.pixels % vector != 0,
    }  # fmt: skip
    return KernelCall(
        Program.of("batch_norm/vectorised_planes.cu", "batch_norm_vectorised_planes", constants),
        (_pieces(problem, config), 1, 1),
        (config.threads, 1, 1),
        _array_arguments(problem),
        overlap=True,
    )


# Predictions are for 64 channels, 56 x 56, batch 256, fp16: 51.4 M elements, 206 MB, 49 us at 4.24 TB/s. 132 SMs issue
# 2.9e13 instructions of a thread in a second. naive: about 80 an element (two divisions for the channel, a square root,
# a division), 142 us; scaled: about 50, 90 us and a launch; vectorised: at the memory's pace, 52 us.
RUNGS: tuple[Rung[BatchNormProblem], ...] = (
    Naive("naive", "an element a thread, with a square root and a division for each", None, None),
    Scaled("scaled", "weight / sqrt(variance + epsilon) is made once a channel", "naive", 1.5),
    Vectorised("vectorised", "up to 16 bytes an access, several under way in a thread", "scaled", 1.7),
)


# --- problems to measure and to test


PROBLEMS = (
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
"""ResNet-18: its first stage, and its last."""

SMALL_PROBLEMS = (
    BatchNormProblem(2, 8, 6, 6, relu=True),
    BatchNormProblem(3, 16, 7, 7, relu=True, residual=True),  # packs over two planes; a tail in nchw
    BatchNormProblem(1, 3, 5, 9),  # one channel a thread in nhwc
    BatchNormProblem(2, 24, 4, 4, relu=True, residual=True, epsilon=1e-3),  # 3 packs a row: threads left over
    BatchNormProblem(5, 40, 1, 1),  # alike in both layouts
    BatchNormProblem(2, 6, 3, 2),  # planes smaller than a pack of fp16
    BatchNormProblem(1, 2056, 2, 4),  # wider than a block
    BatchNormProblem(2, 64, 24, 24, residual=True),
    BatchNormProblem(
        2, 20, 5, 5, relu=True, residual=True, layout="nhwc", x_pitch=32, residual_pitch=24, y_pitch=40
    ),
)


# --- the reference


Tensors = Mapping[str, torch.Tensor]


def random_inputs(problem: BatchNormProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """x and the statistics of channels that differ; y of order one."""
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)
    size, each = (p.batch, p.channels, p.height, p.width), (1, p.channels, 1, 1)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    mean = normal(p.channels)
    variance = torch.rand(p.channels, generator=generator, device=device).add_(0.5)
    x = normal(*size).mul_(variance.sqrt().view(each)).add_(mean.view(each))
    inputs = {
        "x": stored_images(p, x),
        "weight": normal(p.channels),
        "bias": normal(p.channels),
        "mean": mean,
        "variance": variance,
    }
    if p.residual:
        inputs["residual"] = stored_images(p, normal(*size))
    return inputs


def empty_output(problem: BatchNormProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.batch, p.channels, p.height, p.width), device)


def peer(problem: BatchNormProblem, inputs: Tensors) -> torch.Tensor:
    """The normalised x by PyTorch, in the dtype of the inputs."""
    y = torch.batch_norm(  # F.batch_norm of PyTorch 2.11 refuses an eps of zero
        inputs["x"], inputs["weight"], inputs["bias"], inputs["mean"], inputs["variance"],
        False, 0.0, problem.epsilon, torch.backends.cudnn.enabled,
    )  # fmt: skip
    return activation.apply(problem, y, inputs["residual"] if problem.residual else None)


def exact(problem: BatchNormProblem, inputs: Tensors) -> torch.Tensor:
    """The result in float64."""
    return peer(problem, {name: tensor.double() for name, tensor in inputs.items()})


# --- the operation


class BatchNorm(Operation[BatchNormProblem]):
    name = "batch_norm"
    problem = BatchNormProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("batch_norm", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: BatchNormProblem) -> tuple[str, ...]:
        return ("vectorised", "scaled")


BATCH_NORM = BatchNorm()


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

    With `training` the batch's own statistics are taken, and the running ones, if there are any, moved
    towards them in place by `momentum` (the variance unbiased). x is [N, C, H, W], NCHW or
    channels_last; `rung` names a rung of the ladder of `batch_norm`, with `training` of `batch_norm_training`.
    """
    run = torch.ops.escalade.batch_norm if torch.compiler.is_compiling() else _batch_norm
    return run(x, weight, bias, running_mean, running_var, training, momentum, eps, relu, residual, rung)


# --- tensors to problems


def _check(x: torch.Tensor, channelwise: dict[str, Optional], residual: Optional) -> None:
    check_images("batch_norm", x)
    require_alike(x, {"residual": residual})
    if residual is not None and residual.shape != x.shape:
        raise UnsupportedError(
            f"residual has shape {tuple(residual.shape)}; it must be x's, {tuple(x.shape)}"
        )
    check_channel_vectors("batch_norm", x, channelwise)


# --- normalisation


def _fake(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    mean: torch.Tensor,
    variance: torch.Tensor,
    eps: float = DEFAULT_EPSILON,
    relu: bool = False,
    residual: Optional = None,
    rung: str | None = None,
) -> torch.Tensor:
    _check(x, {"weight": weight, "bias": bias, "running_mean": mean, "running_var": variance}, residual)
    return empty_images_like(x, x.shape)


def _plan(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    mean: torch.Tensor,
    variance: torch.Tensor,
    eps: float,
    relu: bool,
    residual: Optional,
    rung: str | None,
) -> CallPlan:
    y = _fake(x, weight, bias, mean, variance, eps, relu, residual)
    batch, channels, height, width = x.shape
    problem = BatchNormProblem(
        batch, channels, height, width, relu, residual is not None, dtype_of("batch_norm", x), layout_of(x), eps
    )  # fmt: skip
    images, numbers = packer(problem.layout), channel_packer(x)
    return CallPlan(
        prepare(BATCH_NORM, problem, x.device, rung, problem.elements),
        {"y": y},
        {
            **dict.fromkeys(("x", "residual"), images),
            **dict.fromkeys(("bias", "mean", "variance"), numbers),
            "weight": channel_packer(x, 1.0),
        },
    )


def _setup_inference(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, weight, _, mean, variance, ctx.eps, relu, residual, _ = inputs
    ctx.has_residual = residual is not None
    ctx.save_for_backward(x, weight, mean, variance, output if relu else None)


def _backward_inference(ctx, gradient):  # type: ignore[no-untyped-def]
    x, weight, mean, variance, y = ctx.saved_tensors
    if y is not None:
        gradient = torch.ops.aten.threshold_backward(gradient, y, 0)
    # The saved statistics are not looked at, but some of PyTorch's kernels want them to be there.
    grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
        gradient, x, weight, mean, variance, mean, variance, False, ctx.eps, _needed(ctx)
    )
    return (
        grad_x,
        grad_weight,
        grad_bias,
        None,
        None,
        None,
        None,
        gradient if ctx.has_residual else None,
        None,
    )


def _needed(ctx):  # type: ignore[no-untyped-def]
    """Whether gradients of x, weight and bias are needed."""
    return list(ctx.needs_input_grad[:3])


# --- both, as PyTorch has it


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
            raise UnsupportedError("without training, batch_norm needs running_mean and running_var")
        return INFERENCE(x, weight, bias, running_mean, running_var, eps, relu, residual, rung)
    y, _, _, *moved = operator("batch_norm_training")(
        x, weight, bias, running_mean, running_var, momentum, eps, relu, residual, rung
    )
    if running_mean is not None and running_var is not None:
        torch._foreach_copy_([running_mean, running_var], moved)
    return y


INFERENCE = define_planned(
    "batch_norm_inference(Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor variance, float eps=1e-05, "
    "bool relu=False, Tensor? residual=None, str? rung=None) -> Tensor",
    _plan, _fake, setup=_setup_inference, backward=_backward_inference,
)  # fmt: skip
library.define(
    "batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "bool training=False, float momentum=0.1, float eps=1e-05, bool relu=False, Tensor? residual=None, "
    "str? rung=None) -> Tensor"
)
library.impl("batch_norm", _batch_norm, "CompositeImplicitAutograd")
