"""Layers beside their peers: the list, the subjects timed, and the figures."""

from __future__ import annotations

import pathlib
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from escalade import cli, models, ops
from escalade.commands import layer_runs as command
from escalade.device import packing
from escalade.device.recipe import Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.accuracy import relative_error
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.stem.problem import StemProblem
from escalade.tune.verification import Outcome, VerificationCase
from escalade_bench import ladder, trial
from escalade_bench import layers as study
from escalade_bench.layers import Layer
from escalade_bench.measure import records as store
from escalade_bench.measure.records import Record
from escalade_bench.peers import cudnn_graph, registry
from escalade_bench.peers import layer as layer_peers
from escalade_bench.peers.layer import LayerPeer, eager_conv2d, stem_convolution, stem_peer
from escalade_bench.report.pages import layers as tables
from escalade_bench.trial import Settings, verified_peers
from tests.bench.fake import Scale, ScaleProblem, rung

CPU = torch.device("cpu")
SMALL = "8to16_9_k3s1_b2_bias+relu"


def shapes_in(name: str) -> Counter[tuple[int, ...]]:
    """Channels, filters, size, filter and stride of every convolution of a network at 224."""
    model, _ = models.model(name)
    found: Counter[tuple[int, ...]] = Counter()

    def note(conv: Any, given: tuple[torch.Tensor, ...], result: object) -> None:
        size = given[0].shape[-1]
        found[conv.in_channels, conv.out_channels, size, conv.kernel_size[0], conv.stride[0]] += 1

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(note)
    model.to("meta")(torch.empty(1, 3, 224, 224, device="meta"))
    return found


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_the_layers_of_a_resnet_are_those_that_it_runs(name: str) -> None:
    found: Counter[tuple[int, ...]] = Counter()
    for layer in study.named(name, 32, "bf16"):
        p = layer.problem
        assert (p.batch, p.dtype, p.layout, p.bias) == (32, "bf16", "nhwc", True)
        found[p.channels, p.filters, p.height, p.filter_height, p.stride[0]] += layer.count
    assert found == shapes_in(name)


def test_what_ends_a_block_adds_its_shortcut_and_what_is_one_has_no_relu() -> None:
    layers = study.named("resnet50", 1, "fp16")
    assert sum(layer.count for layer in layers if layer.problem.residual) == 16
    assert sum(layer.count for layer in layers if not layer.problem.relu) == 4
    assert all(layer.problem.relu for layer in layers if layer.problem.residual)


def test_layers_that_repeat_are_measured_once() -> None:
    layers = study.named("resnet18", 256, "fp16")
    assert len({layer.key for layer in layers}) == len(layers) == 15
    assert sum(layer.count for layer in layers) == 20


def test_the_other_sets() -> None:
    first, pooled = study.named("stem", 8, "tf32")
    assert first.problem.name == "3to64_224_k7s2_b8_bias+relu"
    assert pooled.operation == "stem" and pooled.problem.source == "fp32" and pooled.problem.pool == (3, 2, 1)
    assert [layer.operation for layer in study.named("stem", 8, "fp8")] == ["conv2d"]
    assert all(
        layer.problem.groups == layer.problem.channels for layer in study.named("depthwise", 8, "fp16")
    )
    assert {layer.problem.dtype for layer in study.named("untuned", 8, "bf16")} == {"bf16"}
    (named,) = study.named(SMALL, 256, "fp32")
    assert named.problem.name == SMALL and named.problem.batch == 2
    with pytest.raises(UnsupportedError, match="neither a set of layers .*resnet18"):
        study.named("resnet19", 8, "fp16")


@pytest.mark.parametrize(("direction", "left_out"), [("input_gradient", 1), ("weight_gradient", 0)])
def test_gradients_of_layers_keep_their_number_and_lose_their_epilogue(direction: str, left_out: int) -> None:
    if study.DIRECTIONS[direction] not in ops.OPERATIONS:
        pytest.skip("there is no such operation yet")
    forward = study.named("resnet50", 4, "fp16")
    layers = study.in_direction(forward, direction)
    assert sum(layer.count for layer in layers) == sum(layer.count for layer in forward) - left_out
    assert len({layer.key for layer in layers}) == len(layers)
    assert {(layer.problem.dtype, layer.problem.layout) for layer in layers} == {("fp16", "nhwc")}
    assert not any("bias" in layer.problem.name for layer in layers)


def test_an_unknown_direction_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="forward, input_gradient"):
        study.in_direction(study.named(SMALL, 1, "fp16"), "sideways")


def test_a_set_with_batches_of_its_own_is_measured_once() -> None:
    parts = command.wanted_parts(("untuned", "resnet18"), (8, 32), ("fp16",), "forward")
    titles = [part.title for part in parts]
    assert len(titles) == 3 and sum(title.startswith("untuned") for title in titles) == 1
    assert "resnet18, forward, fp16, batch 32" in titles
    with pytest.raises(UnsupportedError, match="dtype 'fp15'"):
        command.wanted_parts(("resnet18",), (), ("fp15",), "forward")


# Peers


def case(name: str = SMALL, dtype: str = "fp16") -> VerificationCase:
    return VerificationCase(ops.operation("conv2d"), Conv2dProblem.parse(name, dtype, "nhwc"), CPU, 0)


def test_a_peer_that_is_wrong_or_fails_is_a_record_that_says_why() -> None:
    conv2d = ops.operation("conv2d")

    def wrong(problem: Any, inputs: Any) -> torch.Tensor:
        return 1.01 * conv2d.peer(problem, inputs)

    def broken(problem: Any, inputs: Any) -> torch.Tensor:
        raise KeyError("whatever\nmore of it")

    given = [
        LayerPeer("right", "nhwc", conv2d.peer),
        LayerPeer("wrong", "nchw", wrong),
        LayerPeer("broken", "nhwc", broken),
    ]
    found, refused = verified_peers(given, conv2d, case())
    assert [peer.system for peer, _ in found] == ["right"] and found[0][1] < 1e-3
    assert [(r.system, r.layout, r.median_us) for r in refused] == [
        ("wrong", "nchw", None), ("broken", "nhwc", None)
    ]  # fmt: skip
    assert "its result is wrong: its error is 1.0" in refused[0].failure
    assert refused[1].failure == "'whatever\\nmore of it'"


def test_without_cudnn_s_package_the_other_peers_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UnsupportedError("it needs a package")

    monkeypatch.setattr(cudnn_graph, "frontend", missing)
    (layer,) = study.named(SMALL, 1, "fp16")
    found, (refused,) = study.candidates(layer, ("cudnn-graph", "torch"))
    assert [peer.system for peer in found] == ["torch-nhwc", "cudnn-fused-nhwc"]
    assert (refused.system, refused.problem, refused.failure) == ("cudnn-graph", SMALL, "it needs a package")


def test_which_peers_there_are() -> None:
    def systems(name: str, dtype: str, *names: str) -> list[str]:
        (layer,) = study.named(name, 1, dtype)
        found, refused = study.candidates(layer, names)
        return [peer.system for peer in found] + [f"no {record.system}" for record in refused]

    assert systems(SMALL, "fp32", "torch") == [
        "torch-nchw", "torch-nhwc", "cudnn-fused-nchw", "cudnn-fused-nhwc"
    ]  # fmt: skip
    assert systems(SMALL, "fp16", "torch-compile") == ["torch-compile"]
    assert systems(SMALL, "fp8", "torch", "torch-compile") == ["no torch", "no torch-compile"]
    assert tuple(registry.chosen((), registry.LAYERS)) == ("cudnn-graph", "torch")
    assert not registry.chosen(("none",), registry.LAYERS)
    assert tuple(registry.chosen(("torch", "torch"), registry.LAYERS)) == ("torch",)
    with pytest.raises(UnsupportedError, match="no peer 'tensorrt'"):
        registry.chosen(("tensorrt",), registry.LAYERS)


def test_a_stem_by_a_peer_is_its_convolution_and_then_the_pooling() -> None:
    stem = ops.operation("stem")
    problem = StemProblem(2, 3, 22, 18, 8, 7, 7, (2, 2), (3, 3), "fp32", "nhwc", pool=(3, 2, 1), dtype="fp32")
    inputs = stem.inputs(problem, CPU, 0)
    calls = []

    def run(asked: Conv2dProblem, given: Any) -> torch.Tensor:
        calls.append((asked, given["weight"]))
        assert given["x"].is_contiguous(memory_format=torch.channels_last)
        return eager_conv2d(asked, given)

    peer = stem_peer(LayerPeer("torch-nhwc", "nhwc", run))
    for _ in range(2):
        assert relative_error(peer.run(problem, inputs), stem.reference(problem, inputs)) < 1e-6
    assert calls[0][0].name == "3to8_22x18_k7s2_b2_bias+relu"
    assert calls[0][1] is calls[1][1], "filters are laid out once"
    with pytest.raises(UnsupportedError, match="normalized before"):
        stem_convolution(replace(problem, source="uint8"))
    layer = Layer("stem", problem)
    found, _ = study.candidates(layer, ("torch", "torch-compile"))
    assert [peer.system for peer in found] == ["torch-nhwc", "cudnn-fused-nhwc", "torch-compile"]


@pytest.mark.parametrize("name", ["8to16_9_k3s2_b2_bias+res+relu", "8to16_9_k3s1g4_b2"])
def test_what_is_compiled_is_the_layer_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def compile(function: Any, **options: Any) -> Any:
        made.append(options["mode"])
        return function

    monkeypatch.setattr(torch, "compile", compile)
    layer_peers._compiled.cache_clear()
    asked = case(name, "fp32")
    peer = layer_peers.compiled_peer(ops.operation("conv2d"))
    for _ in range(2):
        result = peer.run(replace(asked.problem, layout="nhwc"), asked.inputs_in("nhwc"))
        assert relative_error(result, asked.expected) < 1e-6
    assert made == ["max-autotune-no-cudagraphs"]
    layer_peers._compiled.cache_clear()


# Measuring


@pytest.fixture
def scales(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found = {"scale": Scale(rung("right")), "wrong_scale": Scale(rung("wrong", "wrong_element"))}
    monkeypatch.setattr(ops, "OPERATIONS", found)
    return found


def measured(operation: str, tune: bool = False) -> list[Record]:
    layer = Layer(operation, ScaleProblem(100))
    return study.measure(layer, ("torch",), Settings(tune=tune), "layers")


@pytest.mark.parametrize("tune", [False, True])
def test_ours_is_verified_and_then_timed(scales: dict[str, Any], tune: bool) -> None:
    (record,) = measured("scale", tune)
    assert (record.workload, record.rung, record.failure) == ("layers", "right", "")
    assert record.median_us is not None and record.config["threads"] in (32, 64, 128)
    assert ("fastest of all" if tune else "preferred") in record.note


def test_what_is_wrong_is_a_failure_and_has_no_time(scales: dict[str, Any]) -> None:
    (record,) = measured("wrong_scale")
    assert record.rung == "wrong" and record.failure and record.median_us is None


def test_what_nothing_does_is_said(scales: dict[str, Any]) -> None:
    said: list[str] = []
    layer = Layer("scale", ScaleProblem(100, layout="nhwc"))
    assert study.measure(layer, (), Settings(note=said.append), "layers") == []
    assert len(said) == 1 and "no rung of scale" in said[0]
    assert study.programs([layer], CPU, False) == []


@pytest.mark.parametrize("change", [False, True])
def test_packing_weights_counts_where_they_change(
    scales: dict[str, Any], change: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Settings] = []
    real = ladder.Bench

    def spy(*arguments: Any) -> Any:
        given.append(arguments[-1])
        return real(*arguments)

    monkeypatch.setattr(ladder, "Bench", spy)
    monkeypatch.setattr(Scale, "weights_change", change)
    measured("scale")
    assert [settings.weights_are_constant for settings in given] == [not change]


@pytest.mark.parametrize(("stay", "timed_steps"), [(True, 1), (False, 2)])
def test_what_stays_is_packed_before_the_clock_starts(
    stay: bool, timed_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stem packs its weights, then convolves. Timed runs may assume that constant weights are packed."""
    ran: list[tuple[int, bool]] = []

    class Spy(packing.Executable):
        def __init__(self, recipe: Recipe, *rest: Any, **flags: Any) -> None:
            self._logged = (len(recipe.steps), flags.get("weights_ready", False))
            super().__init__(recipe, *rest, **flags)

        def bind(self, tensors: Any) -> Any:
            ran.append(self._logged)
            return super().bind(tensors)

    monkeypatch.setattr(packing, "Executable", Spy)
    stem = ops.operation("stem")
    problem = StemProblem(1, 3, 16, 16, 16, 3, 3, (1, 1), (1, 1), "fp16", "nhwc")
    best = stem.ladder.rung("tensor_core")
    config = best.configs(problem)[0]
    verified = trial.Verified(best, problem, config, Outcome(best.name, problem, config, True, 0.0, 1e-3))
    recipe = best.recipe(problem, config)
    bench = trial.Bench(stem, problem, [recipe], Settings(weights_are_constant=stay))
    (record,) = bench.measure([verified], [])
    assert not record.failure
    assert ran[-1] == (timed_steps, stay) and sum(steps for steps, _ in ran) == 2


def test_what_will_be_compiled_is_known_before(scales: dict[str, Any]) -> None:
    layers = [Layer("scale", ScaleProblem(size)) for size in (100, 200)]
    assert len(study.programs(layers, CPU, tune=True)) == 1
    assert len(study.programs(layers, CPU, tune=False)) == 1


# Figures


def timed(system: str, us: float, problem: Conv2dProblem) -> Record:
    rung = "best" if system == "escalade" else ""
    return Record(
        "layers",
        problem.name,
        problem.dtype,
        "nhwc",
        problem.batch,
        system,
        rung,
        timing="graph",
        median_us=us,
        floor_us=us / 2,
    )


def test_means_and_totals_count_every_layer_as_often_as_a_network_has_it() -> None:
    one, two, alone = (
        Conv2dProblem.square(64, 64, size, 3, layout="nhwc", dtype="fp16") for size in (8, 9, 10)
    )
    layers = (Layer("conv2d", one, 3), Layer("conv2d", two), Layer("conv2d", alone))
    found = tables.rows(
        layers,
        {
            layers[0].key: [
                timed("escalade", 10.0, one),
                timed("torch-nhwc", 40.0, one),
                timed("torch-compile", 30.0, one),
                timed("cudnn-graph", 20.0, one),
            ],
            layers[1].key: [
                timed("escalade", 8.0, two),
                timed("torch-nhwc", 4.0, two),
                timed("torch-compile", 5.0, two),
            ],
            layers[2].key: [timed("escalade", 8.0, alone)],
        },
    )
    assert [row.ratio for row in found] == [2.0, 0.5, None]
    assert found[0].peer is not None and found[0].peer.system == "cudnn-graph"
    tflops = (3 * one.flops + two.flops) / 38.0 / 1e6
    assert tables.summary(found) == (
        "2 layers (and 1 without a peer): 1.000× the fastest peer's speed in the geometric mean; 1 slower than it, "
        f"worst 0.500× ({two.name}); in all 38 µs ({tflops:.0f} TFLOP/s) against 64 µs, 1.684×"
    )
    assert tables.table("a set", found).rich().row_count == 3
    assert tables.summary(found[2:]) == ""


def test_a_row_has_our_fastest_and_the_fastest_peer_and_what_is_shown_of_them() -> None:
    problem = Conv2dProblem.square(64, 64, 8, 3, layout="nhwc", dtype="fp16")
    layer = Layer("conv2d", problem, 3)
    ours = [replace(timed("escalade", us, problem), tflops=us) for us in (12.0, 8.0, 10.0)]
    peers = [
        timed(system, us, problem)
        for system, us in (("torch-nhwc", 40.0), ("cudnn-graph", 20.0), ("torch-compile", 30.0))
    ]
    (row,) = tables.rows([layer], {layer.key: [*ours, *peers, replace(ours[0], median_us=None)]})
    assert row.ours == ours[1] and row.peer == peers[1] and row.ratio == 2.5
    table = tables.table("a set", [replace(row, ours=replace(ours[1], floor_us=6.0))])
    cells = {column.heading: column.cell(table.rows[0]) for column in table.columns}
    assert (
        cells["% of floor"].startswith("75")
        and cells["×"] == "3"
        and cells["best peer"] == "cuDNN's graph API"
    )
    assert (
        cells["µs"].startswith("8")
        and cells["peer's µs"].startswith("20")
        and cells["ratio"].startswith("2.5")
    )


def test_fp8_is_compared_with_our_own_fp16_of_the_same_layer() -> None:
    half = Conv2dProblem.square(64, 64, 8, 3, layout="nhwc", dtype="fp16")
    eight, other = replace(half, dtype="fp8"), replace(half, dtype="fp8", batch=2)
    layers = [Layer("conv2d", problem) for problem in (half, eight, other)]
    times = {half: 10.0, eight: 4.0, other: 1.0}
    found = tables.rows(
        layers, {layer.key: [timed("escalade", times[layer.problem], layer.problem)] for layer in layers}
    )
    assert tables.over_fp16(found) == {eight.name: 2.5}


# The command


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(cli.app, ["layers", *arguments])


def test_the_command_on_the_twin_checks_and_files(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "records.jsonl"
    result = run(SMALL, "--device", "twin", "-t", "fp16", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "nothing here is a speed" in result.output and "right" in result.output
    (record,) = store.load(path)
    assert (record.workload, record.problem, record.system) == ("layers", SMALL, "escalade")
    assert record.tflops is None and record.error is not None


def test_the_command_fails_if_a_result_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "OPERATIONS", {"conv2d": Scale(rung("wrong", "wrong_element"))})
    monkeypatch.setattr(study, "named", lambda name, batch, dtype: (Layer("conv2d", ScaleProblem(100)),))
    result = run("anything", "--device", "twin")
    assert result.exit_code == 1 and "failed: scale_100 wrong" in result.output


def test_a_layer_that_breaks_is_a_failure_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(layer: Layer, *rest: Any) -> list[Record]:
        if layer.problem.batch == 2:
            raise torch.OutOfMemoryError("no room\nat all")
        return [timed("escalade", 1.0, layer.problem)]

    monkeypatch.setattr(command, "measure", out_of_memory)
    result = run("8to8_4_k1s1_b2", "8to8_4_k1s1_b3", "--device", "twin", "-t", "fp16")
    assert result.exit_code == 1 and "failed: 8to8_4_k1s1_b2" in result.output and "no room" in result.output
    assert "8to8_4_k1s1_b3" in result.output


def test_the_command_names_what_it_does_not_know() -> None:
    for arguments, sentence in (
        (["resnet19"], "neither a set"),
        (["resnet18", "--peers", "tensorrt"], "no peer"),
        (["resnet18", "-d", "sideways"], "no direction"),
    ):
        result = run(*arguments, "--device", "twin")
        assert result.exit_code != 0 and sentence in str(result.exception)


@pytest.mark.gpu
def test_a_layer_on_the_gpu_beside_its_peers(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "records.jsonl"
    result = run("64to64_28_k3s1_b8_bias+relu", "-t", "fp16", "--seconds", "0.01", "--json", str(path))
    assert result.exit_code == 0, result.output
    records = store.load(path)
    measured = {record.system for record in records}
    assert {"escalade", "torch-nhwc", "cudnn-fused-nhwc"} <= measured
    assert "torch-compile" not in measured, "it takes long, and is measured if asked for"
