"""Means and both layers in one launch, by a cluster whose CTAs exchange sums once and prefetch all weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from escalade.device.architecture import WITH_WGMMA
from escalade.device.program import Program
from escalade.device.recipe import HALF_SM_COUNT, HALF_SM_SHARED_BYTES, KernelCall, Recipe, WeightsReady
from escalade.ops.base.card import HOPPER_SHARED
from escalade.ops.base.dtypes import ELEMENT_BYTES, STORAGE, VECTOR_BYTES, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.shared.pixel_sums import PixelSums, line_factor
from escalade.ops.squeeze_excite.problem import SqueezeExciteProblem
from escalade.ops.squeeze_excite.rungs.arguments import BUFFERS, generated, x_pitch

_WARP = 32
_MMA_DEPTH = 16
"""K of an mma.sync."""
_MOST_BLOCKS = 8
"""Portable cluster size limit."""
_MOST_CONFIGS = 24
"""Largest number of configs to offer."""
_SECTOR_BYTES = 32
"""Memory sector; slices of channels are whole sectors if possible."""
_STATIC_BYTES = 16
"""The barrier that counts pushed bytes."""
_REGISTERS = 64
"""Approximate registers per thread."""
_THREADS_HELD = 2048
"""Threads per SM."""
LANES = 128
"""Thread instructions issued per clock and SM."""
READING = 3.0
"""Instructions per element of x: conversion, addition, and a share of addresses and selections."""
PUSHED = 8.0
"""Bytes per clock that a CTA receives from its cluster."""
LAYERS_US = 0.4
"""Microseconds besides products: first load, exchange, barriers, shuffles, activations, store."""
TENSOR_CORES_US = 0.15
"""Extra microseconds for splitting values and for tensor-core latency."""
TURN_US = 0.15
"""Microseconds per further round of loads."""
THREAD_US = 0.0006
"""Microseconds per thread of a CTA, for barriers and sums."""
EXCHANGE_US = 0.1
"""Microseconds of wait per CTA of a cluster: they start together and push to each other."""
CLUSTERED_US = 0.004
"""Microseconds of launch overhead per CTA in a cluster."""


@dataclass(frozen=True)
class SlicedConfig(Config):
    threads: int
    images: int
    """Images per cluster, which share one read of the weights."""
    slices: int
    """Slices of channels."""
    parts: int
    """Parts of pixels."""
    tensor_cores: bool = False
    """True to compute the layers on tensor cores, for up to eight images at once."""

    @property
    def cluster(self) -> int:
        return self.slices * self.parts

    def width(self, problem: SqueezeExciteProblem) -> int:
        """Return the channels per slice."""
        size, vector = ELEMENT_BYTES[problem.dtype], widest_vector(problem.dtype, problem.channels)
        unit = vector if self.slices == 1 or vector * size < VECTOR_BYTES else _SECTOR_BYTES // size
        return ceil_div(ceil_div(problem.channels, self.slices), unit) * unit

    def share(self, problem: SqueezeExciteProblem) -> int:
        """Return the channels whose gates one CTA computes, in whole packs."""
        vector = widest_vector(problem.dtype, problem.channels)
        return ceil_div(ceil_div(problem.channels, self.cluster), vector) * vector

    def pixel_sums(self, problem: SqueezeExciteProblem) -> PixelSums:
        columns = self.width(problem) // widest_vector(problem.dtype, problem.channels)
        return PixelSums(self.threads, columns, ceil_div(problem.pixels, self.parts), self.images)

    def team(self, outputs: int, packs: int) -> int:
        """Return the lanes per sum: every sum of a layer has its own, and every lane has work."""
        team = 1
        while team < min(_WARP, packs) and 2 * team * outputs <= self.threads:
            team *= 2
        return team

    def weight_pitch(self, problem: SqueezeExciteProblem) -> int:
        """Return the row pitch of a slice of the first weight, padded to avoid bank conflicts."""
        p, vector = problem, widest_vector(problem.dtype, problem.channels)
        packs = self.width(p) // vector
        team = self.team(p.squeezed, packs)
        while packs % 2 == 0 if self.tensor_cores else team < 8 and packs % 8 != team:
            packs += 1
        return packs * vector

    def factors_bytes(self, problem: SqueezeExciteProblem, depth: int) -> int:
        """Return the bytes of a layer's inputs: fp32, or two elements per value for tensor cores."""
        if not self.tensor_cores:
            return self.images * depth * 4
        return self.images * (ceil_div(depth, _MMA_DEPTH) * _MMA_DEPTH + 8) * 2 * ELEMENT_BYTES[problem.dtype]

    def shared_bytes(self, problem: SqueezeExciteProblem) -> int:
        """Bytes of sums, means, squeezed features and weights, rounded up to whole vectors."""
        p, size, hidden = problem, ELEMENT_BYTES[problem.dtype], ceil_div(problem.squeezed, 4) * 4
        width, share = self.width(p), self.share(p)
        floats = [width * self.pixel_sums(p).sums, hidden, hidden * (self.cluster if self.cluster > 1 else 0)]
        elements = [p.squeezed * self.weight_pitch(p), share * p.squeezed, p.squeezed, share]
        pieces = [4 * self.images * count for count in floats] + [size * count for count in elements]
        pieces += [self.factors_bytes(p, width), self.factors_bytes(p, hidden)]
        return sum(ceil_div(piece, VECTOR_BYTES) * VECTOR_BYTES for piece in pieces)

    def clusters(self, problem: SqueezeExciteProblem) -> int:
        return ceil_div(problem.batch, self.images)


@lru_cache(1024)
def _offered(p: SqueezeExciteProblem) -> tuple[SlicedConfig, ...]:
    pairs = ELEMENT_BYTES[p.dtype] == 2 and p.channels % 2 == 0 and p.squeezed % 2 == 0
    return tuple(
        config
        for slices in range(1, _MOST_BLOCKS + 1)
        for parts in (1, 2, 4, 8)
        if slices * parts <= _MOST_BLOCKS and parts <= p.pixels
        for images in ((1, 2, 4, 8) if pairs else (1, 2, 4))
        if images == 1 or images <= p.batch
        for threads in (512, 256)
        if (config := SlicedConfig(threads, images, slices, parts, pairs and images > 2)).pixel_sums(p).groups
        if (slices - 1) * config.width(p) < p.channels
        if config.shared_bytes(p) + _STATIC_BYTES <= HOPPER_SHARED
    )


@lru_cache(1024)
def _best_first(rung: Sliced, problem: SqueezeExciteProblem) -> tuple[SlicedConfig, ...]:
    best = sorted(_offered(problem), key=lambda config: rung.estimate(problem, config))
    return tuple(best[:_MOST_CONFIGS])


class Sliced(Rung[SqueezeExciteProblem, SlicedConfig]):
    @property
    def architectures(self) -> tuple[str, ...]:
        return WITH_WGMMA

    def supports(self, problem: SqueezeExciteProblem) -> str | None:
        if _offered(problem):
            return None
        return (
            f"{self.name} keeps weights in shared memory; those of {problem.channels} channels and {problem.squeezed} "
            "squeezed features do not fit. The rung `cluster` reads them from global memory"
        )

    def configs(self, problem: SqueezeExciteProblem) -> tuple[SlicedConfig, ...]:
        return _best_first(self, problem)

    def estimate(self, problem: SqueezeExciteProblem, config: SlicedConfig) -> float:
        """Sum up waves of clusters, each with the traffic, instructions and round trips of its CTAs; at least the time
        to read x."""
        p, rates, size = problem, self.card.rates, ELEMENT_BYTES[problem.dtype]
        blocks = config.clusters(p) * config.cluster
        usable = max(1, self.card.max_active_clusters(config.cluster) * config.cluster)
        most = min(self.card.registers // _REGISTERS, _THREADS_HELD) // config.threads
        held = min(most, self.card.resident_blocks(config.shared_bytes(p) + _STATIC_BYTES))
        resident = min(held, ceil_div(blocks, usable))
        waves = ceil_div(blocks, resident * usable)
        rate = rates.copies.loads
        pixels = config.images * config.width(p) * ceil_div(p.pixels, config.parts)
        weights = (config.width(p) + config.share(p)) * p.squeezed
        read = READING * config.pixel_sums(p).slots * widest_vector(p.dtype, p.channels)
        product = 3.5 if config.tensor_cores else 2.25 + 2.75 * config.images
        clocks = weights * (size / rate + product / LANES)
        if config.cluster > 1:
            clocks += config.cluster * config.images * p.squeezed * 4 / PUSHED
        summed = waves * resident * max(pixels * size / rate, read / LANES) / rates.clock
        steps = LAYERS_US + THREAD_US * config.threads + config.tensor_cores * TENSOR_CORES_US
        steps += (config.pixel_sums(p).waits(resident) - 1) * TURN_US
        if config.cluster > 1:
            steps += EXCHANGE_US * (1 + config.cluster) + CLUSTERED_US * blocks / waves
        lines = line_factor(config.slices, config.width(p) * size)
        moved = max(self.card.transfer_us(p.elements * size) * lines, summed)
        return rates.launch_us + waves * (steps + resident * clocks / rates.clock) + moved

    def recipe(self, problem: SqueezeExciteProblem, config: SlicedConfig) -> Recipe:
        p, vector = problem, widest_vector(problem.dtype, problem.channels)
        share = config.share(p)
        squeezed_vector = widest_vector(p.dtype, p.squeezed)
        blocks, shared_bytes = config.clusters(p) * config.cluster, config.shared_bytes(p)
        program = Program.of(
            "squeeze_excite/sliced.cu",
            constants=generated(p) | config.pixel_sums(p).constants,
            problem=p,
            config=config,
            vector=vector,
            squeezed_vector=squeezed_vector,
            gate_unit=widest_vector(p.dtype, share * p.squeezed, p.weight_elements),
            early=blocks <= HALF_SM_COUNT or shared_bytes > HALF_SM_SHARED_BYTES,
            largest=torch.finfo(STORAGE[p.dtype]).max,
        )
        call = KernelCall(
            program,
            (blocks, 1, 1),
            (config.threads, 1, 1),
            (*BUFFERS, p.batch, x_pitch(p), WeightsReady(("weight", "bias", "gate_weight", "gate_bias"))),
            shared_bytes=shared_bytes,
            cluster=(config.cluster, 1, 1),
            overlap=True,
        )
        return Recipe((call,))


# Predicted for 1152_7_b1_s48 in fp16: `cluster` takes 6.4 us by its estimate, of which three serial round trips are 3
# and two exchanges 1; here one round trip and the layers are 0.7, and one exchange 0.9.
SLICED = Sliced(
    "sliced",
    "CTAs multiply the sums of their own slice and exchange them once; weights are loaded while pixels are summed",
    below="cluster",
    predicted_gain=1.4,
)
