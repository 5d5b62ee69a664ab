"""The mean over a whole image: blocks have slices of channels and parts of the pixels, and all sizes are constants."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Macro, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.adaptive_avg_pool2d.problem import AdaptiveAvgPool2dProblem
from escalade.ops.base.dtypes import ELEMENT_BYTES, VECTOR_BYTES, element, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung
from escalade.ops.shared.pixel_sums import PixelSums, line_factor

_THREADS_HELD = 1024
"""Threads that a multiprocessor holds with 64 registers each."""
LANES = 128
"""Instructions of threads that a multiprocessor starts in a clock."""
READING = 3.0
"""Instructions for an element of x: conversion, addition, and a share of addresses and selections."""
_OVERHEAD = 100
"""Instructions of a thread besides those for elements: where it begins, and how its sums meet others."""
TURN_US = 0.15
"""Microseconds from a load to its value, besides the bytes: a block's threads wait for all loads of a turn."""
LOAD_US = 0.03
"""Microseconds that each load of a thread adds to a turn."""
EXCHANGE_US = 0.35
"""Microseconds in which the blocks of a cluster start together, and push their sums to the first."""
CLUSTERED_US = 0.0022
"""Microseconds that each block of a cluster adds to a launch."""
BLOCK_US = 0.0002
"""Microseconds that each block adds to a launch."""


@dataclass(frozen=True)
class SlicedConfig(Config):
    threads: int
    columns: int
    """Packs of channels of a slice."""
    parts: int
    """Parts of the pixels: the blocks of a cluster."""

    def width(self, problem: AdaptiveAvgPool2dProblem) -> int:
        return self.columns * widest_vector(problem.dtype, problem.channels)

    def slices(self, problem: AdaptiveAvgPool2dProblem) -> int:
        return ceil_div(problem.channels, self.width(problem))

    def blocks(self, problem: AdaptiveAvgPool2dProblem) -> int:
        return problem.batch * self.slices(problem) * self.parts

    def pixel_sums(self, problem: AdaptiveAvgPool2dProblem) -> PixelSums:
        return PixelSums(self.threads, self.columns, ceil_div(problem.pixels, self.parts))

    def shared_bytes(self, problem: AdaptiveAvgPool2dProblem) -> int:
        """Sums of groups, of the block, and of all parts, each up to whole accesses."""
        width, padded = self.width(problem), ceil_div(self.width(problem), 4) * 4
        summed = ceil_div(4 * self.pixel_sums(problem).sums * width, VECTOR_BYTES) * VECTOR_BYTES
        return summed + 4 * padded * (1 + self.parts)


class Sliced(Rung[AdaptiveAvgPool2dProblem]):
    @property
    def architectures(self) -> tuple[str, ...]:
        return ("sm_90a",)

    def supports(self, problem: AdaptiveAvgPool2dProblem) -> str | None:
        p = problem
        if p.layout != "nhwc" or p.output != (1, 1):
            return f"{self.name} takes whole images in layout nhwc, not {p.name} in {p.layout}"
        if p.batch == 0 or p.batch * ceil_div(p.channels, widest_vector(p.dtype, p.channels)) >= 2**28:
            return f"{self.name} takes at least one image, and counts blocks in 32 bits; {p.name} has others"
        return unsupported_pitch(self.name, p, ("x", "y"))

    def configs(self, problem: AdaptiveAvgPool2dProblem) -> tuple[Config, ...]:
        p = problem
        packs = p.channels // widest_vector(p.dtype, p.channels)
        offered = [
            SlicedConfig(threads, columns, parts)
            for columns in sorted({min(packs, most) for most in (4, 8, 16, 32)})
            for parts in (1, 2, 4, 8)
            if parts <= p.pixels
            for threads in (64, 128, 256)
            if columns <= threads <= 32 * ceil_div(columns * ceil_div(p.pixels, parts), 32)
        ] or [SlicedConfig(64, min(packs, 32), 1)]
        return tuple(sorted(offered, key=lambda config: self.estimate(p, config)))

    def estimate(self, problem: AdaptiveAvgPool2dProblem, config: Config) -> float:
        """The bytes and the instructions of the busiest multiprocessor, or all bytes at the rate of the whole card,
        and the round trips of as many waves as there are.
        """
        assert isinstance(config, SlicedConfig)
        p, rates, size = problem, self.card.rates, ELEMENT_BYTES[problem.dtype]
        sums, vector = config.pixel_sums(p), widest_vector(p.dtype, p.channels)
        usable = max(1, self.card.clusters_at_once(config.parts) * config.parts)
        a_multiprocessor = ceil_div(config.blocks(p), usable)
        resident = min(a_multiprocessor, _THREADS_HELD // config.threads)
        waves = ceil_div(a_multiprocessor, resident)
        rate = self.card.copy_rate(rates.copies.mma_ring, min(config.blocks(p), usable))
        read = config.width(p) * ceil_div(p.pixels, config.parts) * size / rate
        done = (READING * vector * sums.slots + _OVERHEAD * config.threads) / LANES
        busy = a_multiprocessor * max(read, done) / rates.clock
        trips = waves * sums.waits(resident) * (TURN_US + LOAD_US * sums.ahead)
        launch = rates.launch_us + BLOCK_US * config.blocks(p)
        if config.parts > 1:
            launch += EXCHANGE_US + CLUSTERED_US * config.blocks(p)
        lines = line_factor(config.slices(p), config.width(p) * size)
        return launch + trips + max(busy, self.card.passing(p.bytes) * lines)

    def recipe(self, problem: AdaptiveAvgPool2dProblem, config: Config) -> Recipe:
        assert isinstance(config, SlicedConfig)
        p = problem
        constants: dict[str, Constant] = {
            **config.pixel_sums(p).constants,
            "Element": element(p.dtype),
            "CHANNELS": p.channels,
            "PIXELS": p.pixels,
            "VECTOR": widest_vector(p.dtype, p.channels),
            "IMAGES": 1,
            "WIDTH": config.width(p),
            "SLICES": config.slices(p),
            "PARTS": Macro(str(config.parts)),
            "THREADS": config.threads,
        }
        call = KernelCall(
            Program.of("adaptive_avg_pool2d/sliced.cu", "adaptive_avg_pool2d_sliced", constants),
            (config.blocks(p), 1, 1),
            (config.threads, 1, 1),
            (Buffer("x"), Buffer("y"), p.batch, p.x_pitch or p.channels, p.y_pitch or p.channels),
            shared_bytes=config.shared_bytes(p),
            cluster=(config.parts, 1, 1),
            overlap=True,
        )
        return Recipe((call,))


# Predicted for 512 channels of 7 x 7 to one mean each, batch 256, fp16: 13 MB, 3 us and a launch. `vectorised` works
# out windows by divisions and fills a block's lanes with one or two loads each, some 600 instructions a thread.
SLICED = Sliced(
    "sliced",
    "whole images, their sizes constants of the kernel; blocks of a cluster share the pixels of large ones",
    below="vectorised",
    predicted_gain=1.4,
)
