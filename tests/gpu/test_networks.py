"""Networks on the GPU: all of `bench`, and times of steps."""

from __future__ import annotations

import copy
import gc
import io
import json
import pathlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from typer.testing import CliRunner, Result

from escalade import cli
from escalade.commands import tour
from escalade.device.timing import ReplaySampler
from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.engine.training.step import training_step
from escalade.models import ConvAutoencoder
from escalade.models.unet import UNet
from escalade_bench.measure import records as store
from escalade_bench.networks import host
from escalade_bench.networks import training_step as steps
from escalade_bench.networks.judging import standard
from escalade_bench.networks.measurement import Case, check, compare, escalade
from escalade_bench.networks.workload import reference
from escalade_bench.networks.workloads import WORKLOADS
from escalade_bench.peers import torch_training_step
from escalade_bench.peers.network import NetworkPeer, Task
from escalade_bench.peers.torch_training_step import Lesson

pytestmark = pytest.mark.gpu


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "220"}).invoke(cli.app, list(arguments))


def stream_batches(workload: str) -> tuple[int, ...]:
    """Return the batches of a workload's streams, which `-b` does not change."""
    stream = WORKLOADS[workload].stream
    assert stream is not None
    return stream.batches


@pytest.mark.parametrize("weighted", (False, True))
def test_a_network_that_gives_images_trains_as_autocast_has_it(weighted: bool, cuda: torch.device) -> None:
    """In fp16 and NHWC: kernels compute the loss over class channels, PyTorch a weighted one, in its own layout."""
    torch.manual_seed(0)
    model = UNet(classes=5, width=8, depth=2).to(cuda).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    expected = copy.deepcopy(model)
    own, theirs = (torch.optim.SGD(one.parameters(), 0.01) for one in (model, expected))
    x, target = torch.randn(2, 3, 32, 32, device=cuda), torch.randint(0, 5, (2, 32, 32), device=cuda)
    target[0, :4] = -100
    loss = partial(F.cross_entropy, weight=torch.rand(5, device=cuda) if weighted else None)
    step = training_step(model, loss, own, (x, target), dtype="fp16", loss_scale=256.0)
    left = {each.node.attributes.get("target", "") for each in step.plan.fallbacks}
    assert any("nll_loss2d" in name for name in left) == weighted
    for _ in range(3):
        theirs.zero_grad()
        with torch.autocast("cuda", torch.float16):
            lost = loss(expected(x), target)
        lost.backward()
        theirs.step()
        torch.testing.assert_close(step(x, target), lost.detach().float(), rtol=2e-2, atol=0)


def layer_norms() -> tuple[nn.Module, tuple[int, ...]]:
    """Autocast computes norms in fp32 between casts, which kernels fuse."""
    width = 96
    block = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    head = [nn.LayerNorm(width), nn.Linear(width, 8)]
    return nn.Sequential(nn.Linear(width, width), *block, *head), (517, width)


def transposed_convolutions() -> tuple[nn.Module, tuple[int, ...]]:
    layers = [nn.Conv2d(8, 64, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(64, 32, 2, 2), nn.ReLU()]
    layers += [nn.ConvTranspose2d(32, 64, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(64, 64, 3, 1, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 8)), (32, 8, 15, 17)


@pytest.mark.parametrize("make", (layer_norms, transposed_convolutions))
@pytest.mark.parametrize("dtype", ("fp16", "bf16", "tf32"))
def test_gradients_of_layers_are_kernels(
    make: Callable[[], tuple[nn.Module, tuple[int, ...]]], dtype: str, cuda: torch.device
) -> None:
    torch.manual_seed(0)
    model, shape = make()
    model = model.to(cuda).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    expected = copy.deepcopy(model)
    own, theirs = (torch.optim.SGD(one.parameters(), 0.1) for one in (model, expected))
    x, target = torch.randn(shape, device=cuda), torch.randint(0, 8, shape[:1], device=cuda)
    step = training_step(model, F.cross_entropy, own, (x, target), dtype=dtype, loss_scale=256.0)
    left = {each.node.attributes.get("target", each.node.op) for each in step.plan.fallbacks}
    assert not any("norm" in name or "conv" in name for name in left), left
    for _ in range(3):
        theirs.zero_grad()
        kind = torch.bfloat16 if dtype == "bf16" else torch.float16
        with torch.autocast("cuda", kind, enabled=dtype != "tf32"):
            lost = F.cross_entropy(expected(x), target)
        lost.backward()
        theirs.step()
        torch.testing.assert_close(step(x, target), lost.detach().float(), rtol=2e-2, atol=0)
    for mine, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=2e-2, atol=2e-3)


def test_bench_measures_systems_phases_and_streams(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "r.jsonl"
    result = run(
        "bench", "resnet18", "--size", "64", "-b", "1,3", "-t", "fp32,fp16", "--seconds", "0.02", "--stream",
        "--peers", "torch-eager,torch-graph", "--json", str(path), "--plot", str(tmp_path / "p.png"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    records = store.load(path)
    timed = [record for record in records if record.workload == "resnet18"]
    assert {record.system for record in timed} == {"escalade", "torch-eager", "torch-graph"}
    assert len(timed) == 3 * 2 * 2
    for record in timed:
        assert record.median_us and record.wall_us and record.peak_bytes and record.floor_us
        assert record.timing == ("calls" if record.system == "torch-eager" else "graph")
    phases = [record for record in records if record.workload == "resnet18_phases"]
    assert [record.rung for record in phases if record.dtype == "fp16"] == list(host.PHASES)
    assert all(record.wall_us for record in phases)
    streams = [(r.dtype, r.batch, r.rung) for r in records if r.workload == "resnet18_stream"]
    rungs = ("compute alone", "copies alone", "stream, pinned", "stream, pageable")
    assert sorted(streams) == sorted(product(("fp32", "fp16"), stream_batches("resnet18"), rungs))


def test_bench_has_the_cpu_beside_the_gpu_by_batch_and_by_kind_of_layer(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "r.jsonl"
    result = run(
        "bench", "resnet18", "--size", "64", "-b", "1,3", "-t", "fp32,fp16", "--seconds", "0.02", "--parts",
        "cpu,layer-kinds", "--json", str(path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    records = store.load(path)
    batches = [record for record in records if record.workload == "resnet18_cpu"]
    assert len(batches) == 2 * 2 * 2 and all(record.wall_us and not record.failure for record in batches)
    assert all(record.median_us and record.peak_bytes for record in batches if not record.is_peer)
    kinds = {r.rung for r in records if r.workload == "resnet18_layer_kinds" and not r.is_peer}
    assert {*host.KINDS, host.TOTAL} <= kinds


def test_bench_measures_rows_and_scores(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "r.jsonl"
    result = run(
        "bench", "spectral_autoencoder", "-b", "33,512", "--seconds", "0.02", "--json", str(path),
        "--plot", str(tmp_path / "p.png"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    records = store.load(path)
    systems = {"escalade", "torch-eager", "torch-graph"}
    for workload, batches in (("", 2), ("_score", 1)):
        own = [record for record in records if record.workload == f"spectral_autoencoder{workload}"]
        assert len(own) == 3 * 2 * batches and {record.system for record in own} == systems
        assert all(record.median_us and record.wall_us and record.gbps and record.copy_pct for record in own)
        assert all(record.timing == "graph" for record in own if record.system != "torch-eager")


def test_bench_measures_steps_of_training_of_rows(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "r.jsonl"
    result = run(
        "bench", "spectral_autoencoder", "--parts", "training-step", "-b", "32,512", "--seconds", "0.02",
        "--peers", "torch-eager,torch-graph", "--json", str(path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    records = store.load(path)
    assert len(records) == 3 * 2 * 2 and not any(record.failure for record in records)
    assert all(record.timing == "graph" for record in records if record.system != "torch-eager")
    own = [record for record in records if record.system == "escalade"]
    assert all(record.config["pytorch"] == {} and record.config["launches"] <= 16 for record in own)


def test_bench_judges_steps_of_networks_with_random_weights(tmp_path: pathlib.Path) -> None:
    """Depthwise convolutions, BatchNorm, and sizes of gradients that differ by orders of magnitude."""
    path = tmp_path / "r.jsonl"
    result = run(
        "bench", "escalade_bench.zoo.varied:ghostnet", "--parts", "training-step", "-b", "16", "-t", "fp16",
        "--seconds", "0.02", "--peers", "torch-eager,torch-graph", "--json", str(path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    records = store.load(path)
    assert len(records) == 3 and not any(record.failure for record in records)


def test_a_captured_step_of_pytorch_keeps_its_loss_scale(cuda: torch.device) -> None:
    """Allocations after the capture may reuse unreferenced memory."""
    torch.manual_seed(0)
    x = torch.rand(4, 3, 16, 16, device=cuda)
    lesson = Lesson(ConvAutoencoder(8).to(cuda).train(), F.mse_loss, x, x, "fp16", 1e-2, 2.0**12)
    graph = torch_training_step._graphed(lesson, "nhwc", "torch-graph")
    assert graph.replay is not None
    gc.collect()
    taken = [torch.full((1,), float("nan"), device=cuda) for _ in range(4096)]
    case = Case("step", Task(lesson.model, x, "fp16"), steps.standard(lesson, steps.exact(lesson), 4.0), 0.02)
    _, failure = check(case, graph, ReplaySampler(graph.replay.fill, graph.replay.run))
    assert not failure and taken


def test_bench_measures_op_times_and_streams_of_a_lenet(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "r.jsonl"
    result = run(
        "bench", "lenet", "-b", "64", "-t", "fp32,fp16", "--seconds", "0.02", "--stream", "--json", str(path)
    )
    assert result.exit_code == 0, result.output
    assert "Sum of Op-Times" in result.output
    records = store.load(path)
    convolutions = [record for record in records if record.workload == "few_channels"]
    assert {record.dtype for record in convolutions} == {"fp32", "tf32", "fp16"}
    assert len({record.problem for record in convolutions}) == 4
    assert {record.system for record in convolutions} == {"escalade", "torch-nchw", "torch-nhwc"}
    streams = [record.rung for record in records if record.workload == "lenet_stream"]
    expected = 2 * len(stream_batches("lenet"))
    assert streams.count("10,000 images, pinned") == streams.count("copies alone") == expected


@pytest.mark.parametrize("name", ["lenet", "spectral_autoencoder", "resnet18"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_graph_that_is_timed_is_judged(name: str, dtype: str, cuda: torch.device) -> None:
    """A right one passes; one that does nothing fails, although nothing else has changed."""
    chosen = WORKLOADS[name]
    model, x = chosen.model(), chosen.inputs(8, device=cuda)
    expected = reference(model, x)
    case = Case(name, Task(model, x, dtype), standard(model, x, dtype, expected), 0.02)
    engine = Engine(capture(model, (chosen.inputs(2),)), dtype, cuda)
    idle = replace_run(escalade(case.task, engine), lambda: None)
    makers = {"escalade": lambda task: [escalade(task, engine)], "idle": lambda task: [idle]}
    records = {record.system: record for record in compare(case, makers, lambda text: None)}
    assert not records["escalade"].failure and records["escalade"].median_us
    assert "its graph: " in records["idle"].failure and records["idle"].median_us is None


def replace_run(peer: NetworkPeer, run: Callable[[], None]) -> NetworkPeer:
    assert peer.replay is not None
    return replace(peer, system="idle", replay=replace(peer.replay, run=run))


def test_explain_times_every_step(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plan.json"
    results = ("--results", str(tmp_path / "results"))
    result = run("explain", "resnet18", "--batch", "2", "--time", "--json", str(path), *results)
    assert result.exit_code == 0, result.output
    plan = json.loads(path.read_text())
    done = [step for step in plan["steps"] if step["rung"]]
    assert done and all(step["time_us"] > 0 and step["floor_us"] > 0 for step in done)
    assert plan["time_us"] > 0
    (filed,) = (tmp_path / "results").rglob("resnet18_steps.jsonl")
    records = store.load(filed)
    assert len(records) == 1 + len(plan["steps"]) and records[0].median_us == pytest.approx(
        plan["time_us"], rel=1e-4
    )


def test_the_network_of_the_demo_runs_on_the_gpu() -> None:
    text = io.StringIO()
    tour.show_network(Console(file=text, width=200), "cuda")
    assert "compiled in fp16 for the GPU" in text.getvalue()
    assert "The kernels agree with PyTorch" in text.getvalue()
