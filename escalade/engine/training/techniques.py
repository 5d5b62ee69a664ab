"""What makes a training step fast, by name: each can be left out, to see what it brings."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from escalade.engine.passes import STEP_TECHNIQUES
from escalade.errors import UnsupportedError

RUNGS, GRAPH = "rungs", "graph"
TECHNIQUES: Mapping[str, str] = {
    RUNGS: "Takes for each step the rung that is chosen for it, and not the foot of its ladder.",
    **STEP_TECHNIQUES,
    GRAPH: "Replays all launches as one CUDA graph, and does not launch them one by one.",
}
"""The techniques, and what each does."""


def required_known(names: Collection[str]) -> frozenset[str]:
    """The names, if all are those of techniques."""
    unknown = [name for name in names if name not in TECHNIQUES]
    if unknown or isinstance(names, str):
        raise UnsupportedError(
            f"without={names!r}: a training step can be made without any of {', '.join(TECHNIQUES)}"
        )
    return frozenset(names)
