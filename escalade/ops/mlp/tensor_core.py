"""Rungs of mlp on tensor cores: a warp keeps 16 rows in registers from x to y."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from escalade.device.architecture import WITH_CLUSTERS
from escalade.device.program import Constant, Macro, Program
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.ops.base.card import RESERVED_SHARED, Card
from escalade.ops.base.dtypes import ELEMENT_BYTES, element, widest_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.launch import kernel_call
from escalade.ops.base.rung import Config, Rung
from escalade.ops.mlp.cuda_core import gelu_constants, gelu_forms
from escalade.ops.mlp.problem import ACTIVATIONS, Layer, MlpProblem

# --- stages: the chain as the kernel runs it, wide at both ends, narrow in between


MOST_NARROW = 128
"""Columns that a warp keeps in registers: 64 per lane for 16 rows."""
BLOCK = 64
"""Columns per block of an ungrouped row; blocks of the result may be smaller."""
STEP = 16


@dataclass(frozen=True)
class Stage:
    """A packed layer: `blocks` pieces of its weights, split along its inputs or outputs."""

    number: int
    layer: Layer
    features: int
    """Features per block."""
    outputs: int
    """Outputs per block."""
    blocks: int = 1
    blocks_of_outputs: bool = False
    source: str = ""
    """Suffix of its buffers instead of the layer's number."""

    @property
    def fragments(self) -> int:
        """16x16 pieces of the weights."""
        return self.blocks * ceil_div(self.features, STEP) * ceil_div(self.outputs, STEP)

    @property
    def bias_steps(self) -> int:
        """Pieces of 16 biases."""
        return (self.blocks if self.blocks_of_outputs else 1) * ceil_div(self.outputs, STEP)


@dataclass(frozen=True)
class Stages:
    """All layers: [a grouped encoder,] the first layer over the whole row, narrow ones, the last [and a grouped
    decoder]."""

    stages: tuple[Stage, ...]
    has_encoder: bool
    has_decoder: bool

    @property
    def blocks_in(self) -> int:
        return self.stages[1 if self.has_encoder else 0].blocks

    @property
    def blocks_out(self) -> int:
        return self.stages[-2 if self.has_decoder else -1].blocks

    @property
    def fragments(self) -> int:
        return sum(stage.fragments for stage in self.stages)

    @property
    def bias_steps(self) -> int:
        return sum(stage.bias_steps for stage in self.stages)


def stages_of(layers: Sequence[Layer], block_out: int = BLOCK) -> Stages | str:
    """Return the stages, or the reason why the kernel does not support the chain."""
    has_encoder, has_decoder = layers[0].groups > 1, layers[-1].groups > 1
    dense = layers[has_encoder : len(layers) - has_decoder]
    if len(dense) < 2:
        return "at least two layers over the whole row are required"
    if any(layer.groups > 1 for layer in dense):
        return "only the first and the last layer may have groups"
    reduce, expand = dense[0], dense[-1]
    narrow = [layer.outputs for layer in dense[:-1]]
    grouped = [
        width
        for layer in (layers[0], layers[-1])
        if layer.groups > 1
        for width in (layer.features, layer.outputs)
    ]
    if max(narrow + grouped) > MOST_NARROW:
        return f"inner layers and groups may have up to {MOST_NARROW} features, not {max(narrow + grouped)}"
    if has_encoder:
        columns, blocks = layers[0].outputs, layers[0].groups
    elif reduce.norm:
        columns, blocks = reduce.features, 1
    else:
        columns = min(reduce.features, BLOCK)
        blocks = ceil_div(reduce.features, columns)
    if reduce.norm and (has_encoder or reduce.features > MOST_NARROW):
        return f"the first layer over the whole row has a norm over more than {MOST_NARROW} features"
    if has_decoder:
        outputs, blocks_out = layers[-1].features, layers[-1].groups
    else:
        outputs = min(expand.outputs, block_out)
        blocks_out = ceil_div(expand.outputs, outputs)
    first = has_encoder
    last = len(layers) - 1 - has_decoder
    stages = []
    for number, layer in enumerate(layers):
        stage = Stage(number, layer, layer.features, layer.outputs)
        if number == first:
            stage = replace(stage, features=columns, blocks=blocks)
        elif number == last:
            stage = replace(stage, outputs=outputs, blocks=blocks_out, blocks_of_outputs=True)
        stages.append(stage)
    return Stages(tuple(stages), has_encoder, has_decoder)


def foldable(layers: Sequence[Layer]) -> int | None:
    """Return the index of a layer that is cheaper merged with the next one, if any; nothing may be between them."""
    for number in range(len(layers) - 1):
        one, other = layers[number : number + 2]
        if one.activation != "none" or other.norm or (one.norm and one.groups > 1):
            continue
        apart = one.groups * one.weight_elements + other.groups * other.weight_elements
        if one.width_in * other.width_out < apart:
            return number
    return None


def folded(layers: Sequence[Layer], number: int) -> tuple[Layer, ...]:
    """Return the chain with that layer and the next one merged."""
    one, other = layers[number : number + 2]
    merged = Layer(one.width_in, other.width_out, 1, one.norm, True, other.activation, one.epsilon)
    return (*layers[:number], merged, *layers[number + 2 :])


# --- rungs


SET_ROWS = 16
MOST_WARPS = 20
"""Largest number of warps that share rows: beyond that, the exchange takes longer than it saves."""
SMALL_BLOCK = 32
"""Columns per block of the result, if there are more warps than blocks of 64 or values need many registers."""
NARROW_SHAPES = (
    (2, 12, 1, 2), (2, 6, 2, 2), (2, 12, 1, 1), (2, 4, 2, 4), (1, 16, 1, 4), (1, 20, 1, 1), (1, 8, 2, 4), (1, 4, 4, 4),
)  # fmt: skip
"""Sets, warps, CTAs per SM and unrolling, for 16-bit elements."""
WIDE_SHAPES = ((1, 8, 1, 4), (1, 4, 2, 4))
"""The same for fp32, whose operands take four times the registers."""
_PACK_THREADS = 128
_BIAS_STEP = 128
"""Bytes: 16 biases in fp32, each twice."""
_ROUNDING = {"fp32": 2.0**-20, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Largest rounding of a weight; in fp32 the loss of split operands (22 bits) over several layers."""
FOLDED_SUFFIX = "_folded"
"""Suffix of the names of merged weights and biases."""


@dataclass(frozen=True)
class WarpsConfig(Config):
    warps: int
    """Warps per CTA."""
    tile_warps: int
    """Warps per 16 rows."""
    sets: int
    """Sets of 16 rows per warp, which share one read of the weights."""
    pieces: int
    """Pieces of a grouped layer, split by outputs among warps."""
    unroll: int
    """Steps of 16 outputs of a grouped layer that overlap; they need registers."""
    weights_in_shared: bool
    """True to copy the weights to shared memory once per CTA; otherwise warps read them through the caches."""
    blocks_per_sm: int
    cluster: int = 1
    """CTAs per rows, each with `tile_warps`."""
    gelu: str = ""
    """One of `gelu_forms`."""


@dataclass(frozen=True)
class TensorCore(Rung[MlpProblem, WarpsConfig]):
    folds: bool = False
    """Merge two layers with nothing between them, if that is cheaper."""
    shares_rows: bool = False
    """Split rows among several warps, by blocks."""
    clusters: bool = False
    """Split rows among several CTAs too."""

    @property
    def architectures(self) -> tuple[str, ...]:
        return WITH_CLUSTERS if self.clusters else super().architectures

    def supports(self, problem: MlpProblem) -> str | None:
        stages = stages_of(problem.layers)
        if isinstance(stages, str):
            return f"{self.name} takes chains that are wide only at both ends: {stages}"
        if self.folds and not self.shares_rows and _to_fold(problem) is None:
            return f"{self.name} needs two layers that are cheaper merged; `tensor_core` takes other chains"
        if self.shares_rows and self._stages(problem).blocks_in == 1:
            return f"{self.name} splits the blocks of a row among warps; this row is one block"
        if self.clusters and not self.configs(problem):
            return (
                f"{self.name} needs equal work for every CTA of a cluster; `shared_rows` takes other chains"
            )
        return None

    def configs(self, problem: MlpProblem) -> tuple[WarpsConfig, ...]:
        stages = self._stages(problem)
        size = packed_bytes(problem, stages)
        if self.clusters:
            shapes = _clustered_rows(stages, size, self.card)
        elif self.shares_rows:
            shapes = _shared_rows(stages, size, problem.batch, self.card)
        else:
            shapes = _separate_rows(size, problem, self.card)
        return tuple(replace(shape, gelu=gelu) for gelu in gelu_forms(problem.dtype) for shape in shapes)

    def recipe(self, problem: MlpProblem, config: WarpsConfig) -> Recipe:
        stages = self._stages(problem)
        size = packed_bytes(problem, stages)
        fold = _fold(problem) if self.folds else Recipe(())
        tiles = ceil_div(problem.batch, config.sets * SET_ROWS)
        tiles_per_cta = config.warps // config.tile_warps
        resident = config.blocks_per_sm * self.card.multiprocessors
        shared = size if config.weights_in_shared else 0
        if self.shares_rows:
            shared += exchange_bytes(stages, config.tile_warps)
            resident *= 4  # a small batch is one wave; persistent CTAs would reuse nothing
        call = kernel_call(
            _program(problem, stages, config),
            min(ceil_div(tiles, tiles_per_cta), resident) * config.cluster,
            config.warps * 32,
            Buffer("x"), Buffer("packed"), Buffer("y"), Int64(problem.batch),
            shared_bytes=shared,
            cluster=(config.cluster, 1, 1),
        )  # fmt: skip
        steps = (*fold.steps, _pack(problem, stages), call)
        return Recipe(steps, (*fold.workspaces, Workspace("packed", size)))

    def tolerance(self, problem: MlpProblem, peer_error: float) -> float:
        """Weights multiplied by a norm's or by another layer's are rounded again, unlike PyTorch's. With few rows
        PyTorch's error may happen to be much smaller than that."""
        return max(super().tolerance(problem, peer_error), _ROUNDING[problem.dtype])

    def _stages(self, problem: MlpProblem) -> Stages:
        number = _to_fold(problem) if self.folds else None
        layers = problem.layers if number is None else folded(problem.layers, number)
        block = SMALL_BLOCK if self.shares_rows or problem.dtype == "fp32" else BLOCK
        found = stages_of(layers, block)
        assert isinstance(found, Stages)
        if number is None:
            return found
        stages = [
            replace(
                stage,
                number=stage.number + (stage.number > number),
                source=FOLDED_SUFFIX if stage.number == number else "",
            )
            for stage in found.stages
        ]
        return replace(found, stages=tuple(stages))


def _separate_rows(size: int, problem: MlpProblem, card: Card) -> list[WarpsConfig]:
    """Return configs with separate rows per warp, best first; weights in shared memory if they fit."""
    shapes = WIDE_SHAPES if problem.dtype == "fp32" else NARROW_SHAPES
    fitting = [
        WarpsConfig(warps, 1, sets, 1, unroll, True, resident)
        for sets, warps, resident, unroll in shapes
        if (size + RESERVED_SHARED) * resident <= card.multiprocessor_shared_bytes
    ]
    through_caches = [WarpsConfig(warps, 1, 1, 1, 4, False, resident) for warps, resident in ((4, 4), (8, 1))]
    return sorted(
        fitting or through_caches, key=lambda config: _turns(config, problem.batch, card.multiprocessors)
    )


def _turns(config: WarpsConfig, batch: int, multiprocessors: int) -> float:
    """Return the sets of rows of the busiest SM: about a microsecond each, a little less in pairs."""
    tiles = ceil_div(batch, config.sets * SET_ROWS)
    blocks = ceil_div(tiles, config.warps)
    at_once = min(config.blocks_per_sm, ceil_div(blocks, multiprocessors))
    turns = ceil_div(blocks, multiprocessors * at_once) * at_once * config.warps * config.sets
    return turns if config.sets > 1 else 1.04 * turns


def _shared_rows(stages: Stages, size: int, batch: int, card: Card) -> list[WarpsConfig]:
    """Return configs with one warp per block of a row, or per piece while there are enough SMs."""
    steps = ceil_div(stages.stages[0].outputs, 16) if stages.has_encoder else 1
    alone = ceil_div(batch, SET_ROWS) <= card.multiprocessors
    offered = []
    for pieces in (2, 1, 4) if alone else (1, 2):
        if steps % pieces:
            continue
        warps = stages.blocks_in * pieces
        while warps > MOST_WARPS:
            warps = ceil_div(warps, 2)
        for staged, unroll in ((True, 4), (True, 1), (False, 4)):
            if warps > 1 and (not staged or size + exchange_bytes(stages, warps) <= card.shared_bytes):
                offered.append(WarpsConfig(warps, warps, 1, pieces, unroll, staged, 1))
    return offered


def _clustered_rows(stages: Stages, size: int, card: Card) -> list[WarpsConfig]:
    """Return configs that split rows among the CTAs of a cluster, each with the tensor cores of its own SM."""
    steps = ceil_div(stages.stages[0].outputs, 16) if stages.has_encoder else 1
    offered = []
    for pieces, cluster in itertools.product((2, 1, 4), (2, 5, 4, 3)):
        parts = stages.blocks_in * pieces
        if steps % pieces or parts % cluster or parts > MOST_WARPS:
            continue
        warps = parts // cluster
        for staged in (True, False):
            if not staged or size + exchange_bytes(stages, warps) <= card.shared_bytes:
                offered.append(WarpsConfig(warps, warps, 1, pieces, 4, staged, 1, cluster))
    return offered


def fragment_bytes(problem: MlpProblem) -> int:
    """Return the bytes of a 16x16 fragment."""
    return 256 * ELEMENT_BYTES[problem.dtype]


def packed_bytes(problem: MlpProblem, stages: Stages) -> int:
    return stages.fragments * fragment_bytes(problem) + stages.bias_steps * _BIAS_STEP


def exchange_bytes(stages: Stages, warps: int) -> int:
    """Return the bytes of the exchange between warps that share rows: the sums of each, and of all."""
    outputs = stages.stages[1 if stages.has_encoder else 0].outputs
    return (warps + 1) * 2 * ceil_div(outputs, 16) * 32 * 16


def _program(problem: MlpProblem, stages: Stages, config: WarpsConfig) -> Program:
    rows, weights, biases = [], 0, 0
    for stage in stages.stages:
        layer = stage.layer
        rows.append(
            f"{{{stage.features}, {stage.outputs}, {str(layer.norm).lower()}, {layer.epsilon!r}f, "
            f"{ACTIVATIONS.index(layer.activation)}, {weights}, {biases}}}"
        )
        weights += stage.fragments
        biases += stage.bias_steps
    p = problem
    table: dict[str, Constant] = {"LAYER_TABLE": Macro(", ".join(rows))}
    return Program.of(
        "mlp/tensor_core.cu",
        constants=table | gelu_constants(config.gelu),
        problem=p,
        stages=stages,
        config=config,
        packed_bytes=packed_bytes(p, stages),
        vector_in=_vector(p, p.features, stages.stages[0].features),
        vector_out=_vector(p, p.outputs, stages.stages[-1].outputs),
    )


def _vector(problem: MlpProblem, width: int, block: int) -> int:
    """Return the elements per access; a lane has four adjacent ones if a step has no partner."""
    alone = 4 if ceil_div(block, 16) % 2 else 8
    return min(alone, widest_vector(problem.dtype, width, block))


def _to_fold(problem: MlpProblem) -> int | None:
    """Return the layer to merge with the next, if the kernel supports the resulting chain."""
    number = foldable(problem.layers)
    if number is None or isinstance(stages_of(folded(problem.layers, number)), str):
        return None
    return number


def _fold(problem: MlpProblem) -> Recipe:
    number = _to_fold(problem)
    return Recipe(()) if number is None else merge(problem, number, weights_only=True)


def merge(problem: MlpProblem, number: int, *, weights_only: bool) -> Recipe:
    """Return the launch that merges that layer with the next one, into fp32 weights and biases."""
    one, other = problem.layers[number : number + 2]
    program = Program.of("mlp/tensor_core_fold.cu", problem=problem, one=one, other=other)
    threads = other.width_out * (one.width_in + 1)
    call = kernel_call(
        program,
        blocks(threads, _PACK_THREADS),
        _PACK_THREADS,
        Buffer(f"weight{number}"), Buffer(f"bias{number}", optional=True), Buffer(f"weight{number + 1}"),
        Buffer(f"bias{number + 1}", optional=True), Buffer(f"weight{FOLDED_SUFFIX}"), Buffer(f"bias{FOLDED_SUFFIX}"),
        weights_only=weights_only,
    )  # fmt: skip
    weight = Workspace(f"weight{FOLDED_SUFFIX}", 4 * one.width_in * other.width_out)
    return Recipe((call,), (weight, Workspace(f"bias{FOLDED_SUFFIX}", 4 * other.width_out)))


def _pack(problem: MlpProblem, stages: Stages) -> KernelCall:
    """Return the launch that packs the weights and biases of all layers."""
    wide = ELEMENT_BYTES[problem.dtype] == 4
    spelled, buffers = [], []
    block = offset = 0
    bias_offset = stages.fragments * fragment_bytes(problem)
    for stage in stages.stages:
        layer = stage.layer
        values = (
            block, stage.features, stage.outputs, layer.features, layer.outputs, stage.blocks,
            stage.blocks_of_outputs, layer.norm, layer.bias, bool(stage.source), offset, bias_offset,
        )  # fmt: skip
        spelled.append("{" + ", ".join(str(value).lower() for value in values) + "}")
        suffix = stage.source or str(stage.number)
        buffers += [
            Buffer(f"weight{suffix}"),
            Buffer(f"bias{suffix}", optional=True),
            Buffer(f"norm_weight{stage.number}", optional=True),
            Buffer(f"norm_bias{stage.number}", optional=True),
        ]
        lanes = stage.fragments * (2 if wide else 1) * 32
        block += blocks(lanes + stage.bias_steps * _BIAS_STEP // 4, _PACK_THREADS)
        offset += stage.fragments * fragment_bytes(problem)
        bias_offset += stage.bias_steps * _BIAS_STEP
    numbers = range(len(spelled))
    program = Program.of(
        "mlp/tensor_core_pack.cu",
        "mlp_tensor_core_pack",
        {
            "Element": element(problem.dtype),
            "STAGE_LIST": Macro(", ".join(spelled)),
            "PARAMETER_LIST": Macro(
                ", ".join(
                    f"const void* weight{n}, const void* bias{n}, const Element* gain{n}, const Element* shift{n}"
                    for n in numbers
                )
            ),
            "PACK_LIST": Macro(
                " ".join(f"pack<{n}>(weight{n}, bias{n}, gain{n}, shift{n}, packed);" for n in numbers)
            ),
        },
    )
    return kernel_call(program, block, _PACK_THREADS, *buffers, Buffer("packed"), weights_only=True)


# Predictions are for the spectral autoencoder in fp16.
TENSOR_CORE = TensorCore(
    "tensor_core",
    "16 rows per warp, products by mma.sync, every intermediate value already in the next product's registers",
    below="persistent",
    # 1,048,576 rows, 131 GFLOP: at least 1.7 ms of FFMA below; here 490 mma and 350 activations of 10 instructions per
    # 16 rows, about 0.55 ms.
    predicted_gain=4.0,
)
FOLDED = TensorCore(
    "folded",
    "layers with nothing but a product between them are merged into one matrix beforehand: here the expansion from the "
    "basis and the last layer",
    below="tensor_core",
    # A third fewer products and a fifth fewer conversions; x and y bound it from 0.32 ms on.
    predicted_gain=1.2,
    folds=True,
)
SHARED_ROWS = TensorCore(
    "shared_rows",
    "the blocks of a row are split among the warps of a CTA: a fifth of the latency from x to y for small batches",
    below="folded",
    # At batch 512 one warp's serial 328 mma and 350 activations are about 5 us; a fifth of it and an exchange, 2.5.
    predicted_gain=2.0,
    folds=True,
    shares_rows=True,
)
CLUSTERED_ROWS = TensorCore(
    "clustered_rows",
    "the warps that share rows are spread over a cluster, whose CTAs each have the tensor cores of an SM",
    below="shared_rows",
    # In fp32 ten warps compete with 240 mma each for one SM, 2.7 of 8.7 us at batch 512; half of that on two, plus half
    # a microsecond for two cluster exchanges.
    predicted_gain=1.1,
    folds=True,
    shares_rows=True,
    clusters=True,
)
