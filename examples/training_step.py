"""Training steps with Escalade's loss and optimizer, compared with PyTorch's.

    python examples/training_step.py

The loss and its gradient are deterministic, and one launch updates all parameters. Values that change per step
(learning rate, step count) are on the device, so a CUDA graph of the step can be replayed.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from escalade.ops import cross_entropy, optimizer_step
from escalade.ops.optimizer_step import adam, no_progress

STEPS = 5


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mine = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    theirs = copy.deepcopy(mine)
    x, target = torch.randn(64, 32, device=device), torch.randint(0, 10, (64,), device=device)

    rule = adam(lr=1e-2, weight_decay=1e-2, decoupled=True)  # AdamW; other optimizers are custom expressions
    parameters = list(mine.parameters())
    state = {name: [torch.zeros_like(one) for one in parameters] for name in rule.state}
    scalars, progress = rule.scalars(device), no_progress(device)
    pytorchs = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=1e-2)

    for step in range(STEPS):
        scalars[rule.scalar_names.index("lr")] = pytorchs.param_groups[0]["lr"] = 1e-2 / (1 + step)
        loss = cross_entropy(mine(x), target, label_smoothing=0.1)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            optimizer_step(rule, parameters, gradients, state, scalars, progress, checked=True)

        expected = nn.functional.cross_entropy(theirs(x), target, label_smoothing=0.1)
        pytorchs.zero_grad()
        expected.backward()
        pytorchs.step()
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
        print(f"step {step + 1}: loss {float(loss.detach()):.4f}, PyTorch's {float(expected.detach()):.4f}")

    taken, skipped = progress[:2].tolist()
    print(f"{taken:.0f} steps taken, {skipped:.0f} skipped, all as PyTorch's")


if __name__ == "__main__":
    main()
