"""How much of a network a plan fuses. `escalade bench` shows the levels one after another: what each one brings."""

from __future__ import annotations

from enum import StrEnum


class FusionLevel(StrEnum):
    """How much of a network a plan fuses, from nothing to all that it can."""

    naive = "naive"
    """Every operation a kernel of its own, by the foot of its ladder."""
    separate = "separate"
    """Every operation a kernel of its own, by the rung chosen for it."""
    fused = "fused"
    """BatchNorm folded, and what can be done on the way out of another operation done there."""
