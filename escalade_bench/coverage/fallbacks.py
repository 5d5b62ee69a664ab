"""Steps of a plan that PyTorch computes, counted by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from escalade.engine.engine import Engine
from escalade.engine.explain import Explanation, Floor, explain_plan


def planned(engine: Engine, *inputs: torch.Tensor, floor: Floor | None = None) -> Explanation:
    """Return the plan for inputs like these: of an engine on the CPU, the one that an H200 would run."""
    device = "cuda" if engine.device.type == "cuda" else "twin"
    return explain_plan(engine.plan(*inputs), floor, device=device)


def by_operator(explanation: Explanation) -> dict[str, int]:
    """Return the number of PyTorch's steps per operator: the most frequent first, then by name."""
    counts = Counter(_operator(step.operation) for step in explanation.fallbacks)
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def _operator(operation: str) -> str:
    """Return mul for `aten::mul.Tensor` and `aten::mul_.Tensor`; Escalade's operations keep their names."""
    return operation.removeprefix("aten::").partition(".")[0].removesuffix("_")


def spelled(counts: Mapping[str, int]) -> str:
    """Return `mul 2, silu 1`; empty without any."""
    return ", ".join(f"{operator} {count}" for operator, count in counts.items())
