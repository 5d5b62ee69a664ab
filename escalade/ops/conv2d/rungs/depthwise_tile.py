"""Depthwise convolution on Hopper: TMA loads the windows of tiles, threads compute strips of outputs from shared
memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import log2

from escalade.device.architecture import WITH_WGMMA
from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, TiledMap, WeightsReady
from escalade.device.sources import C_TYPES, Constant, Macro, Type
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import MULTIPLIED, QUANTIZED, VECTOR_BYTES
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.depthwise import Tiles, overlapped
from escalade.ops.conv2d.rungs.rung import Conv2dRung, fitting_blocks
from escalade.ops.shared import activation

WARP = 32
BOX = 256
"""Largest side of a TMA box."""
STRIPS = range(1, 9)
"""Output columns per thread."""
ROWS = (1, 2, 4)
"""Output rows per thread."""
VECTORS = (2, 4)
"""Channels per thread; of bytes whole words."""
MOST_INTEGER_TAPS = 1024
"""Taps whose sum of products of 8-bit integers is exact in fp32: 2^24 / 128^2."""
FEW = 3
"""Number of best candidates kept for channels per CTA, strips, and images per tile."""
USUAL_PIXEL_BYTES = 96
"""Preferred bytes of channels per CTA: neither short copies nor large windows."""
MOST_CODE = 1100
"""Largest number of unrolled multiply-adds per thread: longer code costs more instruction fetches than it saves."""
MOST_PIXEL_BYTES = 256
"""Largest bytes of channels per CTA."""
LEAST_THREADS, MOST_THREADS = 96, 384
HELD = 110
"""Registers per thread for accumulators, weights and inputs; addresses and counters need `OTHERS` more."""
OTHERS = 26
STAGES = 2
MOST_BLOCKS = 8
"""Largest number of CTAs per SM."""
MOST_CONFIGS = 12

# Clocks of an SM.
ISSUE_RATE = 4.0
"""Warp instructions issued per clock."""
HALF_ISSUE = 0.7
"""Warps per scheduler at which it reaches half its issue rate."""
START = 900.0
"""From the start of a CTA to its first window and weights."""
TURN = 1100.0
"""From the end of a tile to the products of the next, hidden by other CTAs."""
SHARED_RATE = 128
"""Bytes of shared memory read per clock."""
SECTOR = 64
"""Copy granularity in bytes."""
BESIDE = 0.2
"""Share of the shorter of memory and SM time that is not hidden."""
LOOP = 1.12
"""Factor for a loop over rows of taps: each iteration waits for its own reads."""
PIXEL_CLOCKS = 2.0
"""Least clocks to copy a pixel, however few its channels."""
ACTIVATION = 5
"""Instructions per activation expression (estimate)."""


@dataclass(frozen=True)
class TileConfig(Config):
    vector: int
    """Channels per thread."""
    strip: int
    """Output columns per thread."""
    rows: int
    """Output rows per thread."""
    channels: int
    """Channels per CTA."""
    images: int
    """Images per tile: several if they are small."""
    tile_rows: int
    tile_columns: int
    stages: int
    """Windows in shared memory."""
    blocks_per_sm: int


@lru_cache(4096)
def _turns(lanes: int, bytes: int, steps: tuple[int, int, int], counts: tuple[int, int]) -> float:
    """Return the mean number of bank-conflict passes per warp access. Lanes are adjacent, with `bytes` each; strips,
    bands and images are `steps` bytes apart."""
    together = max(1, SHARED_RATE // bytes)  # threads per pass
    turns, groups = 0, 4 * WARP // together
    for group in range(groups):
        words: dict[int, set[int]] = {}
        for thread in range(group * together, (group + 1) * together):
            lane, rest = thread % lanes, thread // lanes
            strip, band, image = (
                rest % counts[0],
                rest // counts[0] % counts[1],
                rest // counts[0] // counts[1],
            )
            first = (lane * bytes + strip * steps[0] + band * steps[1] + image * steps[2]) // 4
            for word in range(first, first + max(1, bytes // 4)):
                words.setdefault(word % 32, set()).add(word)
        turns += max(len(found) for found in words.values())
    return turns / 4


@lru_cache(1024)
def _distinct(outputs: int, stride: int, taps: int, dilation: int) -> int:
    """Return the inputs that adjacent outputs read along one dimension."""
    return len({i * stride + tap * dilation for i in range(outputs) for tap in range(taps)})


@dataclass(frozen=True)
class _Tiling(Tiles):
    """Sizes derived from a problem and a config; the kernel computes the same."""

    problem: Conv2dProblem
    config: TileConfig
    card: Card

    @cached_property
    def lanes(self) -> int:
        return self.config.channels // self.config.vector

    @cached_property
    def strips(self) -> int:
        return self.config.tile_columns // self.config.strip

    @cached_property
    def bands(self) -> int:
        return self.config.tile_rows // self.config.rows

    @cached_property
    def threads(self) -> int:
        return ceil_div(self.lanes * self.strips * self.bands * self.config.images, WARP) * WARP

    @cached_property
    def window(self) -> tuple[int, int]:
        return self.problem.window(self.config.tile_rows, self.config.tile_columns)

    @cached_property
    def window_bytes(self) -> int:
        c = self.config
        return c.images * self.window[0] * self.window[1] * c.channels * self.problem.element_bytes

    @cached_property
    def shared_bytes(self) -> int:
        return self.shared_bytes_of(self.config.stages)

    def shared_bytes_of(self, stages: int) -> int:
        c = self.config
        stage = ceil_div(self.window_bytes, 128) * 128
        return stages * (stage + 8) + self.problem.taps * (c.channels + c.vector) * 4

    @cached_property
    def columns(self) -> int:
        """Input columns per row that a thread reads."""
        p = self.problem
        return _distinct(self.config.strip, p.stride[1], p.filter_width, p.dilation[1])

    @cached_property
    def input_rows(self) -> int:
        """Input rows that a thread reads."""
        p = self.problem
        return _distinct(self.config.rows, p.stride[0], p.filter_height, p.dilation[0])

    @property
    def held(self) -> int:
        """Registers for accumulators, one input row as stored, and its weights."""
        p, c = self.problem, self.config
        sums = c.rows * c.strip * c.vector
        words = self.columns * ceil_div(c.vector * p.element_bytes, 4)
        weights = min(c.rows, p.filter_height) * p.filter_width * c.vector
        return sums + words + weights + 2 * c.vector

    @property
    def reads(self) -> tuple[int, int]:
        """Reads of inputs and of weights per thread."""
        c = self.config
        return self.input_rows * self.columns, self.problem.taps * ceil_div(c.vector, 4)

    @property
    def instructions(self) -> float:
        """Instructions per thread and tile."""
        p, c = self.problem, self.config
        inputs, weights = self.reads
        # Bytes take a permutation, at half rate, and an addition each.
        converted = inputs * c.vector * {1: 3, 2: 1, 4: 0}[p.element_bytes]
        outputs = c.rows * c.strip
        ends = (
            (ACTIVATION if p.activation else 1)
            + (2 if p.residual else 0)
            + {1: 4, 2: 0.5, 4: 0}[p.element_bytes]  # rounded and packed
        )
        taken = (
            inputs + weights + converted + outputs * c.vector * (p.taps + ends) + 3 * outputs
            + 6 * self.input_rows + 60
        )  # fmt: skip
        return taken * (LOOP if c.rows == 1 else 1)

    @property
    def reading(self) -> float:
        """Clocks of shared memory per warp and tile."""
        p, c = self.problem, self.config
        pixel, lane = c.channels * p.element_bytes, c.vector * p.element_bytes
        row = self.window[1] * pixel
        steps = (c.strip * p.stride[1] * pixel, c.rows * p.stride[0] * row, self.window[0] * row)
        period = (steps[0] % SHARED_RATE, steps[1] % SHARED_RATE, steps[2] % SHARED_RATE)
        inputs, weights = self.reads
        turns = _turns(self.lanes, lane, period, (self.strips, self.bands))
        return inputs * turns + weights * min(4, max(1, self.lanes * 16 / SHARED_RATE))

    @property
    def clocks(self) -> float:
        return self._clocks(self.reading)

    @property
    def rough_clocks(self) -> float:
        """`clocks` with a guess at the bank conflicts, which are slow to count."""
        inputs, weights = self.reads
        return self._clocks(2 * inputs + weights)

    def _clocks(self, reading: float) -> float:
        p, c = self.problem, self.config
        blocks = ceil_div(self.channel_blocks * self.workers, self.card.multiprocessors)
        resident, warps = min(blocks, c.blocks_per_sm), self.threads // WARP
        each = resident * warps / ISSUE_RATE
        rate = ISSUE_RATE * each / (each + HALF_ISSUE)
        tiles = blocks * self.rounds
        busy = tiles * warps * self.instructions / rate
        read = tiles * (warps * reading + self.window_bytes / SHARED_RATE)
        pixel = c.channels * p.element_bytes
        whole = ceil_div(pixel, SECTOR) * SECTOR / pixel
        stored = c.images * c.tile_rows * c.tile_columns * pixel * (2 if p.residual else 1)
        loaded = self.window_bytes * max(whole, PIXEL_CLOCKS * self.card.rates.copies.loads / pixel)
        copied = tiles * (loaded + stored * whole) / self.card.rates.copies.loads
        waits = START * ceil_div(blocks, resident) + self.rounds * TURN / resident
        if c.stages == 1:
            waits += (self.rounds - 1) * START / 2
        parts = sorted((busy, read, copied))
        return waits + parts[2] + 0.3 * parts[1]


def even_shares(p: Conv2dProblem) -> list[int]:
    """Return channels per CTA: even shares in units of a copy, close to the preferred size, preferably whole
    sectors."""
    unit = VECTOR_BYTES // p.element_bytes
    units = ceil_div(p.channels, unit)
    shares = sorted({ceil_div(units, parts) for parts in range(1, units + 1)})

    def badness(share: int) -> float:
        pixel = share * VECTOR_BYTES
        left = ceil_div(units, share) * share / units - 1
        return abs(log2(pixel / USUAL_PIXEL_BYTES)) + 4 * left + (0.5 if pixel % SECTOR else 0)

    return [n * unit for n in sorted(shares, key=badness)[:FEW] if n * VECTOR_BYTES <= MOST_PIXEL_BYTES]


@lru_cache(4096)
def cuts(total: int) -> tuple[int, ...]:
    """Return sizes of equal parts with little waste, each about two thirds of the next."""
    parts = sorted({ceil_div(total, count) for count in range(1, total + 1)}, reverse=True)
    found = parts[:1]
    for part in parts[1:]:
        if part <= max(1, found[-1] * 2 // 3) and ceil_div(total, part) * part * 9 <= total * 10:
            found.append(part)
    return tuple(sorted(found))


def _tiles(
    p: Conv2dProblem, vector: int, strip: int, rows: int, channels: int
) -> Iterator[tuple[int, int, int]]:
    """Yield images, rows and columns of tiles for CTAs of a few hundred threads."""
    lanes = channels // vector
    for strips in cuts(ceil_div(p.output_width, strip)):
        for bands in cuts(ceil_div(p.output_height, rows)):
            threads = lanes * strips * bands
            if threads > MOST_THREADS:
                break
            if strips * strip < p.output_width or bands * rows < p.output_height:
                if threads >= LEAST_THREADS:
                    yield 1, bands * rows, strips * strip
                continue
            most = min(p.batch, MOST_THREADS // threads)
            idle = sorted(range(1, most + 1), key=lambda images: (-images * threads % WARP / images, images))
            for images in idle[:FEW]:
                yield images, bands * rows, strips * strip


def _strips(p: Conv2dProblem) -> list[int]:
    """Return the best few strips: little waste first, then length."""
    width = p.output_width
    return sorted(
        (strip for strip in STRIPS if strip <= width),
        key=lambda strip: (ceil_div(width, strip) * strip / width + 1 / strip, -strip),
    )[:FEW]


def _candidates(p: Conv2dProblem, card: Card) -> Iterator[_Tiling]:
    few_channels = even_shares(p)
    for vector in VECTORS[1:] if p.is_quantized else VECTORS:
        for strip in _strips(p):
            for rows in ROWS:
                if rows > p.output_height or (rows > 1 and rows * strip * vector * p.taps > MOST_CODE):
                    continue
                if (
                    _Tiling(p, TileConfig(vector, strip, rows, vector, 1, rows, strip, 1, 1), card).held
                    > HELD
                ):
                    continue
                for channels in few_channels:
                    for tile in _tiles(p, vector, strip, rows, channels):
                        config = TileConfig(vector, strip, rows, channels, *tile, STAGES, 1)
                        yield from _resident(_Tiling(p, config, card))


def _resident(tiling: _Tiling) -> Iterator[_Tiling]:
    """Yield the tiling with as many CTAs per SM as fit, and a single stage if no CTA has two tiles."""
    card, c = tiling.card, tiling.config
    if max(tiling.window) > BOX:
        return
    for stages in (STAGES, 1):
        shared = tiling.shared_bytes_of(stages)
        blocks = min(fitting_blocks(card, tiling.threads, tiling.held + OTHERS, shared), MOST_BLOCKS)
        if shared > card.shared_bytes or blocks < 1:
            continue
        made = _Tiling(tiling.problem, c.changed(stages=stages, blocks_per_sm=blocks), card)
        if (made.rounds > 1) == (stages > 1):
            yield made
            return


@lru_cache(4096)
def _best_first(p: Conv2dProblem, card: Card) -> tuple[TileConfig, ...]:
    tilings = sorted(_candidates(p, card), key=lambda tiling: tiling.rough_clocks)
    best = sorted(tilings[: 4 * MOST_CONFIGS], key=lambda tiling: tiling.clocks)
    return tuple(tiling.config for tiling in best[:MOST_CONFIGS])


@dataclass(frozen=True)
class DepthwiseTile(Conv2dRung[TileConfig]):
    layouts: tuple[str, ...] = ("nhwc",)
    takes_groups = True
    architectures = WITH_WGMMA
    pitched_buffers = ("x", "y")

    def limits(self, problem: Conv2dProblem) -> str | None:
        p, unit = problem, VECTOR_BYTES // problem.element_bytes
        if p.groups != p.channels or p.filters != p.channels:
            return f"{self.name} takes one filter per channel; depthwise takes several"
        if p.is_quantized and p.taps > MOST_INTEGER_TAPS:
            return f"{self.name} adds up to {MOST_INTEGER_TAPS} products of bytes exactly, not {p.taps}"
        if p.taps == 1:
            return f"{self.name} needs filters of more than one tap"
        if p.channels % unit:
            return f"{self.name} takes multiples of {unit} channels, not {p.channels}; depthwise takes any"
        if not _best_first(p.dense, self.card):
            return (
                f"{self.name} keeps windows in shared memory; those of {p.filter_height}x{p.filter_width} filters do "
                f"not fit into {self.card.shared_bytes} bytes. direct takes any"
            )
        return None

    def configs(self, problem: Conv2dProblem) -> tuple[TileConfig, ...]:
        return _best_first(problem.dense, self.card)

    def clocks(self, problem: Conv2dProblem, config: TileConfig) -> float:
        return _Tiling(problem, config, self.card).clocks

    def estimate(self, problem: Conv2dProblem, config: TileConfig) -> float:
        return overlapped(self.card, self.clocks(problem, config), problem.traffic, BESIDE)

    def recipe(self, problem: Conv2dProblem, config: TileConfig) -> Recipe:
        p, tiling = problem, _Tiling(problem, config, self.card)
        pixel = (p.x_pitch or p.channels) * p.element_bytes
        x_map = TiledMap(
            Buffer("x"), "fp32" if p.dtype == "tf32" else p.dtype, (p.channels, p.width, p.height, p.batch),
            (config.channels, tiling.window[1], tiling.window[0], config.images), swizzle=0,
            strides=(pixel, p.width * pixel, p.height * p.width * pixel),
        )  # fmt: skip
        _, weight, bias, residual, y = arguments.tensors()
        scales: tuple[Buffer, ...] = ()
        quantized: dict[str, Constant] = {}
        if p.is_quantized:
            scales = (Buffer("scale"), Buffer("scales"))
            quantized = {"QUANTIZED": Macro(""), "Output": Type(C_TYPES[p.stored])}
        call = KernelCall(
            Program.of(
                "conv2d/depthwise_tile.cu",
                constants=activation.constants_of(p) | quantized,
                problem=p,
                tiling=tiling,
                config=config,
            ),
            (tiling.channel_blocks * tiling.workers, 1, 1),
            (tiling.threads, 1, 1),
            (
                x_map,
                weight,
                bias,
                *scales,
                residual,
                y,
                p.batch,
                tiling.tiles,
                WeightsReady(("weight", "bias", *(buffer.name for buffer in scales))),
            ),
            shared_bytes=tiling.shared_bytes,
            overlap=True,
        )
        return Recipe((call,))


# Prediction for 672to672_14_k5s1g672 at batch 32 in fp16, 0.2 GFLOP and 17 MB.
RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    DepthwiseTile(
        "depthwise_tile",
        "TMA loads the windows of tiles and zero-fills borders: a loop over rows of taps that fits into the "
        "instruction cache, and many small CTAs with their loads in flight",
        below="depthwise",
        # `depthwise` takes 20.6 us: 56 KB of code that run twice, and two CTAs of 7 warps on some SMs. Here the 25 taps
        # of an output take about 43 instructions: 6 us, plus 2.5 to start.
        predicted_gain=2.2,
        dtypes=(*MULTIPLIED, *QUANTIZED),
    ),
)
