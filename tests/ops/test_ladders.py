"""Every rung of every operation: its declared properties, and its results on the twin."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from itertools import chain, product
from math import prod
from typing import Any

import pytest
import torch

from escalade import ops
from escalade.device.architecture import ALL_ARCHITECTURES
from escalade.device.nvrtc import compile_program
from escalade.device.recipe import Buffer, KernelCall, Recipe, WeightsReady
from escalade.device.run import Executable, TwinOptions
from escalade.device.twin import Order
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, Operation, Rung
from escalade.ops.base.card import H200, RESERVED_SHARED, SHARED_BYTES, TWIN
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.rung import Config
from tests.support import (
    MEDIUM_BATCH,
    SHARE,
    Sample,
    all_rungs,
    check,
    cover,
    label,
    medium_problems,
    refusals,
    supported,
    variants,
    with_batch,
)

CPU = torch.device("cpu")
MOST_CONFIGS = 1
"""Configs per rung that run with checks, others every day; `--thorough` runs all."""
MOST_THREADS = 2**18
"""Work limit of a run with checks, if a rung has so small a problem: the twin runs threads one after another."""
each_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=label)
each_rung = pytest.mark.parametrize(("operation", "rung"), all_rungs(), ids=label)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The cases of a rung: a covering choice, whose smallest runs with checks; with --thorough all of them.

    Checks also verify the result: the only problem of a rung is not run again without them.
    """
    checked = "smallest" in metafunc.fixturenames
    if not checked and "problem" not in metafunc.fixturenames:
        return
    cases: list[tuple[Operation[Any], Rung[Any], Any]] = []
    for (operation, rung), (smallest, *others) in zip(all_rungs(), _chosen(), strict=True):
        problems = others
        if checked:
            problems = [smallest]
        elif metafunc.config.option.thorough:
            problems = list(chain(*supported(operation, rung, operation.small_problems)))
        cases += [(operation, rung, problem) for problem in problems]
    names = ("operation", "rung", "smallest" if checked else "problem")
    metafunc.parametrize(names, cases, ids=label)


@cache
def _chosen() -> list[list[Any]]:
    """The problems of each rung, the smallest first."""
    return [
        sorted(
            cover(operation, rung, operation.small_problems, turn, SHARE),
            key=partial(_size, rung),
        )
        for turn, (operation, rung) in enumerate(all_rungs())
    ]


def _size(rung: Rung[Any], problem: Any) -> tuple[bool, int]:
    steps = rung.recipe(problem, rung.configs(problem)[0]).steps
    threads = sum(prod((*step.grid, *step.block)) for step in steps if isinstance(step, KernelCall))
    return threads > MOST_THREADS, problem.flops * (1 + (problem.batch == 1))


# --- results of a rung


@pytest.mark.share(7)
def test_the_result_is_right(operation: Operation[Any], rung: Rung[Any], problem: Any, seed: int) -> None:
    check(operation, rung, problem, rung.configs(problem)[0], CPU, seed)


@pytest.mark.share(7)
def test_every_config_is_right_and_its_accesses_in_order_and_in_bounds(
    operation: Operation[Any], rung: Rung[Any], smallest: Any, seed: int, sample: Sample
) -> None:
    """With checks: races, overruns and reads of unwritten memory; shuffled threads, copies as late as allowed.

    Rungs that have changed since they last ran in full do not wait for their day: test_changed.py runs them at once.

    A launch with ready weights may read those, and nothing else, before it has waited for the preceding one.
    """
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    for config in sample(rung.configs(smallest), MOST_CONFIGS):
        check(operation, rung, smallest, config, CPU, seed, options)
        recipe = rung.recipe(smallest, config)
        calls = [step for step in recipe.after_packing.steps if isinstance(step, KernelCall)]
        if any(isinstance(argument, WeightsReady) for call in calls for argument in call.arguments):
            tensors = {**operation.inputs(smallest, CPU, seed), "y": operation.output(smallest, CPU)}
            tensors |= {workspace.name: workspace.allocate(CPU) for workspace in recipe.workspaces}
            Executable(recipe.packing, CPU, options=options).bind(tensors)()
            Executable(recipe.after_packing, CPU, options=options, weights_ready=True).bind(tensors)()


UNEVEN = {
    "conv2d": (
        "6to4_9x7_k3x2s2x1p1x2d1x3g2_b2", "8to8_9x7_k3x2s2x1p1x2d1x3_b1", "8to8_9x7_k3x2s2x1p1x2d1x3g8_b1",
        "64to64_9x7_k3x2s2x1p1x2_b1",
    ),
    "conv2d_input_gradient": ("8to8_9x7_k3x2s2x1p1x2d1x3_b1",),
    "conv2d_weight_gradient": ("8to8_9x7_k3x2s2x1p1x2d1x3_b1",),
    "few_channels": ("3to8_9x7_k3x2p1x0_b2",),
    "max_pool2d": ("8_9x7_k3x2s2x1p1x0d1x3_b1", "8_9x7_k3x2s2x1p1x0_b1"),
    "max_pool2d_backward": ("8_9x7_k3x2s2x1p1x0d1x3_b1",),
    "avg_pool2d": ("8_9x7_k3x2s2x1p1x0_b1",),
    "avg_pool2d_backward": ("8_9x7_k3x2s2x1p1x0_b1",),
}  # fmt: skip
"""Problems whose rows and columns differ in every size; a rung is tested on the first that it supports."""


@pytest.mark.share(7)
@pytest.mark.parametrize(
    ("operation", "rung"),
    [
        (operation, rung)
        for operation, rung in all_rungs()
        if operation.name in UNEVEN and rung.below is not None
    ],
    ids=label,
)
def test_rows_are_told_from_columns(operation: Operation[Any], rung: Rung[Any], seed: int) -> None:
    _check_uneven(operation, rung, seed)


@pytest.mark.parametrize("name", UNEVEN)
def test_the_foot_of_a_ladder_tells_rows_from_columns(name: str, seed: int) -> None:
    operation = OPERATIONS[name]
    _check_uneven(operation, next(rung for rung in operation.ladder if rung.below is None), seed)


def _check_uneven(operation: Operation[Any], rung: Rung[Any], seed: int) -> None:
    for offered in supported(operation, rung, map(operation.parse, UNEVEN[operation.name]))[:1]:
        problem = offered[seed % len(offered)]
        check(operation, rung, problem, rung.configs(problem)[0], CPU, seed)


@pytest.mark.parametrize(
    ("operation", "rung", "name"),
    [
        ("softmax", "columns", "67_b2_inner40"),
        ("layer_norm", "columns", "67_b2_inner40_weight_bias"),
        ("reduce", "columns", "sum_300x24_b2"),
    ],
)
def test_warps_and_blocks_merge_what_they_have(operation: str, rung: str, name: str, seed: int) -> None:
    """With checks: the smallest problems leave them nothing to merge."""
    asked = OPERATIONS[operation]
    tried = asked.ladder.rung(rung)
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    problem = asked.parse(name)
    for config in tried.configs(problem):
        check(asked, tried, problem, config, CPU, seed, options)


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("softmax", "19_b3_inner88"),
        ("layer_norm", "19_b3_inner88_weight_bias"),
        ("layer_norm", "67_b9_inner40_rms"),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_persistent_block_takes_tile_after_tile(operation: str, name: str, dtype: str, seed: int) -> None:
    """On a card where a single CTA runs at once, with and without prefetching the next tile to shared memory."""
    asked = OPERATIONS[operation]
    problem = asked.problem.parse(name, dtype)
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    for shared_bytes in (TWIN.shared_bytes, 0):
        card = dataclasses.replace(TWIN, multiprocessors=1, registers=1, shared_bytes=shared_bytes)
        tried = asked.ladder.on(card).rung("columns")
        config = tried.configs(problem)[0]
        (call,) = tried.recipe(problem, config).steps
        assert isinstance(call, KernelCall) and call.grid == (1, 1, 1) and config.tiles(problem.rows) > 1
        check(asked, tried, problem, config, CPU, seed, options)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_all_persistent_blocks_run_at_once(dtype: str) -> None:
    """A CTA more than fit an SM would run after the others, and double the time."""
    for operation, name in (
        ("softmax", "64_b16_inner65536"),
        ("softmax", "19_b16_inner65536_log"),
        ("layer_norm", "64_b16_inner65536_weight_bias"),
        ("layer_norm", "128_b16_inner65536_rms"),
        ("layer_norm", "64_b16_inner65536_weight_bias[silu(x)]"),
        ("group_norm", "64_128_b16_g64_weight_bias"),
    ):
        asked = OPERATIONS[operation]
        problem = asked.problem.parse(name, dtype, "nchw" if operation == "group_norm" else "")
        rung = asked.ladder.on(H200).rung("staged" if operation == "group_norm" else "columns")
        (call,) = rung.recipe(problem, rung.configs(problem)[0]).steps
        assert isinstance(call, KernelCall)
        used = compile_program(call.program, "sm_90a").resources
        threads = prod(call.block)
        per_sm = min(
            H200.registers // (threads * (used.registers + 7 & ~7)),
            H200.multiprocessor_shared_bytes // (call.shared_bytes + used.shared_bytes + RESERVED_SHARED),
        )
        assert not used.spill_bytes and prod(call.grid) <= per_sm * H200.multiprocessors, (name, used)


# --- declared properties


@each_operation
def test_a_rung_has_a_problem_and_a_summary(operation: Operation[Any]) -> None:
    for rung in operation.ladder:
        assert rung.name.isidentifier()
        assert len(rung.summary.split()) >= 3, rung.name
        assert (rung.below is None) or rung.predicted_gain is not None, (
            f"{rung.name}: a prediction is written down before it is measured"
        )
        assert set(rung.architectures) <= set(ALL_ARCHITECTURES) and rung.architectures, rung.name
        assert supported(operation, rung, operation.small_problems), f"the twin cannot try {rung.name}"
        assert supported(operation, rung, operation.problems), f"there is nothing to measure {rung.name} on"


@each_operation
def test_a_rung_has_a_problem_of_medium_size(operation: Operation[Any]) -> None:
    """The problems for tests on a GPU."""
    medium = medium_problems(operation)
    assert all(problem.batch <= MEDIUM_BATCH for problem in medium)
    for rung in operation.ladder:
        assert any(supported(operation, rung, [problem]) for problem in medium), rung.name


@each_operation
def test_every_problem_can_be_had_with_another_batch(operation: Operation[Any]) -> None:
    for problem in (*operation.problems, *operation.small_problems):
        other = with_batch(problem, max(1, problem.batch - 1))
        assert other.batch == max(1, problem.batch - 1)
        assert with_batch(other, problem.batch) == problem


@each_operation
def test_a_refusal_is_a_sentence(operation: Operation[Any]) -> None:
    for rung, problem in product(operation.ladder, (*operation.small_problems, *operation.problems)):
        for _, refusal in refusals(operation.name, rung.name, problem):
            if refusal is not None:
                assert len(refusal.split()) >= 4, f"{rung.name}: {refusal!r} does not say why"
                assert "\n" not in refusal, f"{rung.name}: {refusal!r}"


@each_rung
def test_configs_are_values_and_recipes_are_pure(operation: Operation[Any], rung: Rung[Any]) -> None:
    for problem in cover(operation, rung, operation.small_problems, 0):
        configs = rung.configs(problem)
        assert configs, f"{rung.name} supports {problem.name} but has no config for it"
        assert len(set(configs)) == len(configs), f"{rung.name} offers a config twice"
        assert configs == rung.configs(problem)
        for config in configs:
            assert isinstance(config, Config)
            if dataclasses.fields(config):
                with pytest.raises(dataclasses.FrozenInstanceError):
                    setattr(config, dataclasses.fields(config)[0].name, None)
            recipe = rung.recipe(problem, config)
            assert recipe == rung.recipe(problem, config)
            _check_launches(recipe)


def _check_launches(recipe: Recipe) -> None:
    """Within the limits of every card."""
    names = {workspace.name for workspace in recipe.workspaces}
    assert len(names) == len(recipe.workspaces)
    calls = [step for step in recipe.steps if isinstance(step, KernelCall)]
    assert calls
    for call in calls:
        assert all(size >= 1 for size in (*call.grid, *call.block, *call.cluster))
        assert call.grid[0] < 2**31 and call.grid[1] < 2**16 and call.grid[2] < 2**16
        assert call.block[0] * call.block[1] * call.block[2] <= 1024
        assert call.shared_bytes <= 227 * 1024


def test_every_architecture_has_its_shared_memory() -> None:
    assert SHARED_BYTES.keys() == set(ALL_ARCHITECTURES)


# --- the registry


@each_operation
def test_an_operation_is_complete(operation: Operation[Any]) -> None:
    names = [rung.name for rung in operation.ladder]
    assert len(set(names)) == len(names)
    assert operation.ladder.operation == operation.name
    for problem in (*operation.problems, *operation.small_problems):
        parsed = operation.parse(problem.name)
        assert dataclasses.replace(parsed, dtype=problem.dtype, layout=problem.layout) == problem
        forms = [dataclasses.replace(problem, layout=layout) for layout in operation.layouts]
        assert any(rung.supports(form) is None for rung in operation.ladder for form in forms), (
            f"no rung does {problem.name}"
        )
    assert len({problem.name for problem in operation.problems}) == len(operation.problems)


@each_operation
def test_references_have_the_shape_of_the_output(operation: Operation[Any]) -> None:
    """Each problem in one dtype and layout; the next problem takes the next pair."""
    for turn, problem in enumerate(operation.small_problems):
        every = variants(operation, problem)
        variant = every[turn % len(every)]
        inputs = operation.inputs(variant, CPU, 0)
        output, reference = operation.output(variant, CPU), operation.reference(variant, inputs)
        assert (reference.shape, reference.dtype) == (output.shape, torch.float64)
        assert operation.peer(variant, inputs).dtype == output.dtype
        again = operation.inputs(variant, CPU, 0)
        assert all(torch.equal(tensor, again[name]) for name, tensor in inputs.items())


def test_every_buffer_is_given_kept_or_judged() -> None:
    """No kernel output goes unchecked: an output that no case provides is an unknown name.

    Kernels that several operations share may have an input that only one of them uses; layers are numbered.
    """
    known, found = {"y", ""}, set()
    for operation in OPERATIONS.values():
        for problem in operation.small_problems:
            for variant in variants(operation, problem):
                known.update(operation.inputs(variant, CPU, 0), operation.extra_outputs(variant, CPU))
        for rung in operation.ladder:
            for problem in cover(operation, rung, operation.small_problems, 0):
                recipe = rung.recipe(problem, rung.configs(problem)[0])
                known.update(workspace.name for workspace in recipe.workspaces)
                found |= _buffers(recipe)
    unknown = {name.rstrip("-0123456789") for name in found} - {name.rstrip("-0123456789") for name in known}
    assert not unknown


def _buffers(part: Any) -> set[str]:
    """Return the names of all buffers anywhere in a recipe."""
    if isinstance(part, Buffer):
        return {part.name}
    if dataclasses.is_dataclass(part):
        return set().union(*(_buffers(getattr(part, field.name)) for field in dataclasses.fields(part)))
    return set().union(*map(_buffers, part)) if isinstance(part, tuple) else set()


def test_an_unknown_operation_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match=r"'conv9d'.*conv2d"):
        ops.operation("conv9d")


def test_an_unknown_rung_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match=r"'nonsense'.*direct"):
        OPERATIONS["conv2d"].ladder.rung("nonsense")


def test_a_ladder_refuses_a_name_twice_and_a_rung_in_the_air() -> None:
    first, second = OPERATIONS["conv2d"].ladder.rungs[:2]
    with pytest.raises(ValueError, match="two rungs of one name"):
        Ladder("conv2d", (first, first))
    with pytest.raises(ValueError, match="input_tile builds on direct"):
        Ladder("conv2d", (second,))
