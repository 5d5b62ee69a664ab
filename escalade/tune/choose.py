"""The choice of a rung and a config: asked for by name, or by a rule that needs no measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from escalade import ops
from escalade.errors import UnsupportedError
from escalade.ops.ladder import Config, Problem, Rung

# From the fastest known to the one that can do everything; the first that supports the problem is taken.
PREFERENCE = {
    "conv2d": {
        "fp32": ("implicit_gemm", "tuned", "direct"),
        "tf32": ("fused_epilogue", "tuned", "direct"),
        "fp16": ("fused_epilogue", "tuned", "direct"),
        "bf16": ("fused_epilogue", "tuned", "direct"),
    }
}
LARGE_FILTER = {"conv2d": ("fft_fused", "fft")}
"""Preferred to all of the above from `LARGE_FILTER_TAPS` taps on."""
LARGE_FILTER_TAPS = 81


@dataclass(frozen=True)
class Choice:
    rung: Rung[Any]
    config: Config
    why: str


def choose(operation: str, problem: Problem, device: torch.device, rung: str | None = None) -> Choice:
    """The rung of that name, or the first of the preferred ones that supports the problem."""
    ladder = ops.operation(operation).ladder
    if rung is not None:
        asked = ladder.rung(rung)
        refusal = asked.supports(problem)
        if refusal:
            raise UnsupportedError(f"rung {rung} of {operation} cannot do {problem.name}: {refusal}")
        return Choice(asked, asked.configs(problem)[0], "asked for by name")
    refusals = []
    for name in _preferred(operation, problem):
        candidate = ladder.rung(name)
        refusal = candidate.supports(problem)
        if refusal is None:
            return Choice(
                candidate, candidate.configs(problem)[0], "first of the preferred rungs that supports it"
            )
        refusals.append(f"{name}: {refusal}")
    raise UnsupportedError(f"no rung of {operation} can do {problem.name}. " + " ".join(refusals))


def _preferred(operation: str, problem: Problem) -> tuple[str, ...]:
    first = LARGE_FILTER.get(operation, ()) if getattr(problem, "taps", 0) >= LARGE_FILTER_TAPS else ()
    return first + PREFERENCE[operation][problem.dtype]
