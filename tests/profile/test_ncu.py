"""Nsight Compute from the outside: its command, its refusals, and the results of the process that it runs."""

from __future__ import annotations

import json
import pathlib
from dataclasses import asdict

import pytest

from escalade.commands.profiling import launch
from escalade.errors import UnsupportedError
from escalade_bench.profile import ncu
from escalade_bench.profile.counters import METRICS, STALLS, Counters, names
from escalade_bench.profile.target import Part

PART = Part("naive", "conv2d", "8to8_9_k3s1_b1", "fp32", "naive", ["conv2d_naive"], 10, 100)
TABLE = '"ID","Kernel Name","gpu__time_duration.sum"\n"","","ns"\n"0","conv2d_naive","1,500"\n'


@pytest.fixture
def stand_in(tmp_path: pathlib.Path) -> pathlib.Path:
    """A fake ncu: it records its arguments, and runs `does.sh`."""
    program = tmp_path / "ncu"
    program.write_text(
        f'#!/bin/sh\necho "$@" | tr "\n" " " >> {tmp_path}/called\necho >> {tmp_path}/called\n'
        'for word; do if [ "$before" = --log-file ]; then log=$word; fi; before=$word; told=$word; done\n'
        f". {tmp_path}/does.sh\n"
    )
    program.chmod(0o700)
    return program


def profiled(program: pathlib.Path, does: str) -> tuple[str, list[Part], list[Counters]]:
    (program.parent / "does.sh").write_text(does)
    (program.parent / "table").write_text(TABLE)
    told = {"title": "naive", "parts": [asdict(PART)]}
    (program.parent / "told").write_text(json.dumps(told))
    return ncu.profiled(str(program), launch, "{}")


def test_counters_come_with_the_parts_that_were_launched(stand_in: pathlib.Path) -> None:
    folder = stand_in.parent
    title, parts, launches = profiled(stand_in, f"cp {folder}/table $log; cp {folder}/told $told")
    assert (title, parts) == ("naive", [PART])
    assert launches == [Counters("conv2d_naive", us=1.5)]
    called = (folder / "called").read_text()
    assert "--clock-control none" in called and "--profile-from-start off" in called
    assert all(each[0] in called for figure in METRICS.values() for each in names(figure))
    assert ncu.unknown_metrics(f"==ERROR== Failed to find metric {STALLS}", ["a.sum", STALLS]) == [STALLS]


def test_metrics_that_ncu_does_not_have_are_left_out(stand_in: pathlib.Path) -> None:
    folder = stand_in.parent
    refusal = r"==ERROR== Failed to find metric regex:^dram__bytes_read\.(sum|min|max)$"
    does = (
        f"if [ $(wc -l < {folder}/called) = 1 ]; then echo '{refusal}'; else "
        f"cp {folder}/table $log; cp {folder}/told $told; fi"
    )
    assert profiled(stand_in, does)[1] == [PART]
    first, second = (folder / "called").read_text().splitlines()
    assert "dram__bytes_read.sum" in first and "dram__bytes_op_read.sum" not in first
    assert "dram__bytes_read.sum" not in second and "dram__bytes_op_read.sum" in second
    assert "dram__bytes_write.sum" in second


@pytest.mark.parametrize(
    ("does", "kind", "sentence"),
    [
        (
            "cp {}/told $told; echo '==ERROR== ERR_NVGPUCTRPERM - no permission'",
            ncu.NoCounters,
            "keeps them for root",
        ),
        (
            "echo '==ERROR== Failed to initialize: LibraryNotLoaded' > $log",
            ncu.NoCounters,
            "LibraryNotLoaded",
        ),
        (
            "cp {}/told $told; echo '==WARNING== No kernels were profiled.' > $log",
            ncu.NoCounters,
            "No kernels were",
        ),
        ('echo \'{{"refusal": "no rung x"}}\' > $told', UnsupportedError, "no rung x"),
    ],
    ids=["permission", "library", "nothing", "refused"],
)
def test_the_reason_for_missing_counters_is_reported(
    stand_in: pathlib.Path, does: str, kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        profiled(stand_in, does.format(stand_in.parent))
