"""Tensors with any strides through every entry point: inputs, targets, gradients and `out=`, beside eager PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from escalade.device.strides import is_disjoint
from escalade.engine import compile
from escalade.engine.plan import stepwise
from escalade.errors import UnsupportedError
from tests import strides


@pytest.mark.parametrize("entry", strides.ENTRIES)
def test_inputs(entry: str, seed: int) -> None:
    strides.check_inference(entry, "twin", seed)


@pytest.mark.parametrize("device", ["cpu", "twin"])
def test_out(device: str, seed: int) -> None:
    strides.check_out(device, seed)
    strides.check_outs_among_each_other(device, seed)


def test_out_of_a_plan_run_step_by_step(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(stepwise, "is_faster_stepwise", lambda *_: True)
    strides.check_outs_among_each_other("twin", seed)


def test_arrays_that_pytorch_does_not_take() -> None:
    """Fields of records, broadcast and read-only arrays, windows and reversed arrays are copied first."""
    model = nn.Linear(3, 2).eval()
    engine = compile(model, (torch.ones(2, 3),), device="cpu")
    records = np.ones((2, 3), dtype=[("flag", np.uint8), ("value", np.float32)])
    records["value"] = np.arange(6).reshape(2, 3)
    row = np.arange(4, dtype=np.float32)
    batches = [
        records["value"],
        np.broadcast_to(row[:3], (2, 3)),
        np.lib.stride_tricks.sliding_window_view(row, 3),
        np.arange(6, dtype=np.float32).reshape(2, 3)[::-1, ::-1],
    ]
    for array, found in zip(batches, engine.stream(batches), strict=True):
        torch.testing.assert_close(found, model(torch.tensor(array.copy())).detach())
    with pytest.raises(
        UnsupportedError, match="a batch is a tensor in layout sparse_coo; stream takes dense"
    ):
        next(iter(engine.stream([torch.ones(2, 3).to_sparse()])))


def test_out_in_memory_of_the_input_that_numpy_shares() -> None:
    """PyTorch sees two storages for two NumPy views of one array."""
    array = np.arange(40, dtype=np.float32)
    model = nn.Softmax(0).eval()
    engine = compile(model, (torch.ones(32),), device="twin")
    x, out = torch.from_numpy(array[:32]), torch.from_numpy(array[4:36])
    expected = model(x)
    assert not is_disjoint(out, [x]) and is_disjoint(
        out, [torch.ones(32)]
    )  # the order of a kernel decides whether it shows
    torch.testing.assert_close(engine(x, out=out), expected)


@pytest.mark.parametrize(
    ("device", "dtype", "fresh"), [("cpu", "fp32", 2), ("twin", "fp32", 10), ("twin", "bf16", 4)]
)
def test_training(device: str, dtype: str, fresh: int, seed: int) -> None:
    strides.check_training(device, seed, dtype=dtype, fresh=fresh)


def test_classes(seed: int) -> None:
    strides.check_classes("twin", seed)


def test_training_behind_torch_compile(seed: int) -> None:
    strides.check_training_behind_torch_compile("twin", seed)
