"""Gates of squeeze-and-excite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from escalade.device.architecture import WITH_WGMMA
from escalade.device.program import Constant, Program
from escalade.device.recipe import (
    HALF_SM_COUNT,
    HALF_SM_SHARED_BYTES,
    Buffer,
    Recipe,
    WeightsReady,
)
from escalade.errors import UnsupportedError
from escalade.ops.base.card import HOPPER_SHARED, MIN_SHARED, TWIN, Card
from escalade.ops.base.checks import require_at_least
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import (
    DTYPES,
    ELEMENT_BYTES,
    NAMES,
    STORAGE,
    VECTOR_BYTES,
    widest_vector,
)
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import launch
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors, in_float64
from escalade.ops.base.pitch import check_pitches
from escalade.ops.base.rung import Config, Rung, ThreadsConfig, ThreadsRung
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.expressions import Expression, fast_functions
from escalade.ops.shared.channels import SIZES
from escalade.ops.shared.images import (
    Images,
    check_problem,
    require_32_bits,
    shape_of,
    stored_images,
)
from escalade.ops.shared.pixel_sums import PixelSums, line_factor

# --- the problem


LAYOUTS = ("nhwc",)
MOST_FEATURES = 24 * 1024
"""Largest sum of channels and squeezed features: in fp32 they fit into the shared memory of a CTA on every card."""


@dataclass(frozen=True)
class SqueezeExciteProblem(Images, Named):
    """y = gate(gate_weight · hidden(weight · mean(x) + bias) + gate_bias): one factor per channel of an image.

    The mean is over the pixels of an image. x is [batch][height][width][channels], weight [squeezed][channels],
    gate_weight [channels][squeezed], y [batch][channels], all of one dtype; sums, means and intermediate values are
    fp32. `hidden` and `gate` are expressions in `x`, the layer's own result.
    """

    NAME: ClassVar = NamePattern(
        "squeeze-and-excite",
        SIZES + r"_s{squeezed}{bias?_bias}{gate_bias?_gatebias}\[{hidden:text}\]\[{gate:text}\]",
    )

    squeezed: int
    bias: bool = True
    gate_bias: bool = True
    hidden: str = "relu(x)"
    gate: str = "sigmoid(x)"
    dtype: str = "fp32"
    layout: str = "nhwc"
    x_pitch: int = 0
    """Elements per pixel step of x, if it is part of a larger buffer; 0 if dense."""

    def __post_init__(self) -> None:
        check_problem("squeeze_excite", self, DTYPES, LAYOUTS)
        require_32_bits("squeeze_excite", max(self.channels, self.x_pitch) * self.pixels)
        require_at_least(1, {"squeezed": self.squeezed})
        if self.channels + self.squeezed > MOST_FEATURES:
            raise UnsupportedError(
                f"{self.channels} channels and {self.squeezed} squeezed features: squeeze_excite takes up to "
                f"{MOST_FEATURES} in all"
            )
        for role in ("hidden", "gate"):
            text = getattr(self, role)
            expression = Expression.parse(text)
            if expression.inputs != ("x",) or len(expression.results) != 1:
                raise UnsupportedError(
                    f"{role} {text!r}: it must be a single expression in x, such as sigmoid(x)"
                )
            object.__setattr__(self, role, expression.text)
        check_pitches(self, x=self.channels)

    @property
    def weight_elements(self) -> int:
        """Elements of each weight."""
        return self.channels * self.squeezed

    @property
    def output_elements(self) -> int:
        return self.batch * self.channels

    @property
    def flops(self) -> int:
        return self.elements + 4 * self.batch * self.weight_elements

    @property
    def bytes(self) -> int:
        constants = 2 * self.weight_elements + self.bias * self.squeezed + self.gate_bias * self.channels
        return (self.elements + constants + self.output_elements) * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        """Error of three consecutive sums."""
        return 2.0**-24 * math.sqrt(3 + (self.pixels + self.channels + self.squeezed) / 6)


# --- the reference


def random_inputs(problem: SqueezeExciteProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Return images with a mean per channel, and weights that keep outputs near 1."""
    p = problem
    x = draw.normal(p.batch, p.channels, p.height, p.width) + draw.normal(p.batch, p.channels, 1, 1)
    tensors = {
        "weight": draw.normal(p.squeezed, p.channels) / p.channels**0.5,
        "gate_weight": draw.normal(p.channels, p.squeezed) / p.squeezed**0.5,
    }
    if p.bias:
        tensors["bias"] = 0.3 * draw.normal(p.squeezed)
    if p.gate_bias:
        tensors["gate_bias"] = 0.3 * draw.normal(p.channels)
    stored = {name: tensor.to(STORAGE[p.dtype]) for name, tensor in tensors.items()}
    return {"x": stored_images(p, x), **stored}


def empty_output(problem: SqueezeExciteProblem, device: torch.device) -> torch.Tensor:
    return torch.empty((problem.batch, problem.channels), dtype=STORAGE[problem.dtype], device=device)


def peer(problem: SqueezeExciteProblem, inputs: Tensors) -> torch.Tensor:
    return gates(problem.hidden, problem.gate, inputs)


def gates(hidden: str, gate: str, inputs: Tensors) -> torch.Tensor:
    """Return the gates; weights may be those of 1×1 convolutions."""
    y = inputs["x"].mean((2, 3))
    for text, prefix in ((hidden, ""), (gate, "gate_")):
        sums = F.linear(y, inputs[f"{prefix}weight"].flatten(1), inputs.get(f"{prefix}bias"))
        (y,) = Expression.parse(text).evaluate({"x": sums})
    return y


# --- rungs


BUFFERS = (
    Buffer("x"), Buffer("weight"), Buffer("bias", optional=True), Buffer("gate_weight"),
    Buffer("gate_bias", optional=True), Buffer("y"),
)  # fmt: skip


def generated(problem: SqueezeExciteProblem) -> dict[str, Constant]:
    """Return the activations of kernels/squeeze_excite/layers.cuh."""
    applied = {
        name: Expression.parse(text).constants(problem.dtype)["EXPRESSION"]
        for name, text in (("ACTIVATION", problem.hidden), ("GATE", problem.gate))
    }
    return {"FAST_FUNCTIONS": fast_functions(problem.dtype), **applied}


def x_pitch(problem: SqueezeExciteProblem) -> int:
    return problem.x_pitch or problem.channels


class Naive(ThreadsRung[SqueezeExciteProblem]):
    def recipe(self, problem: SqueezeExciteProblem, config: ThreadsConfig) -> Recipe:
        return launch(
            Program.of(
                "squeeze_excite/naive.cu", constants=generated(problem), problem=problem, config=config,
            ),
            problem.batch,
            config.threads,
            *BUFFERS, x_pitch(problem),
            shared_bytes=4 * (problem.channels + problem.squeezed),
        )  # fmt: skip


NAIVE = Naive(
    "naive",
    "one CTA per image; a thread sums the pixels of a channel, then the products of a feature",
    None,
    None,
)


# --- rungs one_block and cluster


_WARP = 32
_IN_FLOAT4 = 4
_AHEAD = 8
"""Pixels in flight per thread."""
_ONE_LAUNCH_REGISTERS = 96
"""Approximate registers per thread, including loads in flight."""
LANES = 128
"""Thread instructions issued per clock and SM."""
ROUND_TRIP_US = 1.0
"""Microseconds from an L2 load behind a barrier to a sum known to all threads of a CTA: for the image, and for each
weight."""
ONE_LAUNCH_TURN_US = 0.4
"""Microseconds per further round of loads, of images or of a thread's pixels."""
SMALL_LAYER_US = 0.8
"""Microseconds of a layer over a few rows, or of a mean besides its traffic, in a separate launch."""
ONE_LAUNCH_EXCHANGE_US = 0.5
"""Microseconds of one exchange between the CTAs of a cluster."""


@dataclass(frozen=True)
class ImagesConfig(Config):
    """Config of clusters with a few images each."""

    threads: int
    images: int
    """Images per cluster, which share one read of the weights."""

    def clusters(self, problem: SqueezeExciteProblem) -> int:
        return ceil_div(problem.batch, self.images)

    def team(self, outputs: int, most: int = _WARP) -> int:
        """Return the lanes per sum, up to `most`, so that every sum of a layer has its own."""
        team = 1
        while team < min(_WARP, most) and 2 * team * outputs <= self.threads:
            team *= 2
        return team


@dataclass(frozen=True)
class OneLaunchConfig(ImagesConfig):
    cluster: int = 1
    """CTAs that share the pixels of an image, then its channels."""

    def share(self, problem: SqueezeExciteProblem) -> int:
        """Return the channels per CTA, in whole packs."""
        least = max(_IN_FLOAT4, widest_vector(problem.dtype, problem.channels))
        return ceil_div(ceil_div(problem.channels, self.cluster), least) * least

    def groups(self, problem: SqueezeExciteProblem) -> int:
        """Return the threads per pack of channels."""
        chunks = problem.channels // widest_vector(problem.dtype, problem.channels)
        return max(1, min(self.threads // chunks, ceil_div(problem.pixels, self.cluster)))

    def shared_bytes(self, problem: SqueezeExciteProblem) -> int:
        share, hidden = self.share(problem), ceil_div(problem.squeezed, _IN_FLOAT4) * _IN_FLOAT4
        summed = self.groups(problem) * problem.channels
        return 4 * self.images * (share * self.cluster + share + 2 * hidden + summed)


@dataclass(frozen=True)
class OneLaunch(Rung[SqueezeExciteProblem, OneLaunchConfig]):
    sizes: tuple[int, ...]
    """Cluster sizes to offer."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return super().architectures if self.sizes == (1,) else WITH_WGMMA

    def supports(self, problem: SqueezeExciteProblem) -> str | None:
        if self._offered(problem):
            return None
        return (
            f"{self.name} keeps the sums of {problem.channels} channels and {problem.squeezed} squeezed features in "
            "shared memory, where they do not fit; the rung `naive` takes any"
        )

    def configs(self, problem: SqueezeExciteProblem) -> tuple[OneLaunchConfig, ...]:
        return tuple(sorted(self._offered(problem), key=lambda config: self.estimate(problem, config)))

    def _offered(self, problem: SqueezeExciteProblem) -> list[OneLaunchConfig]:
        most = max(1, problem.batch)
        return [
            config
            for cluster in self.sizes
            for images in (1, 2, 4)
            for threads in (512, 256)
            if images == 1 or images <= most
            if (config := OneLaunchConfig(threads, images, cluster)).shared_bytes(problem) <= MIN_SHARED
        ]

    def estimate(self, problem: SqueezeExciteProblem, config: OneLaunchConfig) -> float:
        """Sum up waves of clusters, each with the traffic and instructions of its CTAs and serial round trips; at least
        the time to read x."""
        p, rates, size = problem, self.card.rates, ELEMENT_BYTES[problem.dtype]
        blocks = config.clusters(p) * config.cluster
        usable = max(1, self.card.max_active_clusters(config.cluster) * config.cluster)
        resident = min(
            self.card.registers // (_ONE_LAUNCH_REGISTERS * config.threads),
            self.card.resident_blocks(config.shared_bytes(p)),
            max(1, ceil_div(blocks, usable)),
        )
        waves = ceil_div(blocks, resident * usable)
        pixels = config.images * p.channels * ceil_div(p.pixels, config.cluster)
        weights = 2 * p.weight_elements / config.cluster
        clocks = (pixels + weights) * size / rates.copies.loads
        clocks += (2 * pixels + (1 + config.images) * weights) / LANES
        moved = max(self.card.transfer_us(p.elements * size), waves * resident * clocks / rates.clock)
        moved += config.clusters(p) * 2 * p.weight_elements * size / rates.l2
        exchanges = 2 * ONE_LAUNCH_EXCHANGE_US if config.cluster > 1 else 0.0
        each = ceil_div(ceil_div(p.pixels, config.cluster), config.groups(p))
        more_turns = (config.images * ceil_div(each, _AHEAD) - 1) / resident
        return (
            rates.launch_us
            + waves * (3 * ROUND_TRIP_US + exchanges + more_turns * ONE_LAUNCH_TURN_US)
            + moved
        )

    def recipe(self, problem: SqueezeExciteProblem, config: OneLaunchConfig) -> Recipe:
        p = problem
        program = Program.of(
            "squeeze_excite/one_launch.cu",
            constants=generated(p),
            problem=p,
            config=config,
            vector=widest_vector(p.dtype, p.channels),
            squeezed_vector=widest_vector(p.dtype, p.squeezed),
            ahead=_AHEAD,
        )
        return launch(
            program,
            config.clusters(p) * config.cluster,
            config.threads,
            *BUFFERS, p.batch, x_pitch(p),
            shared_bytes=config.shared_bytes(p),
            cluster=(config.cluster, 1, 1),
        )  # fmt: skip


def one_launch_pays(problem: SqueezeExciteProblem, card: Card = TWIN) -> bool:
    """Return True if one launch takes less time than three launches at best: the mean at memory bandwidth, and two
    small layers. Graphs are built before their card is known, with an H200's rates."""
    rungs: tuple[Any, ...] = (SLICED, CLUSTER, ONE_BLOCK)
    supported = [rung.on(card) for rung in rungs if rung.supports(problem) is None]
    times = [rung.estimate(problem, rung.configs(problem)[0]) for rung in supported]
    separate = 3 * (card.rates.launch_us + SMALL_LAYER_US)
    separate += card.transfer_us(problem.elements * ELEMENT_BYTES[problem.dtype])
    return min(times, default=separate) < separate


# Predictions are for 1152_7_b1_s48 in fp16: 113 KB of x and 111 KB of each weight.
ONE_BLOCK = OneLaunch(
    "one_block",
    "16-byte loads; several lanes share the products of a feature, and weights serve several images",
    below="naive",
    # naive: 49 loads 5 times, four in flight, 37,000 clocks; 1152 serial products, 40 clocks each, 46,000; 48 of them 5
    # times, 10,000: 53 us. Here 335 KB at 39 bytes per clock, 4.9 us, 0.8 us of instructions, and a launch with three
    # round trips, 3.3 us.
    predicted_gain=5.9,
    sizes=(1,),
)
CLUSTER = OneLaunch(
    "cluster",
    "the CTAs of a cluster share an image's pixels, then its channels: sums are exchanged through DSMEM",
    below="one_block",
    # 42 KB per CTA, 0.6 us, 0.1 us of instructions, a launch with three round trips, 3.3 us, and two exchanges, 1 us;
    # against 9.0.
    predicted_gain=1.8,
    sizes=(8, 4, 2),
)


# --- rung sliced


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
_SLICED_REGISTERS = 64
"""Approximate registers per thread."""
_THREADS_HELD = 2048
"""Threads per SM."""
READING = 3.0
"""Instructions per element of x: conversion, addition, and a share of addresses and selections."""
PUSHED = 8.0
"""Bytes per clock that a CTA receives from its cluster."""
LAYERS_US = 0.4
"""Microseconds besides products: first load, exchange, barriers, shuffles, activations, store."""
TENSOR_CORES_US = 0.15
"""Extra microseconds for splitting values and for tensor-core latency."""
SLICED_TURN_US = 0.15
"""Microseconds per further round of loads."""
THREAD_US = 0.0006
"""Microseconds per thread of a CTA, for barriers and sums."""
SLICED_EXCHANGE_US = 0.1
"""Microseconds of wait per CTA of a cluster: they start together and push to each other."""
CLUSTERED_US = 0.004
"""Microseconds of launch overhead per CTA in a cluster."""


@dataclass(frozen=True)
class SlicedConfig(ImagesConfig):
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
    architectures = WITH_WGMMA

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
        most = min(self.card.registers // _SLICED_REGISTERS, _THREADS_HELD) // config.threads
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
        steps += (config.pixel_sums(p).waits(resident) - 1) * SLICED_TURN_US
        if config.cluster > 1:
            steps += SLICED_EXCHANGE_US * (1 + config.cluster) + CLUSTERED_US * blocks / waves
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
        return launch(
            program,
            blocks,
            config.threads,
            *BUFFERS, p.batch, x_pitch(p), WeightsReady(("weight", "bias", "gate_weight", "gate_bias")),
            shared_bytes=shared_bytes,
            cluster=(config.cluster, 1, 1),
        )  # fmt: skip


# Predicted for 1152_7_b1_s48 in fp16: `cluster` takes 6.4 us by its estimate, of which three serial round trips are 3
# and two exchanges 1; here one round trip and the layers are 0.7, and one exchange 0.9.
SLICED = Sliced(
    "sliced",
    "CTAs multiply the sums of their own slice and exchange them once; weights are loaded while pixels are summed",
    below="cluster",
    predicted_gain=1.4,
)


# --- the operation


class SqueezeExciteOperation(Operation[SqueezeExciteProblem]):
    name = "squeeze_excite"
    problem = SqueezeExciteProblem
    in_pytorch = Reference(random_inputs, empty_output, in_float64(peer), peer)
    ladder = Ladder("squeeze_excite", (NAIVE, ONE_BLOCK, CLUSTER, SLICED))
    problems = (
        SqueezeExciteProblem(1, 32, 112, 112, 8, hidden="silu(x)"),
        SqueezeExciteProblem(1, 1152, 7, 7, 48, hidden="silu(x)"),
        SqueezeExciteProblem(32, 240, 28, 28, 10, hidden="silu(x)"),
        SqueezeExciteProblem(32, 960, 7, 7, 240, gate="hardsigmoid(x)"),
        SqueezeExciteProblem(8, 784, 14, 14, 196),
        SqueezeExciteProblem(8, 256, 56, 56, 16, bias=False, gate_bias=False),
    )
    """Gates of EfficientNet-B0 at batch 1 and 32, MobileNetV3, RegNet-Y and SE-ResNet-50."""
    small_problems = (
        SqueezeExciteProblem(3, 32, 5, 7, 8, hidden="silu(x)"),
        SqueezeExciteProblem(2, 36, 4, 4, 10, gate="hardsigmoid(x)"),
        SqueezeExciteProblem(5, 5, 3, 3, 3, bias=False, gate_bias=False),
        SqueezeExciteProblem(1, 80, 2, 2, 67, bias=False),
        SqueezeExciteProblem(1, 2056, 1, 3, 4, gate_bias=False, hidden="x"),
    )
    """Tested on the twin: widths that no vector divides, fewer pixels and channels than CTAs, more channels than
    threads times a vector, and uneven batches."""
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("sliced", "cluster", "one_block", "naive")


SQUEEZE_EXCITE = SqueezeExciteOperation()


# --- the PyTorch operator


_ROLES = ("x", "weight", "bias", "gate_weight", "gate_bias")


def squeeze_excite(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
    hidden: str = "relu(x)",
    gate: str = "sigmoid(x)",
    *,
    rung: str | None = None,
) -> torch.Tensor:
    """Return one factor per channel of each image [N, C, H, W] as [N, C]: two layers over the means of its channels.

    weight is [squeezed, C], gate_weight [C, squeezed]; `hidden` and `gate` are expressions in `x` applied after each
    layer. `rung` selects a rung of the ladder by name.
    """
    return OPERATOR(x, weight, bias, gate_weight, gate_bias, hidden, gate, rung)


def _plan(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
    hidden: str,
    gate: str,
    rung: str | None = None,
) -> CallPlan:
    given = (bias is not None, gate_bias is not None)
    return CallPlan(
        SQUEEZE_EXCITE,
        lambda: x.new_empty(x.shape[:2]),
        lambda: SqueezeExciteProblem(*shape_of(x), weight.shape[0], *given, hidden, gate, NAMES[x.dtype]),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.hidden, ctx.gate, _ = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Let PyTorch recompute and differentiate the gates, which are small compared to x."""
    with torch.enable_grad():
        leaves = {
            role: tensor.detach().requires_grad_(needed)
            for role, tensor, needed in zip(_ROLES, ctx.saved_tensors, ctx.needs_input_grad, strict=False)
            if tensor is not None
        }
        y = gates(ctx.hidden, ctx.gate, leaves)
    inputs = {role: leaf for role, leaf in leaves.items() if leaf.requires_grad}
    found = dict(zip(inputs, torch.autograd.grad(y, tuple(inputs.values()), gradient), strict=True))
    return (*(found.get(role) for role in _ROLES), None, None, None)


OPERATOR = define_planned(
    "squeeze_excite", _plan, "x: N C H W, weight: S C, bias: S, gate_weight: C S, gate_bias: C",
    setup=_setup, backward=_backward,
)  # fmt: skip
