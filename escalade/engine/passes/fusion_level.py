"""Fusion levels, which `escalade bench` compares to show the gain of each."""

from __future__ import annotations

from enum import StrEnum


class FusionLevel(StrEnum):
    """Amount of fusion in a plan."""

    naive = "naive"
    """One kernel per operation, by the lowest rung of its ladder."""
    separate = "separate"
    """One kernel per operation, by the best rung."""
    fused = "fused"
    """All fusions: BatchNorm folding, epilogues, prologues and more."""
