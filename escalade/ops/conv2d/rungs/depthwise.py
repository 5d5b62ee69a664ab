"""Depthwise convolution on CUDA cores, with one or more filters per channel and register reuse.

Also tile counts and the estimate shared by `depthwise_tile` and `depthwise_mma`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

from escalade.device.program import Program
from escalade.device.recipe import KernelCall, Recipe, WeightsReady
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import VECTOR_BYTES
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.rung import Conv2dRung
from escalade.ops.shared import activation


class TileSizes(Protocol):
    @property
    def channels(self) -> int: ...
    @property
    def images(self) -> int: ...
    @property
    def tile_rows(self) -> int: ...
    @property
    def tile_columns(self) -> int: ...
    @property
    def blocks_per_sm(self) -> int: ...


class Tiles:
    """Tile counts; the kernels compute the same."""

    problem: Conv2dProblem
    config: TileSizes
    card: Card

    @cached_property
    def channel_blocks(self) -> int:
        return ceil_div(self.problem.channels, self.config.channels)

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Tiles down and across an image."""
        p, c = self.problem, self.config
        return ceil_div(p.output_height, c.tile_rows), ceil_div(p.output_width, c.tile_columns)

    @cached_property
    def tiles(self) -> int:
        return ceil_div(self.problem.batch, self.config.images) * self.grid[0] * self.grid[1]

    @cached_property
    def rounds(self) -> int:
        """Tiles per CTA."""
        at_once = self.card.multiprocessors * self.config.blocks_per_sm // self.channel_blocks
        return ceil_div(self.tiles, max(1, at_once))

    @cached_property
    def workers(self) -> int:
        """CTAs per range of channels."""
        return ceil_div(self.tiles, self.rounds)


WARP = 32
HELD = 190
"""Registers per thread for weights, accumulators and inputs; addresses and counters need `BESIDES` more."""
BESIDES = 40
SMALL_CODE, MOST_CODE = 2800, 4500
"""Instructions of a loop unrolled over all open rows of accumulators. Up to the first limit they stay in place, beyond
the second they move; in between, either may be faster."""
STRIPS = (1, 2, 4, 7)
"""Output columns per thread. Images of 224 pixels shrink to multiples of 7."""
SEGMENTS = (1, 2, 4, 7, 14, 28, 56)
"""Row segments per image, each with threads of its own."""
MOST_CONFIGS = 12

LATENCY = 700.0
"""Latency of a load in cycles."""
ISSUE_RATE = 4.0
"""Warp instructions issued per cycle and SM."""
BESIDE = 0.35
"""Share of the shorter of memory and SM time that is not hidden."""


def overlapped(card: Card, clocks: float, moved: float, beside: float) -> float:
    """Estimate the microseconds of a launch whose memory and SM times overlap, except for the share `beside` of the
    shorter."""
    busy, memory = clocks / card.rates.clock, card.transfer_us(moved)
    return card.rates.launch_us + max(busy, memory) + beside * min(busy, memory)


@dataclass(frozen=True)
class DepthwiseConfig(Config):
    vector: int
    """Filters per thread."""
    strip: int
    """Output columns per thread."""
    rows: int
    """Output rows per thread."""
    lanes: int
    """Threads per CTA along the filters; 1 in NCHW."""
    threads: int
    phases: int
    """Unrolled steps of the kernel's loop: 1, moving accumulators every step, or the number of open rows."""

    def blocks(self, p: Conv2dProblem) -> int:
        positions = p.batch * ceil_div(p.output_height, self.rows) * ceil_div(p.output_width, self.strip)
        if p.layout == "nchw":
            return blocks(positions * p.filters, self.threads)
        return blocks(positions, self.threads // self.lanes) * ceil_div(p.filters, self.lanes * self.vector)

    def columns(self, p: Conv2dProblem) -> int:
        """Return the input columns per row that a thread reads."""
        return len(
            {i * p.stride[1] + s * p.dilation[1] for i in range(self.strip) for s in range(p.filter_width)}
        )

    def inputs(self, p: Conv2dProblem) -> int:
        """Return the channels per thread."""
        return max(1, self.vector // p.group_filters)

    def held(self, p: Conv2dProblem) -> int:
        """Return the registers for weights, accumulators, an input row as floats, and one in flight as stored."""
        columns, inputs = self.columns(p), self.inputs(p)
        under_way = p.stride[0] * columns * ceil_div(inputs * p.element_bytes, 4)
        return (p.taps + _open_rows(p) * self.strip) * self.vector + columns * inputs + under_way

    def clocks(self, p: Conv2dProblem, card: Card) -> float:
        """Estimate the cycles of an SM: instructions and load latency of every wave of CTAs, or copies from L2."""
        steps = self.rows + _open_rows(p) - 1
        inputs = steps * p.stride[0]
        moves = 0 if self.phases > 1 else steps * _open_rows(p) * self.strip * self.vector
        instructions = (
            300
            + p.taps * self.vector
            + inputs * (self.columns(p) * (self.inputs(p) + 2) + 10)
            + self.rows * self.strip * self.vector * p.taps
            + self.rows * self.strip * (4 * self.vector + 4)
            + moves
        )
        warps = ceil_div(self.threads, WARP)
        resident = max(1, min(64, card.registers // WARP // (self.held(p) + BESIDES)) // warps)
        blocks = ceil_div(self.blocks(p), card.multiprocessors)
        busy = blocks * warps * instructions / ISSUE_RATE
        waiting = ceil_div(blocks, resident) * (3 + steps) * LATENCY
        read_again = inputs / min(self.rows * p.stride[0], p.height)
        moved = (p.input_elements * read_again + p.output_elements) * p.element_bytes
        copied = moved / card.multiprocessors / card.rates.copies.loads
        return max(busy + waiting, copied) + 0.05 * copied


def _open_rows(p: Conv2dProblem) -> int:
    """Return the output rows between the first and the last that one input row contributes to."""
    return ((p.filter_height - 1) * p.dilation[0] + p.stride[0]) // p.stride[0]


@lru_cache(1024)
def _lanes_and_threads(p: Conv2dProblem, vector: int) -> tuple[int, int]:
    """Return the lanes along the filters, and threads per CTA: preferably whole warps."""
    if p.layout == "nchw":
        return 1, 128
    vectors = p.filters // vector
    lanes = ceil_div(vectors, ceil_div(vectors, 64))
    sizes = [lanes * positions for positions in range(1, 256 // lanes + 1) if lanes * positions >= 96]
    return lanes, max(sizes, key=lambda threads: (threads / (ceil_div(threads, WARP) * WARP), -threads))


def _phases(p: Conv2dProblem, vector: int, strip: int) -> tuple[int, ...]:
    rows = _open_rows(p)
    code = rows * (p.taps * vector * strip + 150)
    return (rows,) if code <= SMALL_CODE or rows == 1 else (rows, 1) if code <= MOST_CODE else (1,)


@lru_cache(1024)
def _candidates(p: Conv2dProblem) -> tuple[DepthwiseConfig, ...]:
    if p.layout == "nchw":
        vectors, strips = [1], [strip for strip in STRIPS if p.output_width % strip == 0 and strip != 7]
    else:
        widest = VECTOR_BYTES // p.element_bytes
        vectors = [
            vector
            for vector in (1, 2, 4, 8)
            if vector <= widest
            and p.filters % vector == 0
            and (vector % p.group_filters == 0 or p.group_filters % vector == 0)
        ]
        strips = list(STRIPS)
    found = [
        DepthwiseConfig(vector, strip, rows, *_lanes_and_threads(p, vector), phases)
        for vector in vectors
        for strip in strips
        for rows in sorted({ceil_div(p.output_height, parts) for parts in SEGMENTS})
        for phases in _phases(p, vector, strip)
    ]
    return tuple(config for config in found if config.held(p) <= HELD)


@dataclass(frozen=True)
class Depthwise(Conv2dRung[DepthwiseConfig]):
    takes_groups = True
    pitched_buffers = ("x", "y")

    def limits(self, problem: Conv2dProblem) -> str | None:
        p = problem
        if p.groups != p.channels:
            return f"{self.name} takes as many groups as channels, not {p.groups} for {p.channels}"
        if not _candidates(p.dense):
            return (
                f"{self.name} keeps weights and the sums of {_open_rows(p)} rows in registers; filters of "
                f"{p.filter_height}x{p.filter_width} do not fit. direct takes any, fft_fused large ones"
            )
        return None

    def configs(self, problem: Conv2dProblem) -> tuple[DepthwiseConfig, ...]:
        return tuple(
            sorted(_candidates(problem.dense), key=lambda config: config.clocks(problem, self.card))[
                :MOST_CONFIGS
            ]
        )

    def clocks(self, problem: Conv2dProblem, config: DepthwiseConfig) -> float:
        return config.clocks(problem, self.card)

    def estimate(self, problem: Conv2dProblem, config: DepthwiseConfig) -> float:
        return overlapped(self.card, self.clocks(problem, config), problem.traffic, BESIDE)

    def recipe(self, problem: Conv2dProblem, config: DepthwiseConfig) -> Recipe:
        p = problem
        call = KernelCall(
            Program.of("conv2d/depthwise.cu", constants=activation.constants_of(p), problem=p, config=config),
            (config.blocks(p), 1, 1),
            (config.threads, 1, 1),
            (*arguments.tensors(), arguments.shape(p), WeightsReady(("weight", "bias"))),
            overlap=True,
        )
        return Recipe((call,))


# Prediction for 144to144_56_k3s1g144 at batch 256 in fp16 and NHWC, 1 GFLOP and 462 MB.
RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Depthwise(
        "depthwise",
        "one filter per channel: a thread walks down a strip of columns with its weights and all open rows of "
        "accumulators in registers, so that inputs are read once, several channels at a time",
        below="direct",
        # 109 us at 4.24 TB/s, of which 85% (128 us) are reached because the ends of walks read without writing.
        # `direct` takes about 200 instructions per output for 18 loads and their addresses: 116M outputs at 3e13
        # instructions per second, 0.77 ms.
        predicted_gain=6.0,
    ),
)
