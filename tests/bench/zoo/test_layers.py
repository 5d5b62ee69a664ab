"""Single layers and chains: example shapes, sizes, plans for an H200, and results on the twin."""

from __future__ import annotations

import math

import pytest
import torch

import escalade
from escalade.models import settle
from escalade.ops.base.card import H200
from escalade_bench.coverage.catalogue import entries
from escalade_bench.zoo import layers
from escalade_bench.zoo.layers import CONV_CHAINS

_STORAGE = {"fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
_TOLERANCE = {"fp16": 4e-3, "tf32": 2e-3, "fp32": 1e-5}
"""Largest error relative to the largest result: a few roundings of the operands of sums of up to 576 products."""


def test_every_layer_takes_items_of_a_megabyte_and_no_chain_takes_more_than_a_few_gigabytes() -> None:
    found = {entry.name: entry for entry in entries("escalade_bench.zoo.layers")}
    assert found.keys() == layers.LAYERS.keys()
    assert len(CONV_CHAINS) >= 60 and CONV_CHAINS.keys() < layers.CHAINS.keys()
    with torch.device("meta"):
        for name, entry in found.items():
            assert entry.item is not None
            sizes = [math.prod(entry.item)]
            model = entry.make().eval()
            for module in model.modules():
                module.register_forward_hook(lambda _, __, y, sizes=sizes: sizes.append(y[0].numel()))
            assert model(torch.empty(2, *entry.item)).shape[0] == 2, name
            if name in CONV_CHAINS:
                assert 4 * 128 * max(sizes) <= 2.5e9, name
            else:
                assert sizes[0] * 4 == pytest.approx(2**20, rel=0.6), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        layers.nothing  # noqa: B018


@pytest.mark.share(7)
@pytest.mark.parametrize("name", CONV_CHAINS)
def test_chains_have_plans_and_right_results_in_both_layouts(name: str) -> None:
    torch.manual_seed(0)
    make, item = CONV_CHAINS[name], CONV_CHAINS[name].example_shape
    model, x = make().eval(), torch.randn(2, item[0], 14, 14)
    settle(model, x)
    expected = model(x).detach()
    # One dtype per chain: each compiles separate kernels, which takes a second.
    dtype = list(_STORAGE)[list(CONV_CHAINS).index(name) % len(_STORAGE)]
    large = escalade.compile(model, torch.empty(2, *item), dtype=dtype, device="cpu")
    small = escalade.compile(model, x, dtype=dtype, device="twin")
    for layout in (torch.contiguous_format, torch.channels_last):
        plan = large.plan_for(H200, torch.empty(16, *item, dtype=_STORAGE[dtype], memory_format=layout))
        # In NCHW a lone 1x1 convolution falls back to PyTorch, which needs no conversions.
        by_pytorch = {step.node.op for step in plan.steps if step.in_pytorch}
        assert by_pytorch <= ({"conv2d"} if "_1x1_" in name and dtype != "fp16" else set())
        error = (small(x.to(memory_format=layout)) - expected).abs().max() / expected.abs().max()
        assert error <= _TOLERANCE[dtype], layout
