"""The HTML page: complete, self-contained, and built from the records alone."""

from __future__ import annotations

import pathlib
import re
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser

import pytest

from escalade_bench.measure import records as store
from escalade_bench.report import changes, plots
from escalade_bench.report.html import report
from escalade_bench.report.pages import readme
from tests.commands.support import run, said_by
from tests.report.browser import browser
from tests.report.test_pages import NETWORK, RECORD, ladder

ROOT = pathlib.Path(__file__).parent.parent.parent
GRAPH = replace(NETWORK, system="torch-graph", median_us=400.0)
FAILED = replace(RECORD, rung="weight_tile", median_us=None, failure="<script>alert('x')</script>")
COVERED = replace(
    NETWORK, workload="coverage_torchvision", problem="vgg11_224_b32", median_us=900.0, older="changed"
)
STEP = replace(NETWORK, workload="autoencoder_training_step", problem="32_b32", median_us=300.0)
TWIN = replace(RECORD, gpu="twin on x86_64", timing="twin", median_us=None)
COUNTED = replace(
    TWIN, workload="conv2d_counts", problem="small", counts={"global_load_requests": 2000, "fma": 7}
)
LEARNED = replace(
    TWIN, workload="autoencoder_learning", problem="synthetic_b8",
    config={
        "images": 24, "optimizer": "adam", "lr": 0.1, "schedule": "cosine", "losses": [[4, 0.3], [8, 0.1]],
        "evaluations": [[4, 0.2, None], [8, 0.15, None]], "reconstructions": "AAAA",
    },
)  # fmt: skip
RECORDS = [
    *ladder(), FAILED, NETWORK, GRAPH, COVERED, replace(COVERED, system="torch-graph", median_us=450.0, older=""), STEP,
    replace(STEP, system="torch-graph", median_us=900.0), COUNTED, LEARNED,
    replace(NETWORK, problem="224_b1", batch=1),
]  # fmt: skip
VOID = ("meta", "br", "hr", "img", "wbr")


@dataclass
class Table:
    """Return the cells of a table, by heading."""

    section: str
    header: list[str] = field(default_factory=list)
    rows: list[dict[str, str]] = field(default_factory=list)


class Page(HTMLParser):
    """Parsed page, whose elements must close in the order in which they were opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.targets: list[str] = []
        self.tables: list[Table] = []
        self.figures: list[str] = []
        self.section = ""
        self.cells: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attributes)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append(Table(self.section))
        if tag == "tr":
            self.cells = []
        if tag in ("th", "td"):
            self.cells.append("")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.names += filter(None, [found.get("id")])
        self.targets += filter(None, [found.get("href"), found.get("src")])
        if tag == "section":
            self.section = found["id"] or ""
        if tag == "svg":
            self.figures.append(f"{self.section}: {found['aria-label']}")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "tr":
            self.cells = [cell.strip() for cell in self.cells]
        if tag == "tr" and not self.tables[-1].header:
            self.tables[-1].header = self.cells
        elif tag == "tr":
            self.tables[-1].rows.append(dict(zip(self.tables[-1].header, self.cells, strict=True)))

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.cells[-1] += data

    def rows(self, section: str) -> list[dict[str, str]]:
        return [row for table in self.tables if table.section == section for row in table.rows]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    for record in RECORDS:
        store.write(folder / "results" / store.gpu_folder(record.gpu) / f"{record.workload}.jsonl", [record])
    said = run("report", "--results", str(folder / "results"), "--output", str(folder / "report.html"))
    assert said.exit_code == 0 and str(folder / "report.html") in said.output.replace("\n", "")
    return (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_nothing_leads_out_of_the_file(text: str, page: Page) -> None:
    assert "//" not in re.sub(r"^//.*$", "", text, flags=re.MULTILINE), "comments of the script apart"
    inside = [target for target in page.targets if not target.startswith("data:image/png;base64,")]
    assert all(target.startswith("#") for target in inside)
    assert {target[1:] for target in inside} <= set(page.names)
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(page.names)
    assert len(page.names) == len(set(page.names))
    assert "alert(" in text and "<script>alert" not in text


def test_it_opens_with_the_readme_and_drills_down(page: Page, text: str) -> None:
    assert page.figures == [
        "overview: Speed relative to the best peer, per network (batch 32 where none is named)",
        "overview: The climb of conv2d, 64to64_56_k3s1_b256, on an NVIDIA H200",
        "networks: resnet18 by batch, on an NVIDIA H200",
        "ladders: The climb of conv2d, 64to64_56_k3s1_b256, on an NVIDIA H200",
        "learning: autoencoder learns synthetic_b8 in fp32, on twin on x86_64",
    ]
    drawn = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert all("#010203" not in one and "#2f6db5" not in one and "currentColor" in one for one in drawn)
    assert (
        ">vgg11<" in drawn[0] and ">2.0×<" in drawn[0] and "climb-fp16" in drawn[1] and "losses" in drawn[4]
    )
    first = page.rows("overview")[1]
    assert (first["network"], first["Escalade, µs"], first["best peer"], first["vs best peer"]) == (
        "ResNet-18", "200.0", "PyTorch, CUDA graph", "2.00×",
    )  # fmt: skip
    sets = {row["set"]: row for row in page.rows("overview") if "set" in row}
    assert (sets["torchvision, fp16, batch 32"]["slower on the device"], sets["networks"]["compared"]) == (
        "1",
        "1",
    )
    assert '<td class="figure slower">0.50×</td>' in text and '<td class="figure faster">2.00×</td>' in text
    summary, covered = page.rows("coverage")
    assert (summary["set"], summary["compared"], summary["faster"]) == (
        "torchvision, fp16, batch 32",
        "1",
        "0",
    )
    assert covered["measured"] == "abc 01-02 older code" and "older code" in text
    counted, *rungs = (row for row in page.rows("ladders") if "loads" in row or "config" in row)
    assert (counted["rung"], counted["loads"], counted["FMA"]) == ("direct", "2k", "7")
    assert [row["rung"] for row in rungs][:3] == ["torch-nhwc", "direct", "input_tile"]
    assert any(row["config"].startswith("failed: <script>") for row in rungs)
    (learned,) = page.rows("learning")
    assert (learned["steps"], learned["last loss"], learned["best test loss"]) == ("8", "0.1", "0.15")
    assert 'src="data:image/png;base64,AAAA"' in text
    machine, twin, *origins = page.rows("provenance")
    assert list(machine.values()) == ["1", "NVIDIA H200", "580.1", "torch 2.11"]
    assert twin["card"] == "twin on x86_64" and sum(int(row["figures"]) for row in origins) == len(RECORDS)


_EMPTY_PLOTS = r"""[...document.querySelectorAll("svg")].filter((plot) => {
  const ofMatplotlib = /-(figure|axes|patch|text|line2d|[xy]tick|legend|matplotlib.axis|\w*Collection)_\d+$/;
  const data = [...plot.querySelectorAll("g[id]")].filter((group) => !ofMatplotlib.test(group.id));
  return !data.some((group) => { const box = group.getBBox(); return box.width + box.height > 1; });
}).map((plot) => plot.getAttribute("aria-label"))"""
_FIGURES = """[...document.querySelectorAll("#provenance .wide:last-child tbody tr")].map(
  (row) => Number(row.cells[3].textContent)
)"""
_CUT_OFF = """[...document.querySelectorAll(".wide")].filter(
  (box) => box.offsetParent && box.scrollWidth > box.clientWidth + 1
).map((box) => `${box.closest("section").id}: ${box.textContent.trim().slice(0, 60)}`)"""
_COLLIDING = r"""[...document.querySelectorAll("svg")].flatMap((plot) => {
  const slanted = (text) => /rotate\(-?(?!0\b|90\b|270\b)/.test(text.getAttribute("transform") || "");
  const labels = [...plot.querySelectorAll("text")].filter((text) => text.textContent.trim() && !slanted(text));
  const boxes = labels.map((text) => text.getBoundingClientRect());
  return labels.flatMap((one, n) => labels.slice(n + 1).filter((other, m) => {
    const [a, b] = [boxes[n], boxes[n + 1 + m]];
    return Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
  }).map((other) => `${one.textContent.trim()} and ${other.textContent.trim()}`));
})"""
_CLIPPED_BARS = """[...document.querySelectorAll(".bars")].filter((list) => {
  const box = list.getBoundingClientRect();
  return !list.offsetParent || box.right > innerWidth || [...list.querySelectorAll("i, b")].some(
    (part) => part.getBoundingClientRect().right > box.right + 1
  );
}).length"""
_HEIGHT = "document.documentElement.scrollHeight"
_HIGHEST = 15_000
"""Pixels of the page of all records, with everything collapsed."""
_OPEN_ALL = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"
_TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
_PAPER = "getComputedStyle(document.body).backgroundColor"


def test_a_browser_shows_it(text: str, page: Page, tmp_path: pathlib.Path) -> None:
    """Without errors or requests, in both themes and on a phone; tables sort, plots have data."""
    path = tmp_path / "report.html"
    path.write_text(text)
    with browser(tmp_path / "profile") as own:
        own.open(path)
        assert own.run("document.querySelectorAll('svg').length") == len(page.figures)
        assert own.run(_EMPTY_PLOTS) == []
        own.click("#provenance > details > summary")
        before = own.run(_FIGURES)
        own.click("#provenance .wide:last-child th:nth-child(4) button")
        assert own.run(_FIGURES) == sorted(before) != before
        own.click("#provenance .wide:last-child th:nth-child(4) button")
        assert own.run(_FIGURES) == sorted(before, reverse=True)
        light = own.run(_PAPER)
        assert own.run(_TOO_WIDE) == 0
        own.look(390, dark=True)
        assert own.run(_TOO_WIDE) == 0 and own.run(_PAPER) != light
        assert own.print().startswith(b"%PDF")
        assert own.complaints == []
        assert {url.partition(":")[0] for url in own.requests} <= {"file", "data"}


def test_the_page_of_the_repositorys_records_fits_a_desk_and_a_phone(tmp_path: pathlib.Path) -> None:
    """In both themes: no column is cut off on a desktop, no labels collide, no bars are clipped on a phone."""
    path = tmp_path / "report.html"
    path.write_text(report(store.load_folder(ROOT / "results")))
    with browser(tmp_path / "profile") as own:
        own.open(path, width=1440)
        for dark in (False, True):
            own.look(1440, dark)
            assert own.run(_TOO_WIDE) == 0 and own.run(_HEIGHT) < _HIGHEST
            own.look(390, dark)
            assert own.run(_TOO_WIDE) == 0 and own.run(_HEIGHT) < _HIGHEST
            assert own.run("document.querySelectorAll('.bars').length") >= 2 and own.run(_CLIPPED_BARS) == 0
        own.look(1440)
        assert not own.run("document.querySelector('#provenance > details').open")
        own.click("nav a[href='#provenance']")
        assert own.run("document.querySelector('#provenance > details').open"), "a link opens its section"
        own.run(_OPEN_ALL)
        assert own.run(_CUT_OFF) == [] and own.run(_COLLIDING) == []


def test_the_verdict_counts_every_lost_comparison() -> None:
    """By the device, by the wall clock alone, and by a wrong result, which is red and in no green cell."""
    peer = replace(NETWORK, system="torch-graph")
    wins, graph = (
        replace(NETWORK, median_us=100.0, wall_us=150.0),
        replace(peer, median_us=200.0, wall_us=250.0),
    )
    slower = replace(NETWORK, problem="224_b1", batch=1, median_us=300.0, wall_us=310.0)
    late = replace(NETWORK, problem="224_b8", batch=8, median_us=100.0, wall_us=500.0)
    wrong = replace(
        NETWORK, problem="224_b64", batch=64, median_us=None, wall_us=None, failure="error 0.7 of 0.01"
    )
    found = [
        wins, graph, slower, replace(graph, problem="224_b1", batch=1), late, replace(graph, problem="224_b8", batch=8),
        wrong, replace(graph, problem="224_b64", batch=64),
    ]  # fmt: skip
    text = report({"h200": found})
    page = Page(text)
    row = next(row for row in page.rows("overview") if row.get("set") == "networks")
    shown = [
        row[name]
        for name in ("compared", "faster", "slower on the device", "slower per call", "not right", "worst")
    ]
    assert shown == ["4", "1", "1", "2", "1", "failed"]
    assert "1 of 4 comparisons with the best peer are won, and 3 are lost" in text
    assert '<td class="figure wrong">failed</td>' in text and '<td class="figure slower">2</td>' in text
    cells = re.findall(r"<td[^>]*>[^<]*(?:<strong>)?error 0.7 of 0.01", text)
    assert cells and all("wrong" in cell for cell in cells)

    covered = replace(COVERED, problem="alexnet_224_b32", median_us=None, failure="error 0.7 of 0.01")
    plot, *_ = readme.speedup_plot([COVERED, replace(COVERED, system="torch-graph", error=None), covered], [])
    assert [(bar.label, bar.text, bar.color) for bar in plot.bars][-1] == ("alexnet", "not right", "red")
    assert "not right" in plots.inline(plot.draw, "x", "x")


def test_plots_start_at_zero_or_are_labeled_logarithmic() -> None:
    near = [replace(RECORD, rung=f"rung{n}", tflops=rate) for n, rate in enumerate((0.2, 0.3, 0.7))]
    axes = plots.climb(near, {}, {}).axes[0]
    assert axes.get_yscale() == "linear" and axes.get_ylim()[0] == 0 and axes.get_ylabel() == "GFLOP/s"
    far = [*near, replace(RECORD, rung="foot", tflops=0.0005)]
    axes = plots.climb(far, {}, {}).axes[0]
    assert (
        axes.get_yscale() == "log" and axes.get_ylim()[0] <= 0.25 and axes.get_ylabel().endswith("log scale")
    )
    single = replace(NETWORK, batch=1, problem="224_b1")
    for figure in (plots.speedups({"a": 2.0}), plots.by_batch([NETWORK, single]), plots.learning(LEARNED)):
        assert all(each.get_ylabel().endswith("log scale") for each in figure.axes)
    alone = plots.by_batch([NETWORK, replace(GRAPH, median_us=900.0)]).axes[0]
    assert alone.get_ylim()[0] == 0 and len(alone.patches) == 2, "one batch is no curve"
    dtypes = ("fp32", "tf32", "fp16", "bf16", "fp8")
    for count in range(1, 6):
        figure = plots.by_batch(
            [replace(r, dtype=dtype) for dtype in dtypes[:count] for r in (NETWORK, single)]
        )
        # Text of 8 points on 9.5 inches is 9 pixels high in a README's column of 830 pixels.
        assert len(figure.axes) == count and figure.get_figwidth() <= 9.5


def test_a_slow_down_is_found_beyond_the_spread(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slower = replace(RECORD, median_us=66000.0, p20_us=65000.0, p80_us=67000.0, commit="def")
    tiled = replace(RECORD, rung="input_tile", median_us=30000.0, p20_us=29000.0, p80_us=31000.0)
    within = replace(tiled, median_us=30900.0, p20_us=30500.0, p80_us=32000.0, commit="def")
    faster = replace(NETWORK, median_us=100.0, p20_us=99.0, p80_us=101.0, commit="def")
    bare = replace(NETWORK, workload="lenet", p20_us=None, p80_us=None)
    store.file_away(tmp_path / "old", [replace(NETWORK, p20_us=190.0, p80_us=210.0), RECORD, tiled, bare])
    store.file_away(tmp_path / "new", [slower, within, faster, replace(bare, median_us=900.0)])
    found = changes.between(changes.read_old(tmp_path / "old"), store.load_folder(tmp_path / "new"))
    assert [new.rung for _, new in found.slower] == ["direct"], "without a spread nothing is beyond it"
    assert [new.workload for _, new in found.faster] == ["resnet18"]
    assert len(found.same) == 4 and found.only_old == found.only_new == 0

    options = ("report", "--results", str(tmp_path / "new"), "--output", str(tmp_path / "page.html"))
    said = run(*options, "--against", str(tmp_path / "old" / "h200" / "conv2d.jsonl"))
    assert (
        "Of 2 times that both have, 1 got slower and 0 faster" in said.output
        and "2 are only here" in said.output
    )
    assert "slower, 0.91×: conv2d 64to64_56_k3s1_b256 fp32 nchw escalade direct" in said.output
    (row,) = Page((tmp_path / "page.html").read_text()).rows("changes")
    assert (row["who"], row["before, µs"], row["now, µs"]) == ("direct", "60,000", "66,000")
    assert row["commits"] == "abc to def"
    sentence = said_by(*options, "--against", str(tmp_path), monkeypatch=monkeypatch, capsys=capsys)
    assert "--against takes a folder like results/" in sentence


def test_counts_of_the_twin_need_no_card() -> None:
    text = report({"twin-on-x86-64": [COUNTED, LEARNED]})
    assert [row["rung"] for row in Page(text).rows("ladders")] == ["direct"]
    assert "Nothing was measured on a card yet" in text
