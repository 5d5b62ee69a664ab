"""Values between PyTorch's steps and kernels: addresses, copies and lifetimes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.engine.graph.forms import Form
from escalade.engine.nodes import aten, conv2d
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.engine.plan.memory import to_form


class Between(nn.Module):
    """Views of kernels' results, read after other kernels ran; and PyTorch's results, read by kernels."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        early = torch.softmax(x * 2, -1).unfold(2, 2, 1)  # PyTorch reads it in the last step
        rows = torch.softmax(x, -1)
        part = rows[:, :, 1:]  # the only reader of `rows`
        others = torch.softmax(F.relu(x).transpose(1, 2).cumsum(1), -1).transpose(1, 2)[:, :, 1:]
        sums = x.cumsum(1)
        flat, later = F.relu(others.flatten(1)), F.relu(sums[:, :, 1:])
        return {"sum": others + part, "flat": flat, "later": later, "last": sums, "early": early.cumsum(1)}


def ran(x: torch.Tensor) -> tuple[KernelProgram, dict[str, torch.Tensor]]:
    """The plan on the twin, and the results of the second of two calls."""
    engine = Engine(capture(Between(), (x,)), "fp32", "twin")
    engine(torch.randn_like(x))
    program = engine.program(x)
    assert isinstance(program, KernelProgram)
    program._values.arena.fill_(0xFF)
    return program, engine(x)


def check(x: torch.Tensor, results: dict[str, torch.Tensor]) -> None:
    for name, expected in Between()(x).items():
        torch.testing.assert_close(results[name], expected, rtol=1e-5, atol=1e-6, msg=name)


def test_views_keep_their_base_alive() -> None:
    x = torch.randn(2, 5, 4)
    check(x, ran(x)[1])


def test_a_view_that_pytorch_does_not_announce_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some operators return their input or a part of it, which their schema does not declare."""
    monkeypatch.setattr(aten.Aten, "may_alias", lambda self, node: False)
    x = torch.randn(2, 5, 4)
    check(x, ran(x)[1])


def test_only_values_that_kernels_read_are_made_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 5, 4)
    program, _ = ran(x)
    copied = []
    real = torch.Tensor.copy_

    def spy(self: torch.Tensor, source: torch.Tensor, *rest: Any) -> torch.Tensor:
        copied.append(tuple(source.shape))
        return real(self, source, *rest)

    monkeypatch.setattr(torch.Tensor, "copy_", spy)
    program.run()
    wanted = {(2, 5, 3), (2, 5, 4), (2, 5, 3, 2)}
    assert set(copied) == wanted, "slices that a kernel reads, and what PyTorch returns"
    assert (2, 4, 5) in {program.plan.forms[name].shape for name in program.plan.pytorch_owned}


def test_kernels_read_memory_aligned_to_16_bytes() -> None:
    """Copied only if its layout differs from the plan's."""
    memory = torch.arange(64.0)
    for first, size in itertools.product(range(5), range(1, 4)):
        value = memory[first : first + 2 * size].view(2, size)
        for form in (Form((2, size), torch.float32, "flat"), Form((2, size), torch.float16, "flat")):
            found = to_form(form, value)
            assert not found.data_ptr() % 16 and found.dtype is form.dtype
            assert (found is value) == (first % 4 == 0 and form.dtype is torch.float32)
            torch.testing.assert_close(found.float(), value, rtol=0, atol=0)
        turned = to_form(Form((size, 2), torch.float32, "flat"), value.t())
        assert turned.is_contiguous() and torch.equal(turned, value.t())


def test_a_run_keeps_nothing_of_pytorchs() -> None:
    program, _ = ran(torch.randn(2, 5, 4))
    assert (
        program.plan.pytorch_owned and not program._values._pytorch_owned and not program._values._alias_views
    )


def test_filters_have_the_layout_of_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise cuDNN would reorder them at every call."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    real = torch.conv_transpose2d

    def spy(x: torch.Tensor, weight: torch.Tensor, *settings: Any) -> torch.Tensor:
        seen.append((x, weight))
        return real(x, weight, *settings)

    x = torch.randn(2, 4, 6, 6)
    model = nn.Sequential(
        nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 6, 2, stride=3)
    )  # some pixels have no tap
    engine = Engine(capture(model, (x,)), "fp32", "twin")
    monkeypatch.setattr(conv2d.F, "conv_transpose2d", spy)
    with torch.no_grad():
        found = engine(x)
    monkeypatch.undo()
    with torch.no_grad():
        torch.testing.assert_close(found, model(x))
    (images,) = seen
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in images)
