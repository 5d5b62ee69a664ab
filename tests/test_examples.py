"""The scripts and the notebook under examples/ run, check themselves, and print what they promise."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import re
from typing import Any

import pytest

from escalade.device.twin import Counts
from tests import fresh

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
    done = fresh.python(str(ROOT / "examples" / f"{name}.py"), **environment)
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


def test_the_notebook_runs_on_the_twin_and_shows_what_is_so() -> None:
    """Cells run in one namespace; what each prints is what is kept with it, up to a compiler's ways."""
    cells = json.loads((ROOT / "examples" / "climb.ipynb").read_text())["cells"]
    space: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile("".join(cell["source"]), f"cell {number} of climb.ipynb", "exec"), space)
        kept = "".join(line for output in cell["outputs"] for line in output["text"])
        words, kept_words = (re.sub(r"[\d,.]+|█", "", text) for text in (said.getvalue(), kept))
        assert words == kept_words, f"cell {number} prints {said.getvalue()}"
        assert figures(said.getvalue()) == pytest.approx(figures(kept), rel=0.05), f"cell {number}"
    check_lessons(space["climb"])
    edited, direct = space["edited"], space["climb"]["direct"]
    assert edited.of("global", "store").per_request == 4 * direct.of("global", "store").per_request == 16


def figures(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def check_lessons(climb: dict[str, Counts]) -> None:
    """The ladder of conv2d on 32 to 32 channels of 8×8 pixels: each rung does what it is there for."""
    direct, tile, weights, padded, vector, mma, wgmma = climb.values()
    inside, warps = (3 * 8 - 2) ** 2, 32 * 8 * 8 // 32
    assert direct.fma == inside * 32 * 32, "what lies in the padding is not multiplied"
    loads = {rung: each.of("global", "load").requests for rung, each in climb.items()}
    assert loads["direct"] == 2 * 9 * 32 * warps, "an element of the image and one of the filter"
    assert weights.read_bytes < tile.read_bytes / 2 < direct.read_bytes / 6
    for each in (tile, weights):
        assert each.of("shared", "load").conflicts == tile.of("shared", "load").requests, (
            "of the image, two turns"
        )
    assert padded.of("shared", "load").requests and not padded.of("shared", "load").conflicts
    assert loads["vector_loads"] < loads["padded_tile"] / 4
    for fast in (mma, wgmma):
        assert fast.tensor_multiplications >= 9 * 32 * 32 * 64 and not fast.fma
        assert fast.read_bytes < vector.read_bytes
        assert fast.unique_read_bytes == 2 * (32 * 64 + 32 * 32 * 9) == direct.unique_read_bytes / 2
        assert fast.unique_written_bytes == fast.written_bytes == 2 * 32 * 64
    assert mma.of("global", "copy").requests and not loads["fused_epilogue"], "cp.async alone brings operands"
    assert wgmma.bulk_loads and wgmma.bulk_stores and not loads["overlapped_store"]
    assert wgmma.tensor_instructions < mma.tensor_instructions
