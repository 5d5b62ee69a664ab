"""Rungs of mlp_backward on CUDA cores, one launch per step or one tile of rows per CTA, and the reduction that all
share."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Macro, Program, Type
from escalade.device.recipe import Argument, Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import element
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.launch import kernel_call
from escalade.ops.base.rung import Config, Rung, ThreadsConfig, ThreadsRung
from escalade.ops.mlp.problem import ACTIVATIONS, Layer
from escalade.ops.mlp_backward.problem import MlpBackwardProblem

# --- rung layers


PARTS = "parts"
_SUM_LANES = 8
_MOST_PARTS = 64
_FLOAT = Type("float")


def sum_parts(count: int, pitch: int, elements: int, target: str = "y") -> KernelCall:
    """Return the launch that adds up `count` partial sums, `pitch` elements apart, into the first `elements` of
    `target`."""
    return kernel_call(
        Program.of("mlp_backward/sum_parts.cu", lanes=_SUM_LANES),
        ceil_div(elements, 32),
        32 * _SUM_LANES,
        Buffer(PARTS), Buffer(target), count, Int64(pitch), Int64(elements),
    )  # fmt: skip


@dataclass(frozen=True)
class Layers(ThreadsRung[MlpBackwardProblem]):
    threads = (256, 128, 64)

    def supports(self, problem: MlpBackwardProblem) -> str | None:
        widest = max(max(layer.width_in, layer.width_out) for layer in problem.layers)
        if problem.batch * widest >= 2**37:  # CTAs of 64 threads
            return f"{self.name} takes fewer than 2^37 elements per step, not {problem.batch} rows of {widest} features"
        return None

    def recipe(self, problem: MlpBackwardProblem, config: ThreadsConfig) -> Recipe:
        return _Steps(problem, config.threads, self.card).recipe()


class _Steps:
    """Builder of the launches, forward and then backward, and of their workspaces."""

    def __init__(self, problem: MlpBackwardProblem, threads: int, card: Card) -> None:
        self._problem = problem
        self._threads = threads
        self._calls: list[KernelCall] = []
        self._workspaces: dict[str, int] = {}
        # Enough parts of the rows to fill the card, few enough that the reduction does not dominate.
        wanted = ceil_div(card.busy_blocks * 256, problem.parameter_elements)
        self._parts = max(1, min(_MOST_PARTS, wanted, ceil_div(problem.batch, 16)))

    def recipe(self) -> Recipe:
        p = self._problem
        for number in range(len(p.layers)):
            self._forward(number)
        gradient, stored = self._last_gradient()
        for number in reversed(range(len(p.layers))):
            gradient, stored = self._backward(number, gradient, stored), _FLOAT
        if self._parts > 1:
            self._workspaces[PARTS] = 4 * self._parts * p.parameter_elements
            self._calls.append(sum_parts(self._parts, p.parameter_elements, p.parameter_elements))
        workspaces = tuple(Workspace(name, size) for name, size in self._workspaces.items())
        return Recipe(tuple(self._calls), workspaces)

    def _keep(self, name: str, number: int, elements: int) -> Buffer:
        """Add an fp32 workspace."""
        self._workspaces[f"{name}{number}"] = 4 * elements
        return Buffer(f"{name}{number}")

    def _slope(self, number: int) -> Buffer:
        """Return the derivative of a layer's activation; there is none before the first."""
        return Buffer(f"slope{number}", optional=True)

    def _norm(self, number: int) -> tuple[Buffer, Buffer]:
        """Return weight and bias of a layer's norm."""
        return Buffer(f"norm_weight{number}", optional=True), Buffer(f"norm_bias{number}", optional=True)

    def _input(self, number: int) -> tuple[Buffer, Type]:
        """Return the input of a layer's product, and its type."""
        if self._problem.layers[number].norm:
            return Buffer(f"hat{number}"), _FLOAT
        return self._before_norm(number)

    def _before_norm(self, number: int) -> tuple[Buffer, Type]:
        return (Buffer(f"value{number - 1}"), _FLOAT) if number else (Buffer("x"), self._element)

    @property
    def _element(self) -> Type:
        return element(self._problem.dtype)

    def _launch(
        self, name: str, constants: dict[str, Constant], threads: int, *arguments: Argument, parts: int = 1
    ) -> None:
        program = Program.of(
            f"mlp_backward/layers_{name}.cu",
            f"mlp_backward_layers_{name}",
            {"Element": self._element, **constants},
        )
        grid = (ceil_div(threads, self._threads), parts)
        self._calls.append(kernel_call(program, grid, self._threads, *arguments))

    def _forward(self, number: int) -> None:
        p, layer = self._problem, self._problem.layers[number]
        rows = p.batch * layer.groups
        if layer.norm:
            source, stored = self._before_norm(number)
            hat = self._keep("hat", number, rows * layer.features)
            rstd = self._keep("rstd", number, rows)
            self._launch(
                "normalise", {"Input": stored, "EPSILON": layer.epsilon}, 32 * rows,
                source, hat, rstd, layer.features, Int64(rows),
            )  # fmt: skip
        last = number == len(p.layers) - 1
        if last and layer.activation == "none":
            return
        elements = rows * layer.outputs
        if not last:
            self._keep("value", number, elements)
        if layer.activation != "none":
            self._keep("slope", number, elements)
        source, stored = self._input(number)
        constants: dict[str, Constant] = {
            "Input": stored, "HAS_NORM": layer.norm, "HAS_BIAS": layer.bias,
            "ACTIVATION": ACTIVATIONS.index(layer.activation), "KEEP_VALUE": not last,
        }  # fmt: skip
        self._launch(
            "forward", constants, elements,
            source, *self._norm(number), Buffer(f"weight{number}"), Buffer(f"bias{number}", optional=True),
            Buffer(f"value{number}", optional=True), self._slope(number), layer.features, layer.outputs,
            Int64(elements),
        )  # fmt: skip

    def _last_gradient(self) -> tuple[Buffer, Type]:
        """Return the gradient of the last activation's input."""
        p, last = self._problem, len(self._problem.layers) - 1
        activation = p.layers[last].activation
        if activation == "none":
            return Buffer("grad_y"), self._element
        elements = p.batch * p.outputs
        result = self._keep("gradient", last, elements)
        self._launch(
            "slope", {"ACTIVATION": ACTIVATIONS.index(activation)}, elements,
            Buffer("grad_y"), self._slope(last), result, Int64(elements),
        )  # fmt: skip
        return result, _FLOAT

    def _backward(self, number: int, gradient: Buffer, stored: Type) -> Buffer:
        """Add the gradients of a layer's parameters; return the gradient of the previous activation's input, if
        needed."""
        p, layer = self._problem, self._problem.layers[number]
        self._weight_gradient(number, gradient, stored)
        wanted = number > 0 or p.input_gradient
        if not (wanted or layer.norm):
            return gradient
        rows = p.batch * layer.groups
        elements = rows * layer.features
        before = p.layers[number - 1].activation if number else "none"
        slope: dict[str, Constant] = {"ACTIVATION": ACTIVATIONS.index(before)}
        if number:
            result = self._keep("gradient", number - 1, elements)
        else:
            result = Buffer("y", offset=4 * p.parameter_elements)
        normalised = self._keep("normalised", number, elements) if layer.norm else result
        self._launch(
            "input_gradient", {"Gradient": stored, **({"ACTIVATION": 0} if layer.norm else slope)}, elements,
            gradient, Buffer(f"weight{number}"), self._slope(number - 1), normalised, layer.features, layer.outputs,
            Int64(elements),
        )  # fmt: skip
        if layer.norm:
            self._norm_parameters(number, normalised)
        if layer.norm and wanted:
            self._launch(
                "norm_gradient", slope, 32 * rows,
                normalised, Buffer(f"hat{number}"), Buffer(f"rstd{number}"), Buffer(f"norm_weight{number}"),
                self._slope(number - 1), result, layer.features, Int64(rows),
            )  # fmt: skip
        return result

    def _part_rows(self, layer: Layer) -> tuple[int, int]:
        rows = self._problem.batch * layer.groups
        return rows, ceil_div(rows, self._parts)

    @property
    def _target(self) -> Buffer:
        return Buffer(PARTS if self._parts > 1 else "y")

    def _weight_gradient(self, number: int, gradient: Buffer, stored: Type) -> None:
        p, layer = self._problem, self._problem.layers[number]
        source, kept = self._input(number)
        rows, part_rows = self._part_rows(layer)
        self._launch(
            "weight_gradient",
            {"Gradient": stored, "Input": kept, "HAS_NORM": layer.norm, "HAS_BIAS": layer.bias},
            layer.outputs * (layer.features + layer.bias),
            gradient, source, *self._norm(number), self._target, Int64(p.parameter_elements),
            Int64(p.offsets[f"weight{number}"]), Int64(p.offsets.get(f"bias{number}", 0)), layer.features,
            layer.outputs, Int64(rows), Int64(part_rows),
            parts=self._parts,
        )  # fmt: skip

    def _norm_parameters(self, number: int, normalised: Buffer) -> None:
        p, layer = self._problem, self._problem.layers[number]
        rows, part_rows = self._part_rows(layer)
        self._launch(
            "norm_parameters", {}, layer.features,
            normalised, Buffer(f"hat{number}"), self._target, Int64(p.parameter_elements),
            Int64(p.offsets[f"norm_weight{number}"]), layer.features, Int64(rows), Int64(part_rows),
            parts=self._parts,
        )  # fmt: skip


LAYERS = Layers("layers", "one plain kernel per step of each layer, forward and then backward", None, None)


# --- rung fused


MODEL_CORRECTION = 1.6  # measured / modeled clocks, 65,536 rows of the spectral autoencoder in fp16 (H200)
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
        at += padded(floats)
        return start

    for layer in layers:
        rows = config.rows * layer.groups
        exchange = 2 * config.threads // 32 if layer.norm else 0
        offsets.append(
            {
                "input_at": allocate(rows * _pitch(layer.features)),
                "gradient_at": allocate(rows * _pitch(layer.outputs)),
                "weight_at": allocate(max(padded(layer.outputs), exchange) * _pitch(layer.features)),
                "bias_at": allocate(layer.outputs),
                "sums_at": allocate(layer.outputs),
                "rstd_at": allocate(rows if layer.norm else 0),
            }
        )
    scratch_at = at
    least = max(config.rows * layer.groups * padded(max(layer.features, layer.outputs)) for layer in layers)
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
    return BackwardPlan(planned, scratch_at, at + padded(scratch), sum(map(_warp_tiles, layers)))


def padded(count: int) -> int:
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
    most = min(config.threads // tiles, scratch // (rows * padded(columns)), ceil_div(depth, 8))
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

    def estimate(self, problem: MlpBackwardProblem, config: FusedConfig) -> float:
        return self.card.microseconds(
            MODEL_CORRECTION * self._clocks(problem, config), problem.bytes, launches=2
        )

    def recipe(self, problem: MlpBackwardProblem, config: FusedConfig) -> Recipe:
        p, planned = problem, plan(problem.layers, config, self.card)
        per_sm = _blocks_per_sm(planned, config, self.card)
        tiles = ceil_div(p.batch, config.rows)
        blocks = min(tiles, per_sm * self.card.multiprocessors)
        pitch = padded(p.parameter_elements)
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
        walk = kernel_call(program, blocks, config.threads, *arguments, shared_bytes=planned.shared_bytes)
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
