"""The maximum over windows: names, limits, PyTorch's rules, and the operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, max_pool2d
from escalade.ops.base.draw import Draw
from escalade.ops.choose.choice import choose
from escalade.ops.max_pool2d import MaxPool2dProblem, exact
from escalade.ops.shared.pooling import random_inputs
from tests import formulas
from tests.support import check

CPU = torch.device("cpu")
PLAIN = MaxPool2dProblem(2, 8, 9, 9, (3, 3), (2, 2), (1, 1))
# Few kernels: the twin compiles each combination of window, dtype and layout.
WINDOW: dict[str, Any] = {"kernel": 3, "stride": 2, "padding": 1}


@st.composite
def problems(draw: st.DrawFn) -> MaxPool2dProblem:
    def two(low: int, high: int) -> tuple[int, int]:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    try:
        return MaxPool2dProblem(
            draw(st.integers(0, 2)), draw(st.integers(1, 3)), *two(1, 9), two(1, 5), two(1, 4), two(0, 2),
            draw(st.booleans()), draw(st.sampled_from(["fp32", "fp16", "bf16"])),
            draw(st.sampled_from(["nchw", "nhwc"])),
        )  # fmt: skip
    except UnsupportedError:  # more padding than half the kernel, or a kernel larger than the image
        assume(False)
        raise


@given(problems())
def test_parse_is_the_inverse_of_name(problem: MaxPool2dProblem) -> None:
    assert MaxPool2dProblem.parse(problem.name, problem.dtype, problem.layout) == problem


@given(problems())
def test_shapes_are_those_of_pytorch(problem: MaxPool2dProblem) -> None:
    y = exact(problem, random_inputs(problem, Draw(CPU, 0)))
    assert y.shape == (problem.batch, problem.channels, problem.output_height, problem.output_width)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("64_112_k3s2p1_b256", MaxPool2dProblem(256, 64, 112, 112, (3, 3), (2, 2), (1, 1))),
        ("8_2x5_k3x1s2x1_b2_ceil", MaxPool2dProblem(2, 8, 2, 5, (3, 1), (2, 1), ceil_mode=True)),
    ],
)
def test_names_are_stable(name: str, problem: MaxPool2dProblem) -> None:
    assert problem.name == name
    assert MaxPool2dProblem.parse(name) == problem


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batch": -1}, "batch is -1"),
        ({"channels": 0}, "channels is 0"),
        ({"kernel": (0, 3)}, "kernel is 0"),
        ({"stride": (1, 0)}, "stride is 0"),
        ({"padding": (-1, 0)}, "padding is -1"),
        ({"padding": (2, 2)}, "padding 2 with kernel 3: it must be at most half"),
        ({"kernel": (13, 3)}, "the kernel has 13x3 pixels.*only 11x11"),
        ({"stride": (2**24, 1)}, "less than 2\\^24"),
        ({"dtype": "fp64"}, "dtype 'fp64'.*fp32, fp16, bf16"),
        ({"layout": "hwcn"}, "layout 'hwcn'"),
        ({"height": 2**14, "width": 2**14}, r"fewer than 2\^31"),
        ({"behind_relu": True}, "behind_relu affects only places"),
        (
            {"height": 40, "width": 40, "kernel": (16, 16), "places": True},
            "so windows have at most 255 pixels",
        ),
    ],
)
def test_impossible_problems_are_refused_with_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        replace(PLAIN, **change)


def test_what_is_no_name_is_refused_with_the_form_of_one() -> None:
    with pytest.raises(UnsupportedError, match="the form is"):
        MaxPool2dProblem.parse("64_112_k3")


def test_the_preferred_rung_follows_layout_and_window() -> None:
    large = replace(PLAIN, height=40, width=40, kernel=(31, 31), layout="nhwc")
    chosen = [
        choose(OPERATIONS["max_pool2d"], p, CPU).rung.name
        for p in (PLAIN, replace(PLAIN, layout="nhwc"), large)
    ]
    assert chosen == ["row_packs", "vectorised", "naive"]


@pytest.mark.parametrize(
    "problem",
    [
        MaxPool2dProblem(2, 3, 8, 16, (2, 2), (2, 2)),
        MaxPool2dProblem(2, 3, 8, 16, (2, 2), (2, 2), places=True),
        MaxPool2dProblem(2, 3, 9, 16, (2, 2), (2, 2)),
        MaxPool2dProblem(2, 3, 9, 17, (3, 3), (2, 2)),
        MaxPool2dProblem(2, 3, 8, 16, (3, 3), (2, 2), (1, 1)),
        MaxPool2dProblem(3, 5, 1, 32, (1, 2), (1, 2)),
        MaxPool2dProblem(2, 3, 9, 15, (1, 1), (3, 2)),
    ],
    ids=lambda problem: problem.name,
)
def test_every_run_of_a_row(problem: MaxPool2dProblem, seed: int) -> None:
    operation = OPERATIONS["max_pool2d"]
    rung = operation.ladder.rung("row_packs")
    for config in rung.configs(problem):
        check(operation, rung, problem, config, CPU, seed)


# --- the operator


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_and_layouts(dtype: torch.dtype, memory_format: torch.memory_format, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(2, 8, 9, 9).to(dtype).contiguous(memory_format=memory_format)
    y = max_pool2d(x, **WINDOW)
    assert y.is_contiguous(memory_format=memory_format)
    assert torch.equal(y, F.max_pool2d(x, 3, 2, 1))


@pytest.mark.parametrize("rung", ["naive", "shared_tile", "vectorised"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_nan_is_larger_than_anything(rung: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 8, 9, 9, generator=torch.Generator().manual_seed(5))
    x.view(-1)[::37] = float("nan")
    x.view(-1)[5::41] = float("inf")
    x[0, 0] = float("-inf")
    x[0, 1, 4] = float("nan")
    layout = torch.channels_last if rung == "vectorised" else torch.contiguous_format
    x = x.to(dtype).contiguous(memory_format=layout)
    expected = formulas.max_pool(x, 3, 2, 1).to(dtype)
    assert expected.isnan().any() and (expected == float("-inf")).any()
    torch.testing.assert_close(max_pool2d(x, rung=rung, **WINDOW), expected, rtol=0, atol=0, equal_nan=True)


def test_the_stride_is_the_kernel_unless_given(seed: int) -> None:
    x = torch.randn(1, 8, 10, 10, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(max_pool2d(x, 2), F.max_pool2d(x, 2))
    assert torch.equal(max_pool2d(x, (2, 3), ceil_mode=True), F.max_pool2d(x, (2, 3), ceil_mode=True))


def test_any_strides_are_taken(seed: int) -> None:
    x = torch.randn(2, 16, 9, 9, generator=torch.Generator().manual_seed(seed))
    for strided in (x[:, ::2], x.transpose(2, 3), x[:, 4:12].contiguous(memory_format=torch.channels_last)):
        assert torch.equal(max_pool2d(strided, **WINDOW), F.max_pool2d(strided, 3, 2, 1))


@pytest.mark.parametrize(
    ("x", "options", "sentence"),
    [
        (torch.ones(8, 9, 9), {}, r"max_pool2d takes x: N C H W"),
        (torch.ones(2, 8, 9, 9).double(), {}, "torch.float64.*float32, float16 or bfloat16"),
        (torch.ones(2, 8, 9, 9), {"kernel": 0}, "kernel is 0"),
        (torch.ones(2, 8, 9, 9), {"kernel": (2, 2, 2)}, "kernel is .*one integer, or two"),
        (torch.ones(2, 8, 9, 9), {"padding": 2}, "at most half"),
        (torch.ones(2, 8, 9, 9), {"rung": "fastest"}, "no rung 'fastest'"),
        (torch.ones(0, 8, 9, 9), {"rung": "fastest"}, "no rung 'fastest'"),
        (torch.ones(2, 8, 9, 9), {"rung": "vectorised"}, "supports layout nhwc, not nchw"),
    ],
)
def test_what_it_refuses(x: torch.Tensor, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        max_pool2d(x, **{**WINDOW, **options})


def test_an_empty_batch() -> None:
    assert max_pool2d(torch.ones(0, 8, 9, 9), **WINDOW).shape == (0, 8, 5, 5)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradients_are_those_of_pytorch(memory_format: torch.memory_format, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(2, 8, 9, 9).contiguous(memory_format=memory_format)
    mine, its = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = max_pool2d(mine, **WINDOW), F.max_pool2d(its, 3, 2, 1)
    gradient = torch.randn_like(expected)
    y.backward(gradient)
    expected.backward(gradient)
    assert mine.grad is not None and its.grad is not None
    torch.testing.assert_close(mine.grad, its.grad)


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_opcheck(ceil_mode: bool) -> None:
    x = torch.randn(2, 8, 9, 9, requires_grad=True)
    last = x.detach().contiguous(memory_format=torch.channels_last)
    for tensor in (x, last):
        torch.library.opcheck(
            torch.ops.escalade.max_pool2d.default, (tensor, [3, 3], [2, 2], [1, 1], ceil_mode)
        )


def test_torch_compile_with_a_batch_that_changes() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: max_pool2d(x * 2, **WINDOW), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for batch in (2, 3):
        x = torch.randn(batch, 8, 9, 9)
        assert torch.equal(compiled(x), F.max_pool2d(x * 2, 3, 2, 1))
