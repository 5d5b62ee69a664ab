"""Fully connected layer on CUDA cores: one thread per output, tiles in shared memory, and one warp per output."""

from __future__ import annotations

from dataclasses import dataclass, replace

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe, WeightsReady, Workspace
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import ELEMENT_BYTES, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.linear.problem import LinearProblem
from escalade.ops.linear.rungs.arguments import launch_arguments, refuses_pixels
from escalade.ops.shared import activation


@dataclass(frozen=True)
class Naive(Rung[LinearProblem, ThreadsConfig]):
    def supports(self, problem: LinearProblem) -> str | None:
        return None

    def configs(self, problem: LinearProblem) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128, 64))

    def recipe(self, problem: LinearProblem, config: ThreadsConfig) -> Recipe:
        call = KernelCall(
            Program.of("linear/naive.cu", constants=activation.constants_of(problem), problem=problem),
            (ceil_div(problem.output_elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            launch_arguments(problem),
            overlap=True,
        )
        return Recipe((call,))


@dataclass(frozen=True)
class TiledConfig(Config):
    rows: int
    """Rows of x per CTA."""
    outputs: int
    """Output features per CTA."""
    thread_rows: int
    thread_outputs: int
    splits: int = 1
    """CTAs that share one sum (split-K)."""

    @property
    def threads(self) -> int:
        return self.rows // self.thread_rows * (self.outputs // self.thread_outputs)

    def tiles(self, problem: LinearProblem) -> int:
        return ceil_div(problem.batch, self.rows) * ceil_div(problem.out_features, self.outputs)

    def cost(self, problem: LinearProblem, multiprocessors: int) -> float:
        """Estimate the clocks of the busiest SM; only the order matters.

        128 multiply-adds per clock, of which larger thread tiles reach more, and a single CTA of 256 threads half.
        Filling the pipeline costs as much as 64 of k, adding up splits as much as a launch and their traffic.
        """
        per_thread = self.thread_rows * self.thread_outputs
        efficiency = {16: 0.5, 32: 0.65, 64: 0.8}[per_thread]
        rounds = ceil_div(self.tiles(problem) * self.splits, multiprocessors)
        busy = min(1.0, 0.25 + min(rounds, 4) * self.threads / 1024)
        depth = ceil_div(problem.in_features, self.splits) + 64
        traffic = self.splits * problem.output_elements * 8 / 2500
        return rounds * depth * self.rows * self.outputs / (128 * efficiency * busy) + (
            3000 + traffic if self.splits > 1 else 0
        )


TILE_DEPTH = 16
TILES = (
    TiledConfig(128, 128, 8, 8),
    TiledConfig(128, 64, 8, 4),
    TiledConfig(128, 32, 8, 4),
    TiledConfig(64, 64, 4, 4),
    TiledConfig(64, 32, 4, 4),
    TiledConfig(32, 64, 4, 4),
    TiledConfig(32, 32, 4, 4),
)


@dataclass(frozen=True)
class Tiled(Rung[LinearProblem, TiledConfig]):
    def supports(self, problem: LinearProblem) -> str | None:
        return refuses_pixels(self.name, problem)

    def configs(self, problem: LinearProblem) -> tuple[TiledConfig, ...]:
        offered, multiprocessors = list(TILES), self.card.multiprocessors
        for config in TILES:
            most = min(
                4 * multiprocessors // config.tiles(problem), problem.in_features // (4 * TILE_DEPTH), 32
            )
            offered += [replace(config, splits=splits) for splits in {most, most // 2} if splits > 1]
        return tuple(sorted(offered, key=lambda config: config.cost(problem, multiprocessors))[:12])

    def recipe(self, problem: LinearProblem, config: TiledConfig) -> Recipe:
        p, whole = problem, config.splits == 1
        finished = p if whole else replace(p, bias=False, relu=False, activation="")
        program = Program.of(
            "linear/tiled.cu",
            constants=activation.constants_of(finished),
            problem=finished,
            config=config,
            vector=widest_vector(p.dtype, p.in_features),
            tile_depth=TILE_DEPTH,
        )
        product = KernelCall(
            program,
            (config.tiles(p), config.splits, 1),
            (config.threads, 1, 1),
            launch_arguments(p, "y" if whole else "parts"),
            overlap=True,
        )
        if whole:
            return Recipe((product,))
        parts = Workspace("parts", config.splits * p.output_elements * 4)
        return Recipe((product, _sum_parts(p, config.splits)), (parts,))


def _sum_parts(problem: LinearProblem, splits: int) -> KernelCall:
    p = problem
    width = widest_vector("fp32", p.out_features)
    return KernelCall(
        Program.of(
            "linear/tiled_sum_parts.cu",
            constants=activation.constants_of(p),
            problem=p,
            width=width,
            splits=splits,
        ),
        (ceil_div(p.output_elements // width, 128), 1, 1),
        (128, 1, 1),
        (
            Buffer("parts"),
            Buffer("bias", optional=True),
            Buffer("y"),
            p.out_features,
            Int64(p.output_elements),
        ),
        overlap=True,
    )


@dataclass(frozen=True)
class WarpConfig(Config):
    rows: int
    """Rows of x per warp."""
    outputs: int
    """Output features per warp."""
    stages: int
    """Stages of the ring, in packs of a row of weights."""
    output_warps: int
    """Warps per CTA along the outputs."""
    depth_warps: int
    """Warps per CTA along k."""

    def warps(self, problem: LinearProblem) -> int:
        groups = ceil_div(problem.batch, self.rows) * ceil_div(problem.out_features, self.outputs)
        return groups * self.depth_warps


MOST_ROWS = 64
"""Largest number of rows; every eight of them read the weights again."""
ENOUGH_WARPS = 24
"""Warps per SM that keep memory busy."""
_OUTPUTS = {1: (1, 2), 2: (2, 1), 4: (4, 2), 8: (4, 2)}
"""Outputs per warp, by its rows: more rows should share loads of x among more outputs."""
_STAGES = {1: 8, 2: 6, 4: 4}
"""Stages, by outputs per warp: the rings of 8 warps take 32 to 64 KiB, so that several CTAs share an SM."""


@dataclass(frozen=True)
class WarpPerOutput(Rung[LinearProblem, WarpConfig]):
    def supports(self, problem: LinearProblem) -> str | None:
        if problem.batch > MOST_ROWS:
            return f"{self.name} takes up to {MOST_ROWS} rows, not {problem.batch}: every eight read the weights again"
        return refuses_pixels(self.name, problem)

    def configs(self, problem: LinearProblem) -> tuple[WarpConfig, ...]:
        rows = next((count for count in (1, 2, 4) if problem.batch <= count), 8)
        offered = []
        for outputs in _OUTPUTS[rows]:
            for stages in (_STAGES[outputs], _STAGES[outputs] // 2 + 1):
                fitted = _fitted(problem, WarpConfig(rows, outputs, stages, 8, 1), self.card)
                offered += [fitted, *_variations(fitted)]
        return tuple(dict.fromkeys(offered))

    def recipe(self, problem: LinearProblem, config: WarpConfig) -> Recipe:
        width = widest_vector(problem.dtype, problem.in_features)
        warps = config.output_warps * config.depth_warps
        call = KernelCall(
            Program.of(
                "linear/warp_per_output.cu",
                constants=activation.constants_of(problem),
                problem=problem,
                width=width,
                config=config,
                warps=warps,
            ),
            (
                ceil_div(problem.out_features, config.outputs * config.output_warps),
                ceil_div(problem.batch, config.rows),
                1,
            ),
            (warps * 32, 1, 1),
            (*launch_arguments(problem), WeightsReady(("weight", "bias"))),
            shared_bytes=warps * config.stages * config.outputs * 32 * width * ELEMENT_BYTES[problem.dtype],
            overlap=True,
        )
        return Recipe((call,))


def _fitted(problem: LinearProblem, config: WarpConfig, card: Card) -> WarpConfig:
    """Split k among enough warps to fill the card, as long as each fills its ring."""
    packs = problem.in_features // widest_vector(problem.dtype, problem.in_features)
    while (
        config.depth_warps < 8
        and config.warps(problem) < ENOUGH_WARPS * card.multiprocessors
        and packs > 32 * config.stages * config.depth_warps
    ):
        config = replace(config, output_warps=config.output_warps // 2, depth_warps=2 * config.depth_warps)
    each = ceil_div(packs, 32 * config.depth_warps)
    return replace(config, stages=max(2, min(config.stages, each + 1)))


def _variations(config: WarpConfig) -> list[WarpConfig]:
    """Return configs with half the warps per CTA, and other splits between outputs and k."""
    half = replace(config, output_warps=max(1, config.output_warps // 2))
    deeper = replace(half, depth_warps=2 * config.depth_warps)
    return [other for other in (half, deeper) if other.output_warps * other.depth_warps <= 8]


# Predictions are for 25088to4096 in fp16 (206 MB of weights): batch 32 for `tiled`, batch 1 for `warp_per_output`.
NAIVE = Naive("naive", "one thread per output, everything read from global memory", None, None)
TILED = Tiled(
    "tiled",
    "tiles of x and of the weights in shared memory, up to 64 outputs in a thread's registers; split-K where tiles are "
    "few",
    below="naive",
    # naive: 3.3 G multiply-adds with a 32-sector load each, 0.5 M warp requests per microsecond at best: about 6 ms;
    # tiled: 6.6 GFLOP at 25 TFLOP/s, 0.26 ms.
    predicted_gain=20.0,
)
WARP_PER_OUTPUT = WarpPerOutput(
    "warp_per_output",
    "for a few rows: each warp streams rows of weights through a ring of asynchronous copies, 16 bytes per lane, and "
    "reduces by shuffles",
    below="tiled",
    # 206 MB at 3.6 TB/s, 57 us; tiled multiplies 32 rows of which 31 are padding, at 25 TFLOP/s: 260 us.
    predicted_gain=4.5,
)
