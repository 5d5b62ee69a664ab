"""The tensor-core rungs of few_channels: whole images, non-finite values, and numbers of any size in halves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order
from escalade.ops.base.accuracy import relative_error
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import STORAGE
from escalade.ops.few_channels import FewChannelsOperation
from escalade.ops.few_channels import problem as reference
from escalade.ops.few_channels.problem import FewChannelsProblem
from escalade.ops.few_channels.tensor_core import Product, TensorCore, TileConfig
from tests.ops.few_channels.definition import by_definition
from tests.support import check

CPU = torch.device("cpu")
OPERATION = FewChannelsOperation()
RUNGS = {"fp16": ("images_a_tile", "pooled"), "bf16": ("images_a_tile", "pooled"), "fp32": ("split_halves",)}


def rung_for(problem: FewChannelsProblem) -> TensorCore:
    rungs = [OPERATION.ladder.rung(name) for name in RUNGS[problem.dtype]]
    found = next(rung for rung in reversed(rungs) if rung.supports(problem) is None)
    assert isinstance(found, TensorCore)
    return found


def run(problem: FewChannelsProblem, inputs: dict[str, torch.Tensor], config: TileConfig) -> torch.Tensor:
    y = reference.empty_output(problem, CPU).fill_(float("nan"))
    bind(rung_for(problem).recipe(problem, config), {**inputs, "y": y})()
    return y


def default(problem: FewChannelsProblem) -> TileConfig:
    config = rung_for(problem).configs(problem)[0]
    assert isinstance(config, TileConfig)
    return config


@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", ("fp16", "fp32"))
@pytest.mark.parametrize(
    "name", ("1to4_86_k7_b3", "4to16_40_k7_b3", "1to4_86_k7_b3_relu_pool2", "4to16_40_k7_b3_relu_pool4c")
)
def test_whole_images(name: str, dtype: str) -> None:
    """Three: the last tile of two is partial."""
    problem = FewChannelsProblem.parse(name, dtype)
    config = replace(default(problem), images=2 if dtype == "fp16" else 1)
    check(OPERATION, rung_for(problem), problem, config, CPU, 0)


@pytest.mark.share(7)
@pytest.mark.parametrize("layout", ("nhwc", "nchw"))
@pytest.mark.parametrize(
    ("name", "dtype"),
    (
        ("1to4_11x13_k7_b2_bias_relu", "bf16"),
        ("1to9_12x10_k6x4_b3_uint8", "fp16"),
        ("1to3_9x10_k2_b3_bias_pool4", "fp32"),
        ("4to24_8x10_k3_b3", "fp16"),
        ("4to16_9x12_k7p3_b2_fp32", "bf16"),
        ("2to32_10x9_k5x2_b2_relu_pool2c", "fp16"),
        ("3to7_9x11_k1x7p0x3_b2_pool4c", "bf16"),
        ("4to6_9x8_k4_b3_bias_relu", "fp32"),
        ("4to8_15x12_k3_b2_relu_pool4c", "fp32"),
    ),
)
def test_sizes_that_do_not_fit_the_fragments(name: str, dtype: str, layout: str) -> None:
    """With checks: accesses in order and in bounds, and no unwritten memory is read."""
    problem = FewChannelsProblem.parse(name, dtype, layout)
    options = TwinOptions(order=Order(seed=5, late=True), checks=True)
    check(OPERATION, rung_for(problem), problem, default(problem), CPU, 1, options)


@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", ("fp16", "bf16", "fp32"))
@pytest.mark.parametrize(
    "name", ("1to4_12_k5_b3", "4to16_9x10_k3_b3_bias", "4to8_9_k3_b3_relu_pool2", "1to4_12_k5_b3_pool4c")
)
def test_what_is_not_finite_reaches_its_windows_only(name: str, dtype: str) -> None:
    """A zero represents a pixel that only the other window of a pair covers; times infinity it would be NaN."""
    problem = FewChannelsProblem.parse(name, dtype)
    inputs = reference.random_inputs(problem, Draw(CPU, 3))
    for value in (float("inf"), float("-inf"), float("nan")):
        inputs["x"][1, 0, 4, 5] = value
        y = run(problem, inputs, replace(default(problem), images=2))
        torch.testing.assert_close(y, by_definition(problem, inputs), equal_nan=True, rtol=2e-2, atol=2e-2)
        assert y[1].isfinite().any() and not y[1].isfinite().all() if value > 0 else y[0].isfinite().all()


@pytest.mark.parametrize("dtype", ("fp16", "fp32"))
def test_weights_that_are_not_finite(dtype: str) -> None:
    problem = FewChannelsProblem.parse("4to8_9_k3_b1", dtype)
    inputs = reference.random_inputs(problem, Draw(CPU, 3))
    inputs["weight"][2, 0, 4] = float("inf")
    inputs["weight"][5, 1, 0] = float("nan")
    y = run(problem, inputs, default(problem))
    torch.testing.assert_close(y, by_definition(problem, inputs), equal_nan=True, rtol=2e-2, atol=2e-2)
    assert y[:, 5].isnan().all() and y[:, 0].isfinite().all()


@pytest.mark.parametrize(("pixels", "weights"), ((1e-30, 1e25), (3e37, 1e-38), (1e-33, 1.0), (1e4, 1e-4)))
def test_halves_of_numbers_of_any_size(pixels: float, weights: float) -> None:
    problem = FewChannelsProblem.parse("1to4_12_k7_b2")
    inputs = reference.random_inputs(problem, Draw(CPU, 4))
    inputs["x"] *= pixels
    inputs["weight"] *= weights
    inputs["weight"][1] *= 1e-3  # filters have separate powers of two
    y = run(problem, inputs, default(problem))
    exact = reference.exact(problem, inputs)
    for filter in range(problem.filters):
        error = relative_error(y[:, filter], exact[:, filter])
        assert error < 3e-7


def test_a_tile_of_zeros() -> None:
    problem = FewChannelsProblem.parse("1to4_12_k7_b2_bias")
    inputs = reference.random_inputs(problem, Draw(CPU, 4))
    inputs["x"].zero_()
    assert torch.equal(run(problem, inputs, default(problem)), by_definition(problem, inputs))


def test_an_empty_batch_does_nothing() -> None:
    problem = FewChannelsProblem.parse("4to16_12_k7_b0", "fp16")
    assert run(problem, reference.random_inputs(problem, Draw(CPU, 0)), default(problem)).numel() == 0


def test_the_images_of_the_first_problem_are_copied_as_they_are() -> None:
    problem = FewChannelsProblem.parse("1to4_86_k7_b10000", "fp16")
    assert Product(problem, replace(default(problem), images=2)).copy_bytes == 16
    assert STORAGE[problem.x_type] == torch.float16


@pytest.mark.parametrize(
    ("name", "dtype", "rung", "reason"),
    (
        ("1to4_86_k7_b2", "fp32", "images_a_tile", "fp16 and bf16"),
        ("1to4_86_k7_b2", "fp16", "pooled", "needs an activation"),
        ("1to4_86_k7_b2_pool3", "fp16", "pooled", "2x2 and 4x4"),
        ("5to4_86_k7_b2", "fp16", "images_a_tile", "up to 4 channels"),
        ("1to4_86_k9_b2", "fp16", "images_a_tile", "up to 7x7"),
        ("4to4_300_k3_b2", "fp16", "images_a_tile", "300x300 is too large"),
    ),
)
def test_refusals_say_why(name: str, dtype: str, rung: str, reason: str) -> None:
    refusal = OPERATION.ladder.rung(rung).supports(FewChannelsProblem.parse(name, dtype))
    assert refusal is not None and reason in refusal


def test_windows_of_one_pair_share_the_rows_of_one_window() -> None:
    """17 pairs are 8 windows of two and one of one: as many tiles as without pooling."""
    pooled, plain = (
        FewChannelsProblem.parse(f"4to16_40_k7_b10000{finish}") for finish in ("_relu_pool4c", "")
    )
    config = default(pooled)
    assert Product(pooled, config).narrow and Product(pooled, config).tiles == Product(plain, config).tiles
