"""Batch normalization in training."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from escalade.device.recipe import Buffer, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, widest_vector
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import launch
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors, in_float64, summed_in_fp32
from escalade.ops.base.problem import traffic
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.batch_norm import (
    BATCH_NORM,
    DEFAULT_EPSILON,
    START_US,
    BatchNormProblem,
    PacksConfig,
)
from escalade.ops.batch_norm import empty_output as batch_norm_empty_output
from escalade.ops.batch_norm import random_inputs as batch_norm_random_inputs
from escalade.ops.batch_statistics import (
    BATCH_STATISTICS,
    RESULTS,
    BatchStatisticsProblem,
    SplitConfig,
    for_training,
    numbers,
)
from escalade.ops.batch_statistics import random_inputs as batch_statistics_random_inputs
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.shared import activation, channels
from escalade.ops.shared.channels import SIZES, channel_packers, empty_vector, vectors_of_x
from escalade.ops.shared.images import LAYOUTS, Images, empty_images_like, form_of, shape_of
from escalade.ops.shared.resident import ResidentConfig, ResidentRung, slices

# --- the problem


@dataclass(frozen=True)
class BatchNormTrainingProblem(Images, Named):
    """y = relu((x - mean) * rstd * weight + bias + residual), residual and relu optional, with the batch's mean and
    rstd (1 / sqrt(variance + epsilon)), and further results.

    `weight`, `bias`, `mean` and `rstd` are fp32 vectors of one number per channel; x, residual and y have the `dtype`.
    With `momentum`, inputs `running_mean` and `running_variance` are updated with the batch's (unbiased variance), as
    results `moved_mean` and `moved_variance`, which may alias them. y may alias the residual.
    """

    NAME: ClassVar = NamePattern(
        "batch normalization in training",
        SIZES + "[_eps{epsilon}][_m{momentum}]<_|+|{residual?res}|{relu?relu}>" + activation.IN_NAME,
    )

    relu: bool = False
    residual: bool = False
    dtype: str = "fp32"
    layout: str = "nchw"
    epsilon: float = DEFAULT_EPSILON
    momentum: float | None = None
    activation: str = ""
    """An activation instead of ReLU: an expression in `x`, such as `x * sigmoid(x)`."""

    def __post_init__(self) -> None:
        activation.normalize(self)
        if self.count < 2:
            raise UnsupportedError(
                f"{self.batch} images of {self.pixels} pixels: training needs more than one value per channel for a "
                "variance"
            )
        _ = self.statistics, self.normalization  # each checks its own fields

    @property
    def count(self) -> int:
        """Elements per channel."""
        return self.batch * self.pixels

    @cached_property
    def statistics(self) -> BatchStatisticsProblem:
        """The first pass."""
        p = self
        return BatchStatisticsProblem(
            p.batch, p.channels, p.height, p.width, p.dtype, p.layout, p.epsilon, p.momentum
        )

    @cached_property
    def normalization(self) -> BatchNormProblem:
        """The second pass; the only one if the statistics come from elsewhere, such as a convolution's epilogue."""
        return BatchNormProblem(
            self.batch, self.channels, self.height, self.width, self.relu, self.residual, self.dtype, self.layout,
            self.epsilon, self.activation,
        )  # fmt: skip

    @property
    def flops(self) -> int:
        return self.statistics.flops + self.normalization.flops

    @property
    def bytes(self) -> int:
        """x and the residual read once, and y written."""
        return self._bytes(2 + self.residual)

    @property
    def traffic(self) -> int:
        """Traffic of two passes, which both read x."""
        return self._bytes(3 + self.residual)

    def _bytes(self, passes: int) -> int:
        return passes * self.elements * ELEMENT_BYTES[self.dtype] + 24 * self.channels

    @property
    def rounding(self) -> float:
        """Also mean, variance and the reciprocal of the deviation are rounded to fp32 between the two passes."""
        return math.hypot(self.statistics.rounding, self.normalization.rounding, math.sqrt(3) * 2.0**-24)


# --- rungs of two passes: one for the statistics and one that normalizes, by rungs of those operations


_LAUNCHES = 3


@dataclass(frozen=True)
class TwoPasses(Rung[BatchNormTrainingProblem]):
    """Statistics and normalization, with a workspace between them."""

    first: str
    """Rung of batch_statistics."""
    second: str
    """Rung of batch_norm."""

    @property
    def _first(self) -> Rung[BatchStatisticsProblem]:
        return BATCH_STATISTICS.ladder.rung(self.first).on(self.card)

    @property
    def _second(self) -> Rung[BatchNormProblem]:
        return BATCH_NORM.ladder.rung(self.second).on(self.card)

    def supports(self, problem: BatchNormTrainingProblem) -> str | None:
        refusal = self._second.supports(problem.normalization)
        return refusal and refusal.replace(f"`{BELOW_WIDE}`", "`one_pass`")

    def configs(self, problem: BatchNormTrainingProblem) -> tuple[Any, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 512))

    def parts(self, problem: BatchNormTrainingProblem, config: Any) -> tuple[Config, Config]:
        """Return the configs of both passes."""
        return config, config

    def estimate(self, problem: BatchNormTrainingProblem, config: Any) -> float | None:
        return None

    def recipe(self, problem: BatchNormTrainingProblem, config: Any) -> Recipe:
        first, second = self.parts(problem, config)
        statistics, variance = Buffer("statistics"), Buffer("statistics", offset=4 * problem.channels)
        passes = (
            self._first.recipe(problem.statistics, first).remap({"y": statistics}),
            self._second.recipe(problem.normalization, second).remap(
                {"mean": statistics, "variance": variance}
            ),
        )
        between = Workspace(statistics.name, 2 * 4 * problem.channels)
        workspaces = (between, *(one for part in passes for one in part.workspaces))
        return Recipe(tuple(step for part in passes for step in part.steps), workspaces)


@dataclass(frozen=True)
class WideConfig(SplitConfig):
    """The config of the statistics, and that of the second pass."""

    second_threads: int = 256
    second_packs: int = 4
    turns: int = 1


@dataclass(frozen=True)
class Wide(TwoPasses):
    """Both passes with up to 16 bytes per access."""

    def configs(self, problem: BatchNormTrainingProblem) -> tuple[WideConfig, ...]:
        """Combine each pass's configs with the other's best."""
        first: tuple[Any, ...] = self._first.configs(problem.statistics)
        second: tuple[Any, ...] = self._second.configs(problem.normalization)
        offered = [
            WideConfig(
                **asdict(one), second_threads=other.threads, second_packs=other.packs, turns=other.turns
            )
            for one, other in (
                *zip_longest(first, second[:1], fillvalue=second[0]),
                *zip_longest(first[:1], second, fillvalue=first[0]),
            )
        ]
        return tuple(dict.fromkeys(offered))

    def parts(self, problem: BatchNormTrainingProblem, config: WideConfig) -> tuple[Config, Config]:
        return (
            SplitConfig(config.threads, config.packs, config.blocks),
            PacksConfig(config.second_threads, config.second_packs, config.turns, backwards=True),
        )

    def estimate(self, problem: BatchNormTrainingProblem, config: WideConfig) -> float:
        return _LAUNCHES * START_US + self.card.microseconds(0, traffic(problem), _LAUNCHES)


BELOW_WIDE = "scaled"
"""The rung of batch_norm for problems that its widest one does not support."""

# Predictions are for 64 channels, 56 x 56, batch 256, fp16, NHWC: 103 MB per tensor, three of them moved, 74 us at 4.2
# TB/s. One CTA per channel fetches 32 bytes for each 2: naive three times, with 64 SMs' 256 loads in flight for 1 us,
# 19 ms; one_pass once for the statistics, 6 ms. vectorised: DRAM bound plus three launches, 80 us.
RUNGS: tuple[Rung[BatchNormTrainingProblem], ...] = (
    TwoPasses("naive", "one CTA per channel reads it twice, then one thread per element", None, None, "naive",
              "naive"),
    TwoPasses("one_pass", "statistics in one pass (Welford, shuffles), and scales computed once", "naive", 2.0,
              "one_pass", BELOW_WIDE),
    Wide("vectorised", "CTAs share a channel's statistics, up to 16 bytes per access in both passes", "one_pass", 75.0,
         "split", "vectorised"),
)  # fmt: skip


# --- rung resident: one launch of clusters that hold x in registers


@dataclass(frozen=True)
class Resident(ResidentRung[BatchNormTrainingProblem]):
    most_steps: ClassVar = {256: 24, 512: 12}
    exchanges = 2

    def recipe(self, problem: BatchNormTrainingProblem, config: ResidentConfig) -> Recipe:
        vector, generated = widest_vector(problem.dtype, problem.channels), activation.constants_of(problem)
        return launch(
            channels.program(
                "batch_norm_training/resident.cu", problem, generated, config=config, vector=vector,
            ),
            (config.blocks, slices(problem, config)),
            config.threads,
            Buffer("x"), Buffer("weight"), Buffer("bias"), Buffer("residual", optional=True), Buffer("y"),
            RESULTS, problem.channels, problem.count, *numbers(problem.statistics),
            cluster=(config.blocks, 1, 1),
        )  # fmt: skip


# For 512 channels, 7 x 7, batch 64, fp16, 3.2 MB per tensor: three launches of 2.8 us each besides their bytes, 10 us;
# one, with two exchanges, 5 us.
RESIDENT = Resident(
    "resident", "one launch: clusters hold x in registers, and read it once", "vectorised", 2.0
)


# --- the reference


def random_inputs(problem: BatchNormTrainingProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Channels with different statistics, such that y is of order one."""
    inputs = batch_statistics_random_inputs(problem.statistics, draw)
    others = batch_norm_random_inputs(problem.normalization, draw.next)
    wanted = ("weight", "bias", "residual") if problem.residual else ("weight", "bias")
    return {**inputs, **{name: others[name] for name in wanted}}


def empty_output(problem: BatchNormTrainingProblem, device: torch.device) -> torch.Tensor:
    return batch_norm_empty_output(problem.normalization, device)


def compute(problem: BatchNormTrainingProblem, inputs: Tensors) -> torch.Tensor:
    """Normalize with PyTorch, without running statistics."""
    y = F.batch_norm(
        inputs["x"], None, None, inputs["weight"], inputs["bias"], training=True, eps=problem.epsilon
    )
    return activation.apply(problem, y, inputs["residual"] if problem.residual else None)


# --- the operation


class BatchNormTrainingOperation(Operation[BatchNormTrainingProblem]):
    name = "batch_norm_training"
    problem = BatchNormTrainingProblem
    in_pytorch = Reference(random_inputs, empty_output, in_float64(compute), summed_in_fp32(compute))
    ladder = Ladder("batch_norm_training", (*RUNGS, RESIDENT))
    problems = tuple(
        BatchNormTrainingProblem.parse(name)
        for name in (
            "64_112_b256_m0.1_relu",
            "64_56_b64_m0.1_relu",
            "64_56_b256_m0.1_relu",
            "64_56_b256_m0.1_res+relu",
            "256_56_b256_m0.1",
            "512_7_b64_m0.1_res+relu",
            "512_7_b256_m0.1_res+relu",
        )
    )
    """ResNets: the first layers, with a ReLU and with a residual and a ReLU, and the last one."""
    small_problems = tuple(
        BatchNormTrainingProblem.parse(name)
        for name in (
            "8_6_b2_m0.1_relu",
            "16_7_b3_eps0.001_m0.25_res+relu",
            "3_5x9_b1",
            "40_1_b5_m0.1",
            "6_3x2_b2_res",
            "16_48_b2_m0.1[x*sigmoid(x)]",
        )
    )
    dtypes = DTYPES
    layouts = LAYOUTS
    weights_change = True
    order = ("vectorised", "resident", "one_pass")

    def extra_outputs(
        self, problem: BatchNormTrainingProblem, device: torch.device
    ) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty(problem.channels, device=device) for name in problem.statistics.for_training
        }

    def extra_references(self, problem: BatchNormTrainingProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        return for_training(problem.statistics, inputs)


BATCH_NORM_TRAINING = BatchNormTrainingOperation()


# --- the PyTorch operator


_NAME = "batch_norm_training"
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def batch_norm_training(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    momentum: float = 0.1,
    eps: float = DEFAULT_EPSILON,
    relu: bool = False,
    residual: torch.Tensor | None = None,
    *,
    rung: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """y = relu(batch_norm(x) + residual) with the batch's own statistics, residual and relu optional; mutates nothing.

    The other results are float32 vectors of one number per channel: mean and reciprocal standard deviation of x, which
    `batch_norm_backward` takes, and, if running statistics are given, these updated by `momentum` (with the unbiased
    variance). Only y is differentiable. Deterministic. `rung` names a rung of the ladder.
    """
    found = OPERATOR(x, weight, bias, running_mean, running_var, momentum, eps, relu, residual, rung)
    return tuple(found[: 3 if running_mean is None else 5])


def _plan(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    momentum: float = 0.1,
    eps: float = DEFAULT_EPSILON,
    relu: bool = False,
    residual: torch.Tensor | None = None,
    rung: str | None = None,
) -> CallPlan:
    moves = running_mean is not None
    if moves != (running_var is not None):
        raise UnsupportedError("running_mean without running_var, or the reverse: pass both or neither")
    if x.shape[0] * x.shape[2] * x.shape[3] < 2:
        raise UnsupportedError(
            f"x has shape {tuple(x.shape)}; training needs more than one value per channel for a variance"
        )
    running = ("running_mean", "running_variance") if moves else ()
    return CallPlan(
        BATCH_NORM_TRAINING,
        lambda: {
            "y": empty_images_like(x, x.shape),
            **{name: empty_vector(x) for name in ("mean", "rstd")},
            **{name: empty_vector(x, moves) for name in ("moved_mean", "moved_variance")},
        },
        lambda: BatchNormTrainingProblem(
            *shape_of(x), relu, residual is not None, *form_of(x), eps, momentum if moves else None
        ),
        channel_packers(x, "bias", *running, weight=1.0),
        renamed={"running_var": "running_variance"},
    )


OPERATOR = define_planned(
    _NAME, _plan,
    f"{vectors_of_x('weight', 'bias', 'running_mean', 'running_var')}, residual: N C H W",
    returns="(Tensor, Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip
