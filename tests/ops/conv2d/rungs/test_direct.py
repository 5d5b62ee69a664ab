"""Configs of the tiled direct convolution: valid for their problems, and padded with an effect."""

from __future__ import annotations

from dataclasses import replace

import pytest

from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import direct
from escalade.ops.conv2d.rungs.direct_config import DirectConfig, fitted, tile, valid

PROBLEMS = (
    Conv2dProblem.square(64, 64, 56, 3, batch=256),
    Conv2dProblem.square(3, 64, 224, 7, batch=8, stride=2),
    Conv2dProblem.square(1, 4, 86, 7, batch=100, padding=0),
    Conv2dProblem.square(32, 32, 64, 31, batch=2),
    Conv2dProblem(1, 5, 1, 1, 7, 1, 1),
    Conv2dProblem(3, 7, 13, 9, 5, 5, 3, (2, 1), (2, 1), (1, 3), dtype="bf16"),
)


@pytest.mark.parametrize("layout", ("nchw", "nhwc"))
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_configs_are_valid_and_vectors_are_aligned(problem: Conv2dProblem, layout: str) -> None:
    problem = replace(problem, layout=layout)
    for config in direct.RUNGS[-1].configs(problem):
        assert isinstance(config, DirectConfig)
        shape = tile(problem, config)
        assert valid(problem, config)
        assert config.runs * config.pixel_threads >= config.tile_runs
        assert shape.pitch % shape.window_vector == shape.plane % shape.window_vector == 0
        assert shape.pitch >= shape.input_columns


def test_every_idea_of_the_top_rung_can_be_switched_off() -> None:
    problem = PROBLEMS[0]
    whole = direct.RUNGS[-1].configs(problem)[0]
    for idea, rung in direct.ablations().items():
        assert rung.supports(problem) is None
        assert rung.configs(problem)[0] != whole, idea


def test_a_padded_row_is_a_little_longer() -> None:
    problem = PROBLEMS[0]
    plain = DirectConfig(weights="shared")
    padded = replace(plain, padded=True)
    # Four rows of eight pixels per warp: a pitch of 10 has bank conflicts, a pitch of 24 does not.
    assert (tile(problem, plain).pitch, tile(problem, padded).pitch) == (10, 24)


def test_a_filter_too_large_for_shared_memory_is_refused() -> None:
    problem = Conv2dProblem(1, 1, 300, 300, 1, 101, 101, dilation=(2, 2))
    config = DirectConfig(weights="shared")
    assert fitted(problem, config) is None
    assert "direct" in str(direct.RUNGS[1].supports(problem))
