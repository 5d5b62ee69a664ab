"""Memory-bound 1x1 filters: weights stay in shared memory, pixels and results in registers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from escalade.device.program import Constant, Macro, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, ReleaseDependents, WeightsReady, Workspace
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import VECTOR_BYTES
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.epilogue import SPECIAL_LANES, activation_cost
from escalade.ops.conv2d.rungs.rung import Conv2dRung, fitting_blocks, portable_first
from escalade.ops.shared import activation, prologue

BLOCK_BYTES = 64
"""Bytes of a pixel's channels per channel block: 16 for each of four lanes."""
PIXELS, FILTERS = 8, 16
"""N and M of an mma.sync."""
MOST_SUMS = 96
"""Accumulator registers per thread."""
MOST_SLOTS = 64
"""Registers per thread for channels in flight."""
MOST_RESIDUALS = 48
"""Registers per thread for residuals."""
OTHER_REGISTERS = 44
"""Other registers per thread: addresses, counters, and the current weights."""
PROLOGUE_REGISTERS = 24
"""Registers per thread for the operands of a prologue besides x and gates."""
MOST_THREADS = 2048
"""Threads per SM."""
MOST_CONFIGS = 16

START_CLOCKS = 200.0
"""Clocks from the launch to the first loads, plus those from the last results to the end."""
LATENCY = 900.0
"""Latency of a load of x in clocks, if nothing hides it."""
SHARED_RATE = 128.0
"""Bytes of shared memory read per clock and SM."""
SCHEDULERS = 4
"""Instructions issued per clock and SM."""
STORED = 1.0
"""Instructions per result to pack and store it, besides its activation."""
GATED = 0.5
"""Cost of loading a pixel's gates relative to its channels: all pixels of an image share them in L1."""
TILE_INSTRUCTIONS = 60.0
"""Instructions per tile for addresses and loop ends."""
BESIDES = 4.0
"""Share of the other units' work, divided by the warps of an SM, that is not hidden behind the busiest unit: each of
four schedulers chooses among a quarter of the warps."""


@dataclass(frozen=True)
class ResidentConfig(Config):
    pixel_blocks: int
    """8-pixel blocks per warp tile."""
    filter_blocks: int
    """16-filter blocks per CTA."""
    depth: int
    """Channel blocks in flight per warp."""
    warps: int
    blocks_per_sm: int = 1


@dataclass(frozen=True)
class _Tiling:
    """Sizes derived from a problem and a config; the kernel computes the same."""

    problem: Conv2dProblem
    config: ResidentConfig

    @cached_property
    def columns(self) -> int:
        """CTA columns that the filters are split into."""
        return ceil_div(self.problem.filters, FILTERS * self.config.filter_blocks)

    @cached_property
    def steps(self) -> int:
        """MMA steps per tile: two per channel block, except for a half block at the end."""
        blocks, rest = _blocks(self.problem), _row_bytes(self.problem) % BLOCK_BYTES
        rounds = ceil_div(blocks, self.config.depth)
        half = rounds == 1 and 0 < rest <= BLOCK_BYTES // 2
        return 2 * rounds * self.config.depth - half

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of weights per column: four registers of a warp per step and filter block."""
        return self.steps * self.config.filter_blocks * 32 * 16

    @property
    def by_channel_bytes(self) -> int:
        """Bytes of fp32 gains and shifts that a warp reads from shared memory."""
        read = sum(name != "gate" for name in prologue.operands(self.problem))
        return read * self.steps * 32 * 4 * (8 // self.problem.element_bytes)

    @property
    def shared_bytes(self) -> int:
        """Bytes of weights, bias, and the fp32 gains and shifts of a prologue."""
        c, blocks = self.config, _blocks(self.problem)
        channels = ceil_div(blocks, c.depth) * c.depth * BLOCK_BYTES // self.problem.element_bytes
        by_channel = 2 * channels if self.problem.prologue else 0
        return self.weight_bytes + (c.filter_blocks * FILTERS + by_channel) * 4

    @property
    def registers(self) -> int:
        """Estimated registers per thread."""
        c = self.config
        area = c.pixel_blocks * c.filter_blocks
        residuals = area * self.problem.element_bytes if self.problem.residual else 0
        gates = 8 * c.pixel_blocks if "gate" in prologue.operands(self.problem) else 0
        prepared = PROLOGUE_REGISTERS + gates if self.problem.prologue else 0
        slots = 4 * c.pixel_blocks * (c.depth + 1)
        return 4 * area + slots + residuals + prepared + OTHER_REGISTERS

    def fitting_blocks(self, card: Card) -> int:
        """Return the CTAs that fit on an SM."""
        threads = self.config.warps * 32
        return min(fitting_blocks(card, threads, self.registers, self.shared_bytes), MOST_THREADS // threads)

    @cached_property
    def tiles(self) -> int:
        return ceil_div(self.problem.output_pixels, PIXELS * self.config.pixel_blocks)

    def turns(self, card: Card, blocks_per_sm: int | None = None) -> int:
        """Return the tiles per warp with all CTAs in one wave."""
        resident = self.config.blocks_per_sm if blocks_per_sm is None else blocks_per_sm
        rows = max(1, card.multiprocessors * resident // self.columns)
        return ceil_div(self.tiles, rows * self.config.warps)

    def grid(self, card: Card) -> int:
        return self._grid(self.turns(card))

    def _grid(self, turns: int) -> int:
        return ceil_div(self.tiles, turns * self.config.warps) * self.columns

    def clocks(self, card: Card, blocks_per_sm: int | None = None) -> float:
        """Estimate the clocks of the busiest SM: its busiest unit, or the latency of one warp's tiles.

        `blocks_per_sm` replaces the config's.
        """
        p, c = self.problem, self.config
        products = self.steps * c.pixel_blocks * c.filter_blocks
        results = 4 * c.pixel_blocks * c.filter_blocks
        instructions, special = activation_cost(p.activation)
        prepared = self.steps * c.pixel_blocks * 8 // p.element_bytes if p.prologue else 0
        before, special_before = activation_cost(p.prologue)
        gated = GATED if "gate" in prologue.operands(p) else 0.0
        x_bytes = PIXELS * c.pixel_blocks * _row_bytes(p)
        y_bytes = PIXELS * c.pixel_blocks * c.filter_blocks * FILTERS * p.element_bytes
        issued = (
            products
            + self.steps * (c.filter_blocks + c.pixel_blocks)
            + results * (STORED + instructions)
            + prepared * (STORED + before)
            + TILE_INSTRUCTIONS
        )
        units = (
            products * PIXELS * FILTERS * BLOCK_BYTES / 4 / card.rates.mma_products,
            (self.weight_bytes + self.by_channel_bytes) / SHARED_RATE,
            issued / SCHEDULERS,
            (results * special + prepared * special_before) * 32 / SPECIAL_LANES,
            (x_bytes * (1 + gated) + y_bytes * (2 if p.residual else 1))
            / card.rates.copies.mma_ring.together,
        )
        turns = self.turns(card, blocks_per_sm)
        blocks = ceil_div(self._grid(turns), card.multiprocessors)
        tile = max(units) + BESIDES * (sum(units) - max(units)) / (blocks * c.warps)
        rounds = ceil_div(_blocks(p), c.depth)
        alone = turns * (issued + SCHEDULERS * units[0]) + LATENCY * (1 + turns * (rounds - 1))
        weights = blocks * self.weight_bytes / card.rates.copies.mma_ring.together
        work = max(blocks * c.warps * turns * tile, alone)
        return START_CLOCKS + weights / rounds + max(work, weights * (rounds - 1) / rounds)


def _row_bytes(p: Conv2dProblem) -> int:
    return p.channels * p.element_bytes


def _blocks(p: Conv2dProblem) -> int:
    """Return the channel blocks."""
    return ceil_div(_row_bytes(p), BLOCK_BYTES)


def _depth(blocks: int, most: int) -> int:
    """Return the channel blocks in flight: all, or the number between `most // 2` and `most` with the least padding."""
    if blocks <= most:
        return blocks
    return min(range(most, most // 2, -1), key=lambda depth: ceil_div(blocks, depth) * depth)


@lru_cache(4096)
def _best_first(p: Conv2dProblem, card: Card) -> tuple[ResidentConfig, ...]:
    all_n, blocks = ceil_div(p.filters, FILTERS), _blocks(p)
    found = {}
    for filter_blocks in sorted({ceil_div(all_n, columns) for columns in range(1, all_n + 1)}):
        for pixel_blocks in (1, 2, 4, 8):
            if 4 * pixel_blocks * filter_blocks > MOST_SUMS:
                continue
            if p.residual and pixel_blocks * filter_blocks * p.element_bytes > MOST_RESIDUALS:
                continue
            most = MOST_SLOTS // (4 * pixel_blocks)
            for depth in {_depth(blocks, most), _depth(blocks, max(1, most // 2))}:
                for warps in (4, 8):
                    config = ResidentConfig(pixel_blocks, filter_blocks, depth, warps)
                    tiling = _Tiling(p, config)
                    fitting = tiling.fitting_blocks(card)
                    if fitting:
                        found[config.changed(blocks_per_sm=fitting)] = tiling.clocks(card, fitting)
    ordered = sorted(found, key=lambda config: found[config])
    return portable_first(ordered, lambda config: _Tiling(p, config).shared_bytes, MOST_CONFIGS)


@dataclass(frozen=True)
class Resident(Conv2dRung[ResidentConfig]):
    dtypes: tuple[str, ...] = ("fp16", "bf16", "tf32")
    layouts: tuple[str, ...] = ("nhwc",)
    supports_prologue = True
    split_rounding = 0.0  # fp32 is not supported
    pitched_buffers = ("x", "y")

    def limits(self, problem: Conv2dProblem) -> str | None:
        p, name = problem, self.name
        if p.taps > 1 or p.padding != (0, 0):
            return f"{name} takes 1x1 filters without padding; overlapped_store takes others"
        if _row_bytes(p) % VECTOR_BYTES or p.filters * p.element_bytes % VECTOR_BYTES:
            return (
                f"{name} moves {VECTOR_BYTES} bytes at once, which do not divide {p.channels} channels or "
                f"{p.filters} filters of {p.element_bytes} bytes; ragged takes any"
            )
        if p.batch < 1:
            return f"{name} needs a batch of at least 1"
        if not _best_first(p.dense, self.card):
            return (
                f"{name} keeps the weights of {p.channels} channels in shared memory, where they do not fit into "
                f"{self.card.shared_bytes} bytes; overlapped_store takes any"
            )
        return None

    def configs(self, problem: Conv2dProblem) -> tuple[ResidentConfig, ...]:
        """Return the configs; the first fits every card, if one does."""
        return _best_first(problem.dense, self.card)

    def clocks(self, problem: Conv2dProblem, config: ResidentConfig) -> float:
        return _Tiling(problem, config).clocks(self.card)

    def estimate(self, problem: Conv2dProblem, config: ResidentConfig) -> float:
        """Pixels skipped by a stride are not read, so `bytes` instead of `traffic`."""
        return self.card.microseconds(self.clocks(problem, config), problem.bytes)

    def recipe(self, problem: Conv2dProblem, config: ResidentConfig) -> Recipe:
        p, tiling = problem, _Tiling(problem, config)
        packed = tiling.columns * tiling.weight_bytes
        strided: dict[str, Constant] = {"STRIDED": Macro("")} if p.stride != (1, 1) else {}
        steps = (
            KernelCall(
                Program.of("conv2d/resident_weights.cu", problem=p, config=config),
                (ceil_div(packed // p.element_bytes, 256), 1, 1),
                (256, 1, 1),
                (Buffer("weight"), Buffer("packed_weight"), p.filters, tiling.columns),
                weights_only=True,
                overlap=True,
            ),
            KernelCall(
                Program.of(
                    "conv2d/resident.cu",
                    constants=prologue.constants(p) | activation.constants_of(p) | strided,
                    problem=p,
                    config=config,
                ),
                (tiling.grid(self.card), 1, 1),
                (config.warps * 32, 1, 1),
                (
                    Buffer("x"),
                    Buffer("packed_weight"),
                    Buffer("bias", optional=True),
                    Buffer("residual", optional=True),
                    Buffer("y"),
                    *prologue.tensors(),
                    arguments.shape(p),
                    WeightsReady(("packed_weight", "bias")),
                    ReleaseDependents(),
                ),
                shared_bytes=tiling.shared_bytes,
                overlap=True,
            ),
        )
        return Recipe(steps, (Workspace("packed_weight", packed),))


# Predictions for 16to96_112_k1s1 at batch 32 in fp16 with SiLU, 1.2 GFLOP and 90 MB.
RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Resident(
        "resident",
        "1x1 filters with weights resident in shared memory: warps without barriers load pixels to registers and store "
        "results from there, 16 bytes per lane, with weights packed to match",
        below="fused_epilogue",
        # 21 us of memory traffic, overlapped with 21 us of special functions, against 87 us of tiles in shared memory.
        predicted_gain=3.0,
    ),
)
