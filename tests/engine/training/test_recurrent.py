"""Recurrent layers in training steps: one operator forward and one backward, whatever their length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import escalade
from escalade.engine.nodes import aten, recurrent
from escalade.engine.nodes.aten import results_of
from escalade.engine.training import planned
from escalade.engine.training.step import plan_training_step
from tests.engine.training.test_loops import Batch, follow
from tests.engine.training.test_memory import H200


class _Sequences(nn.Module):
    """A recurrent layer whose results and last states all reach the loss, with an initial state of its own or none."""

    def __init__(self, layer: nn.RNNBase, with_state: bool = False) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.LazyLinear(3)
        shape = (layer.num_layers * (1 + layer.bidirectional), 1, layer.proj_size or layer.hidden_size)
        self.state = nn.Parameter(torch.randn(shape)) if with_state else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = x.shape[0 if self.layer.batch_first else 1]
        state: Any = None if self.state is None else self.state.expand(-1, batch, -1).contiguous()
        if state is not None and isinstance(self.layer, nn.LSTM):
            state = state, state.new_zeros(*state.shape[:2], self.layer.hidden_size).exp()
        y, last = self.layer(x, state)
        lasts = last if isinstance(last, tuple) else (last,)
        return self.head(y) + sum(one.mean() for one in lasts)


def _batch() -> Batch:
    return torch.randn(5, 4, 6), torch.randn(5, 4, 3)


def _sequences(layer: nn.RNNBase, **given: Any) -> nn.Module:
    model = _Sequences(layer, **given)
    model(_batch()[0])
    return model


_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: _sequences(nn.LSTM(6, 5, 2, bidirectional=True), with_state=True),
    "gru": lambda: _sequences(nn.GRU(6, 8, 2, batch_first=True)),
    "tanh": lambda: _sequences(nn.RNN(6, 8, bidirectional=True), with_state=True),
    "relu": lambda: _sequences(nn.RNN(6, 8, 2, nonlinearity="relu", bias=False)),
    "projections": lambda: _sequences(nn.LSTM(6, 8, 2, proj_size=3, batch_first=True, bidirectional=True)),
    "dropout": lambda: _sequences(nn.LSTM(6, 8, 3, dropout=0.5, bidirectional=True), with_state=True),
    "evaluated": lambda: _evaluated(_sequences(nn.GRU(6, 8, 2, dropout=0.5))),
    "frozen": lambda: _frozen(_sequences(nn.LSTM(6, 8, 2))),
}


def _evaluated(model: nn.Module) -> nn.Module:
    model.layer.eval()  # type: ignore[union-attr]
    return model


def _frozen(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("weight_hh_l0" not in name and "bias_ih" not in name)
    return model


@pytest.mark.parametrize("name", _LAYERS)
def test_steps_are_those_of_pytorch(name: str) -> None:
    torch.manual_seed(0)
    follow(_LAYERS[name](), [_batch() for _ in range(3)], F.mse_loss)


def test_layers_whose_weights_cudnn_would_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU their weights have one storage, and the first run with new ones moves these into one, too."""
    torch.manual_seed(0)
    model = _sequences(nn.LSTM(6, 5, 2, bidirectional=True), with_state=True)
    weights = list(model.layer.parameters())  # type: ignore[union-attr]
    joined = torch.cat([weight.detach().flatten() for weight in weights])
    for weight, part in zip(weights, joined.split([weight.numel() for weight in weights]), strict=True):
        weight.data = part.view(weight.shape)

    def flatten_parameters(layer: nn.RNNBase) -> None:
        if len({weight.data_ptr() for weight in layer._flat_weights if weight is not None}) == len(weights):
            torch.zeros(joined.shape)

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten_parameters)
    follow(model, [_batch() for _ in range(3)], F.mse_loss)


@pytest.mark.parametrize(("dtype", "layer", "device"), [("fp16", nn.GRU, "twin"), ("bf16", nn.LSTM, "cpu")])
def test_mixed_steps(dtype: str, layer: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a layer is computed in 16 bits, as by cuDNN: by a plan in its arena, and by the operators as captured."""
    monkeypatch.setattr(planned, "CHECKS_PLANS", False)
    torch.manual_seed(0)
    batches: list[Batch] = [(torch.randn(5, 4, 6), torch.randn(5, 4, 16)) for _ in range(2)]
    follow(
        layer(6, 8, 2, bidirectional=True), batches, lambda y, target: F.mse_loss(y[0].float(), target),
        close=2e-2, dtype=dtype, device=device,
    )  # fmt: skip


def test_plans_have_a_bounded_number_of_steps() -> None:
    def count(steps: int) -> int:
        model = _Sequences(nn.LSTM(16, 32, 2, bidirectional=True, dropout=0.1))
        x, target = torch.randn(steps, 4, 16), torch.randn(steps, 4, 3)
        model(x)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        plan = plan_training_step(model, F.mse_loss, optimizer, (x, target), "fp16", H200)
        return sum(step.runs for step in plan.steps)

    assert count(3) == count(40) < 32


def test_weights_of_an_engine_are_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights that PyTorch's operator reads on a GPU are in cuDNN's buffer, and stay there when they change."""
    made = []

    def buffer(layers: Any, shapes: Any, hidden: int, projection: int, *_: Any) -> recurrent._Buffer:
        assert (layers.kind, hidden, projection) == ("lstm", 8, 3)
        made.append(recurrent._Buffer(tuple(1000 * (number + 1) for number in range(len(shapes))), 20000))
        return made[-1]

    monkeypatch.setattr(recurrent, "_calls_cudnn", lambda x: True)
    monkeypatch.setattr(recurrent, "_buffer", buffer)
    copies: list[Any] = []
    copy = torch._foreach_copy_

    def logged(own: Any, given: Any) -> None:
        copies.append(own)
        copy(own, given)

    monkeypatch.setattr(torch, "_foreach_copy_", logged)
    model = nn.LSTM(6, 8, proj_size=3, bidirectional=True, batch_first=True)
    x = torch.randn(4, 5, 6)
    engine = escalade.compile(model, x, device="twin")
    for batch in (4, 2):
        torch.testing.assert_close(engine(x[:batch]), model(x[:batch]))
    assert made and len(copies) == 1 and {one._base is None for one in copies[0]} == {False}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    engine.refresh()
    torch.testing.assert_close(engine(x), model(x))


def test_an_engine_calls_an_operator_once_for_all_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def logged(target: str, *given: Any) -> Any:
        called.append(target)
        return results_of(target, *given)

    monkeypatch.setattr(aten, "results_of", logged)
    model, x = nn.GRU(6, 8, batch_first=True), torch.randn(4, 5, 6)
    engine = escalade.compile(model, x, device="twin")
    called.clear()
    torch.testing.assert_close(engine(x), model(x))
    assert called.count("aten::gru.input") == 1
