"""The installed card: its description against the driver's data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from escalade.device.cuda import _launch_config, load
from escalade.device.driver import check
from escalade.device.gpu import properties_of
from escalade.device.recipe import KernelCall
from escalade.ops import OPERATIONS
from escalade.ops.base.card import H200, Card, derive_card
from escalade.ops.conv2d import Conv2dProblem
from escalade.ops.conv2d.rungs.sm90_persistent import PersistentConfig

pytestmark = pytest.mark.gpu


@pytest.fixture
def h200(cuda: torch.device) -> torch.device:
    if torch.cuda.get_device_name(cuda) != H200.name:
        pytest.skip("describes an H200")
    return cuda


def test_a_card_matches_the_driver(cuda: torch.device) -> None:
    card, told = Card.of(cuda), properties_of(cuda)
    assert (card.name, card.architecture) == (told.name, told.architecture)
    assert (card.multiprocessors, card.registers) == (told.multiprocessors, told.registers)
    assert (card.shared_bytes, card.multiprocessor_shared_bytes) == (
        told.shared_bytes,
        told.multiprocessor_shared_bytes,
    )
    assert card.l2_bytes == pytest.approx(told.l2_bytes, rel=0.2)
    assert Card.of(cuda) is card


def test_rates_derived_for_an_h200_are_near_the_measured_ones(h200: torch.device) -> None:
    made = derive_card(properties_of(h200)).rates
    for name in ("clock", "dram", "l2", "fp32"):
        assert getattr(made, name) == pytest.approx(getattr(H200.rates, name), rel=0.15), name


@pytest.mark.parametrize("blocks", range(2, 9))
def test_cluster_counts_match_the_card(h200: torch.device, blocks: int) -> None:
    """By the driver, for a kernel with one CTA per SM. Which SMs form a cluster differs slightly
    between H200s."""
    from cuda.bindings import driver

    problem = Conv2dProblem.square(512, 512, 7, 3, dtype="fp16", layout="nhwc")
    rung = OPERATIONS["conv2d"].ladder.rung("cluster_split_k")
    config = rung.configs(problem)[0]
    assert isinstance(config, PersistentConfig)
    call = rung.recipe(problem, replace(config, splits=blocks)).steps[-1]
    assert isinstance(call, KernelCall) and call.cluster == (blocks, 1, 1)
    index = h200.index or 0
    kernel = load(call.program, index)
    kernel.allow_shared(H200.shared_bytes, index, "a block of its own multiprocessor")
    with torch.cuda.device(h200):
        function = check(driver.cuKernelGetFunction(kernel.handle), "finding the kernel")
        asked = _launch_config(replace(call, shared_bytes=H200.shared_bytes, overlap=False))
        found = check(driver.cuOccupancyMaxActiveClusters(function, asked), "asking for clusters")
    assert found == pytest.approx(H200.max_active_clusters(blocks), rel=0.15)
