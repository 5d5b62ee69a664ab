"""Networks and their peers on the CPU: right results pass, wrong ones are not timed."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from escalade import cli
from escalade.device.timing import CallSampler
from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.engine.explain import explain_plan
from escalade.engine.passes import FusionLevel
from escalade.errors import UnsupportedError
from escalade.models import ResNet
from escalade.models.resnet import BasicBlock, Bottleneck
from escalade.ops.base.switches import precision
from escalade_bench.campaign.units import Session
from escalade_bench.measure import records as store
from escalade_bench.measure.records import Record
from escalade_bench.networks import host, measurement, parts, workload
from escalade_bench.networks.data import images
from escalade_bench.networks.judging import PEERS, standard
from escalade_bench.networks.workload import Setting, Workload, reference
from escalade_bench.networks.workloads import WORKLOADS, resnet
from escalade_bench.peers import registry
from escalade_bench.peers.network import NetworkPeer, Task, Unavailable, tensors
from escalade_bench.report.plots import by_batch, save

SIZE = 32
TINY = resnet("tiny", lambda: ResNet(BasicBlock, (1, 1, 1, 1), 10))
NARROW = resnet("narrow", lambda: ResNet(Bottleneck, (1, 1, 1, 1), 10))


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    return TINY.model(SIZE)


@pytest.fixture(scope="module")
def engine(network: torch.nn.Module) -> Engine:
    return Engine(capture(network, (images(2, SIZE),)), "fp32", "cpu")


@pytest.fixture(scope="module")
def case(network: torch.nn.Module) -> measurement.Case:
    x = images(2, SIZE, 5)
    return measurement.Case(
        "tiny", Task(network, x, "fp32"), standard(network, x, "fp32", reference(network, x)), 0.0
    )


def bench(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(cli.app, ["bench", *arguments, "--device", "cpu"])


def silent(text: str) -> None:
    pass


def test_workloads_are_the_same_every_time_and_keep_their_values_in_range(network: torch.nn.Module) -> None:
    x = images(4, SIZE, 9)
    logits = network(x)
    assert torch.equal(TINY.model(SIZE)(x), logits)
    assert not torch.equal(TINY.model(SIZE, seed=1)(x), logits)
    assert 0.05 < float(logits.detach().std()) < 20
    assert any(norm.running_var is not None and norm.running_var.std() > 0 for norm in _norms(network))


def _norms(network: torch.nn.Module) -> list[torch.nn.BatchNorm2d]:
    return [module for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d)]


def test_a_peer_agrees_with_the_reference(case: measurement.Case) -> None:
    with precision("fp32"):
        (eager,) = registry.RESNETS["torch-eager"](case.task)
        error, failure = measurement.check(case, eager, None)
    assert not failure and 0 < error < PEERS * case.standard.tolerance


@pytest.mark.parametrize("chosen", [TINY, NARROW], ids=lambda chosen: chosen.name)
def test_jax_agrees_with_the_reference(chosen: Workload) -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    if jax.default_backend() != "cpu":
        pytest.skip(f"jax runs on {jax.default_backend()} here; the GPU's tests compare it there")
    model, x = chosen.model(SIZE), images(2, SIZE, 5)
    (peer,) = registry.RESNETS["jax"](Task(model, x, "fp32"))
    task = Task(model, x, "fp32")
    known = measurement.Case("net", task, standard(model, x, "fp32", reference(model, x)), 0.0)
    _, failure = measurement.check(known, peer, None)
    assert not failure, failure
    peer.wait()


@pytest.mark.parametrize("system", ["torch-graph", "torch-compile"])
def test_a_peer_that_cannot_take_part_says_why(system: str, case: measurement.Case) -> None:
    with pytest.raises(Unavailable, match="needs a GPU"):
        registry.RESNETS[system](case.task)


def test_the_engine_is_measured_and_the_unavailable_is_said(case: measurement.Case, engine: Engine) -> None:
    said: list[str] = []
    peers = registry.chosen(("torch-graph", "torch-eager"), registry.RESNETS)
    records = measurement.measure(case, engine, peers, said.append)
    ours, eager, absent = records
    assert (ours.system, eager.system, absent.system) == ("escalade", "torch-eager", "torch-graph")
    assert absent.failure == "torch-graph needs a GPU" and absent.median_us is None
    assert ours.wall_us and ours.images_per_s == pytest.approx(2e6 / ours.time)
    assert ours.timing == "cpu" and ours.tflops is None
    assert any("without torch-graph" in text for text in said)


def test_an_interrupt_in_a_peer_stops_the_run(case: measurement.Case) -> None:
    """Refused even if the peer wraps the error; any other error is the peer's failure."""

    def interrupted(task: Task) -> list[NetworkPeer]:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            raise RuntimeError("the compiler's workers are gone") from interrupt

    def broken(task: Task) -> list[NetworkPeer]:
        raise TypeError("no such layer")

    with pytest.raises(KeyboardInterrupt):
        measurement.compare(case, {"peer": interrupted}, silent)
    (record,) = measurement.compare(case, {"peer": broken}, silent)
    assert record.failure == "TypeError: no such layer"


def test_a_wrong_result_is_a_failure_without_a_time(case: measurement.Case, engine: Engine) -> None:
    (expected,) = case.standard.expected

    def wrong(task: Task) -> list[NetworkPeer]:
        return [NetworkPeer("wrong", "nhwc", lambda: 1.001 * expected, tensors, lambda: None)]

    def broken(task: Task) -> list[NetworkPeer]:
        raise RuntimeError("out of luck")

    peers = {"wrong": wrong, "broken": broken}
    records = {r.system: r for r in measurement.measure(case, engine, peers, silent)}
    assert "its error is 1.00e-03, more than" in records["wrong"].failure
    assert (
        records["wrong"].median_us is None and records["wrong"].tolerance == PEERS * case.standard.tolerance
    )
    assert "out of luck" in records["broken"].failure
    assert records["escalade"].median_us


def test_the_faster_layout_of_a_system_counts() -> None:
    blank = Record("net", "32_b1", "fp16", "nchw", 1, "torch-graph", "")
    records = [replace(blank, median_us=9.0), replace(blank, layout="nhwc", median_us=5.0)]
    (best,) = measurement._fastest_layouts(records)
    assert best.layout == "nhwc"


def test_peers_by_name() -> None:
    known = registry.RESNETS
    assert "torch-compile" not in registry.chosen((), known) and "jax" in registry.chosen((), known)
    assert registry.chosen(("none",), known) == {} and registry.chosen(("all",), known) == known
    assert list(registry.chosen(("jax", "jax"), known)) == ["jax"]
    with pytest.raises(UnsupportedError, match="there is no peer 'openvino' here; known: torch-eager"):
        registry.chosen(("openvino",), known)
    with pytest.raises(UnsupportedError, match="no peer 'jax' here"):
        registry.chosen(("jax",), registry.plain("flat"))


def test_slow_peers_take_part_at_some_batches_only() -> None:
    chosen = WORKLOADS["spectral_autoencoder"]
    setting = Setting.of(chosen, Session(torch.device("cpu"), 0.0), dtypes=("fp32",))
    assert "torch-compile" in setting.peers_at(512) and "torch-compile" not in setting.peers_at(64)
    assert "torch-graph" in setting.peers_at(64)
    assert "torch-compile" in replace(setting, slow_batches=()).peers_at(64)
    assert setting.among((512, 7)) == (512,) and setting.among((7,)) == (1_048_576,)


@pytest.mark.parametrize(("count", "asked"), [(1, {1, 8}), (8, {8}), (11, {11})])
def test_few_rows_are_allowed_what_more_of_them_are(
    count: int, asked: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = WORKLOADS["spectral_autoencoder"]
    setting = Setting.of(chosen, Session(torch.device("cpu"), 0.0), batches=(1,), dtypes=("fp32",), peers={})
    seen: list[int] = []

    def fake(
        model: object,
        x: torch.Tensor,
        dtype: str,
        expected: list[torch.Tensor],
        chunk: int,
        trials: int,
        counts: set[int],
    ) -> dict[int, tuple[float]]:
        seen.append(len(expected[0]))
        return {rows: (1.0 / rows if dtype == "fp16" else float(rows),) for rows in {len(x), *counts}}

    monkeypatch.setattr(workload, "own_errors", fake)
    x, known = setting.known(setting.model, count, 3, ("fp16", "fp32", "fp16"))
    assert all(len(x) == len(one.expected[0]) == count for one in known.values())
    assert seen == [max(asked)] * 2
    assert {dtype: one.own for dtype, one in known.items()} == {
        "fp16": (1.0 / min(asked),),
        "fp32": (float(max(asked)),),
    }


def test_references_are_computed_once_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = WORKLOADS["spectral_autoencoder"]
    setting = Setting.of(
        chosen, Session(torch.device("cpu"), 0.0), batches=(1, 32), dtypes=("fp32",), peers={}
    )
    model = setting.model
    seen: list[int] = []

    def counted(model: torch.nn.Module, x: torch.Tensor, chunk: int) -> tuple[torch.Tensor, ...]:
        seen.append(len(x))
        return references(model, x, chunk)

    references = workload.references
    monkeypatch.setattr(workload, "references", counted)
    one, few = setting.known(model, 1, 2, ("fp32",))
    many, all_of = setting.known(model, 32, 2, ("fp32", "fp16"))
    assert seen == [32] and torch.equal(one, many[:1])
    assert torch.equal(few["fp32"].expected[0], all_of["fp32"].expected[0][:1])
    setting.known(model, 1, 3, ("fp32",))
    assert seen == [32, 32], "another number gives other inputs"
    for batch in (1, 4, 8):  # as the units of a campaign do
        x, known = replace(setting, batches=(batch,)).known(model, batch, 2, ("fp32",))
        assert len(x) == batch and known["fp32"].own


def test_accuracy_counts_answers_of_clear_images_only(network: torch.nn.Module, engine: Engine) -> None:
    setting = Setting.of(TINY, Session(torch.device("cpu")), SIZE)
    judged = parts.Accuracy(setting, network, TINY.inputs(3, SIZE, 1))
    record = judged.check(engine)
    assert not record.failure and record.error is not None and record.error < 1e-5
    clear = int(judged.clear.sum())
    assert f"on {clear} of {clear} images" in record.note
    judged.expected = judged.expected.roll(1, dims=1)
    clear = int(judged.clear.sum())
    assert judged.check(engine).failure and f"on 0 of {clear} images" in judged.check(engine).note


def test_an_autoencoder_is_judged_on_photographs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = WORKLOADS["autoencoder"]
    setting = Setting.of(chosen, Session(torch.device("cpu"), 0.0), batches=(4,), dtypes=("fp32",), peers={})
    monkeypatch.setenv("ESCALADE_DATA", str(tmp_path))
    measured = chosen.parts["accuracy"].measure
    ((record,),) = measured(setting, lambda text: None)
    assert record.problem == "32_n2" and not record.failure
    np.savez(tmp_path / "cifar10_test1000.npz", x=np.full((3, 32, 32, 3), 51, np.uint8))
    layers = [np.zeros(one.numel(), np.float32) for one in setting.model.parameters()]
    layers[-1] += 0.5
    flat = b"".join(np.int32(one.size).tobytes() + one.tobytes() for one in layers)
    (tmp_path / "autoencoder_naive.bin").write_bytes(flat)
    ((record,),) = measured(setting, lambda text: None)
    assert (record.workload, record.problem, record.failure) == ("autoencoder_accuracy", "32_n3", "")
    assert record.note.startswith("mean squared error 0.090000 on 3 images"), "0.2 became 0.5"


@pytest.mark.parametrize("fusion", list(FusionLevel))
def test_every_fusion_level_computes_the_same(
    fusion: FusionLevel, case: measurement.Case, engine: Engine
) -> None:
    other = Engine(engine.graph, "fp32", "cpu", fusion=fusion)
    assert case.standard.judge((other(case.task.x),))[1] == ""
    operations = [step.operation for step in other.explain().steps]
    assert ("batch_norm" in operations) == (fusion is not FusionLevel.fused)
    if fusion is FusionLevel.naive:
        explained = explain_plan(other.plan(case.task.x))
        assert {step.why for step in explained.steps if step.launches} == {"the lowest rung of its ladder"}


def test_gains_of_phases_pass_over_the_copies_and_over_failures() -> None:
    blank = Record("net_phases", "32_b1", "fp32", "nhwc", 1, "escalade", "")
    walls = {"cpu": 800.0, "transfer": 10.0, "naive": 400.0, "separate": None, "graph": 100.0}
    found = host.with_gains([replace(blank, rung=rung, wall_us=wall) for rung, wall in walls.items()])
    gains = {record.rung: (record.gain, record.gain_over) for record in found}
    assert gains["naive"] == (2.0, "cpu") and gains["graph"] == (4.0, "naive")
    assert gains["cpu"] == gains["transfer"] == gains["separate"] == (None, "")


def test_calls_are_timed_from_idle_to_done() -> None:
    log: list[str] = []
    sampler = CallSampler(lambda: log.append("call"), lambda: log.append("wait"), 2)
    sampler.start()
    assert sampler.finish() > 0 and log == ["wait", "call", "call", "wait"]


def test_bench_writes_records_and_a_plot_and_says_whose_times_they_are(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORKLOADS, "tiny", TINY)
    records, plot = tmp_path / "r.jsonl", tmp_path / "p.png"
    result = bench(
        "tiny", "--size", "32", "-b", "1,2", "-t", "fp32,bf16", "--seconds", "0",
        "--json", str(records), "--plot", str(plot), "--results", str(tmp_path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "Times are this CPU's" in result.output and "images/s" in result.output
    found = store.load(records)
    timed = [r for r in found if r.workload == "tiny"]
    assert {(r.batch, r.dtype) for r in timed} == {(1, "fp32"), (1, "bf16"), (2, "fp32"), (2, "bf16")}
    assert all(r.gpu.startswith("cpu") and r.timing == "cpu" and r.wall_us for r in timed)
    assert {r.workload for r in found} == {"tiny", "tiny_accuracy"}
    assert plot.read_bytes().startswith(b"\x89PNG")
    (filed,) = tmp_path.glob("cpu-*/tiny.jsonl")
    assert len(store.load(filed)) == len(timed)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("resnet19",), "there is no workload 'resnet19'; known: resnet18"),
        (("resnet18", "-t", "fp64"), "dtype 'fp64'"),
        (("resnet18", "--size", "8"), "these networks take 32 or more"),
        (("resnet18", "--peers", "tvm"), "there is no peer 'tvm'"),
        (("resnet18", "--stream"), "stream is measured on a GPU"),
        (("resnet18", "--parts", "op-times"), "resnet18 has no part 'op-times'; it has accuracy, batches"),
        (("lenet", "--size", "28"), "lenet takes 86 only"),
        (("spectral_autoencoder", "--stream"), "spectral_autoencoder has no part 'stream'"),
        (("spectral_autoencoder", "--peers", "jax"), "there is no peer 'jax' here"),
        (("resnet18", "--parts", "phases"), "phases is measured on a GPU"),
    ],
)
def test_bench_says_what_it_takes(arguments: tuple[str, ...], sentence: str) -> None:
    result = bench(*arguments)
    assert isinstance(result.exception, UnsupportedError) and sentence in str(result.exception)


def test_bench_takes_whole_numbers_for_batches() -> None:
    assert bench("resnet18", "-b", "two").exit_code == 2


def test_plots_refuse_what_they_cannot_write(tmp_path: pathlib.Path) -> None:
    record = Record("net", "32_b1", "fp16", "nhwc", 1, "escalade", "", wall_us=1.0, images_per_s=1e6)
    with pytest.raises(UnsupportedError, match=r"written as \.png, \.svg or \.pdf"):
        save(lambda: by_batch([record]), tmp_path / "p.txt")
    with pytest.raises(UnsupportedError, match="nothing was timed"):
        save(lambda: by_batch([replace(record, images_per_s=None)]), tmp_path / "p.png")


def test_fp8_is_for_resnets_when_it_is_named(tmp_path: pathlib.Path) -> None:
    assert "fp8" not in WORKLOADS["resnet18"].dtypes and WORKLOADS["resnet18"].further_dtypes == (
        "fp8",
        "int8",
    )
    refused = CliRunner().invoke(cli.app, ["bench", "lenet", "--device", "cpu", "-t", "fp8"])
    assert refused.exit_code and "fp8 is for ResNets" in str(refused.exception)


@pytest.mark.usefixtures("all_in_8_bits")  # the images are so small that 16 bits are faster
def test_an_engine_in_fp8_is_calibrated_and_has_no_peers() -> None:
    tiny = WORKLOADS["resnet18"]
    known = {"torch-eager": registry.RESNETS["torch-eager"]}
    setting = Setting.of(
        tiny, Session(torch.device("cpu"), 0.0), SIZE, batches=(2,), dtypes=("fp8",), peers=known
    )
    (records,) = parts.batches(setting, silent)
    (ours,) = records
    assert (ours.system, ours.dtype, ours.failure) == ("escalade", "fp8", "") and ours.tolerance == 0.25
    assert ours.error is not None and ours.error > 1e-2, "and not fp16 by mistake"
