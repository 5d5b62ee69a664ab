"""Attention in networks: PyTorch's operator, written out, in windows with masks, and operands read in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine import compile
from escalade.engine.capture.export import capture
from escalade.engine.graph.forms import InputFormat
from escalade.engine.graph.graph import Graph
from escalade.engine.nodes.attention import Attention
from escalade.engine.nodes.signature import SizeError
from escalade.engine.passes import for_batch, optimize
from escalade.engine.plan.plan import PlanStep
from escalade.engine.plan.planner import make_plan
from escalade.ops.base.accuracy import relative_error
from escalade.ops.base.card import H200

ALLOWED = {"fp32": 1e-5, "tf32": 2e-3, "fp16": 3e-3, "bf16": 2e-2}
Formula = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
HEADS, SIZE = 2, 16
WIDTH = HEADS * SIZE


class Block(nn.Module):
    """Self-attention of a vision transformer: one projection for q, k and v."""

    def __init__(self, formula: Formula, part: str = "unbind") -> None:
        super().__init__()
        self.norm, self.qkv, self.project = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.formula, self.part = formula, part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        packed = self.qkv(self.norm(x))
        if self.part == "chunk":
            q, k, v = (one.view(batch, tokens, HEADS, SIZE).transpose(1, 2) for one in packed.chunk(3, -1))
        else:
            packed = packed.reshape(batch, tokens, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
            q, k, v = packed.unbind(0) if self.part == "unbind" else (packed[0], packed[1], packed[2])
        return x + self.project(self.formula(q, k, v).transpose(1, 2).reshape(batch, tokens, WIDTH))


class Sequences(nn.Module):
    """PyTorch's own layer, on rows [tokens][batch][features]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class Cross(nn.Module):
    """Cross-attention of sequences with different numbers of tokens and features."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(24, WIDTH), nn.Linear(24, 2 * WIDTH)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(given).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer, given in ((self.q, x), (self.k, other), (self.v, other))
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Windows(nn.Module):
    """A block of Swin: windows of an image, shifted, with a bias per head and a mask per window."""

    side, window = 6, 3

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift, self.qkv, self.project = shift, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        tokens = self.window**2
        self.table = nn.Parameter(torch.randn(25, HEADS))
        self.index = nn.Buffer(torch.randint(0, 25, (tokens * tokens,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift, n, w = self.shift, self.side // self.window, self.window
        batch, tokens, count = len(x), w * w, n * n
        y = torch.roll(x, (-shift, -shift), (1, 2)) if shift else x
        y = y.view(batch, n, w, n, w, WIDTH).transpose(2, 3).reshape(batch * count, tokens, WIDTH)
        q, k, v = self.qkv(y).reshape(batch * count, tokens, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * SIZE**-0.5) @ k.transpose(-2, -1)
        scores = scores + self.table[self.index].view(tokens, tokens, HEADS).permute(2, 0, 1).unsqueeze(0)
        if shift:
            regions = x.new_zeros(self.side, self.side)
            regions[-w:-shift] = 1
            regions[-shift:] = 2
            regions = regions.view(n, w, n, w).transpose(1, 2).reshape(count, tokens)
            mask = regions.unsqueeze(1) - regions.unsqueeze(2)
            mask = mask.masked_fill(mask != 0, -100.0)
            scores = scores.view(batch, count, HEADS, tokens, tokens) + mask.unsqueeze(1).unsqueeze(0)
            scores = scores.view(-1, HEADS, tokens, tokens)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch * count, tokens, WIDTH)
        y = self.project(y).view(batch, n, n, w, w, WIDTH).transpose(2, 3).reshape(x.shape)
        return torch.roll(y, (shift, shift), (1, 2)) if shift else y


def written(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-2, -1) / 4).softmax(-1) @ v


MASK = torch.randn(1, 1, 11, 11).masked_fill(torch.rand(1, 1, 11, 11) > 0.8, -torch.inf)
FORMULAS: dict[str, Formula] = {
    "operator": F.scaled_dot_product_attention,
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
    "mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, MASK),
    "kept": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, MASK[0, 0] > 0),
    "written": written,
    "scaled": lambda q, k, v: (2 * q @ (k * 0.125).mT * 0.7).softmax(-1) @ v,
    "biased": lambda q, k, v: ((q @ k.mT - 1) * 0.25 + MASK).softmax(-1) @ v,
    "filled": lambda q, k, v: (q @ k.mT).masked_fill(MASK < -1, -torch.inf).softmax(-1) @ v,
    "transposed": lambda q, k, v: (v.mT @ (q @ k.mT * 0.25).softmax(-1).mT).mT,
    "sums of products": lambda q, k, v: torch.einsum(
        "bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q * 0.5, k * 0.5).softmax(-1), v
    ),
    "batched": lambda q, k, v: written(*(one.flatten(0, 1) for one in (q, k, v))).unflatten(0, (-1, HEADS)),
}


def kernels(engine: Any, *inputs: torch.Tensor) -> list[PlanStep]:
    return [step for step in engine.plan(*inputs).steps if step.runs]


def operations(steps: list[PlanStep]) -> list[str]:
    return [step.lowered.operation.name if step.lowered else "PyTorch" for step in steps]


@pytest.mark.share(7)
@torch.no_grad()
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_block_reads_its_projection_in_place(formula: str, dtype: str) -> None:
    torch.manual_seed(2)
    model, x = Block(FORMULAS[formula]).eval(), torch.randn(2, 11, WIDTH)
    engine = compile(model, x, dtype=dtype, device="twin")
    assert relative_error(engine(x), model.double()(x.double())) < ALLOWED[dtype]
    steps = kernels(engine, x)
    if formula == "batched":  # no stride covers its batch and heads
        assert "attention" in operations(steps)
    else:
        assert operations(steps)[:4] == ["layer_norm", "conv2d", "attention", "conv2d"]
        assert steps[2].lowered is not None and steps[2].lowered.problem.q_at[1:] == (11 * 96, 16, 96)  # type: ignore[attr-defined]
    more = torch.randn(3, 11, WIDTH)
    assert relative_error(engine(more), model(more.double())) < ALLOWED[dtype]


@torch.no_grad()
@pytest.mark.parametrize("part", ["unbind", "index", "chunk"])
@pytest.mark.parametrize("dtype", ["tf32", "bf16"])
def test_every_way_to_part_a_projection(part: str, dtype: str) -> None:
    model, x = Block(F.scaled_dot_product_attention, part).eval(), torch.randn(2, 11, WIDTH)
    engine = compile(model, x, dtype=dtype, device="twin")
    assert relative_error(engine(x), model.double()(x.double())) < ALLOWED[dtype]
    assert operations(kernels(engine, x))[:4] == ["layer_norm", "conv2d", "attention", "conv2d"]


@torch.no_grad()
def test_pytorchs_layer_has_no_copies_left() -> None:
    model, x = Sequences().eval(), torch.randn(3, 11, WIDTH)
    engine = compile(model, x, dtype="fp16", device="twin")
    assert relative_error(engine(x), model.double()(x.double())) < ALLOWED["fp16"]
    found = operations(kernels(engine, x))
    assert "copy" not in found and "PyTorch" not in found and found.count("attention") == 1


@torch.no_grad()
def test_attention_to_other_tokens() -> None:
    model, given = Cross().eval(), (torch.randn(2, 7, WIDTH), torch.randn(2, 13, 24))
    engine = compile(model, given, dtype="fp16", device="twin")
    exact = model.double()(*(one.double() for one in given))
    assert relative_error(engine(*given), exact) < ALLOWED["fp16"]
    assert sorted(operations(kernels(engine, *given)))[:1] == ["attention"]
    assert "copy" not in operations(kernels(engine, *given))


@torch.no_grad()
@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("shift", [0, 1])
def test_windows_have_a_bias_that_repeats_from_image_to_image(dtype: str, shift: int) -> None:
    torch.manual_seed(3)
    model, x = Windows(shift).eval(), torch.randn(2, 6, 6, WIDTH)
    engine = compile(model, x, dtype=dtype, device="twin")
    exact = model.double()
    for images in (x, torch.randn(3, 6, 6, WIDTH)):
        assert relative_error(engine(images), exact(images.double())) < ALLOWED[dtype]
    (step,) = [one for one in kernels(engine, x) if one.node.op == Attention.name]
    assert step.lowered is not None
    problem: Any = step.lowered.problem
    assert (problem.batch, problem.bias, problem.bias_row) == (8, (4 if shift else 1, HEADS, 9, 9), 16)
    assert "PyTorch" not in operations(kernels(engine, x))


@torch.no_grad()
@pytest.mark.parametrize("items", [1, HEADS])
def test_masks_of_operands_without_heads(items: int) -> None:
    """A mask of three dimensions has one matrix per item, not per head."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.mask = nn.Linear(WIDTH, 3 * WIDTH), nn.Buffer(torch.randn(items, 11, 11))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (one.view(11, HEADS, SIZE).transpose(0, 1) for one in self.qkv(x).chunk(3, -1))
            return F.scaled_dot_product_attention(q, k, v, self.mask).transpose(0, 1).reshape(11, WIDTH)

    model, x = Fixed().eval(), torch.randn(11, WIDTH)
    engine = compile(model, x, device="twin")
    assert relative_error(engine(x), model.double()(x.double())) < ALLOWED["fp32"]
    assert "attention" in operations(kernels(engine, x))


@torch.no_grad()
def test_a_bias_gets_new_weights() -> None:
    """The scale beside it is computed from sums with the bias, whose rounding must not show."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.bias = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(HEADS, 11, 11))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (one.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
            return (q @ k.mT * 0.17677669 + self.bias).softmax(-1) @ v

    model, x = Biased().eval(), torch.randn(2, 11, WIDTH)
    engine = compile(model, x, device="twin")
    assert "attention" in operations(kernels(engine, x))
    model.bias.normal_(0, 3)
    engine.refresh()
    assert relative_error(engine(x), model.double()(x.double())) < ALLOWED["fp32"]


@torch.no_grad()
def test_it_is_recognized_in_graphs_of_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors are on the device of the graph unless a pass says otherwise; meta stands for a GPU."""
    graph = capture(Block(written).eval(), (torch.randn(2, 11, WIDTH),))
    monkeypatch.setattr(Graph, "device", torch.device("meta"))
    assert any(Attention.matches(node) for node in optimize(graph, "fp32"))


NO_KEY = torch.arange(11)[:, None] == 3
NO_ATTENTION: dict[str, Formula] = {
    "another dimension": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "not a multiple": lambda q, k, v: (q @ k.mT).tanh().softmax(-1) @ v,
    "a power": lambda q, k, v: ((q @ k.mT) ** 2).softmax(-1) @ v,
    "weights read twice": lambda q, k, v: (w := (q @ k.mT).softmax(-1)) @ v + w.sum(-1, keepdim=True),
    "a factor per key": lambda q, k, v: (q @ k.mT * torch.arange(11.0)).softmax(-1) @ v,
    "no key at all": lambda q, k, v: (q @ k.mT).masked_fill(NO_KEY, -torch.inf).softmax(-1) @ v,
    "logarithms": lambda q, k, v: (q @ k.mT).log_softmax(-1) @ v,
    "a mask of the input": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, q[..., :11] > 0),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("formula", NO_ATTENTION)
def test_other_patterns_are_left_alone(formula: str) -> None:
    model, x = Block(NO_ATTENTION[formula]).eval(), torch.randn(2, 11, WIDTH)
    graph = optimize(capture(model, (x,)), "fp32")
    assert not any(Attention.matches(node) for node in graph)
    engine = compile(model, x, device="twin")
    torch.testing.assert_close(engine(x), model(x), rtol=1e-4, atol=1e-5, equal_nan=True)


@torch.no_grad()
def test_heads_without_a_kernel_and_many_keys_stay_with_pytorch() -> None:
    class Wide(nn.Module):
        def __init__(self, heads: int, size: int) -> None:
            super().__init__()
            self.layer, self.sizes = nn.Linear(24, heads * size), (heads, size)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.layer(x).unflatten(-1, self.sizes).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q)

    def why(heads: int, size: int, tokens: int) -> str:
        model, x = Wide(heads, size).eval(), torch.randn(2, tokens, 24)
        graph = for_batch(optimize(capture(model, (x,)), "fp16"), "fp16", 2, card=H200)
        plan = make_plan(graph, "fp16", H200, {graph.inputs[0].name: InputFormat.of(x)})
        (step,) = [one for one in plan.steps if Attention.matches(one.node)]
        assert step.in_pytorch == bool(step.why_pytorch)
        return step.why_pytorch

    assert "size is 12" in why(2, 12, 9) and "there are 300" in why(1, 16, 300) and not why(1, 16, 200)
    model, x = Wide(2, 12).eval(), torch.randn(2, 9, 24)
    engine = compile(model, x, device="twin")
    torch.testing.assert_close(engine(x), model(x), rtol=1e-4, atol=1e-5)


def test_sizes_of_a_bias_in_a_file() -> None:
    attributes = {"scale": 1.0, "causal": False, "order": "bqh", "size": 16, "keys": 7}
    operands = {"q": (4, 2, 5, 16), "k": (4, 2, 7, 16), "v": (4, 2, 7, 24)}
    for fits in ((2, 2, 5, 8), (1, 1, 1, 1), (4, 1, 5, 7)):
        sizes = Attention().sizes({**operands, "bias": fits}, attributes)
        assert sizes["y"] == (4, 5, 2, 24) and sizes["k"] == operands["k"]
    for wrong in ((3, 2, 5, 8), (1, 3, 1, 1), (4, 1, 5, 6), (1, 1, 4, 7), (8, 1, 1, 1)):
        with pytest.raises(SizeError, match="bias is"):
            Attention().sizes({**operands, "bias": wrong}, attributes)
