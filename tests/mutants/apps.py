"""Mutants of the trainer, of classification and of Ray jobs."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = ()
