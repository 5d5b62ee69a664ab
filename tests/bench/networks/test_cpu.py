"""CPU time beside the GPU: plain loops, layers by kind, and the table of both."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from escalade import models
from escalade.errors import UnsupportedError
from escalade.models.resnet import BasicBlock
from escalade_bench.measure.records import Record
from escalade_bench.networks import host, loops
from escalade_bench.networks.host import CPU
from escalade_bench.report.pages import networks


@pytest.fixture(scope="module")
def network() -> models.ResNet:
    torch.manual_seed(0)
    model = models.ResNet(BasicBlock, (1, 1, 1, 1), 7)
    models.settle(model, torch.randn(2, 3, 64, 64))
    return model


@torch.no_grad()
def test_loops_compute_what_pytorch_does_and_only_while_they_are_asked_to(network: models.ResNet) -> None:
    x = torch.randn(1, 3, 33, 33)
    expected = network(x)
    with loops.in_loops():
        result = network(x)
    assert not torch.equal(result, expected), "other sums"
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(network(x), expected)
    with pytest.raises(UnsupportedError, match="without bias, dilation or groups"), loops.in_loops():
        nn.Conv2d(3, 4, 3)(x)


@torch.no_grad()
def test_convolutions_and_norms_go_elsewhere_and_come_back(
    network: models.ResNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, torch.dtype]] = []

    def conv2d(x: torch.Tensor, w: torch.Tensor, **how: object) -> torch.Tensor:
        seen.append(("conv2d", x.dtype))
        return nn.functional.conv2d(x, w, **how)  # type: ignore[call-overload]

    def batch_norm(
        x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor, eps: float
    ) -> torch.Tensor:
        seen.append(("batch_norm", x.dtype))
        mean, variance = rest
        assert w.dtype == torch.float32
        return nn.functional.batch_norm(x.float(), mean, variance, w, b, eps=eps).to(x.dtype)

    monkeypatch.setattr(loops, "conv2d", conv2d)
    monkeypatch.setattr(loops, "batch_norm", batch_norm)
    x = torch.randn(1, 3, 32, 32)
    with loops.convolutions_on(torch.device("cpu"), torch.bfloat16):
        result = network(x)
    count = sum(isinstance(module, nn.Conv2d) for module in network.modules())
    assert seen == [("conv2d", torch.bfloat16), ("batch_norm", torch.bfloat16)] * count
    expected = network(x)
    assert result.dtype == torch.float32 and not torch.equal(result, expected)
    assert float((result - expected).norm() / expected.norm()) < 0.1


def test_layers_are_told_apart_by_kind(network: models.ResNet) -> None:
    found = host.kinds_on_cpu(network, torch.randn(1, 3, 32, 32))
    assert set(host.KINDS) <= set(found) and list(found)[-1] == host.TOTAL
    assert all(us > 0 for us in found.values())
    assert found["Conv2D"] == max(us for kind, us in found.items() if kind != host.TOTAL)


def test_rows_divide_the_cpu_s_time_by_both_of_the_gpu_s() -> None:
    ours = Record(
        "resnet18_cpu", "224_b8", "fp16", "nhwc", 8, "escalade", "", median_us=100.0, wall_us=400.0,
        images_per_s=20_000.0, peak_bytes=3 << 20,
    )  # fmt: skip
    cpu = replace(ours, system=CPU, median_us=None, wall_us=20_000.0)
    slower = replace(ours, dtype="fp32", median_us=1000.0)
    (by_batch,) = networks.on_cpu([ours, cpu, slower])
    assert by_batch.grid[1] == [
        ["fp32", "8", "", "1.00", "", "0.4000", "", "20,000", "3.0"],
        ["fp16", "8", "20.00", "0.1000", "200×", "0.4000", "50.00×", "20,000", "3.0"],
    ]
    relu = replace(ours, rung="ReLU")
    (kinds,) = networks.by_kind([relu, replace(relu, rung="total", median_us=1.0), replace(cpu, rung="ReLU")])
    assert kinds.grid[1] == [
        ["fp16", "ReLU", "20.00", "0.1000", "200×"],
        ["fp16", "total", "", "0.0010", ""],
    ]


def test_the_cpu_is_timed_on_all_cores_in_a_process_with_one_thread() -> None:
    used = []

    def model(x: torch.Tensor) -> torch.Tensor:
        used.append(torch.get_num_threads())
        return x

    judge = cast(Any, SimpleNamespace(judge=lambda results: (0.0, ""), tolerance=1.0))
    setting = cast(Any, SimpleNamespace(size=4, model=model, session=SimpleNamespace(seconds=0.0)))
    with host.on_threads(1):
        record = host._on_all_cores(setting, "small_cpu", torch.zeros(1, 3, 4, 4), judge)
        assert torch.get_num_threads() == 1
    cores = len(os.sched_getaffinity(0))
    assert set(used) == {cores} and f"on {cores} thread" in record.note
