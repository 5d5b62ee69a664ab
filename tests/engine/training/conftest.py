"""Steps on the CPU run their plans here, so that tests of passes need no kernels."""

from __future__ import annotations

import pytest

from escalade.engine.training import planned


@pytest.fixture(autouse=True)
def checks_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "CHECKS_PLANS", True)
