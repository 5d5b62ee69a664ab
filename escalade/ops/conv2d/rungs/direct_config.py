"""Configs of the tiled direct convolution: mapping of outputs to threads, and their expected efficiency."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from escalade.ops.base.card import MIN_SHARED, Card
from escalade.ops.base.rung import Config
from escalade.ops.conv2d.problem import Conv2dProblem

BANKS = 32
WARP = 32
CONSTANT_LIMIT = 64 * 1024
WEIGHTS = {"global": 0, "shared": 1, "constant": 2}


@dataclass(frozen=True)
class DirectConfig(Config):
    """One CTA computes images x rows x columns pixels times filter_threads * outputs_k filters."""

    images: int = 1
    rows: int = 8
    columns: int = 8
    chunk: int = 8
    """Channels per stage."""
    run: int = 1
    """Adjacent pixels of one row per thread."""
    runs: int = 1
    """Runs of pixels per thread."""
    outputs_k: int = 1
    """Filters per thread."""
    filter_threads: int = 4
    input_tile: bool = True
    weights: str = "global"
    padded: bool = False
    vector: bool = False
    restrict: bool = False
    unrolled: bool = False

    @property
    def tile_runs(self) -> int:
        return self.images * self.rows * (self.columns // self.run)

    @property
    def pixel_threads(self) -> int:
        return math.ceil(self.tile_runs / self.runs)

    @property
    def threads(self) -> int:
        return self.pixel_threads * self.filter_threads

    @property
    def tile_filters(self) -> int:
        return self.filter_threads * self.outputs_k

    @property
    def outputs(self) -> int:
        """Accumulators per thread."""
        return self.run * self.runs * self.outputs_k

    def blocks(self, problem: Conv2dProblem) -> int:
        return (
            math.ceil(problem.batch / self.images)
            * math.ceil(problem.output_height / self.rows)
            * math.ceil(problem.output_width / self.columns)
            * math.ceil(problem.filters / self.tile_filters)
        )


@dataclass(frozen=True)
class Tile:
    """Shared-memory layout of a config and problem, and the width of each access."""

    input_rows: int
    input_columns: int
    window: int
    """Inputs of a run per row of taps."""
    x_vector: int
    w_vector: int
    y_vector: int
    filter_vector: int
    window_vector: int
    pitch: int
    plane: int
    margin: int
    """Floats before the input tile."""
    sliding: bool
    unroll_rows: int
    unroll_columns: int
    shared_bytes: int


def widest(limit: int, *multiples: int) -> int:
    """Return the largest power of two up to `limit` that divides all of `multiples`."""
    width = 1
    while width * 2 <= limit and all(value % (width * 2) == 0 for value in multiples):
        width *= 2
    return width


@lru_cache(4096)
def tile(problem: Conv2dProblem, config: DirectConfig) -> Tile:
    p, nhwc = problem, problem.layout == "nhwc"
    input_rows, input_columns = p.window(config.rows, config.columns)
    window = p.window(1, config.run)[1]
    limit = 16 // p.element_bytes if config.vector else 1
    filter_vector = widest(4, config.outputs_k) if config.vector else 1
    if nhwc:  # a vector of outputs is part of a vector of filters
        x_vector = w_vector = widest(limit, p.channels, config.chunk)
        y_vector = widest(limit, p.filters, filter_vector)
    else:
        x_vector = widest(limit, p.width)
        w_vector = widest(limit, p.channels * p.taps, config.chunk * p.taps)
        y_vector = widest(limit, p.output_width, config.run)

    # A sliding window must fit into registers besides the accumulators.
    sliding = config.input_tile and config.unrolled and window * config.runs <= 40
    window_vector = 1
    if sliding and config.vector:
        window_vector = widest(min(4, window), config.run * p.stride[1])
    pitch, margin = input_columns, 0
    if not nhwc and x_vector > 1:  # vectors extend beyond a row at both ends, but must not touch other rows
        margin = _round_up(x_vector, 4)
        pitch = (input_columns + 2 * x_vector - 2) // x_vector * x_vector
    pitch = _round_up(pitch, window_vector)
    if config.padded:
        firsts = _first_inputs(p, config, input_rows)
        pitch = _best(
            pitch,
            window_vector,
            lambda pitch: _conflicts([row * pitch + column for row, column in firsts], window_vector),
        )
    plane = config.images * input_rows * pitch
    if config.padded and nhwc:
        lanes = config.chunk // x_vector
        plane = _best(
            plane,
            window_vector,
            lambda plane: _conflicts([at % lanes * x_vector * plane + at // lanes for at in range(WARP)], 1),
        )

    row_work = config.outputs * p.filter_width
    input_floats = _round_up(margin + config.chunk * plane, 4) if config.input_tile else 0
    weight_floats = config.chunk * p.taps * config.tile_filters if config.weights == "shared" else 0
    return Tile(
        input_rows, input_columns, window, x_vector, w_vector, y_vector, filter_vector, window_vector,
        pitch, plane, margin, sliding,
        unroll_rows=p.filter_height if config.unrolled and row_work * p.filter_height <= 2048 else 1,
        unroll_columns=p.filter_width if config.unrolled and row_work <= 2048 else 1,
        shared_bytes=4 * (input_floats + weight_floats),
    )  # fmt: skip


def valid(problem: Conv2dProblem, config: DirectConfig, shape: Tile | None = None) -> bool:
    return (
        (shape or tile(problem, config)).shared_bytes <= MIN_SHARED
        and config.threads <= 1024
        and config.columns % config.run == 0
        and (config.weights != "constant" or constant_bytes(problem) <= CONSTANT_LIMIT)
    )


def constant_bytes(problem: Conv2dProblem) -> int:
    return problem.element_bytes * (problem.weight_elements + (problem.filters if problem.bias else 0))


def _round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


def _best(least: int, step: int, conflicts: Callable[[int], int]) -> int:
    """Return the size from `least` on with the fewest conflicts, the smallest of equals."""
    return min(range(least, least + BANKS, step), key=conflicts)


def _first_inputs(problem: Conv2dProblem, config: DirectConfig, input_rows: int) -> list[tuple[int, int]]:
    """Return row and column in the input tile of the first input of each run of the first warp."""
    nhwc = problem.layout == "nhwc"
    tile_runs, pixel_threads, per_row = config.tile_runs, config.pixel_threads, config.columns // config.run
    firsts = []
    for thread in range(WARP):
        pixel = thread // config.filter_threads if nhwc else thread % pixel_threads
        index = min(pixel, tile_runs - 1)
        image, row = divmod(index // per_row, config.rows)
        tile_row = image * input_rows + row * problem.stride[0]
        firsts.append((tile_row, index % per_row * config.run * problem.stride[1]))
    return firsts


def _conflicts(addresses: list[int], width: int) -> int:
    """Return the passes per access of `width` words per thread: 16-byte accesses are served by quarter warps."""
    passes = 0
    together = WARP // width
    for first in range(0, WARP, together):
        words = {address + word for address in addresses[first : first + together] for word in range(width)}
        banks = [0] * BANKS
        for word in words:
            banks[word % BANKS] += 1
        passes += max(banks)
    return passes


def fitted(problem: Conv2dProblem, config: DirectConfig) -> DirectConfig | None:
    """Return `config` adapted to the problem size and shared memory; None if nothing fits."""
    outputs_k = min(config.outputs_k, 2 ** math.ceil(math.log2(problem.filters)))
    filter_threads = min(config.filter_threads, math.ceil(problem.filters / outputs_k))
    chunk = min(config.chunk, problem.channels)
    config = replace(config, chunk=chunk, filter_threads=filter_threads, outputs_k=outputs_k)
    while config.threads < 64 and config.rows < problem.output_height:
        config = replace(config, rows=2 * config.rows)
    while not valid(problem, config):
        if config.chunk > 1:
            config = replace(config, chunk=config.chunk // 2)
        elif config.filter_threads > 1:
            config = replace(config, filter_threads=config.filter_threads // 2)
        elif config.rows > 1:
            config = replace(config, rows=config.rows // 2)
        elif config.columns > config.run:
            config = replace(config, columns=config.run)
        else:
            return None
    return config


@lru_cache(256)
def candidates(
    problem: Conv2dProblem, ideas: DirectConfig, card: Card, most: int = 24
) -> tuple[DirectConfig, ...]:
    """Return the configs with the switches of `ideas`, best first; those with constant memory come last."""
    others = ["constant"] if constant_bytes(problem) <= 16 * 1024 and ideas.weights == "shared" else []
    scored: dict[DirectConfig, float] = {}
    # Scored without padding, which is slow to choose and changes no count.
    switches = _switches(ideas) | {"padded": False}
    for mapping in _mappings(problem):
        for chunk in {min(chunk, problem.channels) for chunk in (2, 4, 8, 16, 32)}:
            for weights in (ideas.weights, *others):
                config = mapping.changed(chunk=chunk, weights=weights, **switches)
                if weights == "constant" and not _is_warp_uniform(problem, config):
                    continue
                shape = tile.__wrapped__(problem, config)  # hashing takes longer than these few sizes
                if valid(problem, config, shape):
                    scored[config] = efficiency(problem, config, card, shape)
    chosen: list[DirectConfig] = []
    alike: Counter[tuple[str, int, int, int, bool]] = Counter()
    chosen_by_memory: Counter[str] = Counter()
    for config in sorted(scored, key=lambda config: -scored[config]):
        config = config.changed(padded=ideas.padded)
        kind = (config.weights, config.run, config.runs, config.outputs_k, config.threads >= 128)
        if chosen_by_memory[config.weights] == most or alike[kind] == 3 or not valid(problem, config):
            continue  # a tuner learns more from dissimilar configs
        chosen_by_memory[config.weights] += 1
        alike[kind] += 1
        chosen.append(config)
    # Constant memory is shared by all callers of a kernel, so it comes last, however fast.
    return tuple(
        sorted(chosen, key=lambda config: (config.weights == "constant", -efficiency(problem, config, card)))
    )


def _is_warp_uniform(problem: Conv2dProblem, config: DirectConfig) -> bool:
    """Return True if all threads of a warp have the same filters: constant memory serves one address at a time."""
    return config.filter_threads == 1 or (problem.layout == "nchw" and config.pixel_threads % WARP == 0)


def _switches(config: DirectConfig) -> dict[str, bool]:
    names = ("input_tile", "padded", "vector", "restrict", "unrolled")
    return {name: getattr(config, name) for name in names}


def _mappings(problem: Conv2dProblem) -> Iterator[DirectConfig]:
    """Yield mappings of outputs to threads: 32 to 64 accumulators per thread, 64 to 512 threads per CTA."""
    for run, runs, outputs_k in (
        (8, 1, 8), (4, 2, 8), (7, 1, 8), (2, 4, 8), (14, 1, 4), (4, 1, 8), (4, 2, 4), (4, 1, 16), (8, 1, 4),
        (8, 2, 4), (4, 4, 4), (7, 2, 4), (1, 8, 8), (2, 2, 16),
    ):  # fmt: skip
        if outputs_k >= 2 * problem.filters:
            continue
        for filter_threads in (1, 2, 4, 8, 16):
            if outputs_k * filter_threads >= 2 * problem.filters:
                continue
            full_width = math.ceil(problem.output_width / run)
            parts = {math.ceil(full_width / part) for part in (1, 2, 4)}
            for runs_wide in {1, 2, 4, 8, 16} | parts:
                if runs_wide > min(full_width, 32):
                    continue
                for rows in {1, 2, 4, 7, 8, 14, 16, min(problem.output_height, 32)}:
                    if rows > problem.output_height:
                        continue
                    whole = rows == problem.output_height and runs_wide == full_width
                    for images in (1, 2, 4) if whole else (1,):
                        config = DirectConfig(
                            images, rows, runs_wide * run, 1, run, runs, outputs_k, filter_threads
                        )
                        if 64 <= config.threads <= 512 and images <= problem.batch:
                            yield config


def efficiency(
    problem: Conv2dProblem, config: DirectConfig, card: Card, known_shape: Tile | None = None
) -> float:
    """Estimate the share of a card's fp32 peak from the instructions of a thread per chunk of channels."""
    p, shape = problem, known_shape or tile(problem, config)
    outputs_computed = config.blocks(p) * WARP * math.ceil(config.threads / WARP) * config.outputs
    useful = p.output_elements / outputs_computed

    multiply_adds = config.chunk * p.taps * config.outputs
    rows_of_taps = config.chunk * p.filter_height
    if shape.sliding:
        input_reads = rows_of_taps * config.runs * math.ceil(shape.window / shape.window_vector)
    else:
        input_reads = rows_of_taps * p.filter_width * config.runs * config.run
    weight_reads = config.chunk * p.taps * config.outputs_k // shape.filter_vector
    x_steps = _steps(config, *_input_lines(p, config, shape))
    w_steps = _steps(config, *_weight_lines(p, config, shape))
    if config.weights == "constant":
        w_steps = 0
        # A constant with an address known at compile time is an operand; otherwise it is a separate load.
        unrolled = shape.unroll_rows == p.filter_height and shape.unroll_columns == p.filter_width
        known = p.channels == 1 and config.filter_threads == 1 and unrolled
        weight_reads = 0 if known else 2 * weight_reads
    staging = x_steps * (22 + 2 * shape.x_vector) + w_steps * (12 + shape.w_vector)
    stores = config.outputs * (8 / shape.y_vector + 1) / math.ceil(p.channels / config.chunk)
    loops = 10 * config.chunk * (1 + p.filter_height // shape.unroll_rows)
    issued = multiply_adds + input_reads + weight_reads + staging + stores + loops
    # Four schedulers share one shared memory, which serves 32 words per clock.
    shared = 4 * (input_reads * shape.window_vector + weight_reads * shape.filter_vector)

    # While one CTA of an SM waits for its loads, others compute; a partial last wave leaves SMs idle.
    inputs = config.runs * (shape.window if shape.sliding else config.run)
    registers = min(255, 40 + config.outputs + inputs + config.outputs_k)
    warps = math.ceil(config.threads / WARP)
    resident = min(
        card.registers // (registers * warps * WARP), card.resident_blocks(shape.shared_bytes), 64 // warps
    )
    if resident == 0:
        return 0.0
    # Weights are fetched in half-used sectors of 32 bytes; L2 delivers about 40 bytes per clock and SM.
    fetched = 2 * w_steps * shape.w_vector + x_steps * shape.x_vector
    computing = max(issued, shared) * math.ceil(warps / 4)
    latencies = math.ceil(x_steps / 4) + math.ceil(w_steps / 4) + 1
    waiting = 700 * latencies + fetched * config.threads * p.element_bytes / 40
    busy = 1 - (waiting / (waiting + computing)) ** resident
    balance = resident * warps / 4 / math.ceil(resident * warps / 4)  # of warps over the four schedulers
    waves = config.blocks(p) / (card.multiprocessors * resident)
    return useful * multiply_adds / max(issued, shared) * busy * balance * waves / math.ceil(waves)


def _input_lines(problem: Conv2dProblem, config: DirectConfig, shape: Tile) -> tuple[int, int]:
    """Return vectors per line, and lines, of the input tile."""
    rows = config.images * shape.input_rows
    if problem.layout == "nhwc":
        return config.chunk // shape.x_vector * shape.input_columns, rows
    return (shape.input_columns + 2 * shape.x_vector - 2) // shape.x_vector, config.chunk * rows


def _weight_lines(problem: Conv2dProblem, config: DirectConfig, shape: Tile) -> tuple[int, int]:
    """Return vectors per line, and lines, of the weight tile."""
    w_vector = shape.w_vector
    if problem.layout == "nhwc":
        return config.tile_filters * config.chunk // w_vector, problem.taps
    return config.tile_filters, config.chunk * problem.taps // w_vector


def _steps(config: DirectConfig, width: int, lines: int) -> int:
    """Return the vectors that one thread moves: `stage` of the kernel."""
    together = max(1, config.threads // width)
    return math.ceil(width / config.threads) * math.ceil(lines / together)
