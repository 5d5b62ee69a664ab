"""Rungs of mlp_backward on tensor cores: layers of a tile of rows in shared memory, weight gradients in registers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from escalade.device.program import Constant, Macro, Program
from escalade.device.recipe import Argument, Buffer, KernelCall, Recipe, Workspace
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.launch import kernel_call
from escalade.ops.base.rung import Config, Rung
from escalade.ops.mlp.problem import ACTIVATIONS, Layer
from escalade.ops.mlp.tensor_core import FOLDED_SUFFIX, foldable, folded, merge
from escalade.ops.mlp_backward.cuda_core import MOST_LAYERS, PARTS, padded, sum_parts
from escalade.ops.mlp_backward.problem import MlpBackwardProblem

STEP = 16
"""Rows, columns and k of an MMA are padded to this."""
TILES = (16, 32, 48, 64, 80, 96, 128)
"""Rows per tile."""
WARPS = 16
_ROUNDING = {"fp16": 2.0**-11, "bf16": 2.0**-8}
"""Largest relative rounding."""
_SHARE = (32, 64)
"""Features and outputs of a warp's share of the weights, or vice versa: 64 accumulators per thread."""
_MULTIPLY_ADDS = 400
"""Multiply-adds per SM and clock, with the activations and norms between them: unmeasured, a third of the rate of
mma.sync."""
_STEP_CLOCKS = 400
"""Clocks per barrier-separated step of a tile, for its latency: unmeasured."""
_START_CLOCKS = 5000
"""Clocks for the weights to arrive and the sums to be stored: unmeasured."""


@dataclass(frozen=True)
class RowsConfig(Config):
    rows: int
    """Rows per tile."""


@dataclass(frozen=True)
class TileLayer:
    """Offsets of a layer in shared memory, in floats, and the warps with its weight gradient."""

    layer: Layer
    input_at: int
    gradient_at: int
    weight_at: int
    bias_at: int
    sums_at: int
    rstd_at: int
    raw_at: int
    wide: bool
    first_warp: int
    splits: int


@dataclass(frozen=True)
class TilePlan:
    layers: tuple[TileLayer, ...]
    staged_at: int
    shared_floats: int

    @property
    def shared_bytes(self) -> int:
        return 4 * self.shared_floats


def plan(layers: Sequence[Layer], rows: int, *, input_gradient: bool) -> TilePlan:
    offsets: list[dict[str, int]] = []
    at = 0

    def allocate(floats: int) -> int:
        nonlocal at
        start = at
        at += padded(floats)
        return start

    def strip(count: int, columns: int) -> int:
        """Return the floats of `count` rows of 16-bit elements."""
        return count * _pitch(columns) // 2

    # x of the next tile takes the place of the last gradients, unless their padding must stay zeros.
    staged, shares = rows * layers[0].width_in // 2, layers[-1].outputs % STEP == 0
    for number, layer in enumerate(layers):
        count, last = rows * layer.groups, number == len(layers) - 1
        passes_norm = layer.norm and (number > 0 or input_gradient)
        exchange = 2 * WARPS * _pitch(layer.features) if layer.norm else 0
        offsets.append(
            {
                "input_at": allocate(strip(count, layer.features)),
                "gradient_at": allocate(max(strip(count, layer.outputs), staged if last and shares else 0)),
                "weight_at": allocate(max(strip(_whole(layer.outputs), layer.features), exchange)),
                "bias_at": allocate(_whole(layer.outputs)),
                "sums_at": allocate(layer.outputs),
                "rstd_at": allocate(count if passes_norm else 0),
                "raw_at": allocate(strip(count, layer.features) if passes_norm else 0),
            }
        )
    staged_at = offsets[-1]["gradient_at"] if shares else allocate(staged)
    warps = _warps(layers)
    planned = tuple(
        TileLayer(layer, **offset, wide=_wide(layer), first_warp=first, splits=splits)
        for layer, offset, (first, splits) in zip(layers, offsets, warps, strict=True)
    )
    return TilePlan(planned, staged_at, at)


def _whole(count: int) -> int:
    return STEP * ceil_div(count, STEP)


def _pitch(columns: int) -> int:
    return _whole(columns) + 8


def _tiles(layer: Layer, wide: bool) -> int:
    features, outputs = reversed(_SHARE) if wide else _SHARE
    return ceil_div(layer.features, features) * ceil_div(layer.outputs, outputs)


def _wide(layer: Layer) -> bool:
    return _tiles(layer, True) <= _tiles(layer, False)


def _shares(layer: Layer) -> int:
    return _tiles(layer, _wide(layer))


def _warps(layers: Sequence[Layer]) -> list[tuple[int, int]]:
    """Return the first warp of each layer and the warps per share. Layers with many groups, which have long sums, come
    first, round-robin over the four schedulers, and divide their rows among spare warps. The last layer, whose sums
    overlap a product, has the last warps: the first ones have most of the product."""
    last = len(layers) - 1
    order = sorted(range(len(layers)), key=lambda number: (number == last, -layers[number].groups))
    spare = WARPS - sum(map(_shares, layers))
    found, at = [(0, 1)] * len(layers), 0
    for number in order:
        shares = _shares(layers[number])
        splits = 2 if layers[number].groups > 1 and shares <= spare else 1
        spare -= shares * (splits - 1)
        found[number] = (at, splits)
        at += shares * splits
    return found


# --- the rungs


@dataclass(frozen=True)
class TensorCore(Rung[MlpBackwardProblem, RowsConfig]):
    folds: bool = False
    """Merge two layers with nothing between them, if that is cheaper."""

    def supports(self, problem: MlpBackwardProblem) -> str | None:
        if ELEMENT_BYTES[problem.dtype] != 2:
            return f"{self.name} takes 16-bit elements; `fused` takes {problem.dtype}"
        if self.folds and to_fold(problem.layers) is None:
            return f"{self.name} needs two layers that are cheaper merged; `tensor_core` takes other chains"
        layers = self._layers(problem)
        if len(layers) > MOST_LAYERS:
            return f"{self.name} takes up to {MOST_LAYERS} layers, not {len(layers)}"
        if problem.batch >= 2**31:
            return f"{self.name} counts rows in 32 bits, not {problem.batch}"
        shares = sum(map(_shares, layers))
        if shares > WARPS:
            return (
                f"{self.name} keeps weight gradients in the registers of {WARPS} warps with 32x64 each; this chain "
                f"takes {shares}"
            )
        needed = self._planned(problem, TILES[0]).shared_bytes
        if needed > self.card.shared_bytes:
            return (
                f"{self.name} keeps all weights and {TILES[0]} rows of every layer in {needed} bytes of shared memory, "
                f"but a CTA has {self.card.shared_bytes}"
            )
        return None

    def configs(self, problem: MlpBackwardProblem) -> tuple[RowsConfig, ...]:
        fitting = [
            RowsConfig(rows)
            for rows in TILES
            if self._planned(problem, rows).shared_bytes <= self.card.shared_bytes
        ]
        return tuple(sorted(fitting, key=lambda config: self.estimate(problem, config)))

    def estimate(self, problem: MlpBackwardProblem, config: RowsConfig) -> float:
        layers = self._layers(problem)
        products = replace(problem, layers=layers).flops / problem.batch / 2
        steps = 2 + sum(2 + 2 * layer.norm for layer in layers)
        tiles = ceil_div(problem.batch, config.rows)
        turns = ceil_div(tiles, self.card.multiprocessors)
        parts = min(tiles, self.card.multiprocessors) * problem.parameter_elements * 8 / 2500
        clocks = turns * (config.rows * products / _MULTIPLY_ADDS + steps * _STEP_CLOCKS)
        launches = 4 if self.folds else 2
        return self.card.microseconds(clocks + parts + _START_CLOCKS, problem.bytes, launches)

    def recipe(self, problem: MlpBackwardProblem, config: RowsConfig) -> Recipe:
        number = to_fold(problem.layers) if self.folds else None
        chain = replace(problem, layers=self._layers(problem))
        planned = self._planned(problem, config.rows)
        tiles = ceil_div(problem.batch, config.rows)
        blocks = min(tiles, self.card.multiprocessors)
        pitch = padded(chain.parameter_elements)
        lists: dict[str, Constant] = {
            "LAYER_LIST": Macro(
                ", ".join(
                    _spell(chain, index, one, index == number) for index, one in enumerate(planned.layers)
                )
            ),
            "PARAMETER_LIST": Macro(", ".join(f"const void* {name}" for name in chain.sizes)),
            "PARAMETER_NAMES": Macro(", ".join(chain.sizes)),
        }
        program = Program.of(
            "mlp_backward/tensor_core.cu",
            constants=lists,
            problem=problem,
            config=config,
            plan=planned,
            threads=32 * WARPS,
            part_pitch=pitch,
            most_splits=max(one.splits for one in planned.layers),
        )
        arguments: tuple[Argument, ...] = (
            Buffer("x"),
            Buffer("grad_y"),
            Buffer(PARTS),
            Buffer("y", offset=4 * problem.parameter_elements),
            tiles,
            problem.batch - (tiles - 1) * config.rows,
            *(Buffer(_source(name, number)) for name in chain.sizes),
        )
        walk = kernel_call(program, blocks, 32 * WARPS, *arguments, shared_bytes=planned.shared_bytes)
        parts = Workspace(PARTS, 4 * blocks * pitch)
        if number is None:
            return Recipe((walk, sum_parts(blocks, pitch, chain.parameter_elements)), (parts,))
        merged = merge(problem.forward, number, weights_only=False)
        total = Workspace("merged", 4 * chain.parameter_elements)
        steps = (
            *merged.steps,
            walk,
            sum_parts(blocks, pitch, chain.parameter_elements, total.name),
            _unfold(problem, chain, number),
        )
        return Recipe(steps, (*merged.workspaces, parts, total))

    def tolerance(self, problem: MlpBackwardProblem, peer_error: float) -> float:
        """Inputs, slopes, gradients and weights of each layer are rounded, as by PyTorch on a GPU. On the CPU PyTorch
        rounds only the result. Where rounding changes the sign of a ReLU's input, a gradient is lost or added as a
        whole."""
        unit = _ROUNDING[problem.dtype] * problem.norm_gain
        rounded = unit * math.sqrt(4 * len(problem.layers))
        flips = 0.5 * math.sqrt(unit) if any(one.activation == "relu" for one in problem.layers[1:]) else 0.0
        return max(super().tolerance(problem, peer_error), rounded, flips)

    def _layers(self, problem: MlpBackwardProblem) -> tuple[Layer, ...]:
        number = to_fold(problem.layers) if self.folds else None
        return problem.layers if number is None else folded(problem.layers, number)

    def _planned(self, problem: MlpBackwardProblem, rows: int) -> TilePlan:
        return plan(self._layers(problem), rows, input_gradient=problem.input_gradient)


def to_fold(layers: Sequence[Layer]) -> int | None:
    """Return the layer to merge with the next. The gradient of a norm needs its layer's own weights."""
    number = foldable(layers)
    return None if number is None or layers[number].norm else number


def _source(name: str, number: int | None) -> str:
    """Return the buffer of a parameter of the chain in which layer `number` is merged with the next."""
    kind, layer = name.rstrip("0123456789"), int(name[len(name.rstrip("0123456789")) :])
    if number is None or layer < number:
        return name
    return f"{kind}{FOLDED_SUFFIX}" if layer == number else f"{kind}{layer + 1}"


_UNFOLD_THREADS = 128


def _unfold(problem: MlpBackwardProblem, chain: MlpBackwardProblem, number: int) -> KernelCall:
    """Return the launch that turns the gradients of the chain with a merged layer into those of the problem."""
    one, other = problem.layers[number : number + 2]
    program = Program.of(
        "mlp_backward/tensor_core_unfold.cu",
        problem=problem,
        one=one,
        other=other,
        first=problem.offsets[f"weight{number}"],
        merged=one.width_in * other.width_out,
    )
    return kernel_call(
        program,
        ceil_div(problem.parameter_elements, _UNFOLD_THREADS),
        _UNFOLD_THREADS,
        Buffer("merged"), Buffer(f"weight{number}"), Buffer(f"bias{number}", optional=True),
        Buffer(f"weight{number + 1}"), Buffer("y"),
    )  # fmt: skip


def _spell(chain: MlpBackwardProblem, number: int, one: TileLayer, from_fp32: bool) -> str:
    """Return a layer as an initializer of the kernel's struct Layer."""
    layer = one.layer
    names = list(chain.sizes)
    begin = names.index(f"{layer.parameters[0]}{number}")
    values = (
        layer.features, layer.outputs, layer.groups, layer.norm, layer.bias, ACTIVATIONS.index(layer.activation),
        f"{layer.epsilon!r}f", from_fp32, begin, chain.offsets[names[begin]],
        one.input_at, one.gradient_at, one.weight_at, one.bias_at, one.sums_at, one.rstd_at, one.raw_at,
        one.wide, one.first_warp, one.splits,
    )  # fmt: skip
    return "{" + ", ".join(str(value).lower() for value in values) + "}"


# Predictions are for the spectral autoencoder at batch 1,048,576 in fp16.
TENSOR_CORE = TensorCore(
    "tensor_core",
    "products by mma.sync over tiles of 16 to 128 rows, with all layers of a tile in shared memory in 16 bits",
    below="fused",
    # 1,048,576 rows, 307 GFLOP: fused 17 ms. Per row 75 MMAs: 140 clocks of tensor cores, some 200 of smem for ldmatrix
    # and intermediate values, 120 for the instructions of 320 activations and norms. With barriers 350 clocks, 1.6 ms.
    predicted_gain=10.0,
)
FOLDED = TensorCore(
    "folded",
    "layers with nothing but a product between them are merged into one matrix beforehand, and their gradients derived "
    "from that matrix's; the last product forward, a backward and a long weight gradient disappear",
    below="tensor_core",
    # 95 instead of 146 k multiply-adds per row, and 48 instead of 32 rows per tile: 250 clocks, 1.15 ms.
    predicted_gain=1.4,
    folds=True,
)
