"""Gradients in one launch of persistent CTAs, and one that adds up their partial sums."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Macro, Program
from escalade.device.recipe import Argument, Buffer, KernelCall, Recipe, Workspace
from escalade.ops.base.card import Card
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.mlp.problem import ACTIVATIONS, Layer
from escalade.ops.mlp_backward.problem import MlpBackwardProblem
from escalade.ops.mlp_backward.rungs.layers import PARTS, sum_parts

MOST_LAYERS = 16
"""Largest number of layers; each is unrolled into the kernel."""
TILES = (4, 8, 12, 16, 32)
"""Rows per tile, in multiples of four."""
_SHARE = (32, 64)
"""Features and outputs of a warp's share of the weights, or vice versa; a thread has 8 by 8."""


@dataclass(frozen=True)
class FusedConfig(Config):
    rows: int
    """Rows per tile."""
    threads: int
    """Threads per CTA."""


@dataclass(frozen=True)
class BackwardLayer:
    """Offsets of a layer in shared memory, in floats, and the split of its products."""

    layer: Layer
    input_at: int
    gradient_at: int
    weight_at: int
    bias_at: int
    sums_at: int
    rstd_at: int
    forward_splits: int
    backward_splits: int
    wide: bool
    first_warp: int


@dataclass(frozen=True)
class BackwardPlan:
    layers: tuple[BackwardLayer, ...]
    scratch_at: int
    shared_floats: int
    warp_tiles: int

    @property
    def shared_bytes(self) -> int:
        return 4 * self.shared_floats


def plan(layers: tuple[Layer, ...], config: FusedConfig, card: Card) -> BackwardPlan:
    offsets: list[dict[str, int]] = []
    at = 0

    def allocate(floats: int) -> int:
        nonlocal at
        start = at
        at += _padded(floats)
        return start

    for layer in layers:
        rows = config.rows * layer.groups
        exchange = 2 * config.threads // 32 if layer.norm else 0
        offsets.append(
            {
                "input_at": allocate(rows * _pitch(layer.features)),
                "gradient_at": allocate(rows * _pitch(layer.outputs)),
                "weight_at": allocate(max(_padded(layer.outputs), exchange) * _pitch(layer.features)),
                "bias_at": allocate(layer.outputs),
                "sums_at": allocate(layer.outputs),
                "rstd_at": allocate(rows if layer.norm else 0),
            }
        )
    scratch_at = at
    least = max(config.rows * layer.groups * _padded(max(layer.features, layer.outputs)) for layer in layers)
    scratch = max(least, min(2 * least, card.shared_bytes // 4 - at))
    warps = _first_warps(layers)
    planned = tuple(
        BackwardLayer(
            layer,
            **offset,
            forward_splits=_splits(config, layer.groups, layer.outputs, layer.features, scratch),
            backward_splits=_splits(config, layer.groups, layer.features, layer.outputs, scratch),
            wide=_wide(layer),
            first_warp=first,
        )
        for layer, offset, first in zip(layers, offsets, warps, strict=True)
    )
    return BackwardPlan(planned, scratch_at, at + _padded(scratch), sum(map(_warp_tiles, layers)))


def _padded(count: int) -> int:
    """Round up to 16 bytes."""
    return 4 * ceil_div(count, 4)


def _pitch(columns: int) -> int:
    return 4 * (ceil_div(columns, 4) | 1)


def _warp_tiles(layer: Layer) -> int:
    return min(_tiles(layer, True), _tiles(layer, False))


def _tiles(layer: Layer, wide: bool) -> int:
    features, outputs = reversed(_SHARE) if wide else _SHARE
    return ceil_div(layer.features, features) * ceil_div(layer.outputs, outputs)


def _wide(layer: Layer) -> bool:
    return _tiles(layer, True) <= _tiles(layer, False)


def _first_warps(layers: tuple[Layer, ...]) -> list[int]:
    """Assign warps to layers: those with many groups, which have long sums, first, round-robin over the four
    schedulers."""
    order = sorted(range(len(layers)), key=lambda number: -layers[number].groups)
    first, at = [0] * len(layers), 0
    for number in order:
        first[number] = at
        at += _warp_tiles(layers[number])
    return first


def _splits(config: FusedConfig, groups: int, columns: int, depth: int, scratch: int) -> int:
    """Return the parts of k that have threads, scratch memory and work (two steps of four)."""
    rows = config.rows * groups
    tiles = rows // 4 * ceil_div(columns, 4)
    most = min(config.threads // tiles, scratch // (rows * _padded(columns)), ceil_div(depth, 8))
    steps = ceil_div(depth, 4)
    return ceil_div(steps, ceil_div(steps, max(1, most)))  # no empty split


@dataclass(frozen=True)
class Fused(Rung[MlpBackwardProblem, FusedConfig]):
    def supports(self, problem: MlpBackwardProblem) -> str | None:
        if len(problem.layers) > MOST_LAYERS:
            return f"{self.name} takes up to {MOST_LAYERS} layers, not {len(problem.layers)}"
        if problem.batch >= 2**31:
            return f"{self.name} counts rows in 32 bits, not {problem.batch}"
        needed = self._planned(problem, TILES[0]).shared_bytes
        if needed > self.card.shared_bytes:
            return (
                f"{self.name} keeps all weights and four rows of every layer in {needed} bytes of shared memory, but a "
                f"CTA has {self.card.shared_bytes}"
            )
        return None

    def configs(self, problem: MlpBackwardProblem) -> tuple[FusedConfig, ...]:
        return self._offered(problem)

    def recipe(self, problem: MlpBackwardProblem, config: FusedConfig) -> Recipe:
        p, planned = problem, plan(problem.layers, config, self.card)
        per_sm = _blocks_per_sm(planned, config, self.card)
        tiles = ceil_div(p.batch, config.rows)
        blocks = min(tiles, per_sm * self.card.multiprocessors)
        pitch = _padded(p.parameter_elements)
        names = tuple(p.sizes)
        lists: dict[str, Constant] = {
            "LAYER_LIST": Macro(
                ", ".join(_spell(problem, number, one) for number, one in enumerate(planned.layers))
            ),
            "PARAMETER_LIST": Macro(", ".join(f"const Element* {name}" for name in names)),
            "PARAMETER_NAMES": Macro(", ".join(names)),
        }
        program = Program.of(
            "mlp_backward/fused.cu",
            constants=lists,
            problem=p,
            config=config,
            plan=planned,
            blocks_per_sm=per_sm,
            part_pitch=pitch,
        )
        arguments: tuple[Argument, ...] = (
            Buffer("x"),
            Buffer("grad_y"),
            Buffer(PARTS),
            Buffer("y", offset=4 * p.parameter_elements),
            tiles,
            p.batch - (tiles - 1) * config.rows,
            *(Buffer(name) for name in names),
        )
        walk = KernelCall(
            program,
            (blocks, 1, 1),
            (config.threads, 1, 1),
            arguments,
            shared_bytes=planned.shared_bytes,
            overlap=True,
        )
        return Recipe(
            (walk, sum_parts(blocks, pitch, p.parameter_elements)), (Workspace(PARTS, 4 * blocks * pitch),)
        )

    def _threads(self, problem: MlpBackwardProblem) -> int:
        """Return the threads: one warp per share of the weights, between 8 and 16 warps."""
        return 512 if sum(map(_warp_tiles, problem.layers)) > 8 else 256

    def _planned(self, problem: MlpBackwardProblem, rows: int) -> BackwardPlan:
        return plan(problem.layers, FusedConfig(rows, self._threads(problem)), self.card)

    def _offered(self, problem: MlpBackwardProblem) -> tuple[FusedConfig, ...]:
        """Return the configs that fit, best first."""
        fitting = [
            FusedConfig(rows, self._threads(problem))
            for rows in TILES
            if self._planned(problem, rows).shared_bytes <= self.card.shared_bytes
        ]
        return tuple(sorted(fitting, key=lambda config: self._clocks(problem, config)))

    def _clocks(self, problem: MlpBackwardProblem, config: FusedConfig) -> float:
        """Estimate the clocks of the busiest SM: half of 128 multiply-adds per clock, some 300 clocks per layer for
        barriers and latency, and the reduction of partial sums."""
        planned = plan(problem.layers, config, self.card)
        per_sm = _blocks_per_sm(planned, config, self.card)
        tiles = ceil_div(problem.batch, config.rows)
        each = problem.flops / problem.batch / 2 * config.rows / 64 + 300 * len(problem.layers)
        parts = min(tiles, per_sm * self.card.multiprocessors)
        return (
            ceil_div(tiles, self.card.multiprocessors) * each + parts * problem.parameter_elements * 8 / 2500
        )


def _blocks_per_sm(planned: BackwardPlan, config: FusedConfig, card: Card) -> int:
    return max(1, min(512 // config.threads, card.resident_blocks(planned.shared_bytes)))


def _spell(problem: MlpBackwardProblem, number: int, one: BackwardLayer) -> str:
    """Return a layer as an initializer of the kernel's struct Layer."""
    layer = one.layer
    names = list(problem.sizes)
    begin = names.index(f"{layer.parameters[0]}{number}")
    values = (
        layer.features, layer.outputs, layer.groups, layer.norm, layer.bias, ACTIVATIONS.index(layer.activation),
        f"{layer.epsilon!r}f", begin, problem.offsets[names[begin]],
        one.input_at, one.gradient_at, one.weight_at, one.bias_at, one.sums_at, one.rstd_at,
        one.forward_splits, one.backward_splits, one.wide, one.first_warp,
    )  # fmt: skip
    return "{" + ", ".join(str(value).lower() for value in values) + "}"


# Predictions are for the spectral autoencoder at batch 65,536 in fp32.
FUSED = Fused(
    "fused",
    "persistent CTAs run tiles of rows forward and backward in shared memory, with weight gradients in registers; a "
    "second launch adds up their partial sums",
    below="layers",
    # layers: 11 G multiply-adds with two loads each at some 1.5 T loads per second, and 2.5 GB of intermediate values:
    # 16 ms; fused: 19 GFLOP at 30 TFLOP/s.
    predicted_gain=24.0,
)
