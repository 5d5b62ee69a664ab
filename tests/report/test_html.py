"""The report: complete, whole, and of the records alone."""

from __future__ import annotations

import pathlib
import re
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser

import pytest

from escalade.measure import records as store
from escalade.measure.records import Record
from escalade.report.html import changes, ladders
from escalade.report.html.page import report
from tests.commands.support import run, said_by
from tests.report.browser import browser

DIRECT = Record(
    "conv2d", "64to64_56_k3s1_b256", "fp32", "nchw", 256, "escalade", "direct", timing="graph", samples=9,
    median_us=60000.0, p20_us=59000.0, p80_us=61000.0, tflops=1.0, gbps=7.0, floor_us=1200.0, error=1.5e-7,
    tolerance=3e-7, gpu="NVIDIA H200", driver="580.1", commit="abc", date="2026-01-02T03:04:05+00:00",
    command="escalade ladder conv2d", versions={"torch": "2.11"},
)  # fmt: skip
TILED = replace(DIRECT, rung="input_tile", median_us=30000.0, p20_us=29000.0, p80_us=31000.0, tflops=2.0,
                predicted_gain=1.5)  # fmt: skip
FAILED = replace(
    DIRECT, rung="weight_tile", median_us=None, tflops=None, failure="<script>alert('x')</script>"
)
LADDER = [DIRECT, TILED, FAILED, replace(DIRECT, system="torch-nchw", rung="", median_us=3000.0, tflops=20.0)]
CEILINGS = [
    replace(DIRECT, workload="ceilings", problem="matmul", system="torch", rung="", tflops=50.0, gbps=None),
    replace(DIRECT, workload="ceilings", problem="copy", system="torch", rung="", tflops=None, gbps=4000.0),
]
NETWORK = replace(
    DIRECT, workload="resnet18", problem="224_b32", dtype="fp16", batch=32, rung="", median_us=200.0, wall_us=250.0,
    images_per_s=160e3, floor_us=100.0, command="escalade bench resnet18", peak_bytes=4 << 20,
    config={"memory": {"weights": 3 << 20, "packed": 0, "arena": 2 << 20, "caller": 1 << 20}},
)  # fmt: skip
PEERS = [
    replace(
        NETWORK, system="torch-graph", median_us=600.0, wall_us=700.0, images_per_s=50e3, peak_bytes=5 << 20
    ),
    replace(NETWORK, system="torch-compile", median_us=500.0, wall_us=550.0, images_per_s=64e3),
]
COVERED = replace(
    NETWORK, workload="coverage_torchvision", problem="vgg11_224_b32", config={"launches": 9, "pytorch": {}}
)
STEP = replace(
    NETWORK, workload="autoencoder_training_step", problem="32_b32", median_us=300.0, peak_bytes=None,
    config={"phases": {"forward": 3 << 20, "backward": 5 << 20, "optimiser": 1 << 20}},
)  # fmt: skip
PLAN = [
    replace(
        NETWORK,
        workload="resnet18_steps",
        problem="b1_plan",
        batch=1,
        config={
            "steps": 1,
            "launches": 1,
            "memory": {"arena": 4096},
            "arena": [{"name": "conv", "offset": 1024, "bytes": 2048, "first": 1, "last": 2}],
        },
    ),
    replace(
        NETWORK,
        workload="resnet18_steps",
        problem="b1_step0",
        batch=1,
        median_us=4.0,
        floor_us=0.5,
        config={
            "number": 1,
            "source": "conv1",
            "operation": "stem",
            "problem": "p",
            "rung": "streamed",
            "kernels": ["stem.cu"],
            "why": "estimate",
        },
    ),
]
TECHNIQUE = replace(NETWORK, workload="autoencoder_training_ablation", problem="32_b32")
ABLATION = [
    replace(TECHNIQUE, rung=rung, median_us=us, config={"plan": rung})
    for rung, us in (("all", 100.0), ("none", 400.0), ("only epilogues", 200.0), ("without epilogues", 150.0))
]
TWIN = replace(DIRECT, gpu="twin on x86_64", timing="twin", median_us=None)
COUNTED = replace(
    TWIN, workload="conv2d_counts", problem="small", counts={"global_load_requests": 2000, "fma": 7}
)
LEARNED = replace(
    TWIN,
    workload="autoencoder_learning",
    problem="synthetic_b8",
    config={
        "images": 24, "optimizer": "adam", "lr": 0.1, "schedule": "cosine", "losses": [[4, 0.3], [8, 0.1]],
        "evaluations": [[4, 0.2, None], [8, 0.15, None]], "reconstructions": "AAAA",
    },
)  # fmt: skip
RECORDS = [
    *ABLATION, COUNTED, LEARNED, replace(NETWORK, workload="resnet18_phases", rung="naive", peak_bytes=8 << 20),
    *LADDER, *CEILINGS, NETWORK, *PEERS, COVERED, replace(COVERED, system="torch-graph", median_us=300.0),
    replace(COVERED, system="torch-compile-default", median_us=300.0), STEP,
    replace(STEP, system="torch-graph", median_us=900.0), *PLAN,
    replace(STEP, system="torch-compile-default", median_us=600.0),
    replace(NETWORK, workload="lenet_accuracy", problem="n100", batch=100, accuracy=0.86, median_us=None),
]  # fmt: skip
VOID = ("meta", "br", "hr", "img")


@dataclass
class Table:
    """The cells of a table, by heading."""

    section: str
    header: list[str] = field(default_factory=list)
    rows: list[dict[str, str]] = field(default_factory=list)


class Page(HTMLParser):
    """A page taken apart, whose elements close in the order in which they were opened."""

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
        if tag == "tr" and not self.tables[-1].header:
            self.tables[-1].header = self.cells
        elif tag == "tr":
            self.tables[-1].rows.append(dict(zip(self.tables[-1].header, self.cells, strict=True)))

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.cells[-1] += data.strip()

    def rows(self, section: str) -> list[dict[str, str]]:
        return [row for table in self.tables if table.section == section for row in table.rows]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    store.file_away(folder / "results", RECORDS)
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


def test_every_plot_has_its_records(page: Page, text: str) -> None:
    assert page.figures == [
        "ladder-conv2d: Gains over the rung below: 64to64_56_k3s1_b256 on NVIDIA H200",
        "ladder-conv2d: Roofline of conv2d on NVIDIA H200",
        "networks: resnet18 beside each peer, on NVIDIA H200",
        "plans: resnet18, batch 1, fp16, on NVIDIA H200",
        "memory: What the peers of resnet18 need, on NVIDIA H200",
        "memory: What it is for, on NVIDIA H200",
        "memory: A step of training, by phase, on NVIDIA H200",
        "memory: One image, phase by phase, on NVIDIA H200",
        "coverage: torchvision, fp16, batch 32, on NVIDIA H200",
        "training: autoencoder_training_step beside each peer, on NVIDIA H200",
        "training: What each technique brings: autoencoder, batch 32, fp16, on NVIDIA H200",
        "learning: autoencoder learns synthetic in fp32, on twin on x86_64",
        "accuracy: The largest error of all verified results, as a share of what is allowed",
    ]
    drawn = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    gains, roofline, network, plan, needs, kinds, phases, climb, covered, step, ablation, learned, errors = (
        drawn
    )
    assert re.findall(r'id="[^"]*-((?:measured|predicted)-\d+)"', gains) == ["measured-0", "predicted-0"]
    assert ">2.00×<" in gains and ">1.50×<" in gains
    points = re.findall(r'id="[^"]*-points-(\w+)">(.*?)\n   </g>', roofline, re.DOTALL)
    assert {kind: group.count("<use") for kind, group in points} == {"peer": 1, "fp32": 2}
    assert 'roof-fp32"' in roofline
    assert ">3.00×<" in network and ">2.50×<" in network and ">PyTorch, CUDA graph<" in network
    assert "<title>1: conv1, stem p by streamed (stem.cu), 4.00 µs, 8.00× its floor</title>" in plan
    assert "<title>conv: 2 KiB at 1 KiB, steps 1 to 2</title>" in plan and ">8.0×<" in plan
    assert ">1.25×<" in needs and ">6.00<" in kinds and ">weights<" in kinds and ">5.00<" in phases
    assert ">resnet18, fp16: naive<" in climb and ">8.00<" in climb
    assert ">vgg11<" in covered and ">1.50×<" in covered
    assert ">3.00×<" in step and ">2.00×<" in step
    assert ">2.00×<" in ablation and ">1.50×<" in ablation
    assert all(f'-{name}"' in learned for name in ("losses", "evaluations")) and ">50%<" in errors
    assert 'src="data:image/png;base64,AAAA"' in text
    assert all("#010203" not in one and "#2f6db5" not in one and "currentColor" in one for one in drawn)


def test_tables_say_what_the_records_do(page: Page, text: str) -> None:
    ours, step = page.rows("verdict")
    assert (ours["workload"], ours["µs"], ours["best peer"]) == (
        "resnet18",
        "200.0",
        "torch.compile max-autotune",
    )
    tiles = re.findall(r'<div class="tile">\n<h3>(.*?)</h3>', text)
    assert tiles == ["Networks and steps of training", "torchvision, fp16, batch 32"]
    assert '<p class="ratio faster">2.24×</p>' in text, "the geometric mean of 2.50 and 2.00"
    assert (ours["vs best peer"], ours["floor, µs"], ours["× floor"]) == ("2.50×", "100.0", "2.00")
    assert '<td style="text-align:right" class="faster">2.50×</td>' in text
    assert '<td style="text-align:right" class="slower">0.05×</td>' in text, "direct beside PyTorch"
    assert ours["vs best peer, a call"] == "not measured: jax" and step["vs best peer"] == "2.00×"
    rungs = page.rows("ladder-conv2d")
    counted = rungs.pop(0)
    assert (counted["rung"], counted["loads"], counted["FMA"]) == ("direct", "2k", "7")
    assert "profile conv2d --problem NAME --beside-twin" in text, "what is not recorded"
    assert [row["rung"] for row in rungs] == ["torch-nchw", "direct", "input_tile", "weight_tile"]
    assert rungs[2]["gain"] == "2.00×" and rungs[3]["config"].startswith("failed: <script>")
    right = {row["workload"]: row for row in page.rows("accuracy")}
    assert right["conv2d"]["of allowed"] == "50%" and right["conv2d"]["failed"] == "1"
    assert right["lenet_accuracy"]["right of labelled images"] == "0.8600 of 100"
    card, twin, *origins = page.rows("provenance")
    assert (
        list(card.values()) == ["1", "NVIDIA H200", "580.1", "torch 2.11"]
        and twin["card"] == "twin on x86_64"
    )
    assert sum(int(row["figures"]) for row in origins) == len(RECORDS)
    assert {row["repeated by"] for row in origins} == {record.command for record in RECORDS}
    assert {(row["commit"], row["measured on"]) for row in origins} == {("abc", "2026-01-02")}
    assert {row["machine"] for row in origins if row["workload"] == LEARNED.workload} == {"2"}
    (run,) = page.rows("learning")
    assert (run["steps"], run["last loss"], run["best test loss"]) == ("8", "0.1", "0.15")


_EMPTY_PLOTS = r"""[...document.querySelectorAll("svg")].filter((plot) => {
  const ofMatplotlib = /-(figure|axes|patch|text|line2d|[xy]tick|legend|matplotlib.axis|\w*Collection)_\d+$/;
  const data = [...plot.querySelectorAll("g[id]")].filter((group) => !ofMatplotlib.test(group.id));
  return !data.some((group) => { const box = group.getBBox(); return box.width + box.height > 1; });
}).map((plot) => plot.getAttribute("aria-label"))"""
_FIGURES = """[...document.querySelectorAll("#provenance .wide:last-child tbody tr")].map(
  (row) => Number(row.cells[5].textContent)
)"""
_TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
_PAPER = "getComputedStyle(document.body).backgroundColor"


def test_a_browser_shows_it(text: str, page: Page, tmp_path: pathlib.Path) -> None:
    """Without a complaint or a request, in both themes and on a phone; tables sort, plots have data."""
    path = tmp_path / "report.html"
    path.write_text(text)
    with browser(tmp_path / "profile") as own:
        own.open(path)
        assert own.run("document.querySelectorAll('svg').length") == len(page.figures)
        assert own.run(_EMPTY_PLOTS) == []
        before = own.run(_FIGURES)
        own.click("#provenance .wide:last-child th:last-child button")
        assert own.run(_FIGURES) == sorted(before) != before
        own.click("#provenance .wide:last-child th:last-child button")
        assert own.run(_FIGURES) == sorted(before, reverse=True)
        own.click('#plans g[id$="step-1"] path')
        assert own.run("document.querySelector('#plans .pointed').textContent").startswith("1: conv1, stem p")
        light = own.run(_PAPER)
        assert own.run(_TOO_WIDE) == 0
        own.look(390, dark=True)
        assert own.run(_TOO_WIDE) == 0 and own.run(_PAPER) != light
        assert own.print().startswith(b"%PDF")
        assert own.complaints == []
        assert {url.partition(":")[0] for url in own.requests} <= {"file", "data"}


def test_a_slow_down_is_found_beyond_the_spread(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slower = replace(TILED, median_us=31900.0, p20_us=31500.0, p80_us=33000.0, commit="def")
    within = replace(DIRECT, median_us=60900.0, p20_us=60800.0, p80_us=62000.0, commit="def")
    faster = replace(NETWORK, median_us=100.0, p20_us=None, p80_us=None, commit="def")
    theirs = replace(PEERS[0], p20_us=590.0, p80_us=610.0)
    their_new = replace(PEERS[0], p20_us=690.0, p80_us=710.0, median_us=700.0, commit="def")
    bare = replace(PLAN[1], p20_us=None, p80_us=None)
    old = [replace(NETWORK, p20_us=190.0, p80_us=210.0), theirs, DIRECT, TILED, bare]
    store.file_away(tmp_path / "old", old)
    store.file_away(tmp_path / "new", [slower, within, faster, their_new, replace(bare, median_us=9.0)])
    found = changes.between(changes.read_old(tmp_path / "old"), store.load_folder(tmp_path / "new"))
    assert [change.new.rung or change.new.system for change in found.slower] == ["torch-graph", "input_tile"]
    assert "2 (1 of them peers') got slower and 1 faster" in found.sentence
    assert [change.new.workload for change in found.faster] == ["resnet18"]
    assert "of 1 the spread is not known" in found.sentence, "of a step by itself"
    assert len(found.same) == 5 and found.only_old == found.only_new == 0

    options = ("report", "--results", str(tmp_path / "new"), "--output", str(tmp_path / "page.html"))
    said = run(*options, "--against", str(tmp_path / "old" / "h200" / "conv2d.jsonl"))
    assert (
        "Of 2 times that both have, 1 got slower and 0 faster" in said.output
        and "3 are only here" in said.output
    )
    assert "slower, 0.94×: conv2d 64to64_56_k3s1_b256 fp32 nchw escalade input_tile" in said.output
    (row,) = Page((tmp_path / "page.html").read_text()).rows("changes")
    assert (row["who"], row["before, µs"], row["now, µs"]) == ("input_tile", "30,000", "31,900")
    assert row["commits"] == "abc to def"

    sentence = said_by(*options, "--against", str(tmp_path), monkeypatch=monkeypatch, capsys=capsys)
    assert "--against takes a folder like results/" in sentence


def test_what_the_twin_has_counted_needs_no_card() -> None:
    text = report({"twin-on-x86-64": [COUNTED, LEARNED]})
    shown = Page(text)
    assert [row["rung"] for row in shown.rows("ladder-conv2d")] == ["direct"] and len(
        shown.rows("learning")
    ) == 1
    assert "Nothing was measured on a card yet" in text


def test_roofs_are_what_was_recorded_or_said_to_be_missing() -> None:
    shares = [replace(DIRECT, peak_pct=2.0)]
    assert ladders.roofs(shares, "conv2d").gflops == {"fp32": 50000.0}
    assert ladders.roofs(CEILINGS, "conv2d") == ladders.Roofs(4000.0, {"fp32": 50000.0})
    assert "no ceilings" in ladders.roof_sentence(ladders.roofs(LADDER, "conv2d"))
