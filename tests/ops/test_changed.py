"""Rungs that a commit changes are tested at once, not on their scheduled day."""

from __future__ import annotations

from typing import Any

import pytest

from escalade.ops import OPERATIONS, Operation
from tests import changed
from tests.support import Sample, label


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=label)
def test_rungs_that_have_changed_are_right(operation: Operation[Any], seed: int, sample: Sample) -> None:
    rungs = list(changed.changed(operation))
    for rung in rungs:
        for problem in sample(changed.problems(operation, rung), changed.most(len(rungs))):
            assert not changed.failure(operation, rung, problem, seed)
