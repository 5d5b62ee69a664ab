"""Every rung on the GPU: small problems, and medium ones that fill a card."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from escalade.device.cuda import architecture
from escalade.ops import Operation, Rung
from tests.support import all_rungs, check, cover, label, medium_problems, supported

pytestmark = pytest.mark.gpu

each_rung = pytest.mark.parametrize(("operation", "rung"), all_rungs(), ids=label)


def _skip_elsewhere(rung: Rung[Any], device: torch.device) -> None:
    here = architecture(device.index or 0)
    if here not in rung.architectures:
        pytest.skip(f"{rung.name} is for {', '.join(rung.architectures)}; this card is {here}")


@each_rung
def test_small_problems(operation: Operation[Any], rung: Rung[Any], cuda: torch.device, seed: int) -> None:
    _skip_elsewhere(rung, cuda)
    for variants in supported(operation, rung, operation.small_problems):
        for problem in variants:
            check(operation, rung, problem, rung.configs(problem)[0], cuda, seed)


@each_rung
def test_medium_problems(operation: Operation[Any], rung: Rung[Any], cuda: torch.device, seed: int) -> None:
    _skip_elsewhere(rung, cuda)
    for problem in cover(operation, rung, medium_problems(operation), seed):
        check(operation, rung, problem, rung.configs(problem)[0], cuda, seed)


@each_rung
def test_every_config(operation: Operation[Any], rung: Rung[Any], cuda: torch.device, seed: int) -> None:
    _skip_elsewhere(rung, cuda)
    for problem in cover(operation, rung, operation.small_problems, seed)[:2]:
        for config in rung.configs(problem):
            check(operation, rung, problem, config, cuda, seed)
