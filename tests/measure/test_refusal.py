"""Errors that are a refusal of a peer or a rung, and errors that stop the whole run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from escalade.tune import verification
from escalade.tune.refusal import LostDevice, failure_reason, require_device
from escalade_bench.peers import cudnn_graph
from escalade_bench.peers.layer import LayerPeer
from escalade_bench.trial import verified_peers
from tests.bench.fake import Scale, ScaleProblem, rung

CPU = torch.device("cpu")


def wrapped() -> None:
    """An interrupt as reported by a compiler that waited for its workers."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as interrupt:
        raise RuntimeError("the workers are gone") from interrupt


def hidden() -> None:
    """The same, as an error raised while the interrupt was handled."""
    try:
        wrapped()
    except RuntimeError:
        raise ValueError("nothing to join")  # noqa: B904


def plain() -> None:
    raise KeyboardInterrupt


def left() -> None:
    raise SystemExit(3)


def refuse() -> None:
    raise TypeError("no kernel for that\nand more of it")


def raising(what: Any) -> Any:
    def run(*_: Any, **__: Any) -> torch.Tensor:
        what()
        raise AssertionError

    return run


def by_peers(what: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    operation = Scale(rung("right"))
    case = verification.VerificationCase(operation, ScaleProblem(10), CPU, 0)
    right, (refused,) = verified_peers([LayerPeer("peer", "nchw", raising(what))], operation, case)
    assert not right
    return refused.failure


def by_verify(what: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    case = verification.VerificationCase(Scale(rung("right")), ScaleProblem(10), CPU, 0)
    monkeypatch.setattr(verification, "bind", raising(what))
    (first, *_) = (one := rung("right")).configs(case.problem)
    return case.check(one, "nchw", first).failure


def by_cudnn(what: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cudnn_graph, "time_interleaved", raising(what))
    y = torch.zeros(1)
    return f"no kernel for that: {cudnn_graph.screened(lambda inputs, y: None, {}, y)}"


WHERE = [by_peers, by_verify, by_cudnn]


@pytest.mark.parametrize("where", WHERE)
def test_an_exception_is_a_refusal(where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no kernel for that" in where(refuse, monkeypatch)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("what", [plain, wrapped, hidden])
def test_an_interrupt_is_none(what: Any, where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        where(what, monkeypatch)


@pytest.mark.parametrize("where", WHERE)
def test_nor_is_the_end_of_the_program(where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        where(left, monkeypatch)


def test_a_reason_is_one_line() -> None:
    assert failure_reason(ValueError("first\nsecond")) == "first"
    assert failure_reason(ValueError()) == "ValueError"


def test_a_gpu_that_only_answers_with_errors_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    require_device(gpu, "since resnet18")

    def lost(device: torch.device) -> None:
        raise RuntimeError("illegal memory access\nand more of it")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    require_device(CPU, "since resnet18")
    with pytest.raises(LostDevice, match="^since resnet18: illegal memory access$"):
        require_device(gpu, "since resnet18")
