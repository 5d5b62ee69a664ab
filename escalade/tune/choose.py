"""The choice of a rung and a config: asked for by name, or by a rule that needs no measurement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from escalade import ops
from escalade.device.cuda import architecture_of
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
LARGE_FILTER_TAPS = {"fp32": 49, "tf32": 121, "fp16": 121, "bf16": 121}
"""In fp32 by the measured crossover (docs/ladder.md), with room for few channels; on tensor cores an estimate."""
WORTH_CONVERTING = {"conv2d": ("fused_epilogue",)}
"""Taken in another layout than the problem's if need be: tensor cores gain more than two transpositions cost."""


@dataclass(frozen=True)
class Choice:
    rung: Rung[Any]
    config: Config
    problem: Any
    """What the rung is to do: the problem, perhaps in another layout."""
    why: str


def choose(operation: str, problem: Problem, device: torch.device, rung: str | None = None) -> Choice:
    """The rung of that name, or the first of the preferred ones that can do the problem on the device."""
    ladder = ops.operation(operation).ladder
    here = architecture_of(device)
    if rung is not None:
        asked = ladder.rung(rung)
        refusal = asked.refusal(problem, here)
        if refusal:
            raise UnsupportedError(f"rung {rung} of {operation} cannot do {problem.name}: {refusal}")
        return Choice(asked, asked.configs(problem)[0], problem, "asked for by name")
    refusals = []
    for name in _preferred(operation, problem):
        candidate = ladder.rung(name)
        for form in _forms(operation, name, problem):
            refusal = candidate.refusal(form, here)
            if refusal is None:
                why = "first of the preferred rungs that supports it"
                if form != problem:
                    why += f", in layout {form.layout}"
                return Choice(candidate, candidate.configs(form)[0], form, why)
            refusals.append(f"{name}: {refusal}")
    raise UnsupportedError(f"no rung of {operation} can do {problem.name}. " + " ".join(refusals))


def _preferred(operation: str, problem: Problem) -> tuple[str, ...]:
    large = getattr(problem, "taps", 0) >= LARGE_FILTER_TAPS[problem.dtype]
    first = LARGE_FILTER.get(operation, ()) if large else ()
    return first + PREFERENCE[operation][problem.dtype]


def _forms(operation: str, rung: str, problem: Any) -> tuple[Any, ...]:
    if rung not in WORTH_CONVERTING.get(operation, ()):
        return (problem,)
    others = (layout for layout in ops.operation(operation).layouts if layout != problem.layout)
    return (problem, *(replace(problem, layout=layout) for layout in others))
