"""Tables at every width: no text is lost."""

from __future__ import annotations

import io
import pathlib
import re

import pytest
from rich.console import Console

import escalade
from escalade.narrow_tables import Table

FIGURES = {"GFLOP/s": "123,456.7", "% of the ceiling": "99.9", "µs": "1,234.56", "note": "[red]failed[/]"}


def shown(width: int) -> str:
    table = Table(title="conv2d 64to64_56_k3s1_b256", title_justify="left")
    for name in ("dtype", "rung"):
        table.add_column(name, no_wrap=True)
    for name in FIGURES:
        table.add_column(name, justify="right", no_wrap=name == "µs")
    table.add_row("fp16", "producer_consumer", *FIGURES.values())
    table.add_row("fp32", "naive", *("",) * len(FIGURES))
    said = io.StringIO()
    Console(file=said, width=width).print(table)
    return said.getvalue()


@pytest.mark.parametrize("width", [200, 80, 60, 45, 30, 20, 12])
def test_no_figure_is_cut_at_any_width(width: int) -> None:
    found = shown(width)
    assert all(len(line) <= width for line in found.splitlines()) and "…" not in found
    together = re.sub(r"[\s│┃]", "", found)
    for figure in ("producer_consumer", "naive", "123,456.7", "99.9", "1,234.56", "failed"):
        assert figure in together, (width, found)


def test_every_table_is_one_of_these() -> None:
    package = pathlib.Path(escalade.__file__).parent
    others = [path.name for path in package.rglob("*.py") if "from rich.table import" in path.read_text()]
    assert not others
