"""attention: matches PyTorch's operator for all strides, masks and numbers; refusals; rungs and tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade import ops
from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order
from escalade.errors import UnsupportedError
from escalade.ops.attention import ATTENTION, MMA, AttentionProblem, MmaConfig, at_of
from escalade.ops.base.accuracy import relative_error
from escalade.ops.base.card import H200
from escalade.ops.choose.choice import choose
from escalade.ops.choose.pytorch import reason_for_pytorch

INF, NAN = float("inf"), float("nan")
CPU = torch.device("cpu")
RUNGS = [(rung.name, dtype) for rung in ATTENTION.ladder for dtype in ("fp32", "fp16")][:-2] + [
    ("mma", "tf32"), ("mma", "fp16"), ("mma", "bf16"),
]  # fmt: skip
TYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-5, "tf32": 3e-3, "fp16": 3e-3, "bf16": 2e-2}


def called(rung: str, dtype: str, *operands: Any, **given: Any) -> torch.Tensor:
    return ops.attention(*operands, **given, tf32=dtype == "tf32", rung=rung)


def drawn(dtype: str, *sizes: int) -> torch.Tensor:
    return torch.randn(sizes).to(TYPES[dtype])


def assert_close(result: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    t = TOLERANCE[dtype]
    torch.testing.assert_close(result.float(), expected.float(), rtol=t, atol=t, equal_nan=True)


def pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **given)


@pytest.mark.parametrize(("rung", "dtype"), RUNGS)
def test_a_packed_projection_is_read_in_place(rung: str, dtype: str) -> None:
    packed = drawn(dtype, 2, 19, 3, 2, 24)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    y = called(rung, dtype, q, k, v)
    assert_close(y, pytorch(q, k, v), dtype)
    assert y.transpose(1, 2).is_contiguous()
    plan = ops.attention.__globals__["_plan"](q, k, v, tf32=dtype == "tf32", rung=rung)
    assert all(plan.packers[role](operand) is operand for role, operand in {"q": q, "k": k, "v": v}.items())
    assert plan.make_problem().k_at[0] == 0  # the tensor has the offset


def test_calls_of_one_kind_from_any_address() -> None:
    """A call prepared for an aligned packed projection gets a misaligned one, and heads that share memory."""
    memory = torch.randn(2 * 19 * 3 * 2 * 24 + 8)
    for first in (0, 3, 4, 1):
        packed = memory[first : first + 2 * 19 * 3 * 2 * 24].view(2, 19, 3, 2, 24)
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        assert_close(ops.attention(q, k, v), pytorch(q, k, v), "fp32")
        shared = memory[first : first + 2 * 9 * 16].view(2, 1, 9, 16).expand(2, 4, 9, 16)
        assert_close(ops.attention(shared, shared, shared), pytorch(shared, shared, shared), "fp32")


def test_strides_that_kernels_cannot_read_are_packed_first() -> None:
    q, k, v = (torch.randn(1, 2, 7, 32, 2)[..., 0] for _ in range(3))
    assert_close(ops.attention(q, k, v), pytorch(q, k, v), "fp32")
    shifted = torch.randn(1 + 2 * 5 * 3 * 16)[1:].view(1, 5, 3, 2, 16).permute(2, 0, 3, 1, 4)  # misaligned
    assert_close(ops.attention(*shifted), pytorch(*shifted), "fp32")
    one_head = torch.randn(2, 1, 9, 16).expand(2, 4, 9, 16)  # of four
    assert_close(ops.attention(one_head, one_head, one_head), pytorch(one_head, one_head, one_head), "fp32")
    assert at_of((96, 32, 8, 2), 4) is None and at_of((96, 32, 6, 1), 4) is None
    assert at_of((96, 0, 8, 1), 4) == (0, 96, 0, 8)


@pytest.mark.share(7)
@pytest.mark.parametrize(("rung", "dtype"), RUNGS)
@pytest.mark.parametrize(
    "sizes", [(2, 3, 21, 37), (1, 1, 21, 37), (1, 3, 1, 37), (2, 1, 21, 1), (1, 37), (21, 37)]
)
def test_every_broadcast_of_a_bias(rung: str, dtype: str, sizes: tuple[int, ...]) -> None:
    q, k, v = (drawn(dtype, 2, 3, tokens, 16) for tokens in (21, 37, 37))
    bias = drawn(dtype, *sizes)
    assert_close(called(rung, dtype, q, k, v, bias=bias), pytorch(q, k, v, attn_mask=bias.float()), dtype)
    kept = torch.rand(sizes) > 0.3
    assert_close(called(rung, dtype, q, k, v, bias=kept), pytorch(q, k, v, attn_mask=kept), dtype)


@pytest.mark.parametrize(("rung", "dtype"), RUNGS)
def test_numbers_that_are_not_finite(rung: str, dtype: str) -> None:
    q, k, v = (drawn(dtype, 1, 1, 40, 16) for _ in range(3))
    bias = torch.zeros(40, 40)
    bias[0] = -INF  # no key at all
    bias[1, :39] = -INF
    bias[2, 3], bias[3, 38] = NAN, INF
    bias[4] = NAN
    bias[5, ::2] = torch.finfo(TYPES[dtype]).min
    bias[6] = torch.finfo(TYPES[dtype]).min
    bias = bias.to(TYPES[dtype])
    y = called(rung, dtype, q, k, v, bias=bias)
    expected = ops.attention.__globals__["written_out"](
        q.double(), k.double(), v.double(), bias.double(), 0.25
    )
    assert not y[0, 0, 0].any() and y[0, 0, 2:5].isnan().all()
    if dtype == "fp32":  # else one of them rounds away the scores added to the mask, and the other does not
        assert_close(y, expected.to(y.dtype), dtype)
    else:
        assert_close(y[:, :, :6], expected[:, :, :6].to(y.dtype), dtype)
        assert y[:, :, 6:].isfinite().all()
    large = 300 * q, 300 * k
    assert called(rung, dtype, *large, v).isfinite().all()
    k[0, 0, 39, 0] = NAN
    assert called(rung, dtype, q, k, v, causal=True)[0, 0, :39].isfinite().all()


@pytest.mark.share(7)
@pytest.mark.parametrize(("rung", "dtype"), RUNGS)
@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (33, 90), (90, 33), (1, 5)])
def test_a_causal_query_reads_no_later_key(rung: str, dtype: str, queries: int, keys: int) -> None:
    q, k, v = (drawn(dtype, 1, 2, tokens, 32) for tokens in (queries, keys, keys))
    assert_close(called(rung, dtype, q, k, v, causal=True), pytorch(q, k, v, is_causal=True), dtype)


TILES = [
    MmaConfig(*each) for each in ((1, 8, 16), (2, 2, 32), (4, 1, 16), (4, 1, 64), (1, 1, 80), (8, 1, 128))
]


@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", ["fp16", "tf32"])
@pytest.mark.parametrize("config", TILES, ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_tiles_of_every_size(dtype: str, config: MmaConfig, seed: int) -> None:
    """Queries, keys and heads that do not fill the last CTA, in several orders, and with checks."""
    queries = min(config.rows, 20) if config.pairs > 1 else 70
    bias = (3, 1, queries, 70) if seed == 1 else ()
    problem = AttentionProblem(
        3, 3, queries, 70, 24, 40, bias=bias, causal=seed == 2, order="bqh", dtype=dtype
    )
    inputs, y = ATTENTION.inputs(problem, CPU, seed), ATTENTION.output(problem, CPU)
    options = TwinOptions(order=Order(seed=seed, late=seed == 2), checks=True)
    bind(MMA.recipe(problem, config), {**inputs, "y": y}, options=options)()
    exact = ATTENTION.reference(problem, inputs)
    error = relative_error(ATTENTION.peer(problem, inputs), exact)
    assert relative_error(y, exact) <= MMA.tolerance(problem, error)


@pytest.mark.parametrize("masked", [False, True])
def test_the_gradient_is_pytorchs(masked: bool) -> None:
    given = [torch.randn(2, 2, tokens, 16) for tokens in (5, 7, 7)]
    bias = torch.randn(1, 2, 1, 7).masked_fill(torch.arange(7) == 2, -INF) if masked else None
    results = []
    operators: tuple[Any, ...] = (ops.attention, F.scaled_dot_product_attention)
    for run in operators:
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        added = None if bias is None else bias.clone().requires_grad_()
        options: Any = (
            {"scale": 0.3} if masked else ({"causal": True} if run is ops.attention else {"is_causal": True})
        )
        run(*leaves, added, **options).square().sum().backward()
        results.append([leaf.grad for leaf in (*leaves, *(() if added is None else (added,)))])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_autocast_and_nothing_to_compute() -> None:
    q = torch.randn(2, 2, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.attention(q, q, q).dtype == torch.bfloat16
    assert ops.attention(q[:0], q[:0], q[:0]).shape == (0, 2, 5, 16)


def test_what_does_not_fit_is_said() -> None:
    q = torch.randn(1, 2, 5, 16)
    for wrong, words in (
        ((q[..., :12], q[..., :12], q), "size is 12; attention supports heads of 16 to 128"),
        ((q, q[:, :1], q), r"k is .* v: N H K V.* here N is 1, H is 2"),
        ((q, q.half(), q), "k is torch.float16"),
        ((q[0], q[0], q[0]), "attention takes q: N H Q S"),
        ((q, q, q, torch.zeros(3, 1, 1, 5)), "bias has 3 batch items"),
        ((q, q, q, torch.zeros(5, 4)), "each must be 1 or that of the scores"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            ops.attention(*wrong)
    with pytest.raises(UnsupportedError, match="tf32=True"):
        ops.attention(q.half(), q.half(), q.half(), tf32=True)
    with pytest.raises(UnsupportedError, match="online takes fp32"):
        ops.attention(q, q, q, rung="mma")
    with pytest.raises(UnsupportedError, match="strides must be multiples"):
        choose(ATTENTION, AttentionProblem(1, 1, 4, 4, 16, q_at=(0, 0, 0, 17)), CPU, "online")
    with pytest.raises(UnsupportedError, match="it must be finite"):
        AttentionProblem(1, 1, 4, 4, 16, scale=INF)
    with pytest.raises(UnsupportedError, match="the form is"):
        AttentionProblem.parse("49")


def test_what_kernels_cannot_count_is_refused() -> None:
    """Sizes, strides and CTA counts are 32-bit arguments, which would wrap."""
    long: dict[str, Any] = {"heads": 16, "queries": 1, "keys": 2**20, "size": 128}
    with pytest.raises(UnsupportedError, match="k has strides \\(2147483648, .*split the batch"):
        AttentionProblem(2, **long)
    assert AttentionProblem(1, **long).strides("k")[0] == 2**31  # a dimension of one item: never used
    with pytest.raises(UnsupportedError, match="y has strides"):
        AttentionProblem(2, 2**10, 2**14, 4, 128, q_at=(0, 0, 0, 128))
    with pytest.raises(UnsupportedError, match="bias has sizes"):
        AttentionProblem(2, 1, 2**16, 2**15, 16, bias=(2, 1, 2**16, 2**15))
    with pytest.raises(UnsupportedError, match="counts CTAs in 32 bits"):
        AttentionProblem(2**20, 2**11, 1, 1, 16)


def test_names_and_sizes() -> None:
    window = AttentionProblem.packed(4, 49, 3, 32, bias=(2, 3, 49, 49), bias_row=56, dtype="fp16")
    assert window.name == (
        "49_h3d32_b4_bias2x3x49x49_row56_q0x14112x32x288_k96x14112x32x288_v192x14112x32x288_tobqh"
    )
    assert AttentionProblem.parse(window.name, "fp16") == window
    assert window.bytes == 2 * (4 * 3 * 4 * 49 * 32 + 2 * 3 * 49 * 49)
    causal = AttentionProblem(1, 1, 3, 5, 16, causal=True)
    assert causal.scores == 1 + 2 + 3 and replace(causal, queries=7).scores == 1 + 2 + 3 + 4 + 5 + 5 + 5
    assert AttentionProblem(1, 1, 3, 5, 64, scale=0.125).scale is None


def test_which_rung_computes_what_and_what_is_left_to_pytorch() -> None:
    def reason(problem: AttentionProblem) -> tuple[str, str | None]:
        choice = choose(ATTENTION, problem, H200)
        return choice.rung.name, reason_for_pytorch(ATTENTION, choice, H200)

    for problem in ATTENTION.problems[:6]:
        assert reason(replace(problem, dtype="fp16")) == ("mma", None), problem.name
    assert reason(replace(ATTENTION.problems[0], dtype="fp32")) == ("online", None)
    long = AttentionProblem.packed(1, 1024, 2, 64, dtype="fp16")
    assert "1024" in str(reason(long)[1]) and reason(replace(long, bias=(1, 1, 1, 1024)))[1] is None
    window = MMA.on(H200).configs(replace(ATTENTION.problems[0], dtype="fp16"))[0]
    assert window == MmaConfig(4, 1, 64)  # all of a window at once
