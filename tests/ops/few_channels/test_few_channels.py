"""The convolution of few channels: problems, refusals, tiles of every form, the operator, non-finite values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade.device.recipe import KernelCall
from escalade.device.run import bind
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, few_channels
from escalade.ops.base.rung import Config
from escalade.ops.few_channels import FewChannelsOperation, FewChannelsProblem
from escalade.ops.few_channels.cuda_core import DirectConfig, RowsConfig
from escalade.ops.few_channels.matrix import ChunksConfig
from tests.ops.few_channels.definition import by_definition
from tests.support import check

CPU = torch.device("cpu")
OPERATION = FewChannelsOperation()
LENET = FewChannelsProblem.parse("4to16_40_k7_b10000_relu_pool4c")
SMALL = FewChannelsProblem.parse("3to5_11x10_k5x3p2x1_b3_bias_relu_pool3c")


def run(rung: str, problem: FewChannelsProblem, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    chosen = OPERATION.ladder.rung(rung)
    output = OPERATION.output(problem, CPU)
    bind(chosen.recipe(problem, chosen.configs(problem)[0]), {**inputs, "y": output}, rung)()
    return output


# --- problems


def test_it_is_registered() -> None:
    assert isinstance(OPERATIONS["few_channels"], FewChannelsOperation)


def test_sizes_of_the_second_convolution_of_the_lenet() -> None:
    assert (LENET.conv_height, LENET.output_width) == (34, 9)
    assert LENET.flops == 2 * 10_000 * 34 * 34 * 16 * 4 * 49
    assert LENET.bytes == 4 * (10_000 * 4 * 40 * 40 + 16 * 4 * 49 + 10_000 * 16 * 81)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 9}, "conv2d"),
        ({"filters": 33}, "conv2d"),
        ({"source": "bf16"}, "uint8"),
        ({"dtype": "fp8"}, "bf16"),
        ({"pool": 0}, "at least 1"),
        ({"height": 6}, "only 6x40"),
        ({"height": 8, "ceil_mode": False}, "does not fit"),
    ],
)
def test_what_is_no_such_problem_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        replace(LENET, **change)


@pytest.mark.parametrize(
    ("rung", "change", "message"),
    [
        ("tensor_cores", {}, "tf32, fp16 or bf16"),
        ("fusion", {}, "tf32, fp16 or bf16"),
        ("half", {"dtype": "tf32"}, "16-bit"),
        ("direct", {"filter_width": 17}, "up to 16 wide"),
        ("rows", {"filter_width": 17}, "up to 16 wide"),
        ("rows", {"pool": 17}, "windows up to 16"),
        (
            "rows",
            {"filter_height": 40, "width": 40_000, "channels": 8, "pool": 1, "height": 41},
            "shared memory",
        ),
    ],
)
def test_refusals_say_what_is_taken(rung: str, change: dict[str, Any], message: str) -> None:
    assert message in str(OPERATION.ladder.rung(rung).supports(replace(LENET, **change)))


def test_every_problem_has_a_preferred_rung() -> None:
    wide = replace(LENET, width=60, filter_width=50, batch=1)
    for problem in (*OPERATION.problems, *OPERATION.small_problems, wide):
        for dtype in OPERATION.dtypes:
            form = replace(problem, dtype=dtype)
            names = OPERATION.preferred(form)
            assert any(OPERATION.ladder.rung(name).supports(form) is None for name in names)


# --- launches


def test_chunks_take_turns_in_two_lanes_with_workspaces_of_their_own() -> None:
    recipe = OPERATION.ladder.rung("streams").recipe(replace(LENET, batch=10), ChunksConfig(4))
    calls = [step for step in recipe.steps if isinstance(step, KernelCall)]
    assert [call.lane for call in calls] == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4
    assert recipe.side_lanes == (1,)
    assert {w.name for w in recipe.workspaces} == {
        f"{n}{i}" for n in ("columns", "product", "unfinished") for i in (0, 1)
    }
    whole = OPERATION.ladder.rung("matrix_unroll").recipe(replace(LENET, batch=10), ChunksConfig())
    assert recipe.workspace_bytes < 0.7 * whole.workspace_bytes


@pytest.mark.parametrize("name", ("1to4_86_k7_b10000", "4to16_40_k7_b10000"))
def test_blocks_of_the_lenet_waste_no_columns(name: str) -> None:
    config = OPERATION.ladder.rung("rows").configs(FewChannelsProblem.parse(name))[0]
    assert isinstance(config, RowsConfig)
    assert config.run * config.segments == FewChannelsProblem.parse(name).conv_width


@pytest.mark.share(7)
@pytest.mark.parametrize(
    ("rung", "name", "layout", "config"),
    [
        ("rows", "4to16_13x15_k7_b3", "nhwc", RowsConfig(2, 7, 3, 3, 4, 128)),
        ("rows", "4to16_13x15_k7_b3", "nchw", RowsConfig(2, 7, 2, 5, 8, 128)),
        ("rows", "4to6_13x15_k7_b2_relu_pool4c", "nhwc", RowsConfig(2, 2, 2, 8, 4, 128)),
        ("rows", "4to6_13x16_k7_b2_relu_pool4c", "nchw", RowsConfig(1, 1, 2, 4, 2, 128)),
        ("rows", "1to4_10x24_k3p1_b1_bias_relu", "nhwc", RowsConfig(1, 4, 2, 8, 4, 128)),
        ("rows", "1to3_10x25_k3p1x2_b3_bias_pool2", "nchw", RowsConfig(2, 5, 5, 6, 1, 128)),
        ("rows", "2to4_9x20_k3p1x4_b2_uint8", "nchw", RowsConfig(1, 3, 2, 4, 2, 256)),
        ("direct", "3to5_9x14_k5x3p2x1_b3_bias_relu", "nhwc", DirectConfig(8, 4, "constant")),
        ("streams", "3to5_9x14_k5x3p2x1_b5_bias_relu", "nchw", ChunksConfig(3)),
        ("streams", "3to5_9x14_k5x3p2x1_b5_bias_relu_pool3c", "nhwc", ChunksConfig(2)),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_parts_meet_without_gap_or_overlap(
    rung: str, name: str, layout: str, config: Config, seed: int
) -> None:
    problem = FewChannelsProblem.parse(name, layout=layout)
    check(OPERATION, OPERATION.ladder.rung(rung), problem, config, CPU, seed)


@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", ("fp16", "bf16"))
@pytest.mark.parametrize("rung", ("streams", "half", "direct", "rows"))
def test_16_bit_images(rung: str, dtype: str, seed: int) -> None:
    problem = replace(SMALL, dtype=dtype, source=dtype)
    chosen = OPERATION.ladder.rung(rung)
    check(OPERATION, chosen, problem, chosen.configs(problem)[0], CPU, seed)


# --- non-finite values


@pytest.mark.parametrize("rung", ("matrix_unroll", "tensor_cores", "fusion", "half", "direct", "rows"))
def test_nan_and_infinity_reach_what_sees_them_and_nothing_else(rung: str) -> None:
    problem = replace(SMALL, dtype="fp16", source="fp16", layout="nhwc")
    inputs = OPERATION.inputs(problem, CPU, 1)
    inputs["x"][0, 1, 4, 5] = float("nan")
    inputs["x"][2, 2, 7, 8] = float("inf")
    expected = by_definition(problem, inputs)
    result = run(rung, problem, inputs)
    torch.testing.assert_close(result, expected, equal_nan=True, rtol=1e-2, atol=1e-2)
    assert result.isnan().any() and not result.isnan().all()


# --- the operator


@pytest.mark.share(7)
@pytest.mark.parametrize("memory_format", (torch.contiguous_format, torch.channels_last))
@pytest.mark.parametrize("source", (torch.float32, torch.uint8))
def test_the_operator_is_the_composition(memory_format: torch.memory_format, source: torch.dtype) -> None:
    x = (torch.rand(2, 3, 10, 11) * 9).to(source).contiguous(memory_format=memory_format)
    weight, bias = torch.randn(5, 3, 3, 2), torch.randn(5)
    result = few_channels(x, weight, bias, padding=(1, 0), relu=True, pool=4, ceil_mode=True)
    expected = F.max_pool2d(F.conv2d(x.float(), weight, bias, padding=(1, 0)).relu(), 4, ceil_mode=True)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert result.is_contiguous(memory_format=memory_format)


def test_strided_inputs_and_empty_batches() -> None:
    x, weight = (
        torch.randn(2, 10, 11, 3).permute(0, 3, 1, 2)[..., ::2],
        torch.randn(3, 3, 4, 2).transpose(2, 3),
    )
    torch.testing.assert_close(
        few_channels(x, weight, rung="direct"), F.conv2d(x, weight), rtol=1e-4, atol=1e-4
    )
    assert few_channels(x[:0], weight, pool=2).shape == (0, 3, 4, 1)


def test_gradients_are_those_of_the_composition() -> None:
    x, weight, bias = torch.randn(2, 2, 7, 8), torch.randn(3, 2, 3, 3), torch.randn(3)
    ours = [t.clone().requires_grad_() for t in (x, weight, bias)]
    theirs = [t.clone().requires_grad_() for t in (x, weight, bias)]
    few_channels(*ours, padding=1, relu=True, pool=3, ceil_mode=True).square().sum().backward()
    y = F.max_pool2d(F.conv2d(theirs[0], theirs[1], theirs[2], padding=1).relu(), 3, ceil_mode=True)
    y.square().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_the_fake_has_the_result_s_form() -> None:
    arguments = (torch.randn(2, 3, 10, 11), torch.randn(4, 3, 3, 2), torch.randn(4), [1, 0], True, 4, True)
    torch.library.opcheck(
        torch.ops.escalade.few_channels.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 3, 8), torch.zeros(4, 3, 3, 3)), "few_channels takes x: N C H W"),
        ((torch.zeros(2, 3, 8, 8), torch.zeros(4, 2, 3, 3)), "here C is 3"),
        ((torch.zeros(2, 9, 8, 8), torch.zeros(4, 9, 3, 3)), "conv2d takes any"),
        ((torch.zeros(2, 3, 8, 8), torch.zeros(4, 3, 3, 3).double()), "float32, float16"),
        ((torch.zeros(2, 3, 8, 8).half(), torch.zeros(4, 3, 3, 3)), "x: N C H W of weight.float32.uint8"),
        ((torch.zeros(2, 3, 8, 8), torch.zeros(4, 3, 3, 3), torch.zeros(3)), "here K is 4"),
    ],
)
def test_bad_tensors_are_refused(arguments: tuple[torch.Tensor, ...], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        few_channels(*arguments)
