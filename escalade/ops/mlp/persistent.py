"""The perceptron by persistent CTAs: tiles of layers, layout of shared memory, and configs for a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Recipe, WeightsReady
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.launch import launch
from escalade.ops.base.rung import Config
from escalade.ops.mlp import cuda_core
from escalade.ops.mlp.cuda_core import ChainRung, gelu_constants, gelu_forms
from escalade.ops.mlp.problem import Layer, MlpProblem

MOST_BATCH = 2**30
_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
_OUTPUTS = (1, 2, 4, 5, 8, 10)
_SPLITS = (1, 2, 4, 8, 16, 32)
_ITEMS = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
_TEAMS = ((2, 128), (3, 128), (4, 128), (1, 256), (2, 256), (1, 128), (1, 512))
_MOST_CONFIGS = 8
_MOST_SUMS = 80


@dataclass(frozen=True)
class PersistentConfig(Config):
    teams: int
    """Teams per CTA, each with rows of its own."""
    threads: int
    """Threads per team."""
    items: int
    """Rows per team at a time."""
    unroll: int
    """Unrolled steps of the product loops."""
    gelu: str
    """One of `gelu_forms`."""


@dataclass(frozen=True)
class Tile:
    """Tile of a layer's product per thread, and the number of lanes that share it."""

    rows: int
    outputs: int
    splits: int

    @property
    def sums(self) -> int:
        return self.rows * self.outputs

    def registers(self, steps: int) -> int:
        """Estimate the registers: accumulators, weights and an activation of each step, addresses."""
        return self.sums + 4 * steps * (self.outputs + 1) + 2 * self.rows + 60

    def passes(self, layer: Layer, items: int, threads: int) -> int:
        tiles = ceil_div(items * layer.groups, self.rows) * ceil_div(layer.outputs, self.outputs)
        return ceil_div(tiles * self.splits, threads)

    def is_regular(self, layer: Layer, items: int) -> bool:
        row_tiles, rest = divmod(items * layer.groups, self.rows)
        return rest == 0 and (items % row_tiles == 0 or row_tiles % items == 0)

    def clocks(self, layer: Layer, items: int, threads: int, teams: int, staged: bool) -> float:
        """Estimate the clocks of all teams for their rows; only the order matters.

        An SM starts 4 multiply-adds of a warp per clock, or a third of a 16-byte load from shared memory, or a sixth of
        one from L2; a single warp waits some 30 clocks for a load.
        """
        steps = ceil_div(max(1, layer.features // 4), self.splits)
        passes = self.passes(layer, items, threads)
        warps = teams * threads // 32
        loads = 3.0 * self.rows + (3.0 if staged else 6.0) * self.outputs
        busy = warps * (steps * max(self.sums, loads) + (self.sums if self.splits > 1 else 0))
        alone = steps * (30 + 4 * self.sums + self.rows + self.outputs) + 30 * math.log2(self.splits)
        finish = 12 * warps * self.sums / self.splits / 4 + 60
        return passes * (max(busy, alone) + finish)


@dataclass(frozen=True)
class LayerLayout:
    """One layer as in kernels/mlp/persistent.cu: sizes and offsets in floats."""

    tile: Tile
    input_at: int
    input_pitch: int
    output_at: int
    weight_at: int
    weight_pitch: int
    bias_at: int
    norm_at: int
    regular: bool
    """True if the distances between a thread's rows are compile-time constants."""

    def fields(self) -> tuple[int, ...]:
        return (
            self.tile.rows, self.tile.outputs, self.tile.splits, self.input_at, self.input_pitch, self.output_at,
            self.weight_at, self.weight_pitch, self.bias_at, self.norm_at,
        )  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Shape of a CTA, as in `PersistentConfig`."""

    teams: int
    threads: int
    items: int

    @property
    def registers(self) -> int:
        """Registers per thread."""
        return min(255, 65536 // (self.teams * self.threads))


@dataclass(frozen=True)
class PersistentPlan:
    shape: Shape
    layouts: tuple[LayerLayout, ...]
    result_pitch: int
    staged_floats: int
    team_floats: int
    clocks: float
    """Clocks per round: the rows of all teams through all layers."""

    @property
    def shared_bytes(self) -> int:
        return 4 * (self.staged_floats + self.shape.teams * self.team_floats)

    @property
    def fits_two_steps(self) -> bool:
        """True if registers allow two steps; rows at irregular distances need two each."""
        return all(
            layout.tile.registers(2) + (0 if layout.regular else 2 * layout.tile.rows + 16)
            <= self.shape.registers
            for layout in self.layouts
        )


@lru_cache(maxsize=4096)
def plan(layers: tuple[Layer, ...], shape: Shape, shared_bytes: int) -> PersistentPlan | None:
    """Return the plan of a chain, or None if not even the rows fit into `shared_bytes`."""
    teams, threads, items = shape.teams, shape.threads, shape.items
    tiles = [_tile(layer, shape) for layer in layers]
    slots, pitches = [0, 0], []
    slot, inputs, outputs = 0, [], []
    widths = [layer.groups * _padded(layer.features) for layer in layers] + [_padded(layers[-1].width_out)]
    for number, (layer, tile) in enumerate(zip(layers, tiles, strict=True)):
        pitches.append(_row_pitch(widths[number]))
        slots[slot] = max(slots[slot], pitches[-1])
        inputs.append(slot)
        if tile.passes(layer, items, threads) > 1:
            slot = 1 - slot
        outputs.append(slot)
    result_pitch = _row_pitch(widths[-1])
    slots[slot] = max(slots[slot], result_pitch)
    starts = (0, items * slots[0])
    team_floats = items * (slots[0] + slots[1])
    room = shared_bytes // 4 - teams * team_floats
    if room < 0:
        return None
    staged = _staged(layers, tiles, room)
    layouts, at, clocks = [], 0, 0.0
    for number, (layer, tile) in enumerate(zip(layers, tiles, strict=True)):
        is_staged = number in staged
        pitch = _weight_pitch(layer, tile)
        bias_at = at + pitch * layer.outputs
        norm_at = bias_at + (_padded(layer.outputs) if layer.bias else 0)
        layouts.append(
            LayerLayout(
                tile, starts[inputs[number]], pitches[number], starts[outputs[number]],
                at if is_staged else -1, pitch, bias_at, norm_at, tile.is_regular(layer, items),
            )
        )  # fmt: skip
        at += _staged_floats(layer, tile) if is_staged else 0
        # Barriers, and the latency of norms and activations, which occupy few warps.
        clocks += tile.clocks(layer, items, threads, teams, is_staged) + 100 + 40_000 / (teams * threads)
    return PersistentPlan(shape, tuple(layouts), result_pitch, at, team_floats, clocks)


def _tile(layer: Layer, shape: Shape) -> Tile:
    """Return the fastest tile that fits into registers."""
    items, threads = shape.items, shape.threads
    found = [
        tile
        for tile in (Tile(*sizes) for sizes in product(_ROWS, _OUTPUTS, _SPLITS))
        if tile.sums % tile.splits == 0
        and tile.sums <= _MOST_SUMS
        and tile.registers(1) <= shape.registers
        and (tile.splits == 1 or tile.splits * 4 <= layer.features)
        and tile.rows <= items * layer.groups
        and tile.outputs <= layer.outputs
    ]

    def clocks(tile: Tile) -> float:
        return tile.clocks(layer, items, threads, shape.teams, True)

    return min(
        found, key=lambda tile: (clocks(tile) + 50 * (tile.passes(layer, items, threads) > 1), tile.sums)
    )


def _staged(layers: tuple[Layer, ...], tiles: list[Tile], room: int) -> set[int]:
    """Return the layers whose weights are staged in shared memory, most frequently read first."""
    chosen = set()
    sizes = {number: _staged_floats(layer, tiles[number]) for number, layer in enumerate(layers)}
    for number in sorted(sizes, key=lambda number: (-layers[number].groups, sizes[number])):
        if sizes[number] <= room:
            chosen.add(number)
            room -= sizes[number]
    return chosen


def _staged_floats(layer: Layer, tile: Tile) -> int:
    vectors = (_padded(layer.outputs) if layer.bias else 0) + (
        2 * _padded(layer.features) if layer.norm else 0
    )
    return layer.outputs * _weight_pitch(layer, tile) + vectors


def _padded(floats: int) -> int:
    """Round up to 16 bytes."""
    return 4 * ceil_div(floats, 4)


def _weight_pitch(layer: Layer, tile: Tile) -> int:
    """Return a pitch at which eight adjacent lanes, of 8 / splits rows, read 16 bytes from different banks."""
    pitch, splits = _padded(layer.features), tile.splits
    while splits < 8 and pitch % (8 * splits) != 4 * splits:
        pitch += 4
    return pitch


def _row_pitch(width: int) -> int:
    """Return a pitch at which the sums of four adjacent rows, eight each, go to different banks."""
    return width + (8 - width) % 32


@dataclass(frozen=True)
class Persistent(ChainRung[PersistentConfig]):
    def supports(self, problem: MlpProblem) -> str | None:
        if problem.batch >= MOST_BATCH:
            return f"{self.name} counts rows in 30 bits, not {problem.batch}; split the batch"
        return super().supports(problem)

    def shared_bytes(self, problem: MlpProblem) -> int:
        """Return the bytes of the default config; more than available if there is none."""
        offered = _offered(problem.layers, problem.batch, self.card)
        return offered[0].shared_bytes if offered else self.card.shared_bytes + 1

    def configs(self, problem: MlpProblem) -> tuple[PersistentConfig, ...]:
        """Conversions from 16 bits leave no registers for two steps."""
        return tuple(
            PersistentConfig(one.shape.teams, one.shape.threads, one.shape.items, unroll, gelu)
            for gelu in gelu_forms(problem.dtype)
            for one in _offered(problem.layers, problem.batch, self.card)[:_MOST_CONFIGS]
            for unroll in ((2, 1) if one.fits_two_steps and problem.dtype == "fp32" else (1,))
        )

    def recipe(self, problem: MlpProblem, config: PersistentConfig) -> Recipe:
        p = problem
        planned = plan(p.layers, Shape(config.teams, config.threads, config.items), self.card.shared_bytes)
        assert planned is not None
        layers = [
            cuda_core.spell(p, number, widest_vector(p.dtype, layer.features))
            for number, layer in enumerate(p.layers)
        ]
        lists: dict[str, Constant] = {
            **cuda_core.constants(p, layers),
            **gelu_constants(config.gelu),
            "PLACE_LIST": cuda_core.initializers(layout.fields() for layout in planned.layouts),
        }
        program = Program.of(
            "mlp/persistent.cu",
            constants=lists,
            problem=p,
            config=config,
            plan=planned,
            vector_in=widest_vector(p.dtype, p.layers[0].features),
            vector_out=widest_vector(p.dtype, p.outputs),
        )
        parameters = cuda_core.parameters(p)
        return launch(
            program,
            min(self.card.multiprocessors, ceil_div(ceil_div(p.batch, config.items), config.teams)),
            config.teams * config.threads,
            Buffer("x"), Buffer("y"), p.batch, WeightsReady(tuple(parameter.name for parameter in parameters)),
            *parameters,
            shared_bytes=planned.shared_bytes,
        )  # fmt: skip


@lru_cache(maxsize=256)
def _offered(layers: tuple[Layer, ...], batch: int, card: Card) -> tuple[PersistentPlan, ...]:
    """Return the plans that fit, by the rounds of the busiest CTA."""
    shapes = (Shape(*team, items) for team, items in product(_TEAMS, _ITEMS) if items <= batch)
    plans = (plan(layers, shape, card.shared_bytes) for shape in shapes)

    def clocks(one: PersistentPlan) -> float:
        return ceil_div(batch, one.shape.items * one.shape.teams * card.multiprocessors) * one.clocks

    return tuple(sorted((one for one in plans if one is not None), key=clocks))


# For the spectral autoencoder at batch 512 in fp32. `vectorised` reads 119 KB of weights from L2 per row, four rows per
# SM at once at 64 bytes per clock: 7500 clocks and a launch, about 6 us. Here each SM reads them once for its four
# rows, 1900 clocks, and multiplies for about 3000: 3.5 us.
PERSISTENT = Persistent(
    "persistent",
    "persistent CTAs with weights in shared memory; several rows at once share each weight that is read, in register "
    "tiles",
    below="vectorised",
    predicted_gain=1.8,
)
