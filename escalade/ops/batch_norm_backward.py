"""Batch normalisation's gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from escalade.device.architecture import WITH_WGMMA
from escalade.device.program import Constant, Program
from escalade.device.recipe import Addresses, Argument, Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require, require_at_least
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, STORAGE, dtype_of, full_vector, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.problem import traffic
from escalade.ops.base.rung import Rung, ThreadsConfig
from escalade.ops.calling.call import CallPlan, prepare
from escalade.ops.calling.library import define_planned, require_alike
from escalade.ops.expressions import Expression
from escalade.ops.shared import channels, resident
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
from escalade.ops.shared.pointwise import PacksConfig
from escalade.ops.shared.resident import ResidentConfig

# --- the problem


MASKS = ("none", "x", "output")
"""How the mask of a ReLU behind the normalisation is found: there is none, again from x, or by the ReLU's output."""


@dataclass(frozen=True)
class BatchNormBackwardProblem(Images, Named):
    """The gradients of y = relu((x - mean) * rstd * weight + bias + residual), relu and residual optional, where mean
    and rstd are x's own.

    Buffers `gradient`, which is that of y, and x are of `dtype`; `mean`, `rstd` (one over the deviation), `weight` and
    the results `weight_gradient` and `bias_gradient` are fp32 and one a channel. The gradient of x is buffer `y`. With
    a mask, gradients pass where the ReLU's output is positive: by `output`, or by x, for which `bias` is there. With
    `residual` the gradient in front of the ReLU is the result `residual_gradient`. y may be the gradient or x.

    Behind another function of single elements than ReLU, `function` says what it leaves of a gradient: an expression in
    `gradient` and in `x`, which there is what the function was applied to; that is found again by x.
    """

    NAME: ClassVar = NamePattern(
        "gradients of batch normalization",
        SIZES + r"[_by{mask:x|output}]{residual?+res}[\[{function:text}\]]",
    )

    mask: str = "none"
    residual: bool = False
    dtype: str = "fp32"
    layout: str = "nchw"
    function: str = ""

    def __post_init__(self) -> None:
        require_at_least(1, {"batch": self.batch})
        check_channelwise("batch_norm_backward", self)
        require("batch_norm_backward", "mask", self.mask, MASKS)
        if self.residual and self.mask != "output":
            raise UnsupportedError(
                f"a residual's gradient with the mask {self.mask!r}: behind a ReLU it is found by the output, and "
                "without one the residual's gradient is y's own"
            )

        if self.function:
            self._settle_function()

    def _settle_function(self) -> None:
        """Says it in the one way there is, in canonical form."""
        expression = Expression.parse(self.function)
        if set(expression.inputs) != {"gradient", "x"} or len(expression.results) != 1 or self.mask != "x":
            raise UnsupportedError(
                f"a function of {self.function!r} with the mask {self.mask!r}: it is one result computed from gradient "
                "and x, such as gradient * sigmoid(x), where what it was applied to is found again by x"
            )
        object.__setattr__(self, "function", expression.text)

    @property
    def count(self) -> int:
        """Elements a channel."""
        return self.batch * self.pixels

    @property
    def flops(self) -> int:
        """Two sums with a difference and a product; then a difference, two products and two sums."""
        return (9 + (self.mask != "none")) * self.elements

    @property
    def bytes(self) -> int:
        """The gradient, x and the output read once, and each result written."""
        return self._bytes(3 + (self.mask == "output") + self.residual)

    @property
    def traffic(self) -> int:
        """What two passes move: the second reads the gradient and x again, and the output unless the first has left the
        gradient in front of the ReLU."""
        by_output = self.mask == "output"
        return self._bytes(5 + by_output + (1 if self.residual else by_output))

    def _bytes(self, passes: int) -> int:
        return passes * self.elements * ELEMENT_BYTES[self.dtype] + 24 * self.channels

    @property
    def rounding(self) -> float:
        """256 running sums side by side, each a random walk of its rounding errors; then five more roundings."""
        return 2.0**-24 * math.sqrt(6 + self.count / 256 / 6)


# --- rungs, naive: a block a channel for the sums, then an element a thread


WEIGHT_GRADIENT, BIAS_GRADIENT = Buffer("weight_gradient"), Buffer("bias_gradient")
_BIAS = Buffer("bias", optional=True)


def kernel_constants(problem: BatchNormBackwardProblem, mask: str) -> dict[str, Constant]:
    found = {**channels.constants(problem), "MASK": MASKS.index(mask)}
    if not problem.function:
        return found
    expression = Expression.parse(problem.function)
    return {**found, "EXPRESSION_X": expression.inputs.index("x"), **expression.constants(problem.dtype)}


def sums_constants(problem: BatchNormBackwardProblem) -> dict[str, Constant]:
    """What the launch that adds up leaves open."""
    return {**kernel_constants(problem, problem.mask), "HAS_RESIDUAL": problem.residual}


def sums_arguments() -> tuple[Argument, ...]:
    """The arguments with which a launch that adds up begins."""
    return (
        Buffer("gradient"), Buffer("x"), Buffer("output", optional=True), Buffer("weight"), _BIAS, Buffer("mean"),
        Buffer("rstd"), Buffer("residual_gradient", optional=True),
    )  # fmt: skip


def apply_constants(problem: BatchNormBackwardProblem) -> dict[str, Constant]:
    """What the last launch leaves open: the residual's gradient has been through the mask."""
    return kernel_constants(problem, "none" if problem.residual else problem.mask)


def apply_arguments(problem: BatchNormBackwardProblem) -> tuple[Argument, ...]:
    """The arguments with which the last launch begins."""
    return (
        Buffer("residual_gradient" if problem.residual else "gradient"), Buffer("x"), Buffer("output", optional=True),
        Addresses((Buffer("mean"), Buffer("rstd"), Buffer("weight"), _BIAS, WEIGHT_GRADIENT, BIAS_GRADIENT)),
        Buffer("y"), 1 / problem.count, problem.channels,
    )  # fmt: skip


@dataclass(frozen=True)
class Naive(Rung[BatchNormBackwardProblem, ThreadsConfig]):
    def supports(self, problem: BatchNormBackwardProblem) -> str | None:
        return None

    def configs(self, problem: BatchNormBackwardProblem) -> tuple[ThreadsConfig, ...]:
        """Offers powers of two, no more of them idle than a channel's elements leave in a few warps."""
        offered = (256, 512, 1024) if problem.count > 64 else (64, 128)
        return tuple(ThreadsConfig(threads) for threads in offered)

    def recipe(self, problem: BatchNormBackwardProblem, config: ThreadsConfig) -> Recipe:
        block = (config.threads, 1, 1)
        sums = KernelCall(
            Program.of(
                "batch_norm_backward/naive_sums.cu",
                "batch_norm_backward_naive_sums",
                {**sums_constants(problem), "THREADS": config.threads},
            ),
            (problem.channels, 1, 1),
            block,
            (
                *sums_arguments(), WEIGHT_GRADIENT, BIAS_GRADIENT, problem.channels, problem.pixels,
                Int64(problem.count),
            ),
            overlap=True,
        )  # fmt: skip
        apply = KernelCall(
            Program.of("batch_norm_backward/naive.cu", "batch_norm_backward_naive", apply_constants(problem)),
            (blocks(problem.elements, config.threads), 1, 1),
            block,
            (*apply_arguments(problem), problem.pixels, Int64(problem.elements)),
            overlap=True,
        )
        return Recipe((sums, apply))


NAIVE = Naive("naive", "a block a channel adds up, then a thread takes an element", None, None)


# --- rungs, resident: one launch of clusters that keep the gradient and x in registers


_MOST_STEPS = {256: 10, 512: 4}
"""Rows of a thread that there are registers for, by the threads of a block, of two tensors."""
_EXCHANGES = 1


@dataclass(frozen=True)
class Resident(Rung[BatchNormBackwardProblem, ResidentConfig]):
    @property
    def architectures(self) -> tuple[str, ...]:
        return WITH_WGMMA

    def supports(self, problem: BatchNormBackwardProblem) -> str | None:
        return resident.refusal(self.name, problem, problem.count, self.card, _MOST_STEPS)

    def configs(self, problem: BatchNormBackwardProblem) -> tuple[ResidentConfig, ...]:
        every = resident.offered(problem, problem.count, self.card, _MOST_STEPS)
        return tuple(sorted(every, key=lambda config: self.estimate(problem, config)))

    def estimate(self, problem: BatchNormBackwardProblem, config: ResidentConfig) -> float:
        return resident.estimate(problem, config, self.card, problem.bytes, _EXCHANGES)

    def recipe(self, problem: BatchNormBackwardProblem, config: ResidentConfig) -> Recipe:
        constants = {
            **sums_constants(problem), "VECTOR": widest_vector(problem.dtype, problem.channels),
            "THREADS": config.threads, "COLUMNS": config.columns, "STEPS": config.steps,
        }  # fmt: skip
        call = KernelCall(
            Program.of("batch_norm_backward/resident.cu", "batch_norm_backward_resident", constants),
            (config.blocks, resident.slices(problem, config), 1),
            (config.threads, 1, 1),
            (
                *sums_arguments(), WEIGHT_GRADIENT, BIAS_GRADIENT, Buffer("y"), 1 / problem.count, problem.channels,
                problem.count,
            ),
            cluster=(config.blocks, 1, 1),
            overlap=True,
        )  # fmt: skip
        return Recipe((call,))


# For 512 channels, 7 x 7, batch 64, fp16, 3.2 MB a tensor: three launches with 2.8 us each besides their bytes, 10.7
# us; one, with an exchange, 5 us.
RESIDENT = Resident(
    "resident",
    "one launch: clusters keep the gradient and x in registers, and read them once",
    "vectorised",
    2.0,
)


# --- rungs, split: sums that many blocks share, and a last launch over all elements: one element an access, or 16 byt


_MERGE_THREADS, _MERGE_CHANNELS, _MERGE_PACKS = 512, 8, 5
_LAUNCHES = 3
_START_US = 1.3
"""Microseconds from each launch to its first loads' arrival, besides its own: as measured where tensors are small."""
_PARTIAL = Buffer("partial")


@dataclass(frozen=True)
class SharedConfig(PacksConfig):
    resident: int = 2
    """Blocks that a multiprocessor has room for, and is given."""


@dataclass(frozen=True)
class Split(Rung[BatchNormBackwardProblem, SharedConfig]):
    wide: bool
    """Whether an access has up to 16 bytes, several under way, or one element."""

    def supports(self, problem: BatchNormBackwardProblem) -> str | None:
        vector = full_vector(problem.dtype)
        if self.wide and not channels_innermost(problem) and problem.pixels < vector:
            return (
                f"a pack of {vector} elements may lie in two planes, not in more, and these have {problem.pixels}; "
                "the rung `split` takes any"
            )
        return None

    def configs(self, problem: BatchNormBackwardProblem) -> tuple[SharedConfig, ...]:
        """Offers what has 64 KiB of loads under way on each multiprocessor, then more and less."""
        if not self.wide:
            return (SharedConfig(256, 1, 8), SharedConfig(512, 1, 4))
        sizes = ((256, 4, 2), (512, 4, 1), (128, 4, 4), (256, 8, 1), (256, 2, 2))
        return tuple(SharedConfig(*size) for size in sizes)

    def estimate(self, problem: BatchNormBackwardProblem, config: SharedConfig) -> float:
        return _LAUNCHES * _START_US + self.card.microseconds(0, traffic(problem), _LAUNCHES)

    def recipe(self, problem: BatchNormBackwardProblem, config: SharedConfig) -> Recipe:
        by_rows = channels_innermost(problem)
        first, splits = (self._sum_rows if by_rows else self._sum_planes)(problem, config)
        merge = KernelCall(
            Program.of(
                "batch_norm_backward/split_merge.cu",
                "batch_norm_backward_split_merge",
                {"THREADS": _MERGE_THREADS, "CHANNELS": _MERGE_CHANNELS, "PACKS": _MERGE_PACKS},
            ),
            (blocks(problem.channels, _MERGE_CHANNELS), 1, 1),
            (_MERGE_THREADS, 1, 1),
            (_PARTIAL, Buffer("rstd"), WEIGHT_GRADIENT, BIAS_GRADIENT, problem.channels, splits),
            overlap=True,
        )
        last = (self._apply_rows if by_rows else self._apply_planes)(problem, config)
        return Recipe((first, merge, last), (Workspace(_PARTIAL.name, 2 * 4 * splits * problem.channels),))

    def _rows(self, problem: BatchNormBackwardProblem, config: SharedConfig) -> tuple[ChannelTile, int]:
        """How rows lie under a block, and how many blocks there are one below the other."""
        rows = (
            ChannelTile.of(problem, config.threads)
            if self.wide
            else ChannelTile.of(problem, config.threads, most=1)
        )
        wanted = max(1, config.resident * self.card.multiprocessors // rows.across)
        return rows, min(wanted, blocks(problem.count, rows.height))

    def _sum_rows(self, problem: BatchNormBackwardProblem, config: SharedConfig) -> tuple[KernelCall, int]:
        """Channels innermost: the launch that adds up, and its shares of each sum."""
        rows, splits = self._rows(problem, config)
        constants = {
            **sums_constants(problem), "VECTOR": rows.vector, "PACKS": config.packs, "THREADS": config.threads,
            "RESIDENT": config.resident,
        }  # fmt: skip
        call = KernelCall(
            Program.of("batch_norm_backward/split_rows.cu", "batch_norm_backward_split_rows", constants),
            (splits, rows.across, 1),
            (config.threads, 1, 1),
            (*sums_arguments(), _PARTIAL, problem.channels, rows.width, Int64(problem.count)),
            overlap=True,
        )
        return call, splits

    def _apply_rows(self, problem: BatchNormBackwardProblem, config: SharedConfig) -> KernelCall:
        rows, down = self._rows(problem, config)
        constants = {
            **apply_constants(problem), "VECTOR": rows.vector, "PACKS": config.packs, "THREADS": config.threads,
            "RESIDENT": config.resident,
        }  # fmt: skip
        return KernelCall(
            Program.of(
                "batch_norm_backward/split_apply_rows.cu", "batch_norm_backward_split_apply_rows", constants
            ),
            (down, rows.across, 1),
            (config.threads, 1, 1),
            (*apply_arguments(problem), rows.width, Int64(problem.count)),
            overlap=True,
        )

    def _sum_planes(self, problem: BatchNormBackwardProblem, config: SharedConfig) -> tuple[KernelCall, int]:
        """Planes: the launch that adds up, and its shares of each sum."""
        vector = widest_vector(problem.dtype, problem.pixels) if self.wide else 1
        packs = problem.count // vector
        wanted = max(1, config.resident * self.card.multiprocessors // problem.channels)
        splits = min(wanted, blocks(packs, config.threads))
        constants = {
            **sums_constants(problem), "VECTOR": vector, "PACKS": config.packs, "THREADS": config.threads,
            "RESIDENT": config.resident,
        }  # fmt: skip
        call = KernelCall(
            Program.of("batch_norm_backward/split_planes.cu", "batch_norm_backward_split_planes", constants),
            (problem.channels * splits, 1, 1),
            (config.threads, 1, 1),
            (*sums_arguments(), _PARTIAL, problem.channels, problem.pixels, splits, Int64(packs)),
            overlap=True,
        )
        return call, splits

    def _apply_planes(self, problem: BatchNormBackwardProblem, config: SharedConfig) -> KernelCall:
        vector = full_vector(problem.dtype) if self.wide else 1
        each = (config.threads * packs for packs in range(config.packs, 1, -1))
        per_block = next(
            (one for one in each if problem.elements // (vector * one) >= self.card.busy_blocks),
            config.threads,
        )
        constants = {
            **apply_constants(problem), "VECTOR": vector, "PACKS": per_block // config.threads,
            "THREADS": config.threads, "STRADDLING": problem.pixels % vector != 0,
        }  # fmt: skip
        return KernelCall(
            Program.of(
                "batch_norm_backward/split_apply_planes.cu",
                "batch_norm_backward_split_apply_planes",
                constants,
            ),
            (blocks(problem.elements // vector, per_block), 1, 1),
            (config.threads, 1, 1),
            (*apply_arguments(problem), problem.pixels, Int64(problem.elements)),
            overlap=True,
        )


# Predictions are for 64 channels, 56 x 56, batch 256, fp16, NHWC, behind a ReLU whose mask is found by x: 103 MB a
# tensor, five of them moved, 123 us at 4.2 TB/s. naive: a block a channel fetches 32 bytes for each 2, 64
# multiprocessors with 256 loads under way for 1 us: 12,544 turns, 6 ms. split: 2,048 threads with 2 bytes of each
# tensor under way are 8 KiB a multiprocessor, answered in 0.8 us, 1.4 TB/s: 370 us. vectorised: 64 KiB, the memory's
# pace and three launches, 130 us.
SPLIT = Split(
    "split", "rows lie side by side in a warp, many blocks share each sum, a second launch merges", "naive", 16.0,
    wide=False,
)  # fmt: skip
VECTORISED = Split(
    "vectorised", "up to 16 bytes an access, several rows under way in a thread", "split", 2.8, wide=True
)


# --- problems to measure and to test


PROBLEMS = tuple(
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

SMALL_PROBLEMS = tuple(
    BatchNormBackwardProblem.parse(name)
    for name in (
        "8_6_b2_byx",
        "16_7_b3_byoutput+res",  # packs over two planes; a tail in nchw
        "3_5x9_b1",  # one channel a thread in nhwc
        "24_9x4_b2_byoutput",  # 3 packs a row: threads left over
        "40_1_b5_byx",  # alike in both layouts
        "6_3x2_b2_byoutput",  # planes smaller than a pack of fp16
        "2056_2_b1_byx",  # wider than a block
        "16_64_b2",  # several splits
        "24_5x6_b3_byx[gradient*sigmoid(x)*(1+x*(1-sigmoid(x)))]",  # SiLU
        "8_33_b2_byx[gradient*(x<6)*(x>0)]",
    )
)


# --- the reference


_MARGIN = 0.05
"""How far outputs are from 0, where a rounding would let a gradient through or not."""


def _each(channelwise: torch.Tensor) -> torch.Tensor:
    return channelwise.view(1, -1, 1, 1)


def random_inputs(
    problem: BatchNormBackwardProblem, device: torch.device, seed: int
) -> dict[str, torch.Tensor]:
    """Channels that differ; where a mask is found by x, no output is near 0."""
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)
    size = (p.batch, p.channels, p.height, p.width)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    mean, bias = normal(p.channels), normal(p.channels)
    rstd = torch.rand(p.channels, generator=generator, device=device).add_(0.5)
    weight = (
        torch.rand(p.channels, generator=generator, device=device).add_(0.5).mul_(normal(p.channels).sign())
    )
    inputs = {"gradient": stored_images(p, normal(*size)), "weight": weight, "mean": mean, "rstd": rstd}
    outputs = normal(*size).add_(_each(bias))
    if p.mask == "x":
        outputs = torch.where(outputs.abs() < _MARGIN, 1.0, outputs)
        inputs["bias"] = bias
    if p.mask == "output":
        inputs["output"] = stored_images(p, outputs.relu())
    x = (outputs - _each(bias)) / _each(weight * rstd) + _each(mean)
    return {"x": stored_images(p, x), **inputs}


def empty_output(problem: BatchNormBackwardProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.batch, p.channels, p.height, p.width), device)


def masked(problem: BatchNormBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """The gradient in front of the ReLU or another function, in the dtype of the gradient."""
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


def gradients(
    problem: BatchNormBackwardProblem, inputs: Tensors
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, weight and bias in float64."""
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    before, rstd = masked(problem, wide), _each(wide["rstd"])
    normalised = (wide["x"] - _each(wide["mean"])) * rstd
    weight_gradient, bias_gradient = (before * normalised).sum((0, 2, 3)), before.sum((0, 2, 3))
    means = (_each(sums / problem.count) for sums in (bias_gradient, weight_gradient))
    centred = before - next(means) - normalised * next(means)
    return centred * rstd * _each(wide["weight"]), weight_gradient, bias_gradient


def exact(problem: BatchNormBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """The gradient of x in float64."""
    return gradients(problem, inputs)[0]


def peer(problem: BatchNormBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """The gradient of x by PyTorch, the ReLU's and then the normalisation's; on a CPU of fp32 tensors."""
    on_gpu = inputs["x"].is_cuda
    given = inputs if on_gpu else {name: tensor.float() for name, tensor in inputs.items()}
    found: tuple[torch.Tensor, ...] = torch.ops.aten.native_batch_norm_backward(
        masked(problem, given), given["x"], given["weight"], None, None, given["mean"], given["rstd"], True, 1e-5,
        [True, True, True],
    )  # fmt: skip
    return found[0].to(STORAGE[problem.dtype])


# --- the operation


class BatchNormBackward(Operation[BatchNormBackwardProblem]):
    name = "batch_norm_backward"
    problem = BatchNormBackwardProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("batch_norm_backward", (NAIVE, SPLIT, VECTORISED, RESIDENT))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS
    weights_change = True

    def preferred(self, problem: BatchNormBackwardProblem) -> tuple[str, ...]:
        return ("vectorised", "resident", "split")

    def extra_outputs(
        self, problem: BatchNormBackwardProblem, device: torch.device
    ) -> dict[str, torch.Tensor]:
        found = {
            name: torch.empty(problem.channels, device=device)
            for name in ("weight_gradient", "bias_gradient")
        }
        if problem.residual:
            found["residual_gradient"] = self.output(problem, device)
        return found

    def extra_references(self, problem: BatchNormBackwardProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        _, weight_gradient, bias_gradient = gradients(problem, inputs)
        found = {"weight_gradient": weight_gradient, "bias_gradient": bias_gradient}
        if problem.residual:
            found["residual_gradient"] = masked(problem, inputs).double()
        return found


BATCH_NORM_BACKWARD = BatchNormBackward()


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
    """The gradients of x, weight and bias in y = relu(batch_norm(x) + residual) in training, from that of y.

    `mean` and `rstd`, one over the deviation, are those of x, in float32, as `batch_norm_training` gives them. Behind a
    ReLU gradients pass where its `output` is positive; without `output` that is found again by x and bias, which is
    possible where no residual was added. With `residual` the residual's gradient is the fourth result. Always the same
    bits. `rung` names one rung of the ladder.
    """
    found = OPERATOR(gradient, x, weight, bias, mean, rstd, relu, output, residual, rung)
    return tuple(found[: 3 + residual])


def _fake(
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
) -> Gradients:
    check_images(_NAME, x)
    images = {"gradient": gradient, "output": output}
    require_alike(x, images)
    for name, tensor in images.items():
        if tensor is not None and tensor.shape != x.shape:
            raise UnsupportedError(
                f"{name} has shape {tuple(tensor.shape)}; it must be x's, {tuple(x.shape)}"
            )
    check_channel_vectors(_NAME, x, {"weight": weight, "bias": bias, "mean": mean, "rstd": rstd})
    if residual and _mask(relu, output) != "output":
        raise UnsupportedError(
            "a residual's gradient without the output: behind a ReLU batch_norm_backward finds it by `output`, and "
            "without a ReLU it is the gradient itself"
        )
    grad_x = empty_images_like(x, x.shape)
    of_weight, of_bias = (x.new_empty(x.shape[1], dtype=torch.float32) for _ in range(2))
    of_residual = empty_images_like(x, x.shape) if residual else x.new_empty(0)
    return grad_x, of_weight, of_bias, of_residual


def _plan(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    relu: bool,
    output: torch.Tensor | None,
    residual: bool,
    rung: str | None,
) -> CallPlan:
    results = _fake(gradient, x, weight, bias, mean, rstd, relu, output, residual)
    mask = _mask(relu, output)
    batch, channels, height, width = x.shape
    problem = BatchNormBackwardProblem(
        batch, channels, height, width, mask, residual, dtype_of(_NAME, x), layout_of(x)
    )
    images, numbers = packer(problem.layout), channel_packer(x)
    lay = {
        **dict.fromkeys(("gradient", "x", "output"), images),
        **dict.fromkeys(("mean", "rstd"), numbers),
        "bias": numbers if mask == "x" else _absent,
        "weight": channel_packer(x, 1.0),
    }
    names = ("y", "weight_gradient", "bias_gradient", "residual_gradient")
    return CallPlan(
        prepare(BATCH_NORM_BACKWARD, problem, x.device, rung),
        dict(zip(names, results, strict=True)),
        lay,
        results=names,
    )


def _absent(bias: torch.Tensor | None) -> None:
    """A bias that is not asked for."""


def _mask(relu: bool, output: torch.Tensor | None) -> str:
    """Where it is found what a ReLU has cut off."""
    return "output" if output is not None else "x" if relu else "none"


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
    gradient, x, weight, bias, mean, rstd, ctx.relu, of_relu, ctx.residual, _ = inputs
    ctx.save_for_backward(gradient, x, weight, bias, mean, rstd, of_relu)


def _backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
    """Differentiates PyTorch's own words for the same, which know that mean and rstd depend on x."""
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
    "batch_norm_backward(Tensor gradient, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, "
    "bool relu=False, Tensor? output=None, bool residual=False, str? rung=None) -> (Tensor, Tensor, Tensor, Tensor)",
    _plan, _fake, setup=_setup, backward=_backward,
)  # fmt: skip
