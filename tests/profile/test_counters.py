"""Parsing of Nsight Compute's output: units, thousands, gaps, and the figures and diagnosis that follow."""

from __future__ import annotations

import pytest

from escalade.device.twin import Counts, Requests
from escalade.errors import EscaladeError
from escalade_bench.profile import counters
from escalade_bench.profile.counters import METRICS, Counters, names, parse
from escalade_bench.profile.profiles import diagnose, diagnose_counts
from escalade_bench.profile.target import Part

PART = Part("naive", "conv2d", "64to64_56_k3s1_b8", "fp32", "naive", ["conv2d_naive"], 10**9, 1_000_000)
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COLUMNS = {
    "gpu__time_duration.sum": ("us", "1,234.50"),
    "dram__bytes_read.sum": ("Mbyte", "1.5"),
    "dram__bytes_op_write.sum": ("byte", "400,000"),
    "lts__t_bytes.sum": ("Kbyte", "2,500"),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "12.25"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": ("%", "n/a"),
    "smsp__issue_active.avg.pct_of_peak_sustained_elapsed": ("%", "20"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "18"),
    "launch__registers_per_thread": ("register/thread", "168"),
    "launch__shared_mem_per_block_static": ("Kbyte/block", "1.024"),
    "launch__shared_mem_per_block_dynamic": ("byte/block", "98,304"),
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": ("", "1,000"),
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": ("sector", "32,000"),
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum": ("", "0"),
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": ("sector", "0"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": ("", "800"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": ("", "200"),
    STALL.format("long_scoreboard"): ("inst", "7.1"),
    STALL.format("barrier"): ("inst", "2.9"),
    STALL.format("not_selected"): ("inst", "90"),
    STALL.format("membar"): ("inst", "0"),
    STALL.format("barrier_not_issued"): ("inst", "2.8"),
    STALL.format("barrier").replace("ratio", "max_rate"): ("inst", "16"),
}


def printed(**changed: tuple[str, str]) -> str:
    """A table of one kernel, with ncu's messages before and after it."""
    columns = {
        "ID": ("", "0"),
        "Kernel Name": ("", "conv2d_naive"),
        "Block Size": ("", "(256, 1, 1)"),
        "Grid Size": ("", "(784, 1, 1)"),
        **COLUMNS,
    } | changed
    rows = [list(columns), [unit for unit, _ in columns.values()], [cell for _, cell in columns.values()]]
    table = "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows)
    return (
        f"==PROF== Connected to process 7 (/usr/bin/python3)\n{table}\n==PROF== Disconnected from process 7\n"
    )


def test_readings_become_figures_in_one_unit() -> None:
    (found,) = parse(printed())
    assert found == Counters(
        "conv2d_naive",
        us=1234.5,
        dram_read_bytes=1.5e6,
        dram_written_bytes=4e5,
        dram_pct=12.25,
        l2_bytes=2.5e6,
        issue_pct=20.0,
        occupancy_pct=18.0,
        registers=168,
        shared_bytes=99_328,
        load_sectors=32.0,
        conflicts_pct=25.0,
        counts={
            "global_load_requests": 1000,
            "global_load_sectors": 32_000,
            "global_store_requests": 0,
            "global_store_sectors": 0,
        },
        stalls={"long_scoreboard": 7.1 / 10.0, "barrier": 2.9 / 10.0},
    )
    assert {name for figure in METRICS.values() for each in names(figure) for name in each} >= {*COLUMNS} - {
        name for name in COLUMNS if name.startswith("smsp__average")
    }


def test_an_invalid_table_is_reported() -> None:
    with pytest.raises(EscaladeError, match="no table"):
        parse("==ERROR== Failed to initialize the profiler: LibraryNotLoaded")


def test_counters_show_stalls_and_excess_work() -> None:
    words = diagnose(PART, [*parse(printed())], floor_us=500.0)
    assert words.split("; ") == [
        "waits on memory: 71% of stalls are long scoreboard",
        "moves 1.9x the compulsory bytes",
        "takes 2.5x its floor",
        "a load touches 32 sectors",
        "25% of shared-memory wavefronts are bank conflicts",
        "occupancy is 18%, with 168 registers per thread and 97 KiB of shared memory per CTA",
    ]


def test_a_busy_unit_is_reported_before_stall_reasons() -> None:
    busy = Counters("k", us=4.0, tensor_pct=71.0, dram_pct=65.0, occupancy_pct=9.0, stalls={"gmma": 1.0})
    short = Counters("pack", us=1.0, dram_pct=99.0)
    assert diagnose(PART, [short, busy], None) == "is bound by tensor cores: active in 71% of all cycles"
    assert diagnose(PART, [Counters("k", us=2.0, stalls={"odd_reason": 1.0})], None).startswith(
        "waits on odd reason"
    )
    assert diagnose(PART, [Counters("k")], 1.0) == ""


def test_counts_of_the_twin_show_repeated_requests() -> None:
    lines = (
        Requests("global", "load", 10, 300, 300, 1200),
        Requests("global", "store", 10, 40, 40, 1280),
        Requests("shared", "load", 10, 20, 15, 1280),
    )
    assert diagnose_counts(Counts(lines, unique_read_bytes=3200)).split("; ") == [
        "requests each byte 3.0 times",
        "a load touches 30 sectors",
        "25% of shared-memory wavefronts are bank conflicts",
    ]
    assert diagnose_counts(Counts()) == ""


def test_counts_of_card_and_twin_are_compared_by_name() -> None:
    one = Counters("a", counts={"global_load_requests": 60, "global_load_sectors": 960, "fma": 0})
    other = Counters("b", counts={"global_load_requests": 40, "global_load_sectors": 40})
    card = counters.summed([one, other])
    assert card == {"global_load_requests": 100, "global_load_sectors": 1000}, (
        "not all launches have the others"
    )
    counts = {"global_load_requests": 96, "global_load_sectors": 900, "add": 3}
    found = counters.differences({**card, "fma": 0}, counts)
    assert found == pytest.approx({"global_load_requests": 0.04, "global_load_sectors": 0.1})
    assert counters.agreement(found) == "1 of 2 counts agree within 5%."
    cells = [list(column.cells) for column in counters.agreement_table(card, counts).columns]
    assert cells[1:] == [["100", "1,000"], ["96", "900"], ["4.0%", "[yellow]10.0%[/]"]]
    assert counters.summed([]) == {}
