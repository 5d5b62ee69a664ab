"""Stages of chains in the tensor-core kernel."""

from __future__ import annotations

import pytest

from escalade.ops.mlp.problem import parse_layers
from escalade.ops.mlp.tensor_core import Stages, foldable, folded, stages_of

AUTOENCODER = "5x64n-64bg_320-32_32n-32bg_32-320_5x64-64b"


def found(layers: str) -> Stages:
    stages = stages_of(parse_layers(layers))
    assert isinstance(stages, Stages), stages
    return stages


def test_autoencoder_goes_by_groups_at_both_ends() -> None:
    stages = found(AUTOENCODER)
    assert (stages.has_encoder, stages.has_decoder, stages.blocks_in, stages.blocks_out) == (True, True, 5, 5)
    assert [stage.fragments for stage in stages.stages] == [16, 5 * 4 * 2, 4, 5 * 2 * 4, 16]


def test_row_without_groups_goes_by_blocks_of_64() -> None:
    stages = found("1296-32br_32-10b")
    assert (stages.blocks_in, stages.stages[0].features) == (21, 64)
    assert (stages.blocks_out, stages.stages[1].outputs) == (1, 10)


@pytest.mark.parametrize(
    "layers, sentence",
    [
        ("320-32b", "two layers"),
        ("320-200br_200-320b", "up to 128"),
        ("200n-32b_32-8b", "norm"),
        ("64-32b_2x16-16b_32-64b", "may have groups"),
    ],
)
def test_other_chains_are_refused_with_a_reason(layers: str, sentence: str) -> None:
    refusal = stages_of(parse_layers(layers))
    assert isinstance(refusal, str) and sentence in refusal


def test_folding_takes_the_pair_that_gets_cheaper() -> None:
    layers = parse_layers(AUTOENCODER)
    assert foldable(layers) == 3
    assert folded(layers, 3)[3] == parse_layers("32-320b")[0]


@pytest.mark.parametrize(
    "layers",
    [
        "32-64br_64-8b",  # an activation in between
        "32-64b_64n-8b",  # a norm in between
        "64-8b_8-64b",  # a bottleneck: slower when merged
        "2x16n-32b_64-8b",  # a norm per group would become one per row
    ],
)
def test_nothing_to_fold(layers: str) -> None:
    assert foldable(parse_layers(layers)) is None
