"""The weights' gradient of a depthwise convolution, on CUDA cores: the sums of a row of taps in registers, in NHWC."""

from __future__ import annotations

from dataclasses import dataclass, replace

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import VECTOR_BYTES
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs import parts

WARP = 32
THREADS = 192
"""Threads of a block, about."""
MOST_LANES = 16
HELD = 130
"""Registers that a thread may fill with sums and what is under way; addresses and counters take `BESIDES` more."""
BESIDES = 36
SEGMENTS = (1, 2, 4, 8)
"""Parts of an image's rows, each walked down by itself."""
LATENCY = 700.0
"""Cycles from a load to its value."""
ISSUE_RATE = 4.0
"""Instructions of warps that a multiprocessor starts in a cycle."""
MOST_CONFIGS = 8


@dataclass(frozen=True)
class DepthwiseConfig(Config):
    vector: int
    """Channels of a thread."""
    rows: int
    """Output rows that a thread walks down."""
    lanes: int
    """Threads of a block side by side in the channels."""
    positions: int
    """Columns that a block walks down at once."""
    part_rounds: int = 1
    """Columns that each thread of a block walks down."""

    def threads(self, f: Conv2dProblem) -> int:
        return self.lanes * f.filter_height * self.positions

    def walks(self, f: Conv2dProblem) -> int:
        return f.batch * ceil_div(f.output_height, self.rows) * f.output_width

    def tiles(self, f: Conv2dProblem) -> int:
        return ceil_div(f.channels, self.lanes * self.vector)


def _held(f: Conv2dProblem, vector: int) -> int:
    """Registers for sums, and for a step that is multiplied and one that is under way."""
    words = ceil_div(vector * f.element_bytes, 4)
    return f.filter_width * vector + vector + 2 * (f.filter_width + 1) * words


def _work(problem: Conv2dWeightGradientProblem, config: DepthwiseConfig, card: Card) -> parts.Work:
    f, vector = problem.forward, config.vector
    warps = ceil_div(config.threads(f), WARP)
    resident = max(1, min(64, card.registers // WARP // (_held(f, vector) + BESIDES)) // warps)
    step = (2 * f.filter_width + 1) * vector + 6 * (f.filter_width + 1) + 10
    busy = warps * (config.rows * step + 100) / ISSUE_RATE
    cycles = max(busy * resident, (1 + config.rows) * LATENCY)
    rounds = ceil_div(config.walks(f), config.positions)
    return parts.Work(
        config.tiles(f), rounds, cycles, card.multiprocessors * resident, problem.part_elements, card
    )


@dataclass(frozen=True)
class Depthwise(Rung[Conv2dWeightGradientProblem, DepthwiseConfig]):
    def supports(self, problem: Conv2dWeightGradientProblem) -> str | None:
        f = problem.forward
        if f.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {f.layout}"
        if not f.groups == f.channels == f.filters:
            return (
                f"{self.name} takes a group and a filter for each channel, not {f.groups} groups and {f.filters} "
                f"filters for {f.channels}; direct takes any"
            )
        if f.output_pixels >= 2**31:
            return f"{self.name} counts columns in 32 bits; {f.output_pixels} output pixels are too many"
        if not self._candidates(f):
            return (
                f"{self.name} keeps the sums of a row of taps in registers, and filters of "
                f"{f.filter_height}x{f.filter_width} leave no room; direct takes any"
            )
        return None

    def _candidates(self, f: Conv2dProblem) -> list[DepthwiseConfig]:
        widest = VECTOR_BYTES // f.element_bytes
        vectors = [
            vector
            for vector in (8, 4, 2, 1)
            if vector <= widest and f.channels % vector == 0 and _held(f, vector) <= HELD
            if f.filter_height <= THREADS
        ]
        found = []
        for vector in vectors:
            columns = f.channels // vector
            lanes = ceil_div(columns, ceil_div(columns, MOST_LANES))
            positions = max(1, THREADS // (lanes * f.filter_height))
            found += [
                DepthwiseConfig(vector, rows, lanes, positions)
                for rows in sorted({ceil_div(f.output_height, count) for count in SEGMENTS})
            ]
        return found

    def configs(self, problem: Conv2dWeightGradientProblem) -> tuple[DepthwiseConfig, ...]:
        found = [
            replace(config, part_rounds=_work(problem, config, self.card).best())
            for config in self._candidates(problem.forward)
        ]
        return tuple(sorted(found, key=lambda config: self.estimate(problem, config))[:MOST_CONFIGS])

    def estimate(self, problem: Conv2dWeightGradientProblem, config: DepthwiseConfig) -> float:
        return _work(problem, config, self.card).microseconds(problem, config.part_rounds)

    def recipe(self, problem: Conv2dWeightGradientProblem, config: DepthwiseConfig) -> Recipe:
        f = problem.forward
        walks, part_walks = config.walks(f), config.part_rounds * config.positions
        count = ceil_div(walks, part_walks)
        constants: dict[str, Constant] = {
            **parts.constants(problem),
            "FILTER_HEIGHT": f.filter_height,
            "FILTER_WIDTH": f.filter_width,
            "STRIDE_H": f.stride[0],
            "STRIDE_W": f.stride[1],
            "DILATION_H": f.dilation[0],
            "DILATION_W": f.dilation[1],
            "VECTOR": config.vector,
            "ROWS": config.rows,
            "LANES": config.lanes,
            "THREADS": config.threads(f),
        }
        product = KernelCall(
            Program.of("conv2d_weight_gradient/depthwise.cu", "conv2d_weight_gradient_depthwise", constants),
            (config.tiles(f), count, 1),
            (config.threads(f), 1, 1),
            (
                Buffer("x"),
                Buffer("gradient"),
                Buffer(parts.PARTS),
                arguments.shape(f),
                walks,
                part_walks,
            ),
            overlap=True,
        )
        return parts.recipe(problem, product, count)


# Prediction for 144to144_56_k3s1g144 at batch 256 in fp16, 1 GFLOP and 462 MB.
DEPTHWISE = Depthwise(
    "depthwise",
    "a filter for every channel: a thread walks down a column with the sums of a row of taps in registers, several "
    "channels at a time; threads of other rows meet it in the L1 cache, so that x and the gradient are read once",
    below="direct",
    # direct: 1,296 sums of 0.8 M pixels each in 256 parts, two loads of 2 bytes for a product, 1 G of them at 32 lanes
    # of each multiprocessor: 0.3 ms, and lines of which it uses 2 bytes at a time, several ms. Here 462 MB at 85% of a
    # copy's rate are 125 us, 6 for parts and launches. Too much was expected: at batch 64, whose bytes pass in 28 us,
    # an H200 took 93, and 96 when a thread had all taps; what it waits for was not looked into.
    predicted_gain=20.0,
)
