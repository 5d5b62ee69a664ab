"""Single layers and chains: each takes what it says it takes, and items are of one size."""

from __future__ import annotations

import math

import pytest
import torch

from escalade_bench.coverage.catalogue import entries
from escalade_bench.zoo import layers


def test_every_layer_takes_items_of_a_megabyte() -> None:
    found = {entry.name: entry for entry in entries("escalade_bench.zoo.layers")}
    assert found.keys() == layers.LAYERS.keys()
    with torch.device("meta"):
        for name, entry in found.items():
            assert entry.item is not None
            assert math.prod(entry.item) * 4 == pytest.approx(2**20, rel=0.6), name
            assert entry.make().eval()(torch.empty(2, *entry.item)).shape[0] == 2, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        layers.nothing  # noqa: B018
