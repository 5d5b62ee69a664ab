"""Images over HTTP by Ray Serve: same answers as the predictor's, batched, and refused with a sentence."""

from __future__ import annotations

import io
import json
import pathlib
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from escalade.errors import UnsupportedError
from tests.ray.networks import CLASSES, picture

pytest.importorskip("ray", reason="Ray is not installed: pip install 'escalade[ray]'")
try:
    from ray import serve
except ImportError as error:
    pytest.skip(f"Ray Serve is not installed ({error}): pip install 'escalade[ray]'", allow_module_level=True)

from escalade_apps.ray import Network, Predictor, serving
from escalade_apps.ray.serving import application
from escalade_apps.ray.storage import source

pytestmark = pytest.mark.usefixtures("patience")
TOGETHER = 6


@pytest.fixture
def url(address: str, network: pathlib.Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        settings = {"network": str(network), "gpus": "0", "batch": "4", "top": str(CLASSES), "wait": "0.05"}
        serve.run(application(settings))
        yield f"http://127.0.0.1:{port}/"
    finally:
        serve.shutdown()


def encoded(number: int) -> bytes:
    written = io.BytesIO()
    picture(number).save(written, "JPEG")
    return written.getvalue()


def post(url: str, contents: bytes | None) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, contents), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


def test_images_over_http(url: str, network: pathlib.Path) -> None:
    images = [encoded(40 * number) for number in range(TOGETHER)]
    with ThreadPoolExecutor(TOGETHER + 1) as pool:
        answers = list(pool.map(lambda contents: post(url, contents), [*images, b"not an image"]))
    predictor = Predictor(Network.read(network), device="cpu", batch=4, top=CLASSES)
    expected, _ = predictor.predict([source(str(number), each) for number, each in enumerate(images)])
    for (status, answer), prediction in zip(answers, expected, strict=False):
        assert status == 200 and answer["sha256"] == predictor.network.sha256
        assert [guess["class"] for guess in answer["top"]] == [guess.number for guess in prediction.guesses]
        assert [guess["probability"] for guess in answer["top"]] == pytest.approx(
            [guess.probability for guess in prediction.guesses]
        )
    assert answers[-1][0] == 400 and "cannot be read" in answers[-1][1]["error"]
    assert post(url, None) == (405, {"error": "POST the bytes of an image"})
    assert post(url, bytes(serving._MAX_BYTES + 1))[0] == 413
    assert post(url, images[0])[0] == 200


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"network": "a", "batches": "3"},
        {"network": "a", "batch": "many"},
        {"network": "a", "batch": None},
        {"network": "a", "batch": "0"},
        {"network": "a", "replicas": "-1"},
        {"network": "a", "wait": "nan"},
        {"network": "a", "gpus": "-1"},
    ],
)
def test_settings_that_there_are_not(settings: dict[str, str]) -> None:
    with pytest.raises(UnsupportedError, match="^settings|not a number|at least 1|not negative"):
        application(settings)
