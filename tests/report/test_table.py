"""A table is the same on a terminal, in Markdown and in HTML, and names the source of each figure."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from escalade.device.nvml import GpuConditions
from escalade_bench.measure.records import Record
from escalade_bench.profile.counters import Counters
from escalade_bench.profile.profiles import Profile, Profiled
from escalade_bench.profile.target import Part
from escalade_bench.report import cells, terminal
from escalade_bench.report.document import OLDER_LEGEND, Heading, html, markdown
from escalade_bench.report.table import Column, Table, columns, text

RECORD = Record(
    "conv2d", "a|b", "fp16", "nhwc", 8, "escalade", "<window>", median_us=20.0, commit="a7fbff58aaaa",
    date="2026-11-17T03:04:05+00:00",
)  # fmt: skip
SLOW = replace(
    RECORD, rung="direct", median_us=4000.0, commit="bbbb", date="2026-11-16", older="the kernel changed"
)
TABLE = Table(
    [*columns("problem|what=rung|µs|GFLOP/s"), Column("vs best peer", lambda r: cells.times(50 / r.time))],
    [RECORD, SLOW],
    title="Some of them",
)


def test_a_row_has_its_own_commit_and_day_and_a_mark_if_it_is_older() -> None:
    lines = TABLE.markdown().splitlines()
    assert lines[0] == "| problem | what | µs | vs best peer | measured |", (
        "a column without a figure is left out"
    )
    assert lines[1] == "| --- | --- | ---: | ---: | --- |"
    assert lines[2] == "| `a\\|b` | <window> | 20.00 | 2.50× | a7fbff58 11-17 |"
    assert lines[3].endswith("| 0.01× | bbbb 11-16 older code |")
    page = markdown([Heading(1, "Page"), "Words.", TABLE, TABLE])
    assert page.startswith("# Page\n\nWords.\n\n#### Some of them\n\n| problem |")
    assert page.count(OLDER_LEGEND) == 1 and cells.OLDER in OLDER_LEGEND
    assert OLDER_LEGEND not in markdown([replace(TABLE, rows=[RECORD])])
    explained = replace(TABLE, legend="What it *means*.")
    assert markdown([explained]).index("What it *means*.") > markdown([explained]).index("0.01×")
    assert "<p>What it <em>means</em>.</p>" in html([explained])


def test_a_row_of_several_records_names_ours_and_is_marked_if_any_is_older() -> None:
    peer = replace(RECORD, system="torch", commit="cccc")
    assert cells.stamp([peer, RECORD]) == "a7fbff58 11-17"
    assert cells.stamp([peer]) == "cccc 11-17"
    assert cells.stamp([RECORD, SLOW]) == "bbbb 11-16, a7fbff58 11-17 older code"
    assert cells.stamp([RECORD, SLOW, replace(SLOW, commit="d", date="2026-11-18")]).endswith(
        "and 1 more older code"
    )


def test_html_escapes_text_and_colors_ratios() -> None:
    made = html([TABLE], folded=4, section="s")
    assert "<details><summary><h5>Some of them</h5>\n</summary>" in made and made.count("</details>") == 1
    assert "<td>&lt;window&gt;</td>" in made and "<td><code>a|b</code></td>" in made
    assert '<td class="figure faster">2.50×</td>' in made and '<td class="figure slower">0.01×</td>' in made


def test_a_terminal_shows_new_measurements_without_commits() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(TABLE)
    shown = console.export_text()
    assert "Some of them" in shown and "<window>" in shown and "4,000" in shown and "a7fbff58" not in shown
    narrow = Table([text("a", lambda r: "x"), *columns("p20–p80")], [replace(RECORD, p20_us=1.0, p80_us=2.0)])
    assert [len(narrow.rich(width).columns) for width in (100, 200)] == [1, 2]


def test_throttling_is_noted_beside_times_and_below_tables() -> None:
    cool = replace(RECORD, conditions=GpuConditions(1980.0, 3201.0, 400.0, 45.0, "").as_dict())
    hot = replace(RECORD, conditions=GpuConditions(1750.0, 3201.0, 699.0, 61.0, "the power limit").as_dict())
    assert [cells.microseconds(one) for one in (RECORD, cool, hot)] == ["20.00", "20.00", "20.00ᵗ"]
    assert terminal.conditions_line([RECORD.conditions]) == ""
    assert terminal.conditions_line([cool.conditions, hot.conditions]) == (
        "The card meanwhile: 1750 to 1980 MHz, 400 to 699 W, 45 to 61 °C; "
        "1 of 2 times (ᵗ) with the clock held down by the power limit"
    )


def test_a_profile_has_a_row_per_kernel_and_names_its_part_once() -> None:
    part = Part("3 conv2d", "conv2d", "64to64_56_k3s1_b8", "fp32", "naive", ["a", "b"])
    kernels = [Counters("a" * 70, us=2000.0, dram_read_bytes=3e6), Counters("b", us=1.5, issue_pct=20.4)]
    table = terminal.profile_table(Profile("conv2d", "by ncu", [Profiled(part, kernels, 0.5, "")], {}))
    shown, rows = table.grid
    assert table.title == "conv2d: by ncu" and [column.left for column in shown] == [True] * 3 + [False] * 4
    assert [column.heading for column in shown] == [
        "part", "rung", "kernel", "floor µs", "µs", "MB read", "issue %"
    ]  # fmt: skip
    assert rows == [
        ["3 conv2d", "naive", "a" * 60, "0.50", "2,000.00", "3.00", ""],
        ["", "", "b", "", "1.50", "", "20"],
    ]
