"""A training step as one graph: its loss, gradients and new buffers are those of autograd."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch import aot_autograd

from escalade.engine.capture.joint import Joint, capture_step
from escalade.engine.capture.reader import CaptureError
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.evaluate import compute


class _Net(nn.Module):
    """Typical parts of a trained network: one weight is used twice, and one is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.again = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.again.weight = self.second.weight
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.full((1,), 0.5), requires_grad=False)
        self.head = nn.Linear(4, 5)
        self.calls: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(x)
        y = F.relu(self.norm(self.first(x)))
        y = F.interpolate(F.max_pool2d(y, 2), scale_factor=2)
        y = F.gelu(self.again(self.second(y)) * self.frozen)
        return self.head(y.mean((2, 3)))


def _results(joint: Joint, model: nn.Module, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Evaluate the graph node by node in PyTorch."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    tensors = [named[name].detach() for name in (*joint.parameters, *joint.buffers)]
    graph = joint.graph
    values = {entry.name: tensor for entry, tensor in zip(graph.inputs, (*tensors, *given), strict=True)}
    values |= graph.constants
    for node in graph:
        inputs = {role: values[name] for role, name in node.inputs.items()}
        values[node.name] = compute(node, inputs, torch.device("cpu")).to(getattr(torch, node.dtype))
    return [values[name] for name in graph.outputs]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_step_matches_autograd(autocast: torch.dtype | None) -> None:
    """Under autocast too, up to rounding; the gradient of a bias before a normalization is pure rounding error."""
    torch.manual_seed(0)
    model, x, target = _Net(), torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
    expected = copy.deepcopy(model)
    loss = F.cross_entropy(expected(x), target)
    (loss * 8).backward()

    joint = capture_step(model, F.cross_entropy, (x,), (target,), autocast=autocast, scaled=True)
    assert any(node.dtype == "bfloat16" for node in joint.graph) == (autocast is not None)
    found, *rest = _results(joint, model, (x, target, torch.tensor(8.0)))

    torch.testing.assert_close(found, loss.detach(), rtol=1e-2 if autocast else 1e-5, atol=0)
    trained = {name: one for name, one in expected.named_parameters() if one.grad is not None}
    assert set(joint.trained) == trained.keys() and len(joint.trained) == len(trained)
    assert set(joint.changed) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    for name, gradient in zip(joint.trained, rest, strict=False):
        wanted = trained[name].grad
        assert wanted is not None and gradient.dtype == wanted.dtype
        close = max(0.05 * float(wanted.abs().max()), 0.01) if autocast else 1e-5
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=close)
    buffers = dict(expected.named_buffers())
    for name, new in zip(joint.changed, rest[len(joint.trained) :], strict=True):
        torch.testing.assert_close(
            new, buffers[name], rtol=1e-2 if autocast else 1e-5, atol=1e-3 if autocast else 1e-5
        )
    assert not model.calls and not dict(model.named_buffers())["norm.num_batches_tracked"]


def test_upsampling_stays_whole() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Upsample(scale_factor=2), nn.Conv2d(1, 1, 1))
    x = torch.randn(2, 1, 4, 4)
    graph = capture_step(model, F.mse_loss, (x,), (torch.randn(2, 1, 8, 8),)).graph
    left = {node.attributes["target"] for node in graph if Aten.matches(node)}
    assert not any("index" in target for target in left)


def test_an_invalid_training_step_is_reported() -> None:
    x, target = torch.randn(2, 3), torch.randn(2, 3)
    layer = nn.Linear(3, 3)
    with pytest.raises(CaptureError, match=r"loss of one number"):
        capture_step(layer, lambda y, t: y - t, (x,), (target,))
    with pytest.raises(CaptureError, match="depends on no parameter"):
        capture_step(layer, lambda y, t: t.sum(), (x,), (target,))
    with pytest.raises(CaptureError, match="none of them requires gradients"):
        capture_step(layer.requires_grad_(False), F.mse_loss, (x,), (target,))


class _Idle(nn.Module):
    """A layer that runs, also in place, for results that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(3, 3), nn.Conv1d(4, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        unread = self.idle(x) * 2
        unread.relu_()
        return self.used(x)


def test_layers_that_the_loss_does_not_depend_on_may_run() -> None:
    """Autograd calls other operators for parameters that need no gradient."""
    model, x = _Idle(), torch.randn(2, 4, 3)
    joint = capture_step(model, F.mse_loss, (x,), (torch.randn(2, 4, 3),))
    assert set(joint.trained) == {"used.weight", "used.bias"}


def test_the_joint_graph_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd would trace it again to drop its tangents."""

    def trace(*_: Any, **__: Any) -> Any:
        raise AssertionError("traced again")

    monkeypatch.setattr(aot_autograd, "make_fx", trace)
    joint = capture_step(nn.Linear(3, 2), F.mse_loss, [torch.randn(4, 3)], [torch.randn(4, 2)])
    assert joint.trained == ("weight", "bias") and aot_autograd.make_fx is trace
