"""Networks on a fake card: subjects are judged as timed, peers are at their best, figures are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torch import nn

from escalade.device.timing import ReplaySampler, Timing
from escalade_bench.measure.ceilings import Ceilings
from escalade_bench.measure.records import Record
from escalade_bench.networks import host, measurement
from escalade_bench.networks.judging import PEERS, Standard, standard
from escalade_bench.networks.workload import reference
from escalade_bench.peers import network
from escalade_bench.peers import registry as peers
from escalade_bench.peers import torch_network as torch_peers
from escalade_bench.peers.network import NetworkPeer, Peak, Replay, Task, Unavailable, tensors
from tests.bench.fake_cuda import Card

GPU = torch.device("cuda", 0)


@dataclass(frozen=True)
class OnGpu(Task):
    """Pretend that its tensors are on the card."""

    @property
    def device(self) -> torch.device:
        return GPU


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.again = nn.Conv2d(8, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)
        for norm in (self.norm, self.again):
            nn.init.uniform_(norm.weight, 0.5, 2.0)
            nn.init.normal_(norm.bias)
            assert norm.running_var is not None
            nn.init.uniform_(norm.running_var, 0.5, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.again(self.second(x)))
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return Net().eval()


@pytest.fixture(scope="module")
def case(model: nn.Module) -> measurement.Case:
    x = torch.randn(8, 3, 9, 9, generator=torch.Generator().manual_seed(1))
    known = standard(model, x, "fp32", reference(model, x))
    return measurement.Case("net", OnGpu(model, x, "fp32"), known, 0.0)


def silent(text: str) -> None:
    pass


class System:
    """y = the right result by a graph of one kernel of 40 us; broken in one of several ways."""

    def __init__(self, card: Card, case: measurement.Case, broken: str = "") -> None:
        (self._right,) = case.standard.expected
        self._card = card
        self._broken = broken
        self._given = case.task.x
        self.x, self.y = self._given.clone(), torch.empty_like(self._right)
        self.replays = 0

    def work(self) -> None:
        self.replays += 1
        wrong = self._broken == "wears out" and self.replays > 4
        self.y.copy_(
            torch.where(self.x.isnan().any(), torch.nan, 1.1 * self._right if wrong else self._right)
        )

    def fill(self) -> None:
        if self._broken != "is not filled":
            self.x.copy_(self._given)

    def run(self) -> None:
        self._card.kernel(40.0, (lambda: None) if self._broken == "does nothing" else self.work)

    def peer(self, task: Task) -> list[NetworkPeer]:
        replay = Replay(self.fill, self.run, (self.x,), (self.y,))

        def call() -> torch.Tensor:
            self._card.kernel(70.0)
            self._card.synchronize()
            return self.y.copy_(self._right).clone()  # a call may use the graph's memory

        return [NetworkPeer("suspect", "nhwc", call, tensors, self._card.synchronize, replay)]


@pytest.mark.parametrize("broken", ["", "does nothing", "is not filled", "wears out"])
def test_the_graph_that_is_timed_is_the_one_that_is_judged(
    broken: str, card: Card, case: measurement.Case
) -> None:
    (record,) = measurement.compare(case, {"suspect": System(card, case, broken).peer}, silent)
    if not broken:
        assert not record.failure and record.median_us == pytest.approx(40.0) and record.timing == "graph"
        return
    assert "its graph: " in record.failure and record.median_us is None
    assert record.failure.startswith("after it was timed") == (broken == "wears out")


def test_the_engine_s_graph_is_judged_and_not_only_its_calls(card: Card, case: measurement.Case) -> None:
    """Its program may differ from the one that a call runs."""
    (right,) = case.standard.expected
    x, y = torch.zeros_like(case.task.x), torch.zeros_like(right)
    plan = SimpleNamespace(bytes=5)

    class Engine:
        def __init__(self, run: Callable[[], None]) -> None:
            self._program = SimpleNamespace(inputs=(x,), outputs=(y,), run=run, plan=plan)

        def program(self, given: torch.Tensor) -> Any:
            return self._program

        def __call__(self, given: torch.Tensor) -> torch.Tensor:
            return right.clone()

    def work() -> None:
        y.copy_(right + x.sum() - case.task.x.sum())

    def run() -> None:
        card.kernel(40.0, work)

    def measured(engine: Any) -> Record:
        makers = {"escalade": lambda task: [measurement.escalade(task, engine)]}
        (record,) = measurement.compare(case, makers, silent)
        return record

    fine, idle = measured(Engine(run)), measured(Engine(lambda: card.kernel(40.0)))
    assert not fine.failure and fine.median_us == pytest.approx(40.0) and fine.peak_bytes == 5
    assert "its graph: 80 of 80 outputs are NaN" in idle.failure and idle.median_us is None


@pytest.mark.parametrize("factor", [0.75, 1.5, 3.0])
def test_peers_may_be_twice_as_far_off_and_we_may_not(
    factor: float, card: Card, case: measurement.Case
) -> None:
    (right,) = case.standard.expected
    off = right * (1 + factor * case.standard.tolerance)

    def maker(system: str) -> Callable[[Task], list[NetworkPeer]]:
        return lambda task: [NetworkPeer(system, "nhwc", off.clone, tensors, card.synchronize)]

    found = measurement.compare(case, {name: maker(name) for name in ("escalade", "torch-eager")}, silent)
    failed = {record.system for record in found if record.failure}
    assert failed == {0.75: set(), 1.5: {"escalade"}, 3.0: {"escalade", "torch-eager"}}[factor]
    by_system = {record.system: record.tolerance for record in found}
    assert by_system["torch-eager"] == pytest.approx(PEERS * (by_system["escalade"] or 0))


# PyTorch at its best


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, torch.Tensor]]:
    """The functions captured into graphs, with their inputs."""
    captured: list[tuple[Any, torch.Tensor]] = []
    real = torch_peers.Graphed

    def spy(run: Any, x: torch.Tensor, peak: Peak) -> Any:
        captured.append((run, x))
        return real(run, x, peak)

    monkeypatch.setattr(torch_peers, "Graphed", spy)
    return captured


def at_its_best(run: nn.Module, x: torch.Tensor, layout: str) -> bool:
    """No BatchNorm is left; images and filters have the requested layout."""
    wanted = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    images = [x, *(weight for weight in run.parameters() if weight.dim() == 4)]
    assert len(images) == 3
    return not any(isinstance(layer, nn.BatchNorm2d) for layer in run.modules()) and all(
        image.is_contiguous(memory_format=wanted) for image in images
    )


def test_the_graph_of_pytorch_is_folded_and_in_both_layouts(
    card: Card, case: measurement.Case, graphed: list[tuple[Any, torch.Tensor]]
) -> None:
    made = peers.RESNETS["torch-graph"](case.task)
    assert [one.layout for one in made] == ["nchw", "nhwc"]
    assert [at_its_best(*one, layout=made[at].layout) for at, one in enumerate(graphed)] == [True, True]
    assert any(isinstance(layer, nn.BatchNorm2d) for layer in case.task.model.modules()), (
        "ours stays as it is"
    )
    with torch.no_grad():
        for one in made:
            assert one.replay is not None
            sampler = ReplaySampler(one.replay.fill, one.replay.run)
            _, failure = measurement.check(case, one, sampler)
            assert not failure, failure
            assert sampler.finish() > 0


def test_what_is_compiled_is_folded_and_frozen_too(
    card: Card,
    case: measurement.Case,
    graphed: list[tuple[Any, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[tuple[str, bool]] = []

    def compile(run: nn.Module, mode: str, dynamic: bool) -> nn.Module:
        compiled.append((mode, inductor.freezing))
        return run

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: None)
    (made,) = peers.RESNETS["torch-compile"](case.task)
    assert made.layout == "nhwc" and at_its_best(*graphed[0], layout="nhwc")
    assert compiled == [("max-autotune-no-cudagraphs", True)]


def test_eager_pytorch_is_in_channels_last(card: Card, case: measurement.Case) -> None:
    seen: list[bool] = []

    class Spy(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            images = (x, self.first.weight, self.second.weight)
            seen.append(all(one.is_contiguous(memory_format=torch.channels_last) for one in images))
            return super().forward(x)

    (made,) = peers.RESNETS["torch-eager"](OnGpu(Spy().eval(), case.task.x, "fp16"))
    assert made.layout == "nhwc" and seen and all(seen)
    assert [one.layout for one in peers.plain("nchw", "nhwc")["torch-eager"](case.task)] == ["nchw", "nhwc"]


# Figures


def test_a_peak_is_that_of_one_run_and_of_what_was_made_for_it(card: Card) -> None:
    card.use(1000)
    card.use(5000)
    card.use(-5000)  # allocated before by other code
    peak = Peak(GPU)
    card.use(200)  # weights

    def warm_up() -> None:
        card.use(9000)
        card.use(-9000)

    def run() -> str:
        card.use(70)
        card.use(-30)
        return "done"

    warm_up()
    assert peak.of(run) == ("done", 270)
    assert Peak(torch.device("cpu")).of(run) == ("done", None)


def test_the_turns_of_networks_leave_out_launches_and_fill_inputs_every_time(card: Card) -> None:
    filled: list[int] = []

    def fill() -> None:
        filled.append(1)
        card.kernel(11.0)

    samplers = {name: ReplaySampler(fill, lambda: card.kernel(30.0)) for name in "AB"}
    times = measurement.time_on_device(samplers, 0.0)
    assert [timing.median_us for timing in times.values()] == pytest.approx([30.0, 30.0])
    assert [timing.samples for timing in times.values()] == [5, 5]
    assert len(filled) == 2 * (2 + 5), "two rounds go first"
    assert card.log.count("sleep") == 2 + 5


def timing(us: float, how: str = "graph") -> Timing:
    return Timing(us, us - 3, us + 4, 11, how)


def test_a_record_s_figures() -> None:
    """Batch 8 of 3 x 9 x 9, 10 logits, one weight matrix of 10 x 5: 1,944 + 80 + 55 numbers of two bytes."""
    model = nn.Linear(5, 10)
    nn.init.zeros_(model.bias)
    card = Ceilings("card", 132, 60 << 20, 227 << 10, 139 << 30, 4000.0, 3900.0, {"fp16": 500.0})
    expected = torch.ones(8, 10, dtype=torch.float64)
    case = measurement.Case(
        "net",
        OnGpu(model, torch.zeros(8, 3, 9, 9), "fp16"),
        Standard("fp16", (expected,), (1e-3,)),
        0.0,
        card,
    )
    one = NetworkPeer("escalade", "nhwc", lambda: None, tensors, lambda: None, peak_bytes=123, note="a note")
    record = measurement._record(
        case, measurement.Ready(one, None, 5e-4), timing(50.0), timing(90.0, "calls")
    )
    moved = 2 * (8 * 3 * 9 * 9 + 8 * 10 + 5 * 10 + 10)
    assert (record.problem, record.batch, record.timing, record.samples) == ("9_b8", 8, "graph", 11)
    assert (record.median_us, record.p20_us, record.p80_us, record.wall_us) == (50.0, 47.0, 54.0, 90.0)
    assert record.images_per_s == pytest.approx(8 / 50e-6)
    assert record.gbps == pytest.approx(moved / 50e-6 / 1e9)
    assert record.copy_pct == pytest.approx(100 * moved / 50e-6 / 4000e9)
    assert (record.error, record.tolerance, record.peak_bytes, record.note) == (5e-4, 2e-3, 123, "a note")
    plan = SimpleNamespace(flops=10**9, floor_us=7.0)
    floored = measurement._with_floor(case, record, plan)  # type: ignore[arg-type]
    assert floored.tflops == pytest.approx(1e9 / 50e-6 / 1e12) and floored.floor_us == 7.0
    assert floored.peak_pct == pytest.approx(100 * (floored.tflops or 0) / 500)


def test_without_a_graph_the_time_is_that_of_calls_in_a_row(
    card: Card, case: measurement.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both by the wall clock, starting with an idle device."""
    monkeypatch.setattr(measurement, "_LONG_CALL_US", float("inf"))
    calls: list[int] = []

    def call() -> torch.Tensor:
        calls.append(1)
        return case.standard.expected[0].clone()

    eager = NetworkPeer("torch-eager", "nhwc", call, tensors, lambda: None)
    timed = measurement._time(case, [measurement.Ready(eager, None, 0.0)])
    device, wall = timed[eager.name]
    assert device.how == wall.how == "calls"
    assert len(calls) == (2 + 5) * (1 + measurement.CALLS_IN_A_ROW), "two rounds are not timed"


def test_a_long_call_is_not_repeated_in_a_row(
    card: Card, case: measurement.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "_LONG_CALL_US", 0.0)
    calls: list[int] = []
    eager = NetworkPeer("torch-eager", "nhwc", lambda: calls.append(1), tensors, lambda: None)
    device, wall = measurement._time(case, [measurement.Ready(eager, None, 0.0)])[eager.name]
    assert device is wall and len(calls) == 2 + 5


def test_a_layout_that_fails_is_a_note_and_a_system_without_a_time_a_failure() -> None:
    blank = Record("net", "9_b8", "fp16", "nhwc", 8, "torch-graph", "", median_us=10.0)
    failed = replace(blank, layout="nchw", median_us=None, failure="out of memory")
    other = replace(failed, system="jax", layout="", failure="jax is not here")
    found = measurement._with_refusals([blank], [failed, other, replace(other, failure="again")])
    assert found == [replace(blank, note="nchw: out of memory"), other]


def test_a_budget_refuses_what_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(network.time, "perf_counter", lambda: now[0])
    peer = NetworkPeer("slow", "nhwc", lambda: None, lambda _: (), lambda: None, config={"mode": "most"})

    def make(task: Task) -> list[NetworkPeer]:
        now[0] += 40.0
        return [peer]

    limited = network.Budget(60.0).limited("slow", make)
    task = Task(torch.nn.Identity(), torch.zeros(1), "fp32")
    for _ in range(2):  # the second starts in time
        assert limited(task)[0].config == {"mode": "most", "seconds_to_make": 40.0}
    with pytest.raises(Unavailable, match="the 60 s for slow peers were spent"):
        limited(task)
    assert network.Budget().limited("slow", make)(task)


# Phases


@pytest.mark.parametrize("broken", ["", "does nothing", "is not filled", "wears out"])
def test_phases_are_rungs_judged_by_what_is_timed_and_rated_by_calls(
    broken: str, card: Card, case: measurement.Case
) -> None:
    from_host = replace(case, own=True, by_call=True)
    (record,) = measurement.compare(from_host, {"graph": System(card, case, broken).peer}, silent)
    assert (record.system, record.rung, record.tolerance) == ("escalade", "suspect", case.standard.tolerance)
    assert bool(record.failure) == bool(broken) == (record.wall_us is None)
    if not broken:
        assert record.median_us == pytest.approx(40.0) and record.timing == "graph"
        assert record.images_per_s == pytest.approx(8e6 / (record.wall_us or 0))


def test_a_phase_without_a_graph_has_the_wall_clock_alone(card: Card, case: measurement.Case) -> None:
    calls: list[int] = []

    def call() -> torch.Tensor:
        calls.append(1)
        return case.standard.expected[0].clone()

    peer = NetworkPeer("cpu", "nhwc", call, tensors, lambda: None)
    (record,) = measurement.compare(replace(case, own=True, by_call=True), {"cpu": lambda _: [peer]}, silent)
    assert (record.timing, record.median_us, record.p20_us, record.samples) == ("cpu", None, None, 5)
    assert record.wall_us and record.images_per_s == pytest.approx(8e6 / record.wall_us)
    assert len(calls) == 2 + 5 + 2, "judged, timed, judged, and none in a row"


@pytest.mark.parametrize("arrives", [True, False])
def test_copies_that_do_not_arrive_are_a_failure(
    arrives: bool, card: Card, case: measurement.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_copy, real_empty = torch.Tensor.copy_, torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **how: real_empty(*size, **how))
    task = Task(case.task.model, case.task.x, "fp32")
    expected, make = host._copies(task, case.task.x.clone(), case.standard)
    monkeypatch.setattr(
        torch.Tensor,
        "copy_",
        lambda to, given, non_blocking=False: to if non_blocking and not arrives else real_copy(to, given),
    )
    wanted = replace(case, standard=expected, own=True, by_call=True)
    (record,) = measurement.compare(wanted, {"transfer": make}, silent)
    assert ("NaN" in record.failure) == (not arrives) and bool(record.wall_us) == arrives


def test_a_call_on_the_cpu_is_judged_by_the_result_that_was_timed(case: measurement.Case) -> None:
    (right,) = case.standard.expected
    blank = Record("net_cpu", "9_b8", "fp32", "nhwc", 8, "torch-cpu", "")
    results = [right, right, 2 * right]
    wrong = host.timed_on_cpu(blank, lambda: results.pop(0), case.standard, 1.0, 3)
    assert wrong.failure and wrong.wall_us is None and not results
    record = host.timed_on_cpu(blank, lambda: right, case.standard)
    assert (record.timing, record.samples, record.failure, record.median_us) == ("cpu", 1, "", None)
    assert record.images_per_s == pytest.approx(8e6 / (record.wall_us or 0))
