"""An operation for commands to run on."""

from __future__ import annotations

import pytest

from tests.bench.fake import Scale, rung


@pytest.fixture
def with_operation(monkeypatch: pytest.MonkeyPatch) -> Scale:
    """One operation, with a right and a wrong rung."""
    operation = Scale(rung("right"), rung("wrong", "wrong_element", below="right"))
    monkeypatch.setattr("escalade.ops.OPERATIONS", {"scale": operation})
    return operation
