"""Mean over a grid of windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from escalade.device.architecture import WITH_WGMMA
from escalade.device.program import Program
from escalade.device.recipe import Buffer, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require_at_least
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import (
    DTYPES,
    ELEMENT_BYTES,
    QUANTIZED,
    VECTOR_BYTES,
    widest_vector,
)
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import launch
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors, in_float64, summed_in_fp32
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung, ThreadsConfig, ThreadsRung
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import Pair, define_planned
from escalade.ops.shared import pooling
from escalade.ops.shared.images import (
    LAYOUTS,
    ResizedImages,
    check_problem,
    empty_images_like,
    form_of,
    shape_of,
)
from escalade.ops.shared.pixel_sums import PixelSums, line_factor
from escalade.ops.shared.pooling import empty_output
from escalade.ops.shared.quantized_input import (
    check_quantized,
    dequantized,
    quantized_input,
    refuses_bytes,
)

# --- the problem


@dataclass(frozen=True)
class AdaptiveAvgPool2dProblem(ResizedImages, Named):
    """y[oh, ow] = mean of x over rows from floor(oh * H / OH) to ceil((oh + 1) * H / OH), and columns likewise.

    With `x_dtype`, x is quantized, and the means are multiplied by its `scale`.
    """

    NAME: ClassVar = NamePattern(
        "pooling", "{channels}_{height,width}to{output}_b{batch}[_x{x_dtype:fp8|int8}]"
    )

    output: tuple[int, int] = (1, 1)
    dtype: str = "fp32"
    layout: str = "nchw"
    x_pitch: int = 0
    y_pitch: int = 0
    """Elements from pixel to pixel in NHWC if the buffer is a slice of a larger one; 0 if dense."""
    x_dtype: str = ""
    """fp8 or int8; empty if x is in `dtype`."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def output_height(self) -> int:
        return self.output[0]

    @property
    def output_width(self) -> int:
        return self.output[1]

    @property
    def largest_window(self) -> int:
        """Pixels of the largest window; windows differ by at most a row and a column."""
        return _widest(self.height, self.output_height) * _widest(self.width, self.output_width)

    @property
    def flops(self) -> int:
        """Additions."""
        rows, columns = (_widths(self.height, self.output_height), _widths(self.width, self.output_width))
        return self.batch * self.channels * rows * columns

    @property
    def bytes(self) -> int:
        return self.elements * ELEMENT_BYTES[self.stored] + self.output_elements * ELEMENT_BYTES[self.dtype]

    @property
    def stored(self) -> str:
        """Dtype of x."""
        return self.x_dtype or self.dtype

    @property
    def rounding(self) -> float:
        """Random walk of a running sum: each of n additions is off by up to 2^-24 of the partial sum."""
        return 2.0**-24 * math.sqrt(1 + self.largest_window / 6)


def _window(at: int, size: int, outputs: int) -> int:
    return -(-(at + 1) * size // outputs) - at * size // outputs


def _widest(size: int, outputs: int) -> int:
    """Return the widest window; sizes repeat after outputs / gcd windows."""
    return max(_window(at, size, outputs) for at in range(outputs // math.gcd(size, outputs)))


def _widths(size: int, outputs: int) -> int:
    """Return the sum of all window widths."""
    return sum(_window(at, size, outputs) for at in range(outputs))


def _check(p: AdaptiveAvgPool2dProblem) -> None:
    check_problem("adaptive_avg_pool2d", p)
    require_at_least(1, {"output": min(p.output)})
    p.check_pitches("adaptive_avg_pool2d")
    check_quantized("adaptive_avg_pool2d", p.x_dtype)
    for size, outputs in ((p.height, p.output_height), (p.width, p.output_width)):
        if (size + 1) * outputs >= 2**31:
            raise UnsupportedError(
                f"{size} pixels to {outputs} outputs: adaptive_avg_pool2d needs a product below 2^31"
            )


SCALE = Buffer("scale", optional=True)
"""Scale of a quantized x."""


# --- rung lanes: several lanes of a warp share a window


BUSY_THREADS = 1024
"""Threads per SM that fill half of it."""


@dataclass(frozen=True)
class LanesConfig(Config):
    lanes: int
    """Lanes per output."""
    threads: int = 128


class Lanes(Rung[AdaptiveAvgPool2dProblem, LanesConfig]):
    def supports(self, problem: AdaptiveAvgPool2dProblem) -> str | None:
        if problem.layout != "nchw" or problem.x_dtype:
            given = f"{problem.stored} in layout {problem.layout}"
            return f"{self.name} supports {', '.join(DTYPES)} in layout nchw, not {given}"
        if problem.batch == 0:
            return f"{self.name} needs at least one image, since idle lanes repeat the last output"
        if problem.output_elements * 32 >= 2**31:
            return f"{self.name} counts lanes in 32 bits; {problem.name} needs more"
        return unsupported_pitch(self.name, problem)

    def configs(self, problem: AdaptiveAvgPool2dProblem) -> tuple[LanesConfig, ...]:
        """Default to at least four loads per lane, or more lanes if there are few outputs."""
        every = (4, 8, 16, 32)
        enough = problem.largest_window // 4
        busy = BUSY_THREADS * self.card.multiprocessors // max(1, problem.output_elements)
        best = next((lanes for lanes in every if lanes >= max(enough, busy)), 32)
        return tuple(LanesConfig(lanes) for lanes in sorted(every, key=lambda lanes: (lanes != best, lanes)))

    def recipe(self, problem: AdaptiveAvgPool2dProblem, config: LanesConfig) -> Recipe:
        return launch(
            Program.of("adaptive_avg_pool2d/lanes.cu", problem=problem, config=config),
            blocks(problem.output_elements * config.lanes, config.threads),
            config.threads,
            Buffer("x"), Buffer("y"), pooling.shape(problem),
        )  # fmt: skip


# Predictions are for 512 channels of 7 x 7 to one mean each, batch 256, fp16: 13 MB, 3 us and a launch.
LANES = Lanes(
    "lanes",
    "several lanes of a warp read a window together and reduce by shuffles",
    below="naive",
    # A warp of naive fetches 32 sectors for each of 49 steps, 205 MB out of L2 or L1 (18 us); coalesced 6 us.
    predicted_gain=3.0,
)


# --- rung column_sums: sums down the columns of a row of windows, exchanged through smem


_STATIC_SHARED_BYTES = 48 * 1024
MOST_AHEAD = 10
"""Most loads in flight per thread of kernels/adaptive_avg_pool2d/column_sums.cu."""
_FEW_THREADS = 512
"""Threads per SM below which several share a column: 64 planes of 64 to 7 take 1.9 us instead of 2.9 at batch 1."""


@dataclass(frozen=True)
class ColumnSumsConfig(Config):
    threads: int
    splits: int
    """Threads that share a column of a window."""

    def packs(self, problem: AdaptiveAvgPool2dProblem) -> int:
        return problem.width // widest_vector(problem.dtype, problem.width)

    def group(self, problem: AdaptiveAvgPool2dProblem) -> int:
        """Return the rows of outputs per CTA."""
        return max(1, self.threads // (self.packs(problem) * self.splits))

    def pitch(self, problem: AdaptiveAvgPool2dProblem) -> int:
        """Return floats per row of sums: whole accesses, and one more, so that rows begin in other banks."""
        return ceil_div(problem.width, 4) * 4 + 4

    def shared_bytes(self, problem: AdaptiveAvgPool2dProblem) -> int:
        return 4 * self.group(problem) * self.splits * self.pitch(problem)

    def ahead(self, problem: AdaptiveAvgPool2dProblem) -> int:
        """Return the loads in flight per thread: all of its window's, or an equal part of them."""
        loads = ceil_div(_widest(problem.height, problem.output_height), self.splits)
        return ceil_div(loads, ceil_div(loads, MOST_AHEAD))

    def lanes(self, problem: AdaptiveAvgPool2dProblem) -> int:
        """Return the lanes that share an output's columns: as many as the CTA has, up to one per column."""
        widest = _widest(problem.width, problem.output_width)
        lanes = 1
        while (
            2 * lanes <= min(32, widest)
            and 2 * lanes * self.group(problem) * problem.output_width <= self.threads
        ):
            lanes *= 2
        return lanes


class ColumnSums(Rung[AdaptiveAvgPool2dProblem, ColumnSumsConfig]):
    def supports(self, problem: AdaptiveAvgPool2dProblem) -> str | None:
        p = problem
        if p.layout != "nchw" or p.x_dtype:
            given = f"{p.stored} in layout {p.layout}"
            return f"{self.name} supports {', '.join(DTYPES)} in layout nchw, not {given}"
        if p.batch * p.channels * p.output_height >= 2**31:
            return f"{self.name} counts rows of outputs in 32 bits; {p.name} needs more"
        if not self.configs(p):
            return f"{self.name} holds a row of fp32 sums in 48 KB of shared memory, which {p.width} columns exceed"
        return unsupported_pitch(self.name, p)

    def configs(self, problem: AdaptiveAvgPool2dProblem) -> tuple[ColumnSumsConfig, ...]:
        """Default to threads that have all their loads in flight at once, and to enough of them."""
        p, rows = problem, _widest(problem.height, problem.output_height)
        wanted = next((splits for splits in (1, 2, 4) if ceil_div(rows, splits) <= MOST_AHEAD), 8)
        alone = p.batch * p.channels * p.output_height * (p.width // widest_vector(p.dtype, p.width))
        while wanted < 4 and wanted * alone < _FEW_THREADS * self.card.multiprocessors:
            wanted *= 2
        every = [ColumnSumsConfig(threads, splits) for threads in (128, 256) for splits in (1, 2, 4, 8)]
        fitting = [
            one for one in every if one.shared_bytes(problem) <= _STATIC_SHARED_BYTES and one.splits <= rows
        ]
        return tuple(sorted(fitting, key=lambda one: one.splits != wanted))

    def recipe(self, problem: AdaptiveAvgPool2dProblem, config: ColumnSumsConfig) -> Recipe:
        p = problem
        rows = p.batch * p.channels * p.output_height
        vector = widest_vector(p.dtype, p.width)
        return launch(
            Program.of("adaptive_avg_pool2d/column_sums.cu", problem=p, config=config, vector=vector),
            blocks(rows, config.group(p)),
            config.threads,
            Buffer("x"), Buffer("y"), rows,
        )  # fmt: skip


# Predicted for 64 channels of 64 x 64 to 7 x 7 means, batch 1024, fp32: 1.09 GB, 260 us at 4.2 TB/s.
COLUMN_SUMS = ColumnSums(
    "column_sums",
    "16 bytes of a row per thread, summed down the columns of a row of windows, then along in shared memory",
    below="lanes",
    # lanes reads a window of 10 x 10 by single elements, 40 bytes of a row at a time, at 800 GB/s.
    predicted_gain=5.0,
)


# --- rung naive: one thread per output


class Naive(ThreadsRung[AdaptiveAvgPool2dProblem]):
    threads = (128,)

    def supports(self, problem: AdaptiveAvgPool2dProblem) -> str | None:
        return refuses_bytes(self, problem.x_dtype) or unsupported_pitch(self.name, problem, ("x", "y"))

    def recipe(self, problem: AdaptiveAvgPool2dProblem, config: ThreadsConfig) -> Recipe:
        return launch(
            Program.of("adaptive_avg_pool2d/naive.cu", problem=problem),
            blocks(problem.output_elements, config.threads),
            config.threads,
            Buffer("x"), Buffer("y"), pooling.shape(problem), SCALE,
        )  # fmt: skip


NAIVE = Naive("naive", "one thread per output, which sums its window pixel by pixel", None, None)


# --- rung sliced: whole images; CTAs take slices of channels and parts of the pixels, all sizes are compile-time


_THREADS_HELD = 1024  # per SM at 64 registers per thread
LANES_SLICED = 128
"""Thread instructions that an SM issues per clock."""
READING = 3.0
"""Instructions per element of x: conversion, addition, and a share of addresses and selections."""
_OVERHEAD = 100  # other instructions per thread: set-up and reduction
TURN_US = 0.15
"""Latency of a load besides the bytes: the threads of a CTA wait for all loads of a turn."""
LOAD_US = 0.03
"""Microseconds that each load of a thread adds to a turn."""
EXCHANGE_US = 0.35
"""Microseconds until all CTAs of a cluster run, and to push their sums to the first."""
CLUSTERED_US = 0.0022
"""Microseconds that each CTA of a cluster adds to a launch."""
BLOCK_US = 0.0002
"""Microseconds that each CTA adds to a launch."""


@dataclass(frozen=True)
class SlicedConfig(Config):
    threads: int
    columns: int
    """Packs of channels per slice."""
    parts: int
    """Parts of the pixels, one per CTA of a cluster."""

    def width(self, problem: AdaptiveAvgPool2dProblem) -> int:
        return self.columns * widest_vector(problem.stored, problem.channels)

    def slices(self, problem: AdaptiveAvgPool2dProblem) -> int:
        return ceil_div(problem.channels, self.width(problem))

    def blocks(self, problem: AdaptiveAvgPool2dProblem) -> int:
        return problem.batch * self.slices(problem) * self.parts

    def pixel_sums(self, problem: AdaptiveAvgPool2dProblem) -> PixelSums:
        return PixelSums(self.threads, self.columns, ceil_div(problem.pixels, self.parts))

    def shared_bytes(self, problem: AdaptiveAvgPool2dProblem) -> int:
        """Sums of groups, of the CTA, and of all parts, each padded to 16 bytes."""
        width, padded = self.width(problem), ceil_div(self.width(problem), 4) * 4
        summed = ceil_div(4 * self.pixel_sums(problem).sums * width, VECTOR_BYTES) * VECTOR_BYTES
        return summed + 4 * padded * (1 + self.parts)


class Sliced(Rung[AdaptiveAvgPool2dProblem, SlicedConfig]):
    architectures = WITH_WGMMA

    def supports(self, problem: AdaptiveAvgPool2dProblem) -> str | None:
        p = problem
        if p.layout != "nhwc" or p.output != (1, 1):
            return f"{self.name} supports whole images in layout nhwc, not {p.name} in {p.layout}"
        if p.batch == 0 or p.batch * ceil_div(p.channels, widest_vector(p.stored, p.channels)) >= 2**28:
            return f"{self.name} needs at least one image, and counts CTAs in 32 bits; {p.name} has none or needs more"
        return refuses_bytes(self, p.x_dtype, p.channels) or unsupported_pitch(self.name, p, ("x", "y"))

    def configs(self, problem: AdaptiveAvgPool2dProblem) -> tuple[SlicedConfig, ...]:
        p = problem
        packs = p.channels // widest_vector(p.stored, p.channels)
        offered = [
            SlicedConfig(threads, columns, parts)
            for columns in sorted({min(packs, most) for most in (4, 8, 16, 32)})
            for parts in (1, 2, 4, 8)
            if parts <= p.pixels
            for threads in (64, 128, 256)
            if columns <= threads <= 32 * ceil_div(columns * ceil_div(p.pixels, parts), 32)
        ] or [SlicedConfig(64, min(packs, 32), 1)]
        return tuple(sorted(offered, key=lambda config: self.estimate(p, config)))

    def estimate(self, problem: AdaptiveAvgPool2dProblem, config: SlicedConfig) -> float:
        """Time of the busiest SM (bytes or instructions) or of DRAM, plus latency per wave."""
        p, rates, size = problem, self.card.rates, ELEMENT_BYTES[problem.stored]
        sums, vector = config.pixel_sums(p), widest_vector(p.stored, p.channels)
        usable = max(1, self.card.max_active_clusters(config.parts) * config.parts)
        per_sm = ceil_div(config.blocks(p), usable)
        resident = min(per_sm, _THREADS_HELD // config.threads)
        waves = ceil_div(per_sm, resident)
        rate = self.card.copy_rate(rates.copies.mma_ring, min(config.blocks(p), usable))
        read = config.width(p) * ceil_div(p.pixels, config.parts) * size / rate
        done = (READING * vector * sums.slots + _OVERHEAD * config.threads) / LANES_SLICED
        busy = per_sm * max(read, done) / rates.clock
        trips = waves * sums.waits(resident) * (TURN_US + LOAD_US * sums.ahead)
        launch = rates.launch_us + BLOCK_US * config.blocks(p)
        if config.parts > 1:
            launch += EXCHANGE_US + CLUSTERED_US * config.blocks(p)
        lines = line_factor(config.slices(p), config.width(p) * size)
        return launch + trips + max(busy, self.card.transfer_us(p.bytes) * lines)

    def recipe(self, problem: AdaptiveAvgPool2dProblem, config: SlicedConfig) -> Recipe:
        p = problem
        sums, vector = config.pixel_sums(p), widest_vector(p.stored, p.channels)
        return launch(
            Program.of("adaptive_avg_pool2d/sliced.cu", problem=p, config=config, sums=sums, vector=vector),
            config.blocks(p),
            config.threads,
            Buffer("x"), Buffer("y"), p.batch, p.x_pitch or p.channels, p.y_pitch or p.channels, SCALE,
            shared_bytes=config.shared_bytes(p),
            cluster=(config.parts, 1, 1),
        )  # fmt: skip


# `vectorised` computes windows by divisions and gives each lane one or two loads, some 600 instructions per thread.
SLICED = Sliced(
    "sliced",
    "whole images of compile-time size; the CTAs of a cluster share the pixels of large ones",
    below="vectorised",
    predicted_gain=1.4,
)


# --- rung vectorised: 16 bytes of channels per lane, a window shared by the lanes of a CTA


VECTOR_LANES = 8
"""Vectors of channels per CTA in kernels/adaptive_avg_pool2d/vectorised.cu."""


@dataclass(frozen=True)
class SplitConfig(Config):
    splits: int
    """Groups of lanes that share a window."""


class Vectorized(Rung[AdaptiveAvgPool2dProblem, SplitConfig]):
    def supports(self, problem: AdaptiveAvgPool2dProblem) -> str | None:
        if problem.layout != "nhwc":
            return f"{self.name} supports layout nhwc, not {problem.layout}"
        if refusal := refuses_bytes(self, problem.x_dtype, problem.channels):
            return refusal
        if self._blocks(problem) >= 2**31:
            return f"{self.name} counts CTAs in 32 bits; {problem.name} needs more"
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: AdaptiveAvgPool2dProblem) -> tuple[SplitConfig, ...]:
        """Default to the fewest that keep the card busy, with at least four loads per lane."""
        every = (4, 8, 16, 32)
        wanted = BUSY_THREADS * self.card.multiprocessors / (self._blocks(problem) * VECTOR_LANES)
        best = next((splits for splits in every if splits >= min(wanted, problem.largest_window / 4)), 32)
        return tuple(
            SplitConfig(splits) for splits in sorted(every, key=lambda splits: (splits != best, splits))
        )

    def recipe(self, problem: AdaptiveAvgPool2dProblem, config: SplitConfig) -> Recipe:
        vector = widest_vector(problem.stored, problem.channels)
        return launch(
            Program.of("adaptive_avg_pool2d/vectorised.cu", problem=problem, config=config, vector=vector),
            self._blocks(problem),
            VECTOR_LANES * config.splits,
            Buffer("x"), Buffer("y"), pooling.shape(problem), self._channel_blocks(problem), SCALE,
        )  # fmt: skip

    def _channel_blocks(self, problem: AdaptiveAvgPool2dProblem) -> int:
        return blocks(problem.channels, VECTOR_LANES * widest_vector(problem.stored, problem.channels))

    def _blocks(self, problem: AdaptiveAvgPool2dProblem) -> int:
        pixels = problem.batch * problem.output_height * problem.output_width
        return max(1, pixels * self._channel_blocks(problem))


VECTORISED = Vectorized(
    "vectorised",
    "16 bytes of channels per lane; the lanes of a CTA share a window and reduce in shared memory",
    below="naive",
    # naive waits 49 / 4 times for memory, 0.8 us each (10 us); here once or twice.
    predicted_gain=2.5,
)


# --- problems


def _square(channels: int, size: int, output: int, batch: int = 1) -> AdaptiveAvgPool2dProblem:
    return AdaptiveAvgPool2dProblem(batch, channels, size, size, (output, output))


# --- the reference


def random_inputs(problem: AdaptiveAvgPool2dProblem, draw: Draw) -> dict[str, torch.Tensor]:
    return quantized_input(pooling.random_inputs(problem, draw), problem.x_dtype)


def compute(problem: AdaptiveAvgPool2dProblem, inputs: Tensors) -> torch.Tensor:
    return F.adaptive_avg_pool2d(dequantized(inputs), problem.output)


# --- the operation


class AdaptiveAvgPool2dOperation(Operation[AdaptiveAvgPool2dProblem]):
    name = "adaptive_avg_pool2d"
    problem = AdaptiveAvgPool2dProblem
    in_pytorch = Reference(random_inputs, empty_output, in_float64(compute), summed_in_fp32(compute))
    ladder = Ladder("adaptive_avg_pool2d", (NAIVE, LANES, COLUMN_SUMS, VECTORISED, SLICED))
    problems = tuple(_square(512, 7, 1, batch) for batch in (1, 32, 256))
    """Problems of `escalade ladder`: ResNet's."""
    small_problems = (
        _square(72, 7, 1, batch=2),
        _square(64, 16, 1),
        _square(20, 13, 6, batch=2),
        _square(5, 3, 7),
        AdaptiveAvgPool2dProblem(3, 36, 9, 5, (2, 4)),
        AdaptiveAvgPool2dProblem(1, 3, 17, 11, (1, 3)),
        _square(1, 1, 1),
        AdaptiveAvgPool2dProblem(1, 2, 31, 301, (2, 3)),
        AdaptiveAvgPool2dProblem(2, 20, 6, 6, (3, 3), layout="nhwc", x_pitch=32, y_pitch=24),
        *(AdaptiveAvgPool2dProblem(3, 208, 7, 5, layout="nhwc", x_dtype=x_dtype) for x_dtype in QUANTIZED),
        AdaptiveAvgPool2dProblem(2, 32, 5, 4, (2, 3), layout="nhwc", x_pitch=64, x_dtype="int8"),
    )
    """Small problems: whole images, windows that overlap, repeat a pixel, differ in size and are tall, rows of more
    columns than a CTA has threads, odd channels, pitches, quantized inputs."""
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("sliced", "vectorised", "column_sums", "lanes", "naive")

    def preferred(self, problem: AdaptiveAvgPool2dProblem) -> tuple[str, ...]:
        """Prefer `lanes` for whole planes, which it reads as fast, with more lanes per mean."""
        is_global = problem.output == (1, 1)
        return tuple(name for name in self.order if not (is_global and name == "column_sums"))


ADAPTIVE_AVG_POOL2D = AdaptiveAvgPool2dOperation()


# --- the PyTorch operator


def adaptive_avg_pool2d(
    x: torch.Tensor, output: int | Sequence[int], *, rung: str | None = None
) -> torch.Tensor:
    """Means over a grid of `output` windows that cover the image, as `torch.nn.functional.adaptive_avg_pool2d`.

    NCHW and channels_last inputs are read in place and give the result's layout; others are copied first. `rung` names
    a rung of the ladder instead of the chosen one.
    """
    return OPERATOR(x, pooling.as_pair(output, "output"), rung)


def _plan(x: torch.Tensor, output: Pair, rung: str | None = None) -> CallPlan:
    if min(output) < 1:
        raise UnsupportedError(f"output is {list(output)}: it must be at least 1")
    return CallPlan(
        ADAPTIVE_AVG_POOL2D,
        lambda: empty_images_like(x, (*x.shape[:2], *output)),
        lambda: AdaptiveAvgPool2dProblem(*shape_of(x), output, *form_of(x)),
    )


OPERATOR = define_planned("adaptive_avg_pool2d", _plan, "x: N C H W")
