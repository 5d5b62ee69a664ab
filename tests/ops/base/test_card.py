"""Cards: an H200's figures are measured, others are scaled from it, and choices follow the card."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch

from escalade.device.architecture import ALL_ARCHITECTURES
from escalade.device.gpu import GpuProperties, properties_of
from escalade.device.recipe import KernelCall, Recipe
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, Operation, Rung
from escalade.ops.base import card as cards_known
from escalade.ops.base.card import H200, SHARED_BYTES, TWIN, Card, derive_card
from escalade.ops.base.cards import A40, A100, B200, H100_PCIE, RTX_4090, RTX_5090, typical_card
from escalade.ops.choose.choice import choose, estimated
from tests.support import check

CPU = torch.device("cpu")
OTHERS = (A100, A40, RTX_4090, H100_PCIE, B200, RTX_5090)
REPORTED = GpuProperties(
    H200.name, "sm_90a", 132, 60 << 20, 227 << 10, 228 << 10, 65536, 140 << 30, 1980.0, 4.917e6
)
"""The driver's data for an H200."""

each_card = pytest.mark.parametrize("card", OTHERS, ids=lambda card: card.name)


def launches(recipe: Recipe) -> list[KernelCall]:
    return [step for step in recipe.steps if isinstance(step, KernelCall)]


# --- properties of a card


def test_an_h200_derived_from_what_its_driver_reports_is_the_measured_one() -> None:
    made = derive_card(REPORTED)
    assert not made.rates.measured and H200.rates.measured
    assert replace(made, rates=H200.rates) == H200
    assert made.rates.l2_holds == pytest.approx(H200.rates.l2_holds, rel=0.3)
    assert replace(made.rates, measured=True, l2_holds=H200.rates.l2_holds) == H200.rates


def test_rates_follow_clocks_multiprocessors_and_memory() -> None:
    half = derive_card(replace(REPORTED, multiprocessors=66))
    assert half.speed == 0.5 and half.rates.fp32 == H200.rates.fp32 / 2 and half.rates.l2 == H200.rates.l2 / 2
    assert half.rates.clock == H200.rates.clock and half.memory_speed == 1.0
    slow = derive_card(replace(REPORTED, clock_mhz=990.0, memory_bytes_per_us=4.917e6 / 4))
    assert slow.speed == 0.5 and slow.rates.clock == H200.rates.clock / 2 and slow.memory_speed == 0.25
    assert A100.rates.fp32 / A100.speed == pytest.approx(H200.rates.fp32 / 2), (
        "64 lanes a multiprocessor, not 128"
    )


def test_clusters_scale_where_there_are_any() -> None:
    assert H100_PCIE.clusters == (114, 57, 34, 24, 19, 13, 12, 12)
    assert H100_PCIE.max_active_clusters(2) == 57 and H100_PCIE.max_active_clusters(9) == 0
    assert A100.clusters == (108,) and A100.max_active_clusters(2) == 0


def test_few_copy_faster_than_all() -> None:
    rate = H200.rates.copies.tma_persistent
    assert H200.copy_rate(rate, 132) == rate.together < H200.copy_rate(rate, 100) < H200.copy_rate(rate, 1)
    assert H200.copy_rate(rate, 1) == rate.alone


def test_the_twin_has_an_h200_that_runs_everything() -> None:
    assert Card.of(CPU) is TWIN
    assert replace(TWIN, name=H200.name, architecture="sm_90a") == H200
    rung = OPERATIONS["conv2d"].ladder.rung("persistent")
    assert rung.card is TWIN and rung.on(TWIN) is rung and rung.on(A100).on(TWIN) == rung
    assert rung.on(A100) != rung and rung.on(A100).card is A100


def test_a_gpu_is_asked_once_and_a_part_of_it_is_no_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    reported = {
        0: REPORTED,
        1: replace(REPORTED, multiprocessors=60),
        2: replace(REPORTED, name="NVIDIA H300"),
    }

    def properties(device: torch.device) -> GpuProperties:
        asked.append(device)
        return reported[device.index]

    monkeypatch.setattr(cards_known, "properties_of", properties)
    cards_known._of_gpu.cache_clear()
    try:
        found = [Card.of(torch.device("cuda", index)) for index in (0, 1, 2, 0, 1, 2)]
    finally:
        cards_known._of_gpu.cache_clear()
    assert len(asked) == 3
    assert found[0] is H200 and found[1].multiprocessors == 60 and not found[1].rates.measured
    assert found[2].name == "NVIDIA H300" and found[3:] == found[:3]


def test_only_a_gpu_has_properties() -> None:
    with pytest.raises(UnsupportedError, match="device cpu"):
        properties_of(CPU)


def test_every_architecture_has_a_card() -> None:
    for architecture in ALL_ARCHITECTURES:
        card = typical_card(architecture)
        assert card.architecture == architecture and card.shared_bytes == SHARED_BYTES[architecture]
    assert typical_card(None) is TWIN and typical_card("sm_90a") is H200
    with pytest.raises(UnsupportedError, match="sm_80, sm_86"):
        typical_card("sm_75")


# --- choices


def problems(operation: Operation[Any]) -> Iterator[Any]:
    """A few large ones and a few small ones, with alternating dtypes and layouts."""
    forms = cycle([(dtype, layout) for dtype in operation.dtypes for layout in operation.layouts])
    chosen = (*operation.problems[::3], *operation.small_problems[::2])
    for problem, (dtype, layout) in zip(chosen, forms, strict=False):
        yield replace(problem, dtype=dtype, layout=layout)


@pytest.mark.share(7)
@each_card
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda operation: operation.name)
def test_a_choice_fits_its_card(operation: Operation[Any], card: Card) -> None:
    chosen = 0
    for problem in problems(operation):
        try:
            choice = estimated(operation, problem, card)
        except UnsupportedError:
            if any(rung.on(card).refusal(problem) is None for rung in operation.ladder):
                raise
            continue
        chosen += 1
        assert choice.rung.card is card and card.architecture in choice.rung.architectures
        for call in launches(choice.rung.recipe(choice.problem, choice.config)):
            assert call.shared_bytes <= card.shared_bytes, (problem.name, choice)
            assert card.max_active_clusters(math.prod(call.cluster)) > 0, (problem.name, choice)
    allowed = {one for rung in operation.ladder for one in rung.architectures}
    assert chosen or card.architecture not in allowed


RESIDENT = (
    ("conv2d", "persistent", "128to128_28_k3s1_b256", "fp16", 1),
    ("conv2d", "overlapped_store", "128to128_28_k3s1_b256", "fp16", 1),
    ("conv2d", "window", "64to64_56_k3s1_b256", "fp16", 1),
    ("conv2d", "streamed_window", "128to128_28_k3s1_b256", "fp16", 1),
    ("conv2d", "wgmma_split", "128to128_28_k3s1_b256", "fp32", 2),
    ("conv2d", "grouped", "128to128_56_k3s1g32_b256", "fp16", 4),
    ("conv2d_input_gradient", "persistent", "128to128_28_k3s1_b256", "fp16", 1),
    ("stem", "streamed", "", "fp16", 1),
    ("few_channels", "pooled", "4to16_40_k7_b10000_relu_pool4c", "fp16", 24),
    ("mlp", "persistent", "", "fp32", 1),
    ("mlp_backward", "fused", "", "fp32", 2),
    ("mlp_backward", "folded", "5x64n-64bg_320-32_32n-32bg_32-320_5x64-64b_b1048576", "fp16", 1),
)
"""Rungs with persistent CTAs: operation, name, problem (none: the largest), dtype, maximum of CTAs
per SM."""


@pytest.mark.parametrize("case", RESIDENT, ids=lambda case: f"{case[0]}-{case[1]}")
def test_blocks_that_stay_are_as_many_as_the_card_holds(case: tuple[str, str, str, str, int]) -> None:
    name, rung_name, problem_name, dtype, most = case
    operation = OPERATIONS[name]
    largest = max(operation.problems, key=lambda problem: problem.flops)
    problem = operation.parse(problem_name) if problem_name else largest
    problem = replace(problem, dtype=dtype, layout="nhwc" if "nhwc" in operation.layouts else problem.layout)
    seen = set()
    for card in (*OTHERS, H200):
        rung: Rung[Any] = operation.ladder.rung(rung_name).on(card)
        if rung.refusal(problem) is not None:
            continue
        calls = launches(rung.recipe(problem, rung.configs(problem)[0]))
        grid = max(math.prod(call.grid) for call in calls if not call.weights_only and call.shared_bytes)
        assert grid > 0.9 * card.multiprocessors and grid <= most * card.multiprocessors, card.name
        assert any(grid % one == 0 for one in range(card.multiprocessors, card.multiprocessors - 8, -1)), (
            f"{grid} blocks leave multiprocessors of {card.name} idle in the last round"
        )
        seen.add(grid)
    assert len(seen) > 1, "it scales with the card"


SPLIT = (
    ("conv2d", "fused_epilogue", "512to512_7_k3s1_b1", "fp16"),
    ("linear", "tiled", "25088to4096_b32", "fp32"),
    ("conv2d_weight_gradient", "direct", "64to64_56_k3s1_b256", "fp32"),
    ("batch_statistics", "split", "", "fp16"),
    ("relu", "vectorised", "", "fp16"),
)
"""Rungs that split a sum or an array into as many parts as fill the card."""


@pytest.mark.parametrize("case", SPLIT, ids=lambda case: f"{case[0]}-{case[1]}")
@each_card
def test_parts_fill_the_card(case: tuple[str, str, str, str], card: Card) -> None:
    name, rung_name, problem_name, dtype = case
    operation = OPERATIONS[name]
    problem = operation.parse(problem_name) if problem_name else operation.problems[-1]
    problem = replace(problem, dtype=dtype, layout="nhwc" if "nhwc" in operation.layouts else problem.layout)
    rung = operation.ladder.rung(rung_name).on(card)
    best = min(rung.configs(problem), key=lambda config: rung.estimate(problem, config) or 0.0)
    grid = max(math.prod(call.grid) for call in launches(rung.recipe(problem, best)))
    assert grid >= 0.6 * card.multiprocessors


def test_a_larger_card_has_more_parts() -> None:
    operation = OPERATIONS["batch_statistics"]
    rung, problem = operation.ladder.rung("split"), operation.problems[-1]
    parts = [rung.on(card).configs(problem)[0].as_dict()["blocks"] for card in (A40, A100, H200, RTX_5090)]
    assert parts == sorted(parts) and len(set(parts)) == 4


def test_a_device_s_choice_is_for_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the device to the launches: nothing on the path uses another card."""
    monkeypatch.setattr(Card, "of", lambda device: H100_PCIE)
    operation = OPERATIONS["conv2d"]
    problem = replace(operation.parse("128to128_28_k3s1_b256"), dtype="fp16", layout="nhwc")
    for rung in (None, "persistent"):
        choice = choose(operation, problem, CPU, rung)
        assert choice.rung.card is H100_PCIE
        (call,) = launches(choice.rung.recipe(problem, choice.config))
        assert call.grid[0] == 114


# --- on the twin


@pytest.mark.parametrize(
    "name", ("conv2d", "stem", "few_channels", "linear", "mlp", "mlp_backward", "batch_norm")
)
def test_choices_of_other_cards_are_right(name: str, seed: int) -> None:
    card = OTHERS[(seed + len(name)) % len(OTHERS)]
    operation = OPERATIONS[name]
    halves = [one for one in operation.small_problems if "+out16" not in one.name]  # the others are in 8 bits
    drawn = halves[seed % 3 :: 3] or halves
    problem = replace(min(drawn, key=lambda one: one.flops), dtype="fp16")
    choice = estimated(operation, problem, card)
    check(operation, choice.rung, choice.problem, choice.config, CPU, seed)
