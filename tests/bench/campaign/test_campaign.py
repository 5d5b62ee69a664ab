"""A campaign measures what is missing or no longer current, in order, within a budget, and nothing twice."""

from __future__ import annotations

import os
import pathlib
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from escalade import ops
from escalade.device.program import Program
from escalade.errors import UnsupportedError
from escalade_bench import evaluation
from escalade_bench.campaign import ladders, registry, runner, staleness
from escalade_bench.campaign.runner import Clock, ordered
from escalade_bench.campaign.staleness import Check, State
from escalade_bench.campaign.units import Say, Session, Unit
from escalade_bench.coverage.catalogue import TORCHVISION
from escalade_bench.measure import currency
from escalade_bench.measure import records as store
from escalade_bench.measure.ceilings import Ceilings
from escalade_bench.measure.currency import GONE, Made
from escalade_bench.measure.records import Provenance, Record
from escalade_bench.networks.workloads import WORKLOADS
from escalade_bench.report.pages import goals
from escalade_bench.report.tables import PREFERRED_GPU
from tests.bench.fake import Scale, rung

VERSIONS = store.versions() | {"torch": "2.11", "cuda": "13.0", "cudnn": "9"}
ORIGIN = Provenance("NVIDIA H200", "580", VERSIONS, "abc", "2026-01-02T03:04:05+00:00", "escalade measure")
ARCHITECTURE = "sm_90a"
CPU = torch.device("cpu")


def unit(name: str, source: pathlib.Path | None = None, **more: object) -> Unit:
    """Return a unit of one comparison, ours and a peer's; ours launches the kernel `k` of a source."""

    def measure(session: Session, say: Say) -> Iterator[list[Record]]:
        ours = Record("ladder", name, "fp32", "nchw", 1, "escalade", "right")
        yield [ours, replace(ours, system="torch-nchw", rung="")]

    def made(session: Session, record: Record) -> Made:
        return Made("a plan", (Program.of(str(source), "k"),) if source else ())

    whole = Unit(name, "a test", f"escalade ladder {name}", 1.0, measure, made)
    return replace(whole, **more)  # type: ignore[arg-type]


class Campaign:
    """Units, and the folder where their records go."""

    def __init__(self, folder: pathlib.Path, *units: Unit) -> None:
        self.folder, self.units = folder, units
        self.said: list[str] = []

    def states(self, here: Provenance | None = None, again: bool = False) -> list[State]:
        known = store.load_folder(self.folder).get("h200", [])
        return Check(Session(CPU), ARCHITECTURE, here, again).states(self.units, known)

    def reasons(self, here: Provenance | None = None) -> list[str]:
        return [state.why for state in self.states(here)]

    def run(self, budget: float | None = None, again: bool = False) -> list[str]:
        return self.run_on(Session(CPU, seconds=0.0), budget, again)

    def run_on(self, session: Session, budget: float | None = None, again: bool = False) -> list[str]:
        """Return the names of the units that are left."""

        def keep(records: object) -> None:
            store.file_away(self.folder, records)  # type: ignore[arg-type]

        made = runner.Campaign(session, ARCHITECTURE, ORIGIN, keep, self.said.append)
        left = made.run(ordered(self.states(ORIGIN, again)), Clock(budget))
        return [state.unit.name for state in left]


KERNEL = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] = x[threadIdx.x] * 2.0f; }\n'


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every check plans, because the sources of these tests are not part of the package."""
    digests = map(str, range(1_000_000))
    monkeypatch.setattr(staleness, "package_digest", digests.__next__)
    yield


def write(path: pathlib.Path, text: str) -> None:
    path.write_text(text)
    for cached in (currency._code, currency.read, currency.Program.headers.__globals__["included"]):
        cached.cache_clear()


def test_machine_code_decides_and_not_the_commit_or_the_text(tmp_path: pathlib.Path) -> None:
    kernel = tmp_path / "a.cu"
    write(kernel, KERNEL)
    one = unit("one", kernel, declared=("torch-nchw",))
    campaign = Campaign(tmp_path / "results", one)
    assert campaign.reasons() == ["never measured"]
    assert campaign.run() == [] and campaign.reasons() == [""]
    found = store.load(tmp_path / "results/h200/ladder.jsonl")
    assert [(r.command, r.case, bool(r.code), r.plan) for r in found] == [
        ("escalade ladder one", "one", True, "a plan"),
        ("escalade ladder one", "one", False, ""),
    ]
    write(kernel, f"// A comment is no code.\n\n{KERNEL}")
    assert campaign.reasons() == [""]
    write(kernel, KERNEL.replace("float* x", "float* values").replace("x[", "values["))
    assert campaign.reasons() == [""], "another name, the same machine code"
    write(kernel, KERNEL.replace("2.0f", "3.0f"))
    assert campaign.reasons() == [f"{kernel} changed"]
    (state,) = campaign.states()
    assert state.older == {found[0].key: f"{kernel} changed"}
    write(kernel, "no C++")
    assert "does not compile" in campaign.reasons()[0]
    write(kernel, KERNEL)
    other = replace(one, made=lambda session, record: replace(one.made(session, record), plan="another"))  # type: ignore
    campaign.units = (other,)
    assert campaign.reasons() == ["the plan changed: another rung, config or problem"]
    campaign.units = (replace(one, made=lambda session, record: None),)
    assert campaign.reasons() == [GONE]
    two = unit("one", kernel, declared=one.declared)
    made, keys = one.made, {found[0].key: "", replace(found[0], layout="nhwc").key: GONE}
    store.file_away(campaign.folder, [replace(found[0], layout="nhwc")])
    campaign.units = (replace(two, made=lambda s, r: made(s, r) if r.layout == "nchw" else None),)  # type: ignore
    (state,) = campaign.states()
    assert (state.why, state.older) == ("", keys), "one figure is older, but the unit is measured"
    campaign.units = (replace(one, declared=("torch-nchw", "a new rung")),)
    assert campaign.reasons() == ["it asks for other rungs, peers or sizes"]
    campaign.units = (one,)
    assert campaign.reasons(ORIGIN) == [""]
    later = replace(ORIGIN, versions=VERSIONS | {"torch": "2.12"})
    assert campaign.reasons(later) == ["its peers were measured with PyTorch 2.11"]


def test_a_package_that_is_the_same_needs_no_plan(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(session: Session, record: Record) -> Made:
        raise AssertionError("it was planned again")

    campaign = Campaign(tmp_path, unit("one"))
    campaign.run()
    campaign.units = (unit("one", made=planned),)
    assert "it was planned again" in campaign.reasons()[0]
    monkeypatch.setattr(staleness, "package_digest", currency.package_digest)
    assert campaign.reasons() == [""]
    (ours, _) = store.load(tmp_path / "h200/ladder.jsonl")
    store.file_away(tmp_path, [replace(ours, older="a kernel changed")])
    assert campaign.reasons() == ["a kernel changed"]


def test_a_compiler_of_another_version_can_compare_texts_alone(tmp_path: pathlib.Path) -> None:
    kernel = tmp_path / "a.cu"
    write(kernel, KERNEL)
    made = Made("a plan", (Program.of(str(kernel), "k"),))
    ours = Record("ladder", "one", "fp32", "nchw", 1, "escalade", "right", versions={"nvrtc": "12.0"})
    ours = currency.stamped(ours, made, ARCHITECTURE)
    assert currency.changed(ours, made, ARCHITECTURE) == ""
    write(kernel, KERNEL.replace("x", "values"))
    assert "NVRTC 12.0 is not here" in currency.changed(ours, made, ARCHITECTURE)
    more = replace(made, programs=(*made.programs, Program.of("other.cu", "k")))
    write(kernel, KERNEL)
    assert currency.changed(ours, more, ARCHITECTURE) == "other.cu is launched too"


def test_units_are_measured_in_order_within_a_budget(tmp_path: pathlib.Path) -> None:
    some = (unit("first"), unit("dear", seconds=100.0), unit("last"))
    campaign = Campaign(tmp_path, *some)
    assert campaign.run(budget=50) == ["dear"]
    ended = [line.partition("s] ")[2] for line in campaign.said if " left, about" in line]
    assert [line.partition(":")[0] for line in ended] == ["first", "last"]
    assert all(re.match(r"\[ *\d+\.\d s\] ", line) for line in campaign.said)
    assert campaign.run(budget=50) == ["dear"] and campaign.run() == []


def test_a_campaign_that_is_stopped_goes_on_where_it_was(tmp_path: pathlib.Path) -> None:
    stopped = True

    def measure(session: Session, say: Say) -> Iterator[list[Record]]:
        yield [Record("ladder", "first", "fp32", "", 1, "escalade", "right")]
        if stopped:
            raise KeyboardInterrupt
        yield [Record("ladder", "second", "fp32", "", 1, "escalade", "right")]

    long = unit("long", measure=measure)
    campaign = Campaign(tmp_path, unit("short"), long)
    with pytest.raises(KeyboardInterrupt):
        campaign.run()
    assert campaign.reasons() == ["", "begun, and not measured to its end"]
    later = Campaign(tmp_path, long, unit("cheap"))
    assert [state.unit.name for state in ordered(later.states())] == ["cheap", "long"]
    stopped = False
    assert campaign.run() == [] and campaign.reasons() == ["", ""]


def test_processes_file_the_same_records_and_what_is_cut_short_is_left(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run in one process here, with fake workers and a fake card."""
    given: list[object] = []

    def measure(name: str, session: Session, say: Say) -> Iterator[list[Record]]:
        given.append(session.reused)
        yield from unit(name).measure(session, say)

    units = {name: unit(name, measure=partial(measure, name)) for name in ("first", "second", "third")}

    class Crew:
        def __init__(self, work: Any, arguments: Any, receive: Any, ended: Any, longest_turn: Any) -> None:
            self.work, self.arguments, self.receive, self.ended = work, arguments, receive, ended
            self.longest_turn = longest_turn

        def run(self, count: int, next_task: Any, seconds_left: Any) -> list[Any]:
            assert count == 2 and seconds_left() == float("inf")

            def tasks() -> Iterator[Any]:
                for lost in (False, True):
                    task = next_task()
                    assert self.longest_turn(task) == 63.0
                    yield replace(task, reused=frozenset({task.name}))
                    self.ended(task, lost)

            desk = SimpleNamespace(tasks=tasks, send=self.receive, spent=None)
            self.work(desk, *pickle.loads(pickle.dumps(self.arguments)))
            return [next_task()]

    monkeypatch.setattr(runner, "Crew", Crew)
    monkeypatch.setattr(runner, "workers_for", lambda states: 2)
    monkeypatch.setattr(registry, "units", lambda: units)
    monkeypatch.setattr(torch.cuda, "set_device", given.append)
    threads = torch.get_num_threads()
    campaign = Campaign(tmp_path, *units.values())
    device = torch.device("cuda", 0)
    card = Ceilings("", 1, 1, 1, 1, 1.0, 1.0, {})
    try:
        left = campaign.run_on(Session(device, 0.0, given_ceilings=card))
    finally:
        torch.set_num_threads(threads)
        os.environ.pop("TORCHINDUCTOR_COMPILE_THREADS", None)
    assert left == ["third"] and given == [device, {"first"}, {"second"}]
    assert campaign.reasons() == ["", "", "begun, and not measured to its end"]
    assert any("second: its process has exited" in line for line in campaign.said)
    (ours, *_) = store.load(tmp_path / "h200/ladder.jsonl")
    assert ours.case == "first" and ours.plan == "a plan"


@pytest.mark.parametrize("workers", [1, 2])
def test_what_finds_too_little_memory_beside_other_processes_is_measured_without_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Memory, processes and card are fakes: other processes hold memory until they end."""
    held, counts = [90], []

    def large(session: Session, say: Say) -> Iterator[list[Record]]:
        if held[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        yield from unit("large").measure(session, say)

    units = {"large": unit("large", measure=large), "small": unit("small")}

    class Crew:
        def __init__(self, work: Any, arguments: Any, receive: Any, ended: Any, longest_turn: Any) -> None:
            self.work, self.arguments, self.receive, self.ended = work, arguments, receive, ended

        def run(self, count: int, next_task: Any, seconds_left: Any) -> list[Any]:
            def tasks() -> Iterator[Any]:
                while task := next_task():
                    yield task
                    self.ended(task, False)

            counts.append(count)
            self.work(SimpleNamespace(tasks=tasks, send=self.receive, spent=None), *self.arguments)
            held[0] = 0
            return []

    monkeypatch.setattr(runner, "Crew", Crew)
    monkeypatch.setattr(runner, "workers_for", lambda states: workers)
    monkeypatch.setattr(registry, "units", lambda: units)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 - held[0], 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    card = Ceilings("", 1, 1, 1, 1, 1.0, 1.0, {})
    session = Session(torch.device("cuda", 0), 0.0, given_ceilings=card)
    campaign = Campaign(tmp_path, *units.values())
    if workers == 1:
        assert campaign.run_on(session) == ["large"]
        assert campaign.reasons() == ["begun, and not measured to its end", ""]
        held[0] = 0
    assert campaign.run_on(session) == [] and campaign.reasons() == ["", ""]
    assert counts == ([2, 1] if workers == 2 else [])


def test_what_is_too_large_for_an_empty_card_has_failed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def huge(session: Session, say: Say) -> Iterator[list[Record]]:
        raise torch.OutOfMemoryError("CUDA out of memory")
        yield []

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (99, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    campaign = Campaign(tmp_path, unit("huge", measure=huge))
    assert campaign.run() == [] and [state.failure for state in campaign.states()] == ["CUDA out of memory"]


def test_a_unit_that_fails_is_tried_again_only_with_another_package(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(session: Session, say: Say) -> Iterator[list[Record]]:
        raise RuntimeError("no memory")
        yield []

    campaign = Campaign(tmp_path, unit("broken", measure=broken), unit("sound"))
    assert campaign.run() == [] and campaign.reasons() == ["it failed, and the package has changed since", ""]
    monkeypatch.setattr(staleness, "package_digest", currency.package_digest)
    assert campaign.reasons() == ["", ""]
    assert [state.failure for state in campaign.states()] == ["no memory", ""]
    assert any(line.endswith("broken: no memory") for line in campaign.said)


def test_a_peer_is_measured_once_per_driver_and_version(tmp_path: pathlib.Path) -> None:
    """Our comparison is measured again alone; with it, a peer that failed or was measured differently."""
    measured: list[set[str]] = []
    failures: dict[str, str] = {}

    def measure(session: Session, say: Say) -> Iterator[list[Record]]:
        peers = {"torch-graph", "torch-eager"} - session.reused
        measured.append(peers)
        for problem in ("b1", "b32"):
            ours = Record("net", problem, "fp16", "nhwc", 1, "escalade", "")
            yield [
                replace(ours, system=name, failure=failures.get(name, "")) for name in ("escalade", *peers)
            ]

    one = unit("network/net", measure=measure, command="escalade bench net --seconds 0.05")
    campaign = Campaign(tmp_path, one)
    campaign.run()
    (state,) = campaign.states(ORIGIN)
    assert state.reused == {"torch-graph", "torch-eager"} and set(state.known) == {"seconds", "declared"}
    assert state.seconds == pytest.approx(0.7 * state.known["seconds"])
    log = store.load(tmp_path / "h200/campaign.jsonl")
    store.file_away(tmp_path, [replace(r, config={**r.config, "seconds": 300.0}) for r in log])
    peer = next(r for r in store.load(tmp_path / "h200/net.jsonl") if r.system == "torch-graph")
    store.file_away(tmp_path, [replace(peer, config={"seconds_to_make": 250.0})])
    assert campaign.states(ORIGIN)[0].seconds == 50.0, "most of it was compiling a peer"
    for other in (
        replace(ORIGIN, driver="590"), replace(ORIGIN, versions=VERSIONS | {"cudnn": "10"}), None,
    ):  # fmt: skip
        assert campaign.states(other)[0].reused == frozenset()
    assert campaign.states(ORIGIN, again=True)[0].reused == frozenset()

    failures["torch-graph"] = "a wrong result"
    campaign.run(again=True)
    assert campaign.reasons(ORIGIN) == [""], "what a peer computes does not depend on our package"
    failures["escalade"] = "another"
    campaign.run(again=True)
    assert "escalade was wrong" in campaign.reasons(ORIGIN)[0]
    failures.clear()
    campaign.run()
    assert measured[-2:] == [{"torch-graph", "torch-eager"}, {"torch-graph"}]
    (state,) = campaign.states(ORIGIN)
    assert not state.why and set(state.known) == {"seconds", "seconds_alone", "declared"}
    assert state.seconds == state.known["seconds_alone"]

    log = [replace(r, problem="ladder/net") for r in store.load(tmp_path / "h200/campaign.jsonl")]
    store.file_away(tmp_path, log)
    campaign.units = (
        replace(one, name="ladder/net"),
        replace(one, command="escalade bench net --seconds 0.5"),
    )
    assert [state.reused for state in campaign.states(ORIGIN)] == [frozenset()] * 2
    campaign.units = (replace(one, command="escalade bench net --seconds 0.5"),)
    assert campaign.states(ORIGIN)[0].reused == frozenset()
    log = store.load(tmp_path / "h200/campaign.jsonl")
    store.file_away(tmp_path, [replace(r, config={"begun": True, **r.config}) for r in log])
    (state,) = Campaign(tmp_path, one).states(ORIGIN)
    assert state.tried and state.reused, "what was measured before is still current"
    store.file_away(tmp_path, [replace(r, failure="no memory") for r in log])
    (state,) = Campaign(tmp_path, one).states(ORIGIN)
    assert not state.reused and set(state.known) == {"seconds", "seconds_alone"}, "some of it may be missing"


def test_a_new_unit_is_expected_to_take_as_long_as_its_like(tmp_path: pathlib.Path) -> None:
    names = ("network/net/batches/b1", "network/net/batches/b2", "network/other/batches/b1", "ladder/net")
    log = [
        Record("campaign", name, "", "", 0, "escalade", "", {"seconds": seconds, "declared": []}).stamped(
            ORIGIN
        )
        for name, seconds in zip(names, (10.0, 30.0, 99.0, 99.0), strict=True)
    ]
    store.file_away(tmp_path, log)
    seconds = {
        state.unit.name: state.seconds
        for state in Campaign(
            tmp_path, *map(unit, ("network/net/batches/b8", "network/new/batches/b1"))
        ).states()
    }
    assert seconds == {"network/net/batches/b8": 25.0, "network/new/batches/b1": 1.0}


def test_a_ladder_runs_as_units(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = Scale(rung("right"), rung("wrong", "wrong_element", below="right"))
    monkeypatch.setattr("escalade.ops.OPERATIONS", {"scale": operation})
    (ladder, *_) = ladders.units()
    campaign = Campaign(tmp_path, ladder)
    campaign.run()
    (found,) = [r for r in store.load(tmp_path / "h200/scale.jsonl") if r.rung == "right"]
    assert found.plan and found.code
    assert campaign.reasons() == ["escalade was wrong, and the package has changed since"]


@pytest.fixture(scope="module")
def every() -> dict[str, Unit]:
    """All existing units; listing some takes a while."""
    return registry.units()


def test_the_registry_has_every_kind_and_finds_names(every: dict[str, Unit]) -> None:
    assert {one.kind for one in every.values()} >= {
        "ladder", "ablation", "crossover", "traffic", "network", "autotune", "steps", "layers", "coverage", "calls",
    }  # fmt: skip
    assert all(name == one.name and one.seconds > 0 for name, one in every.items())
    assert all(
        one.command.startswith("escalade ") and "--results" not in one.command for one in every.values()
    )
    for pattern in ("ladder/relu", "network/*/fp16", "layers/input_gradient/"):
        assert registry.named([pattern])
    assert len(registry.named(["all"])) == len(every)
    with pytest.raises(UnsupportedError, match="no unit is named 'ladders'; names begin with ladder,"):
        registry.named(["ladders"])


def test_processes_find_the_same_states(every: dict[str, Unit], monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("ladder/copy", "ladder/add")
    units = [unit for name, unit in every.items() if name.startswith(names)]
    known = [
        replace(record, checked="")
        for record in store.load_folder(pathlib.Path("results"))[PREFERRED_GPU]
        if record.workload == staleness.WORKLOAD or record.case.startswith(names)
    ]
    check = Check(Session(torch.device("cpu")), "sm_90a")
    alone = check.states(units, known)
    assert any(state.older for state in alone)
    monkeypatch.setattr(staleness, "_MANY", 1)
    monkeypatch.setattr(staleness.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(Check, "state", None)  # would be called in this process
    assert check.states(units, known) == alone


def test_every_name_of_the_headline_is_a_unit(every: dict[str, Unit]) -> None:
    absent = [name for name in registry.NAMES if not registry._selected(every, name)]
    elsewhere = (
        f"coverage/{TORCHVISION}/",
        "evaluation/",
        "learning/",
    )  # where torchvision, or weights and images, are at hand
    assert [name for name in absent if not name.startswith(elsewhere)] == []
    unasked, asked = ([one.name for one in registry.named(given)] for given in ([], ["headline"]))
    assert unasked == asked


def test_the_headline_has_the_ladders_of_all_ideas() -> None:
    ladders = {f"ladder/{i.workload}/{i.problem}/fp32" for i in goals.IDEAS if i.workload in ops.OPERATIONS}
    assert ladders <= {unit.name for unit in registry.named(["headline"])}


def test_accuracy_is_a_unit_where_weights_and_photographs_are(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESCALADE_DATA", str(tmp_path))
    assert not list(evaluation.units()) and evaluation.FILES[0] in evaluation.missing()
    for name in evaluation.FILES:
        (tmp_path / name).touch()
    (found,) = evaluation.units()
    assert not evaluation.missing()
    assert found.command.startswith(
        f"escalade bench evaluate resnet18 --weights {tmp_path / evaluation.FILES[0]} --data"
    )


def test_whatever_is_filed_has_units_that_measure_it_again(every: dict[str, Unit]) -> None:
    """Docs show records, so the campaign must know every workload among them."""
    apart = {
        "ceilings", "gpu_test", "soak", "service", "startup", "photographs", "campaign", "autoencoder_learning",
    }  # fmt: skip
    parts = {
        f"{name}_{part}".replace("-", "_"): f"network/{name}/{part}"
        for name in WORKLOADS
        for part in WORKLOADS[name].parts
    }
    records = store.load_folder(pathlib.Path("results"))[PREFERRED_GPU]
    for workload in {record.workload for record in records if not record.case} - apart:
        name, _, rest = workload.partition("_")
        begins = parts.get(workload) or (
            f"ladder/{workload}/" if workload in ops.OPERATIONS
            else f"network/{workload}/batches/" if workload in WORKLOADS
            else f"layers/{rest or 'forward'}/" if name == "layers"
            else "calls/" if name == "calls"
            else f"coverage/{rest}/" if name == "coverage"
            else f"{rest}/{name}"
        )  # fmt: skip
        if begins.startswith((f"coverage/{TORCHVISION}/", "evaluation/")):
            continue  # such units exist only if networks, or weights and photographs, are installed
        assert any(each.startswith(begins) for each in every), workload


@pytest.mark.parametrize(
    "name",
    [
        "network/lenet/batches/b10000/fp16",
        "network/autoencoder/training-step/b64/fp16",
        "steps/resnet18/b1/fp16",
    ],
)
def test_a_network_is_planned_as_a_gpu_runs_it_without_one(every: dict[str, Unit], name: str) -> None:
    made = every[name].made
    assert made is not None
    ours = Record("", "", "fp16", "nhwc", 64, "escalade", "")
    one, other = made(Session(CPU), ours), made(Session(CPU), ours)
    assert one is not None and one == other and one.programs


def test_a_unit_that_hangs_ends_the_process_and_says_where() -> None:
    script = (
        "import time\n"
        "from escalade_bench.campaign.runner import _ended_after\n"
        "with _ended_after(60): pass\n"
        "def hangs(): time.sleep(60)\n"
        "with _ended_after(0.1): hangs()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1 and "in hangs" in ended.stderr
