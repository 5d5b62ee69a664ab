"""Attention that a model writes itself, in training steps: two calls of fused kernels, with all gradients."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import escalade
from escalade.engine.capture.joint import capture_step
from escalade.engine.graph.graph import Node
from escalade.engine.nodes import BY_NAME
from escalade.engine.nodes.attention import AttentionBackward, AttentionForward
from escalade.engine.passes.step_attention import recognize_step_attention
from escalade.engine.training.step import TrainingStep, plan_training_step
from escalade.ops.base.card import H200, TWIN

HEADS, SIZE, TOKENS, WIDTH = 2, 8, 6, 16
Weights = Callable[["Attention", torch.Tensor, torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    """Attention with the weights that a function computes of queries and keys [batch, heads, tokens, size]."""

    index: torch.Tensor
    mask: torch.Tensor

    def __init__(self, weights: Weights, apply: Callable[..., torch.Tensor] = torch.matmul) -> None:
        super().__init__()
        self.weights, self.apply_weights = weights, apply
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(9, HEADS))
        self.position = nn.Parameter(torch.randn(TOKENS, SIZE))
        self.temperature = nn.Parameter(torch.rand(HEADS, 1, 1))
        self.register_buffer("index", torch.randint(0, 9, (TOKENS * TOKENS,)))
        self.register_buffer("mask", torch.rand(2, TOKENS, TOKENS) > 0.6)

    def bias(self) -> torch.Tensor:
        return self.table[self.index].view(TOKENS, TOKENS, HEADS).permute(2, 0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(-1, TOKENS, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        y = self.apply_weights(self.weights(self, q, k), v)
        return x + self.out(y.transpose(1, 2).flatten(2))


def _windows(self: Attention, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Weights in windows of two kinds: of shifted images, with a table of biases and a mask per kind."""
    scores = (q * SIZE**-0.5) @ k.mT + self.bias()
    mask = torch.zeros(2, TOKENS, TOKENS).masked_fill(self.mask, -100.0)
    scores = scores.view(-1, 2, HEADS, TOKENS, TOKENS) + mask[:, None]
    return scores.view(-1, HEADS, TOKENS, TOKENS).softmax(-1)


def _masked(self: Attention, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.mT + self.bias()) / SIZE**0.5
    return scores.masked_fill(self.mask[0] & ~torch.eye(TOKENS, dtype=torch.bool), -torch.inf).softmax(-1)


def _merged(self: Attention, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) * 0.5
    return scores.softmax(-1).view(-1, HEADS, TOKENS, TOKENS)


def _turned(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As layers on images in PyTorch's order compute it."""
    return (v.mT @ weights.mT).mT


class _Signs(torch.autograd.Function):
    """weights @ v, with a gradient of the weights that reads the signs of v instead."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weights, v)
        return weights @ v

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, v = ctx.saved_tensors
        return gradients[0] @ v.sign().mT, weights.mT @ gradients[0]


WEIGHTS: dict[str, Weights] = {
    "windows": _windows,
    "masked": _masked,
    "merged heads": _merged,
    "both scaled": lambda self, q, k: ((q * 0.5) @ (k * 0.7).mT).softmax(-1),
    "positions": lambda self, q, k: (q @ k.mT + self.position @ q.mT).softmax(-1),
    "temperature": lambda self, q, k: (
        F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.temperature.exp() + self.bias()
    ).softmax(-1),
}
ALIKE: dict[str, tuple[Callable[..., torch.Tensor], ...]] = {
    "over queries": (lambda self, q, k: (q @ k.mT).softmax(-2),),
    "weights dropped": (lambda self, q, k: F.dropout((q @ k.mT).softmax(-1), 0.5),),
    "weights masked": (lambda self, q, k: (q @ k.mT).softmax(-1) * ~self.mask[0],),
    "scores set to 0": (lambda self, q, k: (q @ k.mT).masked_fill(self.mask[0], 0.0).softmax(-1),),
    "scores set to a number": (lambda self, q, k: (q @ k.mT).masked_fill(self.mask[0], -1e9).softmax(-1),),
    "clamped": (lambda self, q, k: (q @ k.mT).clamp(max=1.0).softmax(-1),),
    "weights read": (
        lambda self, q, k: (q @ k.mT).softmax(-1), lambda weights, v: weights @ v + weights.mean(),
    ),
    "scores read": (lambda self, q, k: (scores := q @ k.mT).softmax(-1) + scores.exp().mean(),),
    "negative": (lambda self, q, k: (-(q @ k.mT)).softmax(-1),),
    "another gradient": (lambda self, q, k: (q @ k.mT).softmax(-1), _Signs.apply),
    "no softmax": (lambda self, q, k: q @ k.mT * self.temperature,),
    "softmax of queries": (lambda self, q, k: q.softmax(-1) @ k.softmax(-2).mT,),
}  # fmt: skip


def _step(model: nn.Module, dtype: str, device: str | None = None) -> TrainingStep:
    """Compare three steps with eager mode: losses and parameters."""
    torch.manual_seed(2)
    x, target = torch.randn(4, TOKENS, WIDTH), torch.randn(4, TOKENS, WIDTH)
    expected = copy.deepcopy(model)
    own, theirs = (torch.optim.SGD(one.parameters(), 0.5) for one in (model, expected))
    step = escalade.training_step(model, F.mse_loss, own, (x, target), dtype=dtype, device=device)
    for number in range(3):
        torch.manual_seed(number)  # of dropout
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            loss = F.mse_loss(expected(x), target)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        torch.manual_seed(number)
        found = float(step(x, target))
        close = 1e-5 if dtype == "fp32" else 1e-2
        assert found == pytest.approx(float(loss.detach()), rel=close)
        torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=close, atol=close)
    return step


def _count(step: TrainingStep) -> Counter[str]:
    return Counter(one.node.calls or one.node.op for one in step.plan.steps)


@pytest.mark.parametrize("name", WEIGHTS)
def test_attention_and_its_gradients_are_two_calls(name: str) -> None:
    torch.manual_seed(0)
    apply = _turned if name in ("both scaled", "positions", "windows") else torch.matmul
    step = _step(Attention(WEIGHTS[name], apply), "fp32")
    seen = _count(step)
    assert seen["attention_forward"] == 2 and seen["softmax"] == seen["softmax_backward"] == 0
    assert seen["attention_backward"] == 3 + (name not in ("merged heads", "both scaled"))
    if name == "positions":
        assert seen["bmm"] + seen["matmul"] <= 3, "of the positions themselves"
        return
    stored = [
        one.node.name
        for one in step.plan.steps
        if one.runs and one.node.shape[:1] == (4,) and one.node.shape[-2:] == (TOKENS, TOKENS)
    ]
    assert not stored, "scores"


def test_what_only_looks_like_attention_is_left_alone() -> None:
    torch.manual_seed(0)
    x, target = torch.randn(4, TOKENS, WIDTH), torch.randn(4, TOKENS, WIDTH)
    model = nn.Sequential(*(Attention(*parts) for parts in ALIKE.values()))
    graph = capture_step(model, F.mse_loss, [x], [target]).graph
    before = {node.name: (node.op, node.inputs, node.source) for node in graph}
    recognize_step_attention(graph, TWIN)
    after = {node.name: (node.op, node.inputs, node.source) for node in graph}
    changed = {name: (before.get(name), after.get(name)) for name in before.keys() | after.keys()}
    assert not {name: pair for name, pair in changed.items() if pair[0] != pair[1]}


@pytest.mark.share(7)
def test_kernels_around_attention_read_and_write_its_operands() -> None:
    torch.manual_seed(0)
    step = _step(Attention(_windows), "bf16", device="twin")
    seen = _count(step)
    assert seen["attention_forward"] == 2 and not seen["bmm"] + seen["softmax"]


def test_masked_scores_below_the_range_of_the_dtype_stay_finite() -> None:
    """In a row without any key they have equal weights, as in eager mode; of -inf PyTorch's kernels compute NaN."""
    bias = torch.full((1, 1, 4, 5), -1e9)
    node = Node("b", "attention_bias", {}, {"masked": True}, (1, 1, 4, 16), "float16")
    found = BY_NAME["attention_bias"].compute(node, {"x": bias})
    assert found[..., :5].eq(torch.finfo(torch.float16).min).all()


@pytest.mark.parametrize(
    ("kernel", "size", "value_size", "bias"),
    [("flash", 36, 36, ()), ("efficient", 32, 32, (4, 3, 10, 16)), ("efficient", 64, 16, (1, 1, 1, 16))],
)
@pytest.mark.parametrize("of_bias", ["", "full", "summed"])
def test_pytorchs_fused_kernels_have_these_signatures(
    kernel: str, size: int, value_size: int, bias: tuple[int, ...], of_bias: str
) -> None:
    """Shapes on the meta device, by PyTorch's own rules, are those on the CPU."""
    if of_bias and not bias:
        pytest.skip("there is no bias")
    attributes = {"kernel": kernel, "scale": 0.3, "of_bias": of_bias, "result": 0}
    node = Node("y", "attention_forward", {}, attributes, (), "float16")
    shapes = []
    for device in ("meta", "cpu"):
        q, k = (torch.zeros(4, 3, tokens, size, dtype=torch.float16, device=device) for tokens in (10, 12))
        v = torch.zeros(4, 3, 12, value_size, dtype=torch.float16, device=device)
        inputs = {"q": q, "k": k, "v": v}
        if bias:
            inputs["bias"] = torch.zeros(bias, dtype=torch.float16, device=device)
        y, sums = AttentionForward().results(node, inputs)
        assert y is not None and sums is not None
        read = {**inputs, "y": y, "logsumexp": sums, "gradient": torch.zeros_like(y)}
        found = (y, sums, *AttentionBackward().results(node, read))
        shapes.append([(tuple(one.shape), one.dtype) for one in found if one is not None])
    assert shapes[0] == shapes[1] and len(shapes[0]) == 5 + bool(of_bias)


class Large(nn.Module):
    def __init__(self, batch: int, tokens: int, size: int) -> None:
        super().__init__()
        self.layer, self.shape = nn.Linear(size, size), (batch, tokens, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.layer(x.expand(self.shape))
        return (q @ q.mT).softmax(-1) @ q.sin()


@pytest.mark.parametrize(
    ("batch", "tokens", "size", "fused"), [(64, 196, 64, 1), (1, 64, 1024, 0), (200_000, 4, 16, 0)]
)
def test_large_heads_and_few_tokens_stay_products(batch: int, tokens: int, size: int, fused: int) -> None:
    """PyTorch's kernels compute tiles of 64 queries and keys, and keep a head in registers."""
    model = Large(batch, tokens, size)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(1, 1, size)
    plan = plan_training_step(model, torch.Tensor.mean, optimizer, (x,), "fp16", H200)
    seen = Counter(one.node.op for one in plan.steps)
    assert (seen["attention_forward"] > 0) is bool(fused)
