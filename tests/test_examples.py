"""The scripts under examples/ run, check themselves, and print what their first lines promise."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PROMISED = {
    "custom_network": "Nothing falls back to PyTorch",
    "own_kernel": "reads shared parts",
    "streaming": "1 images: classes",
    "torch_compile": "right, also with other weights",
    "training_step": "5 steps taken, 0 skipped",
}
"""What each prints near its end."""


def run(name: str, **environment: str) -> None:
    if name == "torch_compile" and not entry_points(group="torch_dynamo_backends", name="escalade"):
        pytest.skip("escalade is run from its sources, not installed: PyTorch does not know its backend")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert done.returncode == 0, done.stderr
    assert PROMISED[name] in done.stdout, done.stdout


def test_every_example_is_here() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(PROMISED)


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_an_example_runs_without_a_gpu(name: str) -> None:
    run(name, CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(PROMISED))
def test_an_example_runs_on_a_gpu(name: str) -> None:
    run(name)
