"""Recording a CUDA graph pauses garbage collection, and restores it afterwards."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch

from escalade.device.recording import capture_into


@pytest.mark.parametrize("was_on", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_rests(was_on: bool, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        with contextlib.suppress(ValueError), capture_into(None):  # type: ignore[arg-type]
            assert not gc.isenabled()
            if fails:
                raise ValueError
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()
