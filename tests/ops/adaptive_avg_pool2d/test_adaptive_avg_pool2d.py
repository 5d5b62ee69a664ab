"""The mean over a grid of windows: names, limits, PyTorch's rule, and the operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, adaptive_avg_pool2d
from escalade.ops.adaptive_avg_pool2d import AdaptiveAvgPool2dProblem
from escalade.ops.base.cards import typical_card
from escalade.ops.choose.choice import choose
from tests import formulas
from tests.support import check

CPU = torch.device("cpu")
PLAIN = AdaptiveAvgPool2dProblem(2, 24, 7, 7)


@st.composite
def problems(draw: st.DrawFn) -> AdaptiveAvgPool2dProblem:
    def size(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    return AdaptiveAvgPool2dProblem(
        size(0, 3), size(1, 9), size(1, 12), size(1, 12), (size(1, 9), size(1, 9)),
        draw(st.sampled_from(["fp32", "fp16", "bf16"])), draw(st.sampled_from(["nchw", "nhwc"])),
    )  # fmt: skip


@given(problems())
def test_parse_is_the_inverse_of_name(problem: AdaptiveAvgPool2dProblem) -> None:
    assert AdaptiveAvgPool2dProblem.parse(problem.name, problem.dtype, problem.layout) == problem


@given(st.integers(1, 12), st.integers(1, 12))
def test_additions_are_those_of_pytorchs_windows(size: int, outputs: int) -> None:
    """Counted by a gradient: each output passes 1 / n to each of its n pixels."""
    problem = AdaptiveAvgPool2dProblem(1, 1, size, 1, (outputs, 1))
    windows = []
    for output in range(outputs):
        x = torch.zeros(1, 1, size, 1, requires_grad=True)
        F.adaptive_avg_pool2d(x, (outputs, 1))[0, 0, output, 0].backward()
        assert x.grad is not None
        windows.append(int((x.grad > 0).sum()))
    assert problem.flops == sum(windows)
    assert problem.largest_window == max(windows)


def test_names_are_stable() -> None:
    assert AdaptiveAvgPool2dProblem(256, 512, 7, 7).name == "512_7to1_b256"
    assert AdaptiveAvgPool2dProblem(3, 36, 9, 5, (2, 4)).name == "36_9x5to2x4_b3"
    with pytest.raises(UnsupportedError, match="the form is"):
        AdaptiveAvgPool2dProblem.parse("512_7_b256")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batch": -1}, "batch is -1"),
        ({"channels": 0}, "channels is 0"),
        ({"output": (0, 1)}, "output is 0"),
        ({"dtype": "tf32"}, "dtype 'tf32'.*fp32, fp16, bf16"),
        ({"layout": "hwcn"}, "layout 'hwcn'"),
        ({"height": 2**14, "width": 2**14}, r"fewer than 2\^31"),
        (
            {"channels": 1, "height": 2**16, "width": 1, "output": (2**16, 1)},
            r"adaptive_avg_pool2d needs a product below 2\^31",
        ),
    ],
)
def test_impossible_problems_are_refused_with_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        replace(PLAIN, **change)


def test_the_preferred_rung_follows_the_layout() -> None:
    chosen = [
        choose(OPERATIONS["adaptive_avg_pool2d"], replace(PLAIN, layout=layout), CPU).rung.name
        for layout in ("nchw", "nhwc")
    ]
    assert chosen == ["lanes", "sliced"]


# --- the operator


@pytest.mark.share(7)
@pytest.mark.parametrize("output", [1, (3, 2)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_and_layouts(
    dtype: torch.dtype, memory_format: torch.memory_format, output: Any, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(2, 24, 7, 7).to(dtype).contiguous(memory_format=memory_format)
    y = adaptive_avg_pool2d(x, output)
    assert y.is_contiguous(memory_format=memory_format)
    expected = F.adaptive_avg_pool2d(x.double(), output).to(dtype)
    close = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(y, expected, rtol=close, atol=close)


@pytest.mark.parametrize("rung", ["naive", "lanes", "vectorised", "sliced"])
def test_what_is_no_number_is_in_its_mean(rung: str) -> None:
    x = torch.randn(2, 24, 7, 7, generator=torch.Generator().manual_seed(5))
    x[0, 0, 3, 3], x[0, 1, 0, 0], x[1, 2, 6, 6] = float("nan"), float("inf"), float("-inf")
    x[1, 3, 2, 2], x[1, 3, 2, 3] = float("inf"), float("-inf")
    if rung in ("vectorised", "sliced"):
        x = x.contiguous(memory_format=torch.channels_last)
    y = adaptive_avg_pool2d(x, 1, rung=rung)
    expected = formulas.mean(x, (2, 3)).float()[..., None, None]
    assert expected[1, 3].isnan().all() and expected.isinf().sum() == 2
    torch.testing.assert_close(y, expected, equal_nan=True)


def test_sums_are_kept_in_fp32() -> None:
    """In 16 bits a sum of ones stops growing at 2048; the largest numbers overflow before the division."""
    ones = torch.ones(1, 8, 64, 64).half().contiguous(memory_format=torch.channels_last)
    assert torch.equal(adaptive_avg_pool2d(ones, 1), ones[:, :, :1, :1])
    large = torch.full((1, 24, 7, 7), 60000.0).half()
    assert torch.equal(adaptive_avg_pool2d(large, 1), large[:, :, :1, :1])


def test_any_strides_are_taken(seed: int) -> None:
    x = torch.randn(2, 48, 7, 7, generator=torch.Generator().manual_seed(seed))
    for strided in (x[:, ::2], x[:, :24].transpose(2, 3), x[:, 1:25]):
        torch.testing.assert_close(adaptive_avg_pool2d(strided, 1), F.adaptive_avg_pool2d(strided, 1))


@pytest.mark.parametrize(
    ("x", "output", "rung", "sentence"),
    [
        (
            torch.ones(8, 9, 9),
            1,
            None,
            r"x is torch.float32 \[8, 9, 9\] on cpu; adaptive_avg_pool2d takes x: N C H W",
        ),
        (torch.ones(2, 8, 9, 9).int(), 1, None, "torch.int32.*float32, float16 or bfloat16"),
        (torch.ones(2, 8, 9, 9), 0, None, r"output is \[0, 0\]"),
        (torch.ones(2, 8, 9, 9), (1, 2, 3), None, "output is .*one integer, or two"),
        (torch.ones(2, 8, 9, 9), 1, "fastest", "no rung 'fastest'"),
        (torch.ones(0, 8, 9, 9), 1, "fastest", "no rung 'fastest'"),
        (torch.ones(2, 8, 9, 9), 1, "vectorised", "supports layout nhwc, not nchw"),
    ],
)
def test_what_it_refuses(x: torch.Tensor, output: Any, rung: str | None, sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        adaptive_avg_pool2d(x, output, rung=rung)


def test_an_empty_batch() -> None:
    assert adaptive_avg_pool2d(torch.ones(0, 8, 9, 9), (2, 3)).shape == (0, 8, 2, 3)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradients_are_those_of_pytorch(memory_format: torch.memory_format) -> None:
    x = torch.randn(2, 24, 7, 7).contiguous(memory_format=memory_format)
    mine, its = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = adaptive_avg_pool2d(mine, (3, 2)), F.adaptive_avg_pool2d(its, (3, 2))
    gradient = torch.randn_like(expected)
    y.backward(gradient)
    expected.backward(gradient)
    assert mine.grad is not None and its.grad is not None
    torch.testing.assert_close(mine.grad, its.grad)


def test_opcheck() -> None:
    x = torch.randn(2, 24, 7, 7, requires_grad=True)
    last = x.detach().contiguous(memory_format=torch.channels_last)
    for tensor in (x, last):
        torch.library.opcheck(torch.ops.escalade.adaptive_avg_pool2d.default, (tensor, [1, 1]))


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(("sizes", "output"), [((37, 16), (3, 5)), ((9, 301), (2, 3)), ((5, 4), (7, 6))])
def test_column_sums_are_right_for_every_config(
    sizes: tuple[int, int], output: tuple[int, int], dtype: str, seed: int
) -> None:
    problem = AdaptiveAvgPool2dProblem(2, 5, *sizes, output, dtype=dtype)
    operation = OPERATIONS["adaptive_avg_pool2d"]
    rung = operation.ladder.rung("column_sums")
    for config in rung.configs(problem):
        check(operation, rung, problem, config, CPU, seed)


def test_planes_that_are_not_averaged_as_a_whole_are_summed_by_columns() -> None:
    outputs = ((1, 1), (1, 2), (7, 7))
    chosen = [choose(OPERATIONS["adaptive_avg_pool2d"], replace(PLAIN, output=one), CPU) for one in outputs]
    assert [one.rung.name for one in chosen] == ["lanes", "column_sums", "column_sums"]
    assert [one.config.as_dict()["splits"] for one in chosen[1:]] == [4, 1], "few threads share columns"
    many = choose(OPERATIONS["adaptive_avg_pool2d"], replace(PLAIN, batch=1024, output=(1, 2)), CPU)
    assert many.config.as_dict()["splits"] == 1


def test_rows_wider_than_shared_memory_are_left_to_another_rung() -> None:
    wide = replace(PLAIN, width=12289, output=(2, 2))
    chosen = choose(OPERATIONS["adaptive_avg_pool2d"], wide, CPU)
    assert chosen.rung.name == "lanes"


@pytest.mark.parametrize("name", ["adaptive_avg_pool2d", "linear"])
def test_fp8_is_read_on_cards_that_convert_it(name: str) -> None:
    operation = OPERATIONS[name]
    small = [one for one in operation.small_problems if getattr(one, "x_dtype", "")]

    def rungs(x_dtype: str, architecture: str) -> set[str]:
        ladder = operation.ladder.on(typical_card(architecture))
        offered = [replace(one, dtype="fp16") for one in small if one.x_dtype == x_dtype]
        return {rung.name for rung in ladder if any(rung.refusal(problem) is None for problem in offered)}

    older = rungs("int8", "sm_80")
    assert len(older) == 2 and rungs("fp8", "sm_89") == older and not rungs("fp8", "sm_80")
    problem = next(one for one in small if one.x_dtype == "fp8")
    reason = operation.ladder.on(typical_card("sm_86")).rung(min(older)).refusal(problem)
    assert reason is not None and "reads fp8 on sm_89, " in reason and "this GPU is sm_86" in reason
