"""Random networks by kernels on the twin, others every day; failures print the command that repeats them."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import torch

from escalade.engine.nodes.conv2d import Conv2d
from tests.random_models import views
from tests.random_models.__main__ import main
from tests.random_models.generator import draw
from tests.random_models.runs import LINKS, Run, failures, of_the_day


def _require_right(kind: str, count: int, links: int = 1) -> None:
    found = failures(of_the_day(kind, count, links=links))
    assert not found, "\n\n".join(found)


# Counts are chosen for about 40 s of CPU time with an empty cache.


def test_networks_of_the_day_match_pytorch() -> None:
    _require_right("network", 6)


def test_training_steps_of_the_day_are_pytorchs() -> None:
    _require_right("training", 3)


def test_views_of_the_day_are_read_right() -> None:
    _require_right("views", 4, LINKS)


def test_networks_of_the_day_are_planned_for_an_h200() -> None:
    """Wide networks, whose channels tensor cores can load. PyTorch computes the plans on the CPU, in fp32 for both
    dtypes: rounding has no influence."""
    found = [
        failure
        for kind, count in (("network", 4), ("training", 1))
        for failure in failures(of_the_day(kind, count, ("tf32", "fp32"), device="h200", wide=True))
    ]
    assert not found, "\n\n".join(found)


def test_a_seed_is_one_network() -> None:
    assert draw(3) == draw(3) != draw(4)
    model, again = draw(3).module(), draw(3).module()
    assert all(
        torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True)
    )
    assert len({views.numbered(number).body for number in range(views.COUNT)}) > views.COUNT / 2


def test_a_failure_prints_the_network_and_how_to_repeat_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run("views", 0, "fp32", "cpu")
    assert run.failure() == ""
    monkeypatch.setattr(Run, "check", lambda self: 1 / 0)
    failure = run.failure()
    assert "class Model" in failure and "ZeroDivisionError" in failure
    command = shlex.split(failure.splitlines()[-1])
    assert main(command[command.index("views") :]) == 1
    monkeypatch.undo()
    assert main(command[command.index("views") :]) == 0
    assert "right views 0 fp32" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["network", "training"])
def test_a_slightly_wrong_operator_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change one element of each image by a hundredth: far less than an off-by-one index would."""
    real = Conv2d.compute

    def wrong(self: Conv2d, node: Any, inputs: Any) -> torch.Tensor:
        result = real(self, node, inputs).clone()
        result[:, 0, 0, 0] *= 1.01
        return result

    runs = (Run(kind, seed, "fp32", "cpu") for seed in range(99))
    run = next(run for run in runs if "Conv2d" in str(run.text))
    assert run.failure() == ""
    monkeypatch.setattr(Conv2d, "compute", wrong)
    assert "Wrong" in run.failure()
