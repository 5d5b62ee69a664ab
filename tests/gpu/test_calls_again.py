"""Repeated calls of operators: a call only sets pointers, on any stream, thread or graph."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from escalade.ops import conv2d

pytestmark = pytest.mark.gpu
TIMES = 4
"""The first call prepares, the second adds a guard, later ones only set pointers."""


def tensors(cuda: torch.device, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = torch.randn(2, 64, 8, 8, device=cuda), torch.randn(64, 64, 3, 3, device=cuda) / 24
    last = torch.channels_last
    return x.to(dtype, memory_format=last), weight.to(dtype, memory_format=last)


def is_right(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    expected = F.conv2d(x.double(), weight.double(), padding=1).to(y.dtype)
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)


def test_on_streams_and_threads(cuda: torch.device) -> None:
    failed: list[Exception] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream(cuda)):
                for dtype in (torch.float32, torch.float16):
                    for _ in range(TIMES):
                        x, weight = tensors(cuda, dtype)
                        is_right(conv2d(x, weight, padding=1), x, weight)
                torch.cuda.current_stream(cuda).synchronize()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    assert not failed, failed


def test_in_a_graph_that_is_replayed_beside_other_calls(cuda: torch.device) -> None:
    x, weight = tensors(cuda)
    for _ in range(TIMES):
        conv2d(x, weight, padding=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = conv2d(x, weight, padding=1)
    for _ in range(TIMES):
        other, _ = tensors(cuda)
        x.normal_()
        graph.replay()
        is_right(conv2d(other, weight, padding=1), other, weight)
        is_right(y, x, weight)


def test_gradients_are_those_of_the_dispatchers_way(cuda: torch.device) -> None:
    x, weight = (tensor.requires_grad_() for tensor in tensors(cuda, torch.float16))
    found = []
    for _ in range(TIMES):
        y = conv2d(x, weight, padding=1, relu=True)
        found.append(torch.autograd.grad(y.float().square().sum(), (x, weight)))
    for again in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], again, strict=True))
