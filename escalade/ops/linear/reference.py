"""Fully connected layer in PyTorch: random inputs, the float64 reference, and the peer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.ops.base.dtypes import STORAGE
from escalade.ops.base.switches import precision, round_to_tf32
from escalade.ops.linear.problem import LinearProblem
from escalade.ops.shared import activation


def random_inputs(problem: LinearProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Return normal deviates, weights scaled to keep outputs of order one."""
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(size, generator=generator, device=device, dtype=torch.float32).mul_(scale)
        return values.to(STORAGE[p.dtype])

    inputs = {
        "x": normal(p.batch, p.pixels, p.in_features) if p.pixels > 1 else normal(p.batch, p.in_features),
        "weight": normal(p.out_features, p.in_features, scale=p.in_features**-0.5),
    }
    if p.bias:
        inputs["bias"] = normal(p.out_features)
    return inputs


def empty_output(problem: LinearProblem, device: torch.device) -> torch.Tensor:
    return torch.empty((problem.batch, problem.out_features), dtype=STORAGE[problem.dtype], device=device)


def compute(problem: LinearProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the layer in the dtype of the inputs; x is [batch][in_features]."""
    y = F.linear(inputs["x"], inputs["weight"], inputs.get("bias"))
    return activation.apply(problem, y)


def exact(problem: LinearProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    return compute(problem, dict(wide, x=_rows(problem, wide["x"])))


def _rows(problem: LinearProblem, x: torch.Tensor) -> torch.Tensor:
    """Return the means over pixels, if there are several."""
    return x.mean(1) if problem.pixels > 1 else x


def peer(problem: LinearProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return PyTorch's result in the problem's dtype, with fp32 accumulation as in cuBLAS.

    The CPU has no TF32, so operands are rounded here, and some CPUs accumulate 16-bit products in 16 bits.
    """
    x = inputs["x"]
    if x.is_cuda:
        with precision(problem.dtype):
            return compute(problem, dict(inputs, x=_rows(problem, x)))
    rows = _rows(problem, x.float()).to(x.dtype)
    if problem.dtype == "tf32":
        rounded = dict(inputs, x=round_to_tf32(rows), weight=round_to_tf32(inputs["weight"]))
        return compute(problem, rounded)
    wide = {name: tensor.float() for name, tensor in dict(inputs, x=rows).items()}
    return compute(problem, wide).to(STORAGE[problem.dtype])
