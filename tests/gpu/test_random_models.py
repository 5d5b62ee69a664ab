"""Random networks on the GPU, others every day, and views of PyTorch's results between kernels."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.random_models import views
from tests.random_models.runs import DTYPES, Run, failures, of_the_day, today

pytestmark = pytest.mark.gpu

SHARES = 8
"""Number of tests that share the networks, for as many processes."""
NETWORKS, TRAINED = 8, 3
"""In each share: about five seconds of compiling and running."""
ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("share", range(SHARES))
def test_networks_of_the_day_match_pytorch(share: int) -> None:
    found = failures(of_the_day("network", NETWORKS, first=share * NETWORKS, device="cuda", wide=True))
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize("share", range(SHARES))
def test_training_steps_of_the_day_are_pytorchs(share: int) -> None:
    found = failures(of_the_day("training", TRAINED, first=share * TRAINED, device="cuda", wide=True))
    assert not found, "\n\n".join(found)


def _views(share: int) -> list[Run]:
    """Every source with every view, with other consumers tomorrow."""
    first = today() * len(views.PAIRS)
    return [
        Run("views", (first + number) % views.COUNT, DTYPES[number // SHARES % len(DTYPES)], "cuda")
        for number in range(share, len(views.PAIRS), SHARES)
    ]


@pytest.mark.parametrize("share", range(SHARES))
def test_views_between_pytorch_and_kernels(share: int) -> None:
    found = failures(_views(share))
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize("share", range(SHARES // 2))
def test_views_where_every_tensor_has_an_allocation_of_its_own(share: int) -> None:
    """A read past an end, or of freed memory, faults instead of finding a neighbor's numbers.

    Without its allocator PyTorch cannot record CUDA graphs, so steps are launched one by one.
    """
    numbers = [run.seed for run in _views(share)]
    command = [sys.executable, "-m", "tests.random_models", "views", "--device", "cuda", "--no-graph", "--seeds",
               ",".join(map(str, numbers))]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
