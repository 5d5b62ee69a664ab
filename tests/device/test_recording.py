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
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the caller's")
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


@pytest.mark.parametrize("invalid", [False, True])
def test_an_invalid_capture_is_left(invalid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch raises before it restores the stream, and its generator stays in the state of a capture."""
    streams, generator = [_Stream()], _Generator()

    @contextlib.contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        streams.append(_Stream())
        generator.is_capturing = True
        with contextlib.suppress(ValueError):
            yield
        if invalid:
            raise RuntimeError("operation failed due to a previous error during capture")
        generator.is_capturing = False
        streams.pop()

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(torch.cuda, "default_generators", [generator], raising=False)
    before = streams[0]
    with pytest.raises(RuntimeError) if invalid else contextlib.nullcontext(), capture_into(None):  # type: ignore[arg-type]
        raise ValueError
    assert streams[-1] is before and not generator.is_capturing
    assert generator.is_replaced is invalid, "graphs captured before follow the generator's own state"


class _Stream:
    device_index = 0


class _Generator:
    is_capturing = is_replaced = False

    def clone_state(self) -> _Generator:
        return _Generator()

    def graphsafe_set_state(self, state: _Generator) -> None:
        self.is_capturing, self.is_replaced = state.is_capturing, True
