"""Peers that read a network as an ONNX model: right by a call and by a graph, told how, and refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from escalade.bench.networks import measurement
from escalade.bench.networks.judging import standard
from escalade.bench.networks.workload import reference
from escalade.bench.peers import onnxruntime_network
from escalade.bench.peers.network import Task, Unavailable
from escalade.bench.peers.registry import EXPORTED
from escalade.measure.records import Record
from tests.bench.fake_cuda import Card
from tests.bench.peers import fake_exported
from tests.bench.peers.fake_exported import OnnxRuntime, TensorRT

CUDA, CPU = onnxruntime_network.CUDA, onnxruntime_network.CPU


class OnGpu(Task):
    """Says that its tensors are on a GPU; they are not."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 5)
    return nn.Sequential(*layers).eval()


def measured(system: str, task: type[Task] = OnGpu, dtype: str = "fp32") -> Record:
    model, x = net(), torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(1))
    case = measurement.Case("net", task(model, x, dtype), standard(model, x, dtype, reference(model, x)), 0.0)
    (record,) = measurement.compare(case, {system: EXPORTED[system]}, lambda text: None)
    return record


def test_onnx_runtime_is_one_graph_in_the_faster_layout(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    package = OnnxRuntime(card)
    package.offered = package.loaded = [CUDA, CPU]
    fake_exported.installed(monkeypatch, package)
    record = measured("onnxruntime", dtype="tf32")
    assert not record.failure and record.timing == "graph" and record.median_us == pytest.approx(5.0)
    told: list[dict[str, Any]] = [options for name, options in package.asked if name == CUDA]
    assert [options["prefer_nhwc"] for options in told] == ["0", "1"]
    assert all(options["use_tf32"] == "1" and "EXHAUSTIVE" in options.values() for options in told)


def test_onnx_runtime_is_called_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_exported.installed(monkeypatch, OnnxRuntime())
    record = measured("onnxruntime", Task)
    assert not record.failure and record.timing == "cpu"


def test_a_provider_that_is_not_there_is_the_reason(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    package = OnnxRuntime(card)
    fake_exported.installed(monkeypatch, package)
    assert measured("onnxruntime").failure == (
        f"the onnxruntime that is installed has no {CUDA}, but {CPU}; onnxruntime-gpu has it"
    )
    package.offered = [CUDA, CPU]
    assert f"could not load its {CUDA}: it has {CPU} instead" in measured("onnxruntime").failure


def test_tensorrt_builds_one_engine_and_is_captured(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    package = TensorRT(card)
    fake_exported.installed(monkeypatch, package)
    record = measured("tensorrt")
    assert not record.failure and record.timing == "graph" and record.median_us == pytest.approx(5.0)
    assert package.flags == {"tf32": False} and package.builder_optimization_level == 5
    package.readable = False
    assert measured("tensorrt").failure.endswith("cannot read the model: an operator that it does not know")


@pytest.mark.parametrize("system", EXPORTED)
def test_what_is_not_installed_is_the_reason(
    system: str, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("escalade.bench.peers.catalogue.importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        Unavailable, match=f"{system} needs the package {system}, which is not installed: pip"
    ):
        EXPORTED[system](Task(net(), torch.randn(1, 3, 9, 9), "fp32"))
