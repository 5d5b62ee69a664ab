"""Gates in PyTorch: random inputs, the float64 reference, and the peer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.ops.base.dtypes import STORAGE
from escalade.ops.expressions import Expression
from escalade.ops.shared.images import stored_images
from escalade.ops.squeeze_excite.problem import SqueezeExciteProblem


def random_inputs(problem: SqueezeExciteProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Return images with a mean per channel, and weights that keep outputs near 1."""
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    x = normal(p.batch, p.channels, p.height, p.width) + normal(p.batch, p.channels, 1, 1)
    tensors = {
        "weight": normal(p.squeezed, p.channels) / p.channels**0.5,
        "gate_weight": normal(p.channels, p.squeezed) / p.squeezed**0.5,
    }
    if p.bias:
        tensors["bias"] = 0.3 * normal(p.squeezed)
    if p.gate_bias:
        tensors["gate_bias"] = 0.3 * normal(p.channels)
    stored = {name: tensor.to(STORAGE[p.dtype]) for name, tensor in tensors.items()}
    return {"x": stored_images(p, x), **stored}


def empty_output(problem: SqueezeExciteProblem, device: torch.device) -> torch.Tensor:
    return torch.empty((problem.batch, problem.channels), dtype=STORAGE[problem.dtype], device=device)


def exact(problem: SqueezeExciteProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return peer(problem, {name: tensor.double() for name, tensor in inputs.items()})


def peer(problem: SqueezeExciteProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return gates(problem.hidden, problem.gate, inputs)


def gates(hidden: str, gate: str, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the gates; weights may be those of 1×1 convolutions."""
    y = inputs["x"].mean((2, 3))
    for text, prefix in ((hidden, ""), (gate, "gate_")):
        sums = F.linear(y, inputs[f"{prefix}weight"].flatten(1), inputs.get(f"{prefix}bias"))
        (y,) = Expression.parse(text).evaluate({"x": sums})
    return y
