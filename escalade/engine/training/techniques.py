"""Optimizations of a training step by name, each of which can be left out to measure what it gains."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from escalade.engine.passes import STEP_TECHNIQUES
from escalade.errors import UnsupportedError

RUNGS, GRAPH = "rungs", "graph"
TECHNIQUES: Mapping[str, str] = {
    RUNGS: "Uses the rung chosen for each step instead of the lowest one of its ladder.",
    **STEP_TECHNIQUES,
    GRAPH: "Replays all launches as one CUDA graph instead of launching them one by one.",
}
"""The techniques, with a description."""


def check_techniques(names: Collection[str]) -> frozenset[str]:
    """Return the names as a set; raises UnsupportedError for an unknown technique."""
    unknown = [name for name in names if name not in TECHNIQUES]
    if unknown or isinstance(names, str):
        raise UnsupportedError(
            f"without={names!r}: the techniques that can be left out are {', '.join(TECHNIQUES)}"
        )
    return frozenset(names)
