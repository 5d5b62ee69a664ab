"""Events recorded by a call: by the driver where it never waits, by PyTorch elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from escalade.device.streams import StreamMarker
from tests.fake_cuda import Event, Gpu


def test_the_driver_records_if_supported_and_pytorch_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, by_pytorch, answers = Gpu(0), [], [0, 1]
    record = Event.record

    def noted(event: Event, stream: Any = None) -> None:
        by_pytorch.append(stream or gpu.current)
        record(event, stream)

    def cuEventRecord(event: Any, stream: Any) -> int:
        if answer := answers.pop(0):
            return answer
        record(gpu.events[event.value or 0], gpu.streams[stream.value or 0])
        return 0

    monkeypatch.setattr(Event, "record", noted)
    monkeypatch.setattr(gpu, "cuEventRecord", cuEventRecord)
    gpu.stand_in(monkeypatch)
    mark, stream = StreamMarker(), gpu.stream()
    assert mark.is_done(), "nothing was marked"
    with gpu.on(stream):
        for has_room, count in ((True, 1), (False, 2), (True, 2), (True, 3)):
            mark.record(stream.cuda_stream, has_room)
            assert by_pytorch == [stream] * count and not mark.is_done()
            mark.event.synchronize()
            assert mark.is_done()
    assert not answers
