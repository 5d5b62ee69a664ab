"""Steps on the CPU: as many PyTorch operators as in eager mode."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from escalade import training_step
from escalade.engine.training import planned
from escalade.errors import EscaladeError
from escalade.models import ConvAutoencoder


@pytest.fixture(autouse=True)
def runs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "CHECKS_PLANS", False)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        y = F.dropout(F.interpolate(y, scale_factor=2.0), 0.25, self.training)
        return self.fc(y.mean((2, 3)))


class Calls(TorchDispatchMode):
    """Count operators that read large tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(one, torch.Tensor) and one.numel() > 2000 for one in args):
            self.seen[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


SMALL = Small, (torch.randn(4, 3, 18, 18), torch.tensor([0, 1, 2, 3])), F.cross_entropy
AUTOENCODER = lambda: ConvAutoencoder(4), (torch.rand(4, 3, 32, 32),) * 2, F.mse_loss


@pytest.mark.parametrize(("make", "batch", "loss"), [SMALL, AUTOENCODER], ids=["small", "autoencoder"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_step_on_the_cpu_matches_eager_mode(
    make: Callable[[], nn.Module], batch: tuple[torch.Tensor, ...], loss: Any, dtype: str
) -> None:
    torch.manual_seed(0)
    eager = make().train()
    own = copy.deepcopy(eager)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (eager, own)]
    tolerance = 1e-5 if dtype == "fp32" else 1e-3  # the steps round in another order
    step = training_step(own, loss, optimizers[1], batch, dtype=dtype)

    def run_eager() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            found = loss(eager(batch[0]), *batch[1:])
        optimizers[0].zero_grad()
        found.backward()
        optimizers[0].step()
        return found.detach()

    for _ in range(3):
        torch.manual_seed(3)  # of the dropout
        with Calls() as wanted:
            expected = run_eager()
        torch.manual_seed(3)
        with Calls() as calls:
            found = step(*batch)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 10)
    for name, tensor in own.state_dict().items():
        torch.testing.assert_close(tensor, eager.state_dict()[name], rtol=10 * tolerance, atol=tolerance)
    assert sum(calls.seen.values()) <= 1.2 * sum(wanted.seen.values()), (calls.seen, wanted.seen)


def test_operators_that_fail_leave_everything_as_it_was() -> None:
    model = Small().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x, target = SMALL[1]
    step = training_step(model, F.cross_entropy, optimizer, (x, target))
    step(x, target)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    with pytest.raises(EscaladeError, match="PyTorch cannot compute the training step"):
        step(x, target + 100)
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()["state"]), before, rtol=0, atol=0)
