"""Streams on a fake card: judged before and after timing, and their figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from escalade.device.timing import Timing
from escalade_bench.campaign.units import Session
from escalade_bench.measure.records import Record
from escalade_bench.networks import parts, streaming
from escalade_bench.networks.judging import Standard
from escalade_bench.networks.workloads import LENET
from tests.bench.fake_cuda import Card

BATCH, ITEM = 6, (1, 2, 2)


def right(images: torch.Tensor) -> torch.Tensor:
    return images.double().flatten(1) + 1


def known(images: torch.Tensor) -> Standard:
    return Standard("fp32", (right(images),), (1e-7,))


class Engine:
    """y = x + 1 by a kernel of 50 us; broken in one of several ways."""

    dtype = "fp32"
    device = torch.device("cpu")

    def __init__(self, card: Card, broken: str = "") -> None:
        self._card, self._broken = card, broken
        x, y = torch.zeros(BATCH, *ITEM, dtype=torch.uint8), torch.zeros(BATCH, 4)
        self._streams = 0

        def work() -> None:
            if broken != "graph does nothing":
                y.copy_(right(x))

        self._program = SimpleNamespace(inputs=(x,), outputs=(y,), run=lambda: card.kernel(50.0, work))

    def program(self, x: torch.Tensor) -> Any:
        return self._program

    def stream(self, batches: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        self._streams += 1
        found = [right(images).float() for images in batches]
        if self._broken == "last is the first's":
            found[-1] = found[0]
        if self._broken == "one is missing":
            found.pop()
        if self._broken == "wears out" and self._streams > 3:
            found[0] = 2 * found[0]
        yield from found


def measured(engine: Any, seconds: float = 0.0) -> list[Record]:
    session = Session(engine.device, seconds)
    return streaming.measure_stream("net", engine, BATCH, ITEM, session, lambda text: None, known, 60)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())


@pytest.mark.parametrize(
    ("broken", "rungs"),
    [
        ("graph does nothing", ["compute alone"]),
        ("last is the first's", ["stream, pinned", "stream, pageable"]),
        ("one is missing", ["stream, pinned", "stream, pageable"]),
        ("wears out", ["stream, pinned", "stream, pageable"]),
    ],
)
def test_a_stream_that_is_wrong_has_no_time(
    broken: str, rungs: Sequence[str], card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[int] = []
    real = streaming._clocked

    def spy(run: Any, *rest: Any) -> Timing:
        timed.append(1)
        return real(run, *rest)

    monkeypatch.setattr(streaming, "_clocked", spy)
    records = measured(Engine(card, broken))
    assert [record.rung for record in records] == list(rungs)
    assert all(record.failure and record.median_us is None for record in records)
    assert bool(timed) == (broken == "wears out"), "what is wrong from the start is not timed"


def test_figures_of_a_stream(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute takes 50 us per batch, a copy 20 us; by the clock, a batch of 6 takes the configured time."""
    clocked: list[int] = []

    def fake(run: Any, batches: int, repetitions: int) -> Timing:
        """The fake card's log of compute and copies, bypassed by streams of this engine."""
        clocked.append(batches)
        card.synchronize()
        began = card.gpu
        run()
        us = (card.gpu - began) / batches or 80.0
        return Timing(us, us - 10, us + 15, repetitions, "calls")

    monkeypatch.setattr(streaming, "_clocked", fake)
    real = torch.Tensor.copy_

    def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            card.kernel(20.0)
        return real(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    by_rung = {record.rung: record for record in measured(Engine(card))}
    assert list(by_rung) == [
        "compute alone", "copies alone", "stream, pinned", "stream, pageable", "60 images, pinned"
    ]  # fmt: skip
    compute, streamed = by_rung["compute alone"], by_rung["stream, pinned"]
    assert compute.median_us == pytest.approx(50.0, rel=0.2) and compute.timing == "calls"
    assert compute.images_per_s == pytest.approx(6e6 / compute.time)
    assert by_rung["copies alone"].median_us == pytest.approx(20.0, rel=0.4)
    assert (streamed.median_us, streamed.p20_us, streamed.p80_us) == (80.0, 70.0, 95.0), "by the same clock"
    assert streamed.images_per_s == pytest.approx(6 / 80e-6) and streamed.timing == "calls"
    assert {record.floor_us for record in by_rung.values()} == {compute.median_us}, "the slower of the two"
    assert clocked[-1] == 10, "60 images in batches of 6"


def test_a_batch_s_share_of_the_clock(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def run() -> None:
        nonlocal now
        now += 0.5 if now == 0 else 4e-4  # the first is slow

    monkeypatch.setattr(streaming.time, "perf_counter", lambda: now)
    timing = streaming._clocked(run, 8, 3)
    assert timing.median_us == pytest.approx(50.0) and timing.samples == 3


def test_bytes_are_normalised_as_an_engine_does_it() -> None:
    images = torch.tensor([0, 255], dtype=torch.uint8).view(1, 2, 1, 1)
    found = parts.normalised(images, ((0.5, 0.25), (0.25, 0.5)))
    assert found.flatten().tolist() == [-2.0, 1.5] and found.dtype == torch.float32
    grey = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert LENET.stream is not None
    torch.testing.assert_close(parts.normalised(grey, LENET.stream.normalize), grey.float())
