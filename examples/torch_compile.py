"""Escalade as a backend of torch.compile.

    python examples/torch_compile.py

The model's weights may change: the next call uses the new ones. On a GPU the graph that Dynamo traces runs as an
Escalade engine. On the CPU the engine runs PyTorch's operators, which shows the interface, not the kernels.
"""

from __future__ import annotations

import torch
from torch import nn

import escalade


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 6 * 6, 10),
    ).eval()


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, x = network().to(device), torch.randn(2, 8, 12, 12, device=device)
    compiled = torch.compile(model, backend="escalade", options={"dtype": "fp16"})

    with torch.inference_mode():
        torch.testing.assert_close(compiled(x).float(), model(x), atol=1e-2, rtol=1e-2)
        next(model.parameters()).mul_(2)
        torch.testing.assert_close(compiled(x).float(), model(x), atol=2e-2, rtol=2e-2)
    print(f"escalade {escalade.__version__} as a backend on {device}: correct, also with new weights")

    compiled(x).square().mean().backward()  # with gradients, forward and backward are one plan each
    found = [parameter.grad for parameter in model.parameters()]
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    torch.testing.assert_close(found, list(expected), atol=1e-3, rtol=1e-3)
    print("gradients agree with the model's")


if __name__ == "__main__":
    main()
