"""Ceilings against hand-computed figures, and the real work of their subjects."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from escalade.device.gpu import GpuProperties
from escalade.device.timing import Subject, Timing
from escalade.ops.base.dtypes import MULTIPLIED, STORAGE
from escalade_bench.measure import ceilings
from escalade_bench.measure.ceilings import Ceilings

CPU = torch.device("cpu")
MEMORY = 1 << 20
SHAPES = ((16, 16, 16), (32, 16, 8), (32, 16, 24))


@pytest.fixture
def subjects(monkeypatch: pytest.MonkeyPatch) -> dict[str, Subject]:
    """The timed subjects: a copy in 8 us, the others in 4 us, except for the long products, in 5."""
    timed: dict[str, Subject] = {}

    def fake(given: list[Subject], device: torch.device, **settings: Any) -> dict[str, Timing]:
        timed.update({subject.name: subject for subject in given})
        slow = {"copy": 8.0} | {subject.name: 5.0 for subject in given if "32x" in subject.name}
        times = {subject.name: slow.get(subject.name, 4.0) for subject in given}
        return {name: Timing(us, us - 1, us + 1, 9, "graph") for name, us in times.items()}

    monkeypatch.setattr(ceilings, "time_interleaved", fake)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(ceilings, "PRODUCTS", SHAPES)
    known = GpuProperties("card", "sm_80", 132, 60 << 20, 227 << 10, 228 << 10, 65536, MEMORY, 1980.0, 4.9e6)
    monkeypatch.setattr(ceilings, "properties_of", lambda device: known)
    return timed


def test_rates_are_those_of_bytes_read_and_written_and_of_operations(subjects: dict[str, Subject]) -> None:
    found = ceilings.measure(CPU)
    copied = MEMORY // 8
    assert found.copy_gbps == pytest.approx((copied + copied) / 8e-6 / 1e9)
    assert found.read_gbps == pytest.approx(copied / 4e-6 / 1e9)
    best = 2 * 32 * 16 * 24 / 5e-6 / 1e12  # 16^3 in 4 us is a lower rate, and so is the smaller one
    assert found.tflops == pytest.approx(dict.fromkeys(("fp32", "tf32", "fp16", "bf16"), best))
    assert (found.gpu, found.multiprocessors, found.l2_bytes) == ("card", 132, 60 << 20)
    assert (found.shared_bytes, found.memory_bytes) == (227 << 10, MEMORY)


def test_the_copy_moves_the_counted_bytes(
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
    for dtype, (rows, columns, depth) in itertools.product(MULTIPLIED, SHAPES):
        (multiply,) = subjects[f"{dtype} {rows}x{columns}x{depth}"].calls
        multiply()
        assert seen[-1] == (STORAGE[dtype], (rows, depth), (depth, columns), dtype == "tf32")


def test_the_sum_reads_the_counted_bytes(
    subjects: dict[str, Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    ceilings.measure(CPU)
    read: list[int] = []
    real = torch.sum

    def spy(source: torch.Tensor, **rest: Any) -> torch.Tensor:
        read.append(source.nbytes)
        return real(source, **rest)

    monkeypatch.setattr(torch, "sum", spy)
    (total,) = subjects["sum"].calls
    total()
    assert read == [MEMORY // 8]


def test_the_floor_is_the_larger_of_operations_and_bytes() -> None:
    card = Ceilings("card", 132, 60 << 20, 227 << 10, 139 << 30, 4000.0, 3900.0, {"fp16": 500.0})
    assert card.floor_us(10**12, 4 * 10**9, "fp16") == pytest.approx(2000.0), (
        "10^12 operations at 500 TFLOP/s"
    )
    assert card.floor_us(10**11, 4 * 10**9, "fp16") == pytest.approx(1000.0), "4 GB at 4 TB/s"


def test_a_floor_is_one_whatever_the_algorithm() -> None:
    rates = {"fp32": 50.0, "tf32": 400.0, "fp16": 700.0, "fp8": 1400.0}
    card = Ceilings("card", 132, 60 << 20, 227 << 10, 139 << 30, 4000.0, 4200.0, rates)
    assert card.floor_us(10**15, 42 * 10**8, "fp32") == pytest.approx(1000.0), (
        "Winograd does fewer operations"
    )
    assert card.floor_us(7 * 10**11, 1, "tf32") == pytest.approx(1000.0), "operands may be rounded to fp16"
    assert card.floor_us(7 * 10**11, 1, "fp16") == pytest.approx(1000.0)
    assert card.floor_us(14 * 10**11, 1, "int8") == pytest.approx(1000.0), "bytes are bytes"
    assert card.peak("int8") == 1400.0 and card.peak("tf32") == 400.0


def test_records_give_the_rates() -> None:
    card = Ceilings("card", 132, 60 << 20, 227 << 10, 8 << 30, 4000.0, 3900.0, {"fp16": 500.0})
    copy, read, product = ceilings.records(card)
    assert (copy.problem, copy.gbps) == ("copy_1024MiB", 4000.0)
    assert (read.problem, read.gbps) == ("sum_1024MiB", 3900.0)
    assert (product.problem, product.dtype, product.tflops) == ("matmul", "fp16", 500.0)
