"""The stem as one step, and how images are read: what is fused, and which steps read a padded image."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine.capture.export import capture
from escalade.engine.compiler import insert_normalization
from escalade.engine.graph.graph import Graph
from escalade.engine.passes.epilogues import fuse_expressions
from escalade.engine.passes.fuse_stem import fuse_stem
from escalade.engine.passes.layout import convert_inputs
from tests.engine.graphs import node_of, ops, same_results


class Stem(nn.Module):
    def __init__(self, pool: nn.Module | None, filters: int = 16, bias: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, filters, 7, 2, 3, bias=bias)
        self.pool = pool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.conv(x))
        return y if self.pool is None else self.pool(y)


def stem_of(model: nn.Module, normalise: bool) -> tuple[Graph, Graph]:
    torch.manual_seed(2)
    graph = capture(model, (torch.randn(1, 3, 12, 12),))
    if normalise:
        insert_normalization(graph, ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)))
    changed = graph.copy()
    fuse_expressions(changed)
    fuse_stem(changed)
    convert_inputs(changed, pad_channels=True)
    changed.remove_dead_code()
    same_results(graph, changed, 12)
    return graph, changed


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(
    ("pool", "window"),
    [(None, None), (nn.MaxPool2d(3, 2, 1), (3, 2, 1)), (nn.MaxPool2d(2), (2, 2, 0))],
)
def test_the_stem_is_one_step(pool: nn.Module | None, window: Any, normalise: bool) -> None:
    _, graph = stem_of(Stem(pool), normalise)
    assert ops(graph) == ["stem"]
    stem = node_of(graph, "stem")
    assert stem.attributes["pool"] == window and stem.attributes["relu"]
    assert stem.inputs["x"] == graph.inputs[0].name and ("scale" in stem.inputs) == normalise


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(
    "pool",
    [nn.MaxPool2d(3, 2), nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d((2, 3), (2, 3)), nn.AvgPool2d(2)],
)
def test_other_pools_stay_behind_the_stem(pool: nn.Module, normalise: bool) -> None:
    _, graph = stem_of(Stem(pool), normalise)
    assert ops(graph)[0] == "stem" and len(ops(graph)) == 2


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("model", [Stem(None, filters=12), Stem(None, bias=False)])
def test_layers_other_than_stems_read_a_padded_image(model: nn.Module, normalise: bool) -> None:
    _, graph = stem_of(model, normalise)
    assert ops(graph) == ["convert", "conv2d"]
    convert = node_of(graph, "convert")
    assert convert.shape[1] == 4 and ("scale" in convert.inputs) == normalise
    weight = graph.constants[node_of(graph, "conv2d").inputs["weight"]]
    assert weight.shape[1] == 4 and not weight[:, 3].any()


def test_an_image_that_others_read_is_not_padded() -> None:
    """If they read the normalized image; otherwise they read the caller's."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 12, 3, padding=1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.conv(x), x * 2

    for normalise, channels in ((False, 4), (True, 3)):
        _, graph = stem_of(Both(), normalise)
        assert node_of(graph, "convert").shape[1] == channels


def test_an_image_of_a_stem_can_be_read_by_others() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 16, 3, padding=1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return F.relu(self.conv(x)), x * 2

    _, graph = stem_of(Both(), False)
    assert sorted(ops(graph)) == ["pointwise", "stem"]
    _, graph = stem_of(Both(), True)
    assert sorted(ops(graph)) == ["conv2d", "convert", "pointwise"]
