"""Ceilings against hand-computed figures, and what their subjects really do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from escalade.device.gpu import Properties
from escalade.measure import ceilings
from escalade.measure.ceilings import Ceilings
from escalade.measure.timing import Subject, Timing
from escalade.ops.base.dtypes import MULTIPLIED, STORAGE

CPU = torch.device("cpu")
MEMORY = 1 << 20


@pytest.fixture
def subjects(monkeypatch: pytest.MonkeyPatch) -> dict[str, Subject]:
    """Those that were timed: a copy in 8 us, products in 4 us."""
    timed: dict[str, Subject] = {}

    def fake(given: list[Subject], device: torch.device, **settings: Any) -> dict[str, Timing]:
        timed.update({subject.name: subject for subject in given})
        times = {subject.name: 8.0 if subject.name == "copy" else 4.0 for subject in given}
        return {name: Timing(us, us - 1, us + 1, 9, "graph") for name, us in times.items()}

    monkeypatch.setattr(ceilings, "time_interleaved", fake)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(ceilings, "MATMUL_SIZE", 16)
    known = Properties("card", "sm_80", 132, 60 << 20, 227 << 10, 228 << 10, 65536, MEMORY, 1980.0, 4.9e6)
    monkeypatch.setattr(ceilings, "properties_of", lambda device: known)
    return timed


def test_rates_are_those_of_bytes_read_and_written_and_of_operations(subjects: dict[str, Subject]) -> None:
    found = ceilings.measure(CPU)
    copied = MEMORY // 8
    assert found.copy_gbps == pytest.approx((copied + copied) / 8e-6 / 1e9)
    assert found.tflops == pytest.approx(
        dict.fromkeys(("fp32", "tf32", "fp16", "bf16"), 2 * 16**3 / 4e-6 / 1e12)
    )
    assert (found.gpu, found.multiprocessors, found.l2_bytes) == ("card", 132, 60 << 20)
    assert (found.shared_bytes, found.memory_bytes) == (227 << 10, MEMORY)


def test_the_copy_reads_and_writes_what_is_counted(
    subjects: dict[str, Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    ceilings.measure(CPU)
    moved: list[int] = []
    real = torch.neg

    def spy(source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        assert source.data_ptr() != out.data_ptr() and bool(source.any()), "a copy of numbers, elsewhere"
        moved.extend([source.nbytes, out.nbytes])
        return real(source, out=out)

    monkeypatch.setattr(torch, "neg", spy)
    (copy,) = subjects["copy"].calls
    copy()
    assert moved == [MEMORY // 8] * 2


def test_products_are_of_the_size_that_is_counted_and_in_their_dtype(
    subjects: dict[str, Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    ceilings.measure(CPU)
    seen: list[tuple[Any, ...]] = []

    def spy(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        seen.append((a.dtype, a.shape, b.shape, torch.backends.cuda.matmul.allow_tf32))
        return out

    monkeypatch.setattr(torch, "mm", spy)
    for dtype in MULTIPLIED:
        (multiply,) = subjects[dtype].calls
        multiply()
        assert seen[-1] == (STORAGE[dtype], (16, 16), (16, 16), dtype == "tf32")


def test_the_floor_is_the_larger_of_operations_and_bytes() -> None:
    card = Ceilings("card", 132, 60 << 20, 227 << 10, 139 << 30, 4000.0, {"fp16": 500.0})
    assert card.floor_us(10**12, 4 * 10**9, "fp16") == pytest.approx(2000.0), (
        "10^12 operations at 500 TFLOP/s"
    )
    assert card.floor_us(10**11, 4 * 10**9, "fp16") == pytest.approx(1000.0), "4 GB at 4 TB/s"


def test_records_give_the_rates_and_the_times_they_stand_for() -> None:
    card = Ceilings("card", 132, 60 << 20, 227 << 10, 8 << 30, 4000.0, {"fp16": 500.0})
    copy, product = ceilings.records(card)
    copied = 1 << 30
    assert copy.problem == "copy_1024MiB" and copy.gbps == 4000.0
    assert copy.median_us == pytest.approx(2 * copied / 4000e9 * 1e6)
    assert product.tflops == 500.0 and product.median_us == pytest.approx(2 * 8192**3 / 500e12 * 1e6)
