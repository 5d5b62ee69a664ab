"""A chain of layers as the tensor-core kernel runs it: wide at both ends, narrow in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from escalade.ops.base.grid import ceil_div
from escalade.ops.mlp.problem import Layer

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
