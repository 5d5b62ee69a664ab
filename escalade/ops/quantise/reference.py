"""What quantisation gives: the values before they are rounded, and PyTorch's rounding of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.base.dtypes import E4M3, STORAGE, to_e4m3
from escalade.ops.quantise.problem import QuantiseProblem


def random_inputs(problem: QuantiseProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(problem.elements, generator=generator, device=device).to(STORAGE[problem.dtype])
    return {"x": x, "factor": torch.tensor([37.5], device=device)}


def empty_output(problem: QuantiseProblem, device: torch.device) -> torch.Tensor:
    return torch.empty(problem.elements, dtype=E4M3, device=device)


def exact(problem: QuantiseProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The values in float64, before they are rounded: what rounding costs is the peer's error too."""
    return inputs["x"].double() * inputs["factor"].double()


def peer(problem: QuantiseProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The values rounded to E4M3 by PyTorch."""
    return to_e4m3(inputs["x"].float() * inputs["factor"])
