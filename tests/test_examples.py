"""The scripts and the notebook under examples/ run, check themselves, and print the documented output."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import escalade
from escalade.device.twin import Counts
from tests import fresh

ROOT = pathlib.Path(__file__).parent.parent
LONGEST = 120
"""Seconds until a hanging service fails its test."""
PROMISED = {
    "hugging_face_trainer": "6 steps in Trainer",
    "lightning_module": "12 steps in Lightning",
    "custom_network": "Nothing falls back to PyTorch",
    "own_kernel": "reads shared parts",
    "streaming": "1 images: classes",
    "torch_compile": "correct, also with new weights",
    "training_step": "5 steps taken, 0 skipped",
}
"""Text that each prints near its end."""
NEEDED = {"hugging_face_trainer": ("transformers", "accelerate"), "lightning_module": ("lightning",)}
"""Packages that may not be installed for the tests; without them, their example is skipped."""
SERVICES = {"fastapi_service"}
"""Services, which run until they are stopped."""


def run(name: str, **environment: str) -> None:
    for package in NEEDED.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}")
    done = fresh.python(str(ROOT / "examples" / f"{name}.py"), **environment)
    assert done.returncode == 0, done.stderr
    assert PROMISED[name] in done.stdout, done.stdout


def test_every_example_is_here() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == PROMISED.keys() | SERVICES


@pytest.mark.share(7)
@pytest.mark.parametrize("name", sorted(PROMISED))
def test_an_example_runs_without_a_gpu(name: str) -> None:
    run(name, CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(PROMISED))
def test_an_example_runs_on_a_gpu(name: str) -> None:
    run(name)


@pytest.fixture(scope="module")
def engine() -> escalade.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(512, 6)).eval()
    example = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    return escalade.compile(
        model, example, dtype="fp32", device="cpu", normalize=((0.5, 0.5, 0.5), (0.1, 0.1, 0.1))
    )


@pytest.fixture(scope="module")
def saved(engine: escalade.Engine, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("engines") / "small.escalade"
    engine.save(path)
    return path


SERVICE = """
import os, pathlib, runpy, sys

_, pid, *sys.argv = sys.argv
pathlib.Path(pid).write_text(str(os.getpid()))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@contextlib.contextmanager
def serving(saved: pathlib.Path, folder: pathlib.Path) -> Iterator[str]:
    """Run the service at a free address; it must stop cleanly when told to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address, port = free.getsockname()
    example = str(ROOT / "examples" / "fastapi_service.py")
    with ThreadPoolExecutor(1) as runner:
        ended = runner.submit(
            fresh.python, "-c", SERVICE, str(folder / "pid"), example, str(saved), "--port", str(port),
            CUDA_VISIBLE_DEVICES="",
        )  # fmt: skip
        try:
            yield answering(f"http://{address}:{port}", ended)
        finally:
            if not ended.done():
                os.kill(int((folder / "pid").read_text()), signal.SIGTERM)
        done = ended.result(timeout=LONGEST)
    assert "Application shutdown complete" in done.stderr and "Traceback" not in done.stderr, done.stderr


def answering(address: str, ended: Future[Any]) -> str:
    """Return the address once the service answers."""
    while True:
        assert not ended.done(), ended.result().stderr
        with contextlib.suppress(urllib.error.URLError):
            urllib.request.urlopen(f"{address}/health", timeout=LONGEST).close()
            return address
        time.sleep(0.1)


def test_a_service_batches_requests_and_stops_on_request(
    engine: escalade.Engine, saved: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("fastapi")
    pictures = np.random.default_rng(0).integers(0, 256, (24, 32, 32, 3), np.uint8)
    expected = engine(torch.from_numpy(pictures).permute(0, 3, 1, 2)).softmax(1)
    with serving(saved, tmp_path) as address, ThreadPoolExecutor(8) as clients:

        def ask(picture: np.ndarray) -> Any:
            body = io.BytesIO()
            Image.fromarray(picture).save(body, "PNG")  # lossless, unlike JPEG
            with urllib.request.urlopen(f"{address}/classify", body.getvalue(), timeout=LONGEST) as answer:
                return json.load(answer)["top"]

        for answer, chances in zip(clients.map(ask, pictures), expected, strict=True):
            assert [each["class"] for each in answer] == chances.topk(5).indices.tolist()
            assert [each["probability"] for each in answer] == pytest.approx(chances.topk(5).values.tolist())
        with urllib.request.urlopen(f"{address}/health", timeout=LONGEST) as answer:
            health = json.load(answer)
        assert health["images"] == 24 > health["batches"] and health["device"] == "cpu"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{address}/classify", b"no image", timeout=LONGEST)
        assert refused.value.code == 400
        assert json.load(refused.value) == {"detail": "the body is no image that can be read"}
        left_in_the_middle(address, b"POST /classify HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf")
        ask(pictures[0])


def left_in_the_middle(address: str, request: bytes) -> None:
    """Send part of a request and disconnect, to check that the service handles it without a traceback."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass


def test_the_notebook_runs_on_the_twin_with_right_results() -> None:
    """Cells run in one namespace; their output matches the stored one, except for details of the compiler."""
    cells = json.loads((ROOT / "examples" / "climb.ipynb").read_text())["cells"]
    space: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile("".join(cell["source"]), f"cell {number} of climb.ipynb", "exec"), space)
        kept = "".join(line for output in cell["outputs"] for line in output["text"])
        # Column widths depend on the numbers.
        words, kept_words = (re.sub(r"[\d,.]+|█", "", text).split() for text in (said.getvalue(), kept))
        assert words == kept_words, f"cell {number} prints {said.getvalue()}"
        assert figures(said.getvalue()) == pytest.approx(figures(kept), rel=0.05), f"cell {number}"
    check_lessons(space["climb"])
    edited, direct = space["edited"], space["climb"]["direct"]
    assert edited.of("global", "store").per_request == 4 * direct.of("global", "store").per_request == 16


def figures(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def check_lessons(climb: dict[str, Counts]) -> None:
    """The ladder of conv2d on 32 to 32 channels of 8×8 pixels: each rung shows its idea."""
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
    assert loads["vector_loads"] < loads["padded_tile"] / 2, "vectors leave some lanes of a warp without work"
    for fast in (mma, wgmma):
        assert fast.tensor_multiplications >= 9 * 32 * 32 * 64 and not fast.fma
        assert fast.read_bytes < vector.read_bytes
        assert fast.unique_read_bytes == 2 * (32 * 64 + 32 * 32 * 9) == direct.unique_read_bytes / 2
        assert fast.unique_written_bytes == fast.written_bytes == 2 * 32 * 64
    assert mma.of("global", "copy").requests and not loads["fused_epilogue"], "cp.async alone brings operands"
    assert wgmma.bulk_loads and wgmma.bulk_stores and not loads["overlapped_store"]
    assert wgmma.tensor_instructions < mma.tensor_instructions
