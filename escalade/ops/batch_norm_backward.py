"""Gradients of batch normalization."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from escalade.device.program import Constant, Macro, Program
from escalade.device.recipe import Addresses, Argument, Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require, require_at_least
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, full_vector, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import kernel_call, launch
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors, summed_in_fp32
from escalade.ops.base.problem import traffic
from escalade.ops.base.rung import Rung, ThreadsConfig
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.expressions import Expression, fast_functions
from escalade.ops.shared import channels
from escalade.ops.shared.channels import (
    SIZES,
    ChannelTile,
    channel_packers,
    channels_innermost,
    check_channelwise,
    empty_vector,
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
from escalade.ops.shared.pointwise import PacksConfig
from escalade.ops.shared.resident import ResidentConfig, ResidentRung, slices

# --- the problem


MASKS = ("none", "x", "output")
"""Source of a ReLU's mask: no ReLU, recomputed from x, or the ReLU's output."""


@dataclass(frozen=True)
class BatchNormBackwardProblem(Images, Named):
    """Gradients of y = relu((x - mean) * rstd * weight + bias + residual), relu and residual optional, where mean and
    rstd (reciprocal standard deviation) are those of x.

    Buffers `gradient` (dy) and x have the `dtype`; `mean`, `rstd`, `weight` and the results `weight_gradient` and
    `bias_gradient` are fp32 vectors of one number per channel. The gradient of x is buffer `y`. With a mask, gradients
    pass where the ReLU's output is positive: read from `output`, or recomputed from x, which also needs `bias`. With
    `residual` the gradient before the ReLU is the result `residual_gradient`. y may alias the gradient or x.

    For another activation than ReLU, `function` is its gradient: an expression in `gradient` and in `x`, the
    activation's input, which is recomputed from x.

    With `summed`, `weight_gradient` and `bias_gradient` are inputs: what produced the gradient has computed them.

    `recompute` is a function of the normalized x that the forward pass has applied, as an expression in `x`. Its result
    is then written again, as buffer `recomputed`, which needs `bias`: the forward pass's need not be kept.
    """

    NAME: ClassVar = NamePattern(
        "gradients of batch normalization",
        SIZES
        + r"[_by{mask:x|output}]{residual?+res}{summed?_summed}[\[{function:text}\]][_again\[{recompute:text}\]]",
    )

    mask: str = "none"
    residual: bool = False
    dtype: str = "fp32"
    layout: str = "nchw"
    function: str = ""
    summed: bool = False
    recompute: str = ""

    def __post_init__(self) -> None:
        require_at_least(1, {"batch": self.batch})
        check_channelwise("batch_norm_backward", self)
        if self.summed and (self.mask, self.residual) != ("none", False):
            raise UnsupportedError(
                f"summed with mask {self.mask!r}, residual={self.residual}: what computes the sums applies the mask"
            )
        require("batch_norm_backward", "mask", self.mask, MASKS)
        if self.residual and self.mask != "output":
            raise UnsupportedError(
                f"residual with mask {self.mask!r}: pass the output of the ReLU (mask output); without a ReLU the "
                "residual's gradient is that of y"
            )
        if self.function:
            self._normalize_function()
        if self.recompute:
            self._normalize_recompute()

    def _normalize_function(self) -> None:
        expression = Expression.parse(self.function)
        if set(expression.inputs) != {"gradient", "x"} or len(expression.results) != 1 or self.mask != "x":
            raise UnsupportedError(
                f"function {self.function!r} with mask {self.mask!r}: it must be one expression in gradient and x, "
                "such as gradient * sigmoid(x), with mask x"
            )
        object.__setattr__(self, "function", expression.text)

    def _normalize_recompute(self) -> None:
        expression = Expression.parse(self.recompute)
        if expression.inputs != ("x",) or len(expression.results) != 1:
            raise UnsupportedError(
                f"recompute {self.recompute!r}: it must be one expression in x, such as relu(x)"
            )
        object.__setattr__(self, "recompute", expression.text)

    @property
    def count(self) -> int:
        """Elements per channel."""
        return self.batch * self.pixels

    @property
    def flops(self) -> int:
        """Two sums with a subtraction and a multiplication; then five more per element."""
        return (9 + (self.mask != "none")) * self.elements

    @property
    def bytes(self) -> int:
        """Gradient, x and output read once, and each result written."""
        return self._bytes(3 + (self.mask == "output") + self.residual + bool(self.recompute))

    @property
    def traffic(self) -> int:
        """Traffic of two passes: the second reads the gradient and x again, and the output unless the first pass has
        stored the gradient before the ReLU."""
        if self.summed:
            return self.bytes
        by_output = self.mask == "output"
        return self._bytes(5 + by_output + (1 if self.residual else by_output) + bool(self.recompute))

    def _bytes(self, passes: int) -> int:
        return passes * self.elements * ELEMENT_BYTES[self.dtype] + 24 * self.channels

    @property
    def rounding(self) -> float:
        """256 parallel running sums, each a random walk of its rounding errors; then five more roundings."""
        return 2.0**-24 * math.sqrt(6 + self.count / 256 / 6)


# --- rungs


WEIGHT_GRADIENT, BIAS_GRADIENT = Buffer("weight_gradient"), Buffer("bias_gradient")
RECOMPUTED = Buffer("recomputed", optional=True)
_BIAS = Buffer("bias", optional=True)


def _program(
    source: str, problem: BatchNormBackwardProblem, mask: str, recompute: str = "", **scope: Any
) -> Program:
    generated: dict[str, Constant] = {}
    if recompute:
        lines, (result,) = Expression.parse(recompute).statements({"x": "x"})
        generated["RECOMPUTED"] = Macro(" ".join((*lines, f"return {result};")))
        generated["FAST_FUNCTIONS"] = fast_functions(problem.dtype)
    if problem.function:
        expression = Expression.parse(problem.function)
        generated |= {"EXPRESSION_X": expression.inputs.index("x"), **expression.constants(problem.dtype)}
    return channels.program(f"batch_norm_backward/{source}.cu", problem, generated, mask=mask, **scope)


def sums_program(source: str, problem: BatchNormBackwardProblem, **scope: Any) -> Program:
    """Return the program of a launch that computes the sums."""
    return _program(source, problem, problem.mask, **scope)


def sums_arguments() -> tuple[Argument, ...]:
    """Return the first arguments of a launch that computes the sums."""
    return (
        Buffer("gradient"), Buffer("x"), Buffer("output", optional=True), Buffer("weight"), _BIAS, Buffer("mean"),
        Buffer("rstd"), Buffer("residual_gradient", optional=True),
    )  # fmt: skip


def apply_program(source: str, problem: BatchNormBackwardProblem, **scope: Any) -> Program:
    """Return the program of the last launch. The residual's gradient, if any, is already masked."""
    mask = "none" if problem.residual else problem.mask
    return _program(source, problem, mask, problem.recompute, **scope)


def apply_arguments(problem: BatchNormBackwardProblem) -> tuple[Argument, ...]:
    """Return the first arguments of the last launch."""
    return (
        Buffer("residual_gradient" if problem.residual else "gradient"), Buffer("x"), Buffer("output", optional=True),
        Addresses((Buffer("mean"), Buffer("rstd"), Buffer("weight"), _BIAS, WEIGHT_GRADIENT, BIAS_GRADIENT)),
        Buffer("y"), 1 / problem.count, problem.channels,
    )  # fmt: skip


@dataclass(frozen=True)
class Naive(Rung[BatchNormBackwardProblem, ThreadsConfig]):
    def configs(self, problem: BatchNormBackwardProblem) -> tuple[ThreadsConfig, ...]:
        """Powers of two; few warps for channels of few elements."""
        offered = (256, 512, 1024) if problem.count > 64 else (64, 128)
        return tuple(ThreadsConfig(threads) for threads in offered)

    def recipe(self, problem: BatchNormBackwardProblem, config: ThreadsConfig) -> Recipe:
        sums = kernel_call(
            sums_program("naive_sums", problem, config=config),
            problem.channels,
            config.threads,
            *sums_arguments(), WEIGHT_GRADIENT, BIAS_GRADIENT, problem.channels, problem.pixels, Int64(problem.count),
        )  # fmt: skip
        apply = kernel_call(
            apply_program("naive", problem),
            blocks(problem.elements, config.threads),
            config.threads,
            *apply_arguments(problem), problem.pixels, Int64(problem.elements), RECOMPUTED,
        )  # fmt: skip
        return Recipe((apply,) if problem.summed else (sums, apply))


NAIVE = Naive("naive", "one CTA per channel computes the sums, then one thread per element", None, None)


# --- rung resident: one launch of clusters that hold the gradient and x in registers


@dataclass(frozen=True)
class Resident(ResidentRung[BatchNormBackwardProblem]):
    most_steps: ClassVar = {256: 10, 512: 4}
    exchanges = 1

    def supports(self, problem: BatchNormBackwardProblem) -> str | None:
        if problem.summed:
            return f"{self.name} computes the sums itself"
        return super().supports(problem)

    def recipe(self, problem: BatchNormBackwardProblem, config: ResidentConfig) -> Recipe:
        vector = widest_vector(problem.dtype, problem.channels)
        return launch(
            _program("resident", problem, problem.mask, problem.recompute, config=config, vector=vector),
            (config.blocks, slices(problem, config)),
            config.threads,
            *sums_arguments(), WEIGHT_GRADIENT, BIAS_GRADIENT, Buffer("y"), 1 / problem.count, problem.channels,
            problem.count, RECOMPUTED,
            cluster=(config.blocks, 1, 1),
        )  # fmt: skip


# For 512 channels, 7 x 7, batch 64, fp16, 3.2 MB per tensor: three launches of 2.8 us each besides their bytes, 10.7
# us; one, with an exchange, 5 us.
RESIDENT = Resident(
    "resident",
    "one launch: clusters hold the gradient and x in registers, and read them once",
    "vectorised",
    2.0,
)


# --- rungs split and vectorised: many CTAs share each sum, and a last launch covers all elements


_MERGE_THREADS, _MERGE_CHANNELS, _MERGE_PACKS = 512, 8, 5
_LAUNCHES = 3
_START_US = 1.3  # latency of each launch besides its own, measured on small tensors
_PARTIAL = Buffer("partial")


def merge_sums(channels: int, splits: int, rstd: str = "rstd") -> tuple[KernelCall, Workspace]:
    """Return the launch that adds up the sums of all splits, and their workspace."""
    call = kernel_call(
        Program.of(
            "batch_norm_backward/split_merge.cu",
            threads=_MERGE_THREADS, channels=_MERGE_CHANNELS, packs=_MERGE_PACKS,
        ),
        blocks(channels, _MERGE_CHANNELS),
        _MERGE_THREADS,
        _PARTIAL, Buffer(rstd), WEIGHT_GRADIENT, BIAS_GRADIENT, channels, splits,
    )  # fmt: skip
    return call, Workspace(_PARTIAL.name, 2 * 4 * splits * channels)


@dataclass(frozen=True)
class SharedConfig(PacksConfig):
    resident: int = 2
    """CTAs per SM."""


@dataclass(frozen=True)
class Split(Rung[BatchNormBackwardProblem, SharedConfig]):
    wide: bool
    """True for accesses of up to 16 bytes, several in flight; False for single elements."""

    def supports(self, problem: BatchNormBackwardProblem) -> str | None:
        vector = full_vector(problem.dtype)
        if self.wide and not channels_innermost(problem) and problem.pixels < vector:
            return (
                f"a pack of {vector} elements may span two planes but not more, and planes have {problem.pixels}; "
                "use the rung `split`"
            )
        return None

    def configs(self, problem: BatchNormBackwardProblem) -> tuple[SharedConfig, ...]:
        """Start with 64 KiB of loads in flight per SM."""
        if not self.wide:
            return (SharedConfig(256, 1, 8), SharedConfig(512, 1, 4))
        sizes = ((256, 4, 2), (512, 4, 1), (128, 4, 4), (256, 8, 1), (256, 2, 2))
        return tuple(SharedConfig(*size) for size in sizes)

    def estimate(self, problem: BatchNormBackwardProblem, config: SharedConfig) -> float:
        launches = 1 if problem.summed else _LAUNCHES
        return launches * _START_US + self.card.microseconds(0, traffic(problem), launches)

    def recipe(self, problem: BatchNormBackwardProblem, config: SharedConfig) -> Recipe:
        by_rows = channels_innermost(problem)
        last = (self._apply_rows if by_rows else self._apply_planes)(problem, config)
        if problem.summed:
            return Recipe((last,))
        first, splits = (self._sum_rows if by_rows else self._sum_planes)(problem, config)
        merge, partial = merge_sums(problem.channels, splits)
        return Recipe((first, merge, last), (partial,))

    def _rows(self, problem: BatchNormBackwardProblem, config: SharedConfig) -> tuple[ChannelTile, int]:
        """Return the tile of a CTA, and the CTAs per column of tiles."""
        rows = ChannelTile.of(problem, config.threads, *(() if self.wide else (1,)))
        wanted = max(1, config.resident * self.card.multiprocessors // rows.across)
        return rows, min(wanted, blocks(problem.count, rows.height))

    def _sum_rows(self, problem: BatchNormBackwardProblem, config: SharedConfig) -> tuple[KernelCall, int]:
        """Return the launch over rows of channels, and its partial sums per channel."""
        rows, splits = self._rows(problem, config)
        call = kernel_call(
            sums_program("split_rows", problem, config=config, vector=rows.vector),
            (splits, rows.across),
            config.threads,
            *sums_arguments(), _PARTIAL, problem.channels, rows.width, Int64(problem.count),
        )  # fmt: skip
        return call, splits

    def _apply_rows(self, problem: BatchNormBackwardProblem, config: SharedConfig) -> KernelCall:
        rows, down = self._rows(problem, config)
        return kernel_call(
            apply_program("split_apply_rows", problem, config=config, vector=rows.vector),
            (down, rows.across),
            config.threads,
            *apply_arguments(problem), rows.width, Int64(problem.count), RECOMPUTED,
        )  # fmt: skip

    def _sum_planes(self, problem: BatchNormBackwardProblem, config: SharedConfig) -> tuple[KernelCall, int]:
        """Return the launch over planes, and its partial sums per channel."""
        vector = widest_vector(problem.dtype, problem.pixels) if self.wide else 1
        packs = problem.count // vector
        wanted = max(1, config.resident * self.card.multiprocessors // problem.channels)
        splits = min(wanted, blocks(packs, config.threads))
        call = kernel_call(
            sums_program("split_planes", problem, config=config, vector=vector),
            problem.channels * splits,
            config.threads,
            *sums_arguments(), _PARTIAL, problem.channels, problem.pixels, splits, Int64(packs),
        )  # fmt: skip
        return call, splits

    def _apply_planes(self, problem: BatchNormBackwardProblem, config: SharedConfig) -> KernelCall:
        vector = full_vector(problem.dtype) if self.wide else 1
        each = (config.threads * packs for packs in range(config.packs, 1, -1))
        per_block = next(
            (one for one in each if problem.elements // (vector * one) >= self.card.busy_blocks),
            config.threads,
        )
        packs = per_block // config.threads
        return kernel_call(
            apply_program("split_apply_planes", problem, config=config, vector=vector, packs=packs),
            blocks(problem.elements // vector, per_block),
            config.threads,
            *apply_arguments(problem), problem.pixels, Int64(problem.elements), RECOMPUTED,
        )  # fmt: skip


# Predictions are for 64 channels, 56 x 56, batch 256, fp16, NHWC, behind a ReLU whose mask comes from x: 103 MB per
# tensor, five of them moved, 123 us at 4.2 TB/s. naive: one CTA per channel fetches 32 bytes for each 2, 64 SMs with
# 256 loads in flight for 1 us: 12,544 turns, 6 ms. split: 2,048 threads with 2 bytes of each tensor in flight are 8 KiB
# per SM, answered in 0.8 us, 1.4 TB/s: 370 us. vectorised: 64 KiB, DRAM bound plus three launches, 130 us.
SPLIT = Split(
    "split", "a warp covers adjacent channels, many CTAs share each sum, a second launch merges", "naive", 16.0,
    wide=False,
)  # fmt: skip
VECTORISED = Split(
    "vectorised", "up to 16 bytes per access, several rows in flight per thread", "split", 2.8, wide=True
)


# --- the reference


_MARGIN = 0.05  # distance of outputs from 0, where rounding would decide whether a gradient passes


def _each(channelwise: torch.Tensor) -> torch.Tensor:
    return channelwise.view(1, -1, 1, 1)


def random_inputs(problem: BatchNormBackwardProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Channels with different statistics; if the mask comes from x, no output is near 0."""
    p = problem
    size = (p.batch, p.channels, p.height, p.width)
    mean, bias = draw.normal(p.channels), draw.normal(p.channels)
    rstd = draw.uniform(p.channels).add_(0.5)
    weight = draw.uniform(p.channels).add_(0.5).mul_(draw.normal(p.channels).sign())
    inputs = {"gradient": draw.stored(p, *size), "weight": weight, "mean": mean, "rstd": rstd}
    outputs = draw.normal(*size).add_(_each(bias))
    if p.mask == "x":
        outputs = torch.where(outputs.abs() < _MARGIN, 1.0, outputs)
    if p.mask == "x" or p.recompute:
        inputs["bias"] = bias
    if p.mask == "output":
        inputs["output"] = stored_images(p, outputs.relu())
    x = (outputs - _each(bias)) / _each(weight * rstd) + _each(mean)
    inputs["x"] = stored_images(p, x)
    if p.summed:
        _, weight_gradient, bias_gradient = gradients(p, inputs)
        inputs |= {"weight_gradient": weight_gradient.float(), "bias_gradient": bias_gradient.float()}
    return inputs


def empty_output(problem: BatchNormBackwardProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.batch, p.channels, p.height, p.width), device)


def masked(problem: BatchNormBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """Return the gradient before the activation, in the dtype of the gradient."""
    gradient = inputs["gradient"]
    if problem.mask == "none":
        return gradient
    if problem.mask == "output":
        output = inputs["output"]
    else:
        scale = _each(inputs["weight"] * inputs["rstd"])
        output = (inputs["x"] - _each(inputs["mean"])) * scale + _each(inputs["bias"])
        if problem.function:
            values = {"gradient": gradient, "x": output}
            return Expression.parse(problem.function).evaluate(values)[0].to(gradient.dtype)
        output = output.to(gradient.dtype)
    found: torch.Tensor = torch.ops.aten.threshold_backward(gradient, output, 0)
    return found


def recomputed(problem: BatchNormBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """Return the forward pass's result, in at least fp32."""
    x = inputs["x"] if inputs["x"].dtype == torch.float64 else inputs["x"].float()
    normalized = (x - _each(inputs["mean"])) * _each(inputs["rstd"])
    value = normalized * _each(inputs["weight"]) + _each(inputs["bias"])
    found: torch.Tensor = Expression.parse(problem.recompute).evaluate({"x": value})[0]
    return found


def gradients(
    problem: BatchNormBackwardProblem, inputs: Tensors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, weight and bias in float64."""
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    before, rstd = masked(problem, wide), _each(wide["rstd"])
    normalized = (wide["x"] - _each(wide["mean"])) * rstd
    weight_gradient, bias_gradient = (before * normalized).sum((0, 2, 3)), before.sum((0, 2, 3))
    means = (_each(sums / problem.count) for sums in (bias_gradient, weight_gradient))
    centered = before - next(means) - normalized * next(means)
    return centered * rstd * _each(wide["weight"]), weight_gradient, bias_gradient


def exact(problem: BatchNormBackwardProblem, inputs: Tensors) -> torch.Tensor:
    return gradients(problem, inputs)[0]


def compute(problem: BatchNormBackwardProblem, given: Tensors) -> torch.Tensor:
    """Return PyTorch's gradients of the ReLU and of the normalization."""
    found: tuple[torch.Tensor, ...] = torch.ops.aten.native_batch_norm_backward(
        masked(problem, given), given["x"], given["weight"], None, None, given["mean"], given["rstd"], True, 1e-5,
        [True, True, True],
    )  # fmt: skip
    return found[0]


# --- the operation


class BatchNormBackwardOperation(Operation[BatchNormBackwardProblem]):
    name = "batch_norm_backward"
    problem = BatchNormBackwardProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, summed_in_fp32(compute))
    ladder = Ladder("batch_norm_backward", (NAIVE, SPLIT, VECTORISED, RESIDENT))
    problems = tuple(
        BatchNormBackwardProblem.parse(name)
        for name in (
            "64_112_b256_byx",
            "64_56_b64_byx",
            "64_56_b256_byx",
            "64_56_b256_byoutput+res",
            "256_56_b256",
            "96_56_b64_byx[gradient*sigmoid(x)*(1+x*(1-sigmoid(x)))]",
            "512_7_b64_byoutput+res",
            "512_7_b256_byoutput+res",
        )
    )
    """ResNets: the first layers, behind a ReLU and behind a residual and a ReLU, and the last one."""
    small_problems = tuple(
        BatchNormBackwardProblem.parse(name)
        for name in (
            "8_6_b2_byx",
            "16_7_b3_byoutput+res",  # packs over two planes; a tail in nchw
            "3_5x9_b1",  # one channel per thread in nhwc
            "24_9x4_b2_byoutput",  # 3 packs per row: idle threads
            "40_1_b5_byx",  # alike in both layouts
            "6_3x2_b2_byoutput",  # planes smaller than a pack of fp16
            "2056_2_b1_byx",  # wider than a CTA
            "16_64_b2",  # several splits
            "24_5x6_b3_byx[gradient*sigmoid(x)*(1+x*(1-sigmoid(x)))]",  # SiLU
            "8_33_b2_byx[gradient*(x<6)*(x>0)]",
            "24_9x4_b2_summed",
            "16_7_b3_byx_again[relu(x)]",
            "24_5x6_b3_byx[gradient*sigmoid(x)*(1+x*(1-sigmoid(x)))]_again[silu(x)]",
            "40_6_b2_summed_again[x]",
        )
    )
    dtypes = DTYPES
    layouts = LAYOUTS
    weights_change = True
    order = ("vectorised", "resident", "split")

    def extra_outputs(
        self, problem: BatchNormBackwardProblem, device: torch.device
    ) -> dict[str, torch.Tensor]:
        found = {"recomputed": self.output(problem, device)} if problem.recompute else {}
        if problem.summed:
            return found
        for name in ("weight_gradient", "bias_gradient"):
            found[name] = torch.empty(problem.channels, device=device)
        if problem.residual:
            found["residual_gradient"] = self.output(problem, device)
        return found

    def extra_references(self, problem: BatchNormBackwardProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        wide = {name: tensor.double() for name, tensor in inputs.items()}
        found = {"recomputed": recomputed(problem, wide)} if problem.recompute else {}
        if problem.summed:
            return found
        _, weight_gradient, bias_gradient = gradients(problem, inputs)
        found |= {"weight_gradient": weight_gradient, "bias_gradient": bias_gradient}
        if problem.residual:
            found["residual_gradient"] = masked(problem, inputs).double()
        return found


BATCH_NORM_BACKWARD = BatchNormBackwardOperation()


# --- the PyTorch operator


_NAME = "batch_norm_backward"
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def batch_norm_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    relu: bool = False,
    output: torch.Tensor | None = None,
    residual: bool = False,
    *,
    rung: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """Gradients of x, weight and bias in y = relu(batch_norm(x) + residual) in training, from that of y.

    `mean` and `rstd` (reciprocal standard deviation) are those of x, in float32, as `batch_norm_training` returns them.
    Behind a ReLU gradients pass where its `output` is positive; without `output` that is recomputed from x and bias,
    which needs a call without residual. With `residual` the residual's gradient is the fourth result. Deterministic.
    `rung` names a rung of the ladder.
    """
    found = OPERATOR(gradient, x, weight, bias, mean, rstd, relu, output, residual, rung)
    return tuple(found[: 3 + residual])


def _plan(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    relu: bool = False,
    output: torch.Tensor | None = None,
    residual: bool = False,
    rung: str | None = None,
) -> CallPlan:
    mask = "output" if output is not None else "x" if relu else "none"  # source of the ReLU's mask
    if residual and mask != "output":
        raise UnsupportedError(
            "residual without output: behind a ReLU batch_norm_backward needs `output`; without a ReLU the residual's "
            "gradient is the gradient itself"
        )
    packers = channel_packers(x, "bias", "mean", "rstd", weight=1.0)
    return CallPlan(
        BATCH_NORM_BACKWARD,
        lambda: {
            "y": empty_images_like(x, x.shape),
            **{name: empty_vector(x) for name in ("weight_gradient", "bias_gradient")},
            "residual_gradient": empty_images_like(x, x.shape) if residual else x.new_empty(0),
        },
        lambda: BatchNormBackwardProblem(*shape_of(x), mask, residual, *form_of(x)),
        packers if mask == "x" else {**packers, "bias": _absent},
    )


def _absent(bias: torch.Tensor | None) -> None:
    """Drop a bias that the kernel does not need."""


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
    gradient, x, weight, bias, mean, rstd, ctx.relu, of_relu, ctx.residual, _ = inputs
    ctx.save_for_backward(gradient, x, weight, bias, mean, rstd, of_relu)


def _backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
    """Differentiate PyTorch's formulation, in which mean and rstd depend on x."""
    gradient, x, weight, bias, mean, rstd, output = ctx.saved_tensors
    with torch.enable_grad():
        leaves = [
            None if one is None else one.detach().requires_grad_(one.is_floating_point())
            for one in (gradient, x, weight)
        ]
        before, again, scale = leaves
        if ctx.relu or output is not None:
            if output is None:
                factor = rstd if weight is None else weight.float() * rstd
                output = (x - mean.view(1, -1, 1, 1)) * factor.view(1, -1, 1, 1)
                output = (output if bias is None else output + bias.view(1, -1, 1, 1)).to(x.dtype)
            before = torch.ops.aten.threshold_backward(before, output, 0)
        found = torch.ops.aten.native_batch_norm_backward(
            before, again, scale, None, None, mean, rstd, True, 1e-5, [True, True, True]
        )
        results = [found[0], *(one.float() for one in found[1:]), *([before] if ctx.residual else [])]
        asked = [leaf for leaf in leaves if leaf is not None]
        of_leaves = iter(torch.autograd.grad(results, asked, gradients[: len(results)], allow_unused=True))
    return *(None if leaf is None else next(of_leaves) for leaf in leaves), *(None,) * 7


OPERATOR = define_planned(
    _NAME, _plan,
    f"gradient: N C H W, {vectors_of_x('weight', 'bias', 'mean', 'rstd')}, output: N C H W",
    returns="(Tensor, Tensor, Tensor, Tensor)", setup=_setup, backward=_backward,
)  # fmt: skip
