"""Weight gradients of depthwise convolutions on CUDA cores, with the sums of a row of taps in registers, in NHWC."""

from __future__ import annotations

from dataclasses import dataclass, replace

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import VECTOR_BYTES
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs import parts
from escalade.ops.conv2d_weight_gradient.rungs.rung import WeightGradientRung

WARP = 32
THREADS = 192
"""Approximate threads per CTA."""
MOST_LANES = 16
HELD = 130
"""Registers per thread for accumulators and loads in flight; addresses and counters need `BESIDES` more."""
BESIDES = 36
SEGMENTS = (1, 2, 4, 8)
"""Row segments per image, each walked separately."""
LATENCY = 700.0
"""Latency of a load in cycles."""
ISSUE_RATE = 4.0
"""Warp instructions issued per cycle and SM."""
MEASURED = 1.6
"""Measured / modeled time on an H200: 100 us for 144to144_56_k3s1 at batch 64, 236 for 96to96_56_k7s1."""
MOST_CONFIGS = 8


@dataclass(frozen=True)
class DepthwiseConfig(Config):
    vector: int
    """Channels per thread."""
    rows: int
    """Output rows per walk of a thread."""
    lanes: int
    """Threads per CTA along the channels."""
    positions: int
    """Columns that a CTA walks at once."""
    part_rounds: int = 1
    """Columns per thread."""

    def threads(self, f: Conv2dProblem) -> int:
        return self.lanes * f.filter_height * self.positions

    def walks(self, f: Conv2dProblem) -> int:
        return f.batch * ceil_div(f.output_height, self.rows) * f.output_width

    def tiles(self, f: Conv2dProblem) -> int:
        return ceil_div(f.channels, self.lanes * self.vector)


def _held(f: Conv2dProblem, vector: int) -> int:
    """Return the registers for accumulators, for the current step and for one in flight."""
    words = ceil_div(vector * f.element_bytes, 4)
    return f.filter_width * vector + vector + 2 * (f.filter_width + 1) * words


def _work(problem: Conv2dWeightGradientProblem, config: DepthwiseConfig, card: Card) -> parts.SplitWork:
    f, vector = problem.forward, config.vector
    warps = ceil_div(config.threads(f), WARP)
    resident = max(1, min(64, card.registers // WARP // (_held(f, vector) + BESIDES)) // warps)
    step = (2 * f.filter_width + 1) * vector + 6 * (f.filter_width + 1) + 10
    busy = warps * (config.rows * step + 100) / ISSUE_RATE
    cycles = max(busy * resident, (1 + config.rows) * LATENCY)
    rounds = ceil_div(config.walks(f), config.positions)
    return parts.SplitWork(
        config.tiles(f), rounds, cycles, card.multiprocessors * resident, problem.part_elements, card
    )


@dataclass(frozen=True)
class Depthwise(WeightGradientRung[DepthwiseConfig]):
    layouts: tuple[str, ...] = ("nhwc",)
    takes_groups = True

    def limits(self, problem: Conv2dWeightGradientProblem) -> str | None:
        f = problem.forward
        if not f.groups == f.channels == f.filters:
            return (
                f"{self.name} takes one group and filter per channel, not {f.groups} groups and {f.filters} filters "
                f"for {f.channels} channels; direct takes any"
            )
        if f.output_pixels >= 2**31:
            return f"{self.name} counts columns in 32 bits, too few for {f.output_pixels} output pixels"
        if not self._candidates(f):
            return (
                f"{self.name} keeps the sums of a row of taps in registers; filters of "
                f"{f.filter_height}x{f.filter_width} do not fit. direct takes any"
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
        return MEASURED * _work(problem, config, self.card).microseconds(problem, config.part_rounds)

    def recipe(self, problem: Conv2dWeightGradientProblem, config: DepthwiseConfig) -> Recipe:
        f = problem.forward
        walks, part_walks = config.walks(f), config.part_rounds * config.positions
        count = ceil_div(walks, part_walks)
        product = KernelCall(
            Program.of("conv2d_weight_gradient/depthwise.cu", problem=problem, forward=f, config=config),
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
    "one filter per channel: a thread walks down a column with the sums of a row of taps in registers, several "
    "channels at a time; threads of other rows hit L1, so that x and the gradient are read once",
    below="direct",
    # direct: 1,296 sums of 0.8 M pixels each in 256 parts, two 2-byte loads per product, 1 G of them at 32 lanes per
    # SM: 0.3 ms, and cache lines of which it uses 2 bytes at a time, several ms. Here 462 MB at 85% of copy bandwidth
    # are 125 us, plus 6 for parts and launches. That was too optimistic: at batch 64 (28 us of traffic) an H200 took 93
    # us, and 96 with all taps per thread; the stall was not investigated.
    predicted_gain=20.0,
)
