"""The steps of a plan that PyTorch does, counted by operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from escalade.engine.engine import Engine
from escalade.engine.explain import Explanation, Floor, explain_plan


def planned(engine: Engine, *inputs: torch.Tensor, floor: Floor | None = None) -> Explanation:
    """The plan for inputs like these as kernels run it: of an engine on the CPU, which compiles none and runs none, as
    an H200's kernels would."""
    device = "cuda" if engine.device.type == "cuda" else "twin"
    return explain_plan(engine.plan(*inputs), floor, device=device)


def by_operator(explanation: Explanation) -> dict[str, int]:
    """How many steps of each operator PyTorch does: the most frequent first, then by name."""
    counts = Counter(_operator(step.operation) for step in explanation.fallbacks)
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def _operator(operation: str) -> str:
    """`aten::mul.Tensor` is mul, and so is `aten::mul_.Tensor`; an operation of Escalade's has its own name."""
    return operation.removeprefix("aten::").partition(".")[0].removesuffix("_")


def spelled(counts: Mapping[str, int]) -> str:
    """`mul 2, silu 1`; empty where PyTorch does nothing."""
    return ", ".join(f"{operator} {count}" for operator, count in counts.items())
