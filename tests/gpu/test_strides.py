"""Tensors with any strides through every entry point on the GPU, with more cases than the twin has time for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import escalade
from tests import strides
from tests.engine.training.running_statistics import check_statistics
from tests.ops.misuse import RIGHT
from tests.ops.test_strides import check_results

pytestmark = pytest.mark.gpu
DRAWN = 60
"""Cases with random strides, beside those of every kind."""


@pytest.fixture(autouse=True)
def in_fp32() -> Iterator[None]:
    """Eager PyTorch uses the same multiplication precision as the engine."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("entry", strides.ENTRIES)
def test_inputs(entry: str, cuda: torch.device, seed: int) -> None:
    strides.check_inference(entry, "cuda", seed, DRAWN, fresh=10)


@pytest.mark.parametrize("pinned", [False, True])
def test_batches_from_the_host(pinned: bool, cuda: torch.device, seed: int) -> None:
    """Pinned batches are read in place, unless their elements are not packed."""
    torch.manual_seed(seed)
    model = strides.Several().eval().to(cuda)
    engine = escalade.compile(model, (torch.ones(strides.SHAPE, device=cuda),), dtype="fp32")
    batches = []
    for name, x in strides.cases(strides.SHAPE, seed, DRAWN):
        if pinned and not x.is_neg():
            memory = torch.empty(0).set_(x.untyped_storage()).pin_memory()
            x = memory.as_strided(x.shape, x.stride(), x.storage_offset())
        batches.append((name, x))
    found = engine.stream([x for _, x in batches])
    with torch.no_grad():
        for (name, x), results in zip(batches, found, strict=True):
            expected = [one.cpu() for one in model(x.to(cuda))]
            for result, wanted in zip(results, expected, strict=True):
                torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5, msg=name)


def test_out(cuda: torch.device, seed: int) -> None:
    strides.check_out("cuda", seed, DRAWN)
    strides.check_outs_among_each_other("cuda", seed)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training(dtype: str, cuda: torch.device, seed: int) -> None:
    strides.check_training("cuda", seed, 20, dtype, fresh=30)


def test_classes(cuda: torch.device, seed: int) -> None:
    strides.check_classes("cuda", seed, 10, most=20)


def test_training_behind_torch_compile(cuda: torch.device, seed: int) -> None:
    strides.check_training_behind_torch_compile("cuda", seed, 10, most=20)


def test_torch_compile_itself(cuda: torch.device, seed: int) -> None:
    """Dynamo recompiles for other strides, so each case has its own compiled model."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()).to(cuda)
    every = list(strides.cases(strides.SHAPE, seed, device=cuda))
    for name, x in every[:: len(every) // 8]:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="escalade")
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5, msg=name)
        given = x.detach().requires_grad_()
        gradients = [
            torch.autograd.grad(one(given).square().sum(), [given, *model.parameters()])
            for one in (compiled, model)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("name", RIGHT)
def test_operators(name: str, cuda: torch.device, seed: int) -> None:
    check_results(name, cuda, seed, 60)


@pytest.mark.parametrize("counted", [0, 41])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_running_statistics(counted: int, dtype: str, cuda: torch.device, seed: int) -> None:
    check_statistics("cuda", counted, seed, dtype)
