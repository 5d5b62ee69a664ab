"""Input gradients of depthwise convolutions with a stride, all phases of the stride in one launch, in NHWC."""

from __future__ import annotations

import math
from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Recipe
from escalade.ops.base.dtypes import VECTOR_BYTES
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.launch import launch
from escalade.ops.base.rung import Config
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.depthwise import overlapped
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.rungs.rung import InputGradientRung
from escalade.ops.shared import activation

THREADS = 256
"""Most threads per CTA."""
MOST_LANES = 16
MOST_TAPS = 128
"""Taps whose products are unrolled."""
MOST_WINDOW = 72
"""Registers per thread for the gradients that a cell meets."""
BESIDES = 38
"""Registers per thread for addresses and counters."""
LATENCY = 700.0
"""Latency of a load in cycles."""
ISSUE_RATE = 4.0
"""Warp instructions issued per cycle and SM."""
WARP = 32
ROUNDS = (1, 2, 4, 8, 16)
"""Cells per thread, one after another: the filters are staged once for all."""
BESIDE = 0.35
"""Share of the shorter of memory and SM time that is not hidden."""


@dataclass(frozen=True)
class GatherConfig(Config):
    vector: int
    """Channels per thread."""
    lanes: int
    """Threads per CTA along the channels."""
    positions: int
    """Cells that a CTA computes at once."""
    rounds: int
    """Cells per thread."""

    @property
    def threads(self) -> int:
        return self.lanes * self.positions


def _cells(f: Conv2dProblem) -> int:
    return f.batch * ceil_div(f.height, f.stride[0]) * ceil_div(f.width, f.stride[1])


def _window(f: Conv2dProblem) -> int:
    """Pixels of dy that a cell meets: `WINDOW` of the kernel's axes."""

    def along(stride: int, pad: int, dilation: int, taps: int) -> int:
        return (stride - 1 + pad) // stride + (((taps - 1) * dilation - pad) // stride) + 1

    sizes = zip(f.stride, f.padding, f.dilation, (f.filter_height, f.filter_width), strict=True)
    return math.prod(along(*each) for each in sizes)


@dataclass(frozen=True)
class DepthwiseGather(InputGradientRung[GatherConfig]):
    layouts: tuple[str, ...] = ("nhwc",)
    takes_groups = True

    def limits(self, problem: Conv2dInputGradientProblem) -> str | None:
        f = problem.forward
        if not f.groups == f.channels == f.filters:
            return (
                f"{self.name} takes one group and filter per channel, not {f.groups} groups and {f.filters} filters "
                f"for {f.channels} channels; direct takes any"
            )
        if f.stride == (1, 1):
            return f"{self.name} takes strides, not stride 1; depthwise_tile does"
        if _cells(f) >= 2**31:
            return f"{self.name} counts cells of dx in 32 bits, too few for {problem.name}; direct takes any"
        if f.taps > MOST_TAPS or not self._vectors(f):
            return (
                f"{self.name} keeps all gradients that {math.prod(f.stride)} pixels meet in registers; those of "
                f"{problem.name} do not fit, direct takes any"
            )
        return None

    def _vectors(self, f: Conv2dProblem) -> list[int]:
        return [
            vector
            for vector in (8, 4, 2, 1)
            if f.channels % vector == 0 and vector * f.element_bytes <= VECTOR_BYTES
            if _window(f) * ceil_div(vector * f.element_bytes, 4) <= MOST_WINDOW
        ]

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[GatherConfig, ...]:
        f = problem.forward
        found = []
        for vector in self._vectors(f)[:2]:
            columns = f.channels // vector
            lanes = ceil_div(columns, ceil_div(columns, MOST_LANES))
            found += [GatherConfig(vector, lanes, THREADS // lanes, rounds) for rounds in ROUNDS]
        return tuple(sorted(found, key=lambda config: self.estimate(problem, config)))

    def estimate(self, problem: Conv2dInputGradientProblem, config: GatherConfig) -> float:
        f = problem.forward
        tiles, parts = self._grid(f, config)
        words = ceil_div(config.vector * f.element_bytes, 4)
        loads = _window(f) + math.prod(f.stride) * (1 + bool(problem.aux) * config.vector)
        cell = 3 * f.taps * config.vector + f.taps + 8 * loads + 60
        staging = 40 + 8 * ceil_div(f.taps * config.lanes * config.vector, config.threads)
        warps = ceil_div(config.threads, WARP)
        fit = self.card.registers // WARP // (_window(f) * words + 2 * config.vector + BESIDES) // warps
        blocks = ceil_div(tiles * parts, self.card.multiprocessors)
        resident = max(1, min(fit, blocks))
        busy = resident * warps * (config.rounds * cell + staging) / ISSUE_RATE
        waiting = (config.rounds + 1) * LATENCY + config.rounds * cell
        return overlapped(self.card, blocks / resident * max(busy, waiting), problem.bytes, BESIDE)

    @staticmethod
    def _grid(f: Conv2dProblem, config: GatherConfig) -> tuple[int, int]:
        """Return the tiles of channels, and the parts of the cells."""
        tiles = ceil_div(f.channels, config.lanes * config.vector)
        return tiles, ceil_div(_cells(f), config.rounds * config.positions)

    def recipe(self, problem: Conv2dInputGradientProblem, config: GatherConfig) -> Recipe:
        f = problem.forward
        tiles, parts = self._grid(f, config)
        return launch(
            Program.of(
                "conv2d_input_gradient/depthwise_gather.cu", constants=activation.constants_of(f), problem=problem,
                forward=f, config=config,
            ),
            (parts, tiles, 1),
            config.threads,
            Buffer("gradient"),
            Buffer("weight"),
            Buffer(problem.aux, optional=True),
            Buffer("bias", optional=True),
            Buffer("y"),
            arguments.shape(f),
            _cells(f),
            config.rounds * config.positions,
        )  # fmt: skip


# Prediction for 96to96_112_k3s2g96 at batch 256 in fp16, 771 MB.
DEPTHWISE_GATHER = DepthwiseGather(
    "depthwise_gather",
    "with a stride: a thread gathers stride x stride pixels of dx from the gradients that they meet, all phases in one "
    "launch",
    below="depthwise",
    # depthwise: 12 launches, four convolutions whose results a launch each scatters in pieces of 192 bytes: at batch 64
    # 187 us by estimate, and 341 measured. Here 193 MB at 80% of copy bandwidth are 57 us.
    predicted_gain=3.3,
)
