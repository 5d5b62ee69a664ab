"""How far a plan goes. `escalade bench` shows the ways one after another: what each step of the climb brings."""

from __future__ import annotations

from enum import StrEnum


class Way(StrEnum):
    naive = "naive"
    """Every operation a kernel of its own, by the foot of its ladder."""
    separate = "separate"
    """Every operation a kernel of its own, by the rung chosen for it."""
    fused = "fused"
    """BatchNorm folded, and what can be done on the way out of another operation done there."""
