"""Serve a classifier over HTTP with Ray Serve, with dynamic batching.

Start it with `serve run escalade_apps.ray.serving:application network=resnet18.escalade`. `POST` the bytes of an image;
the response is JSON.
"""

from __future__ import annotations

import asyncio
import io
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from PIL import Image
from ray.util.metrics import Counter, Histogram

from escalade.errors import LaunchError, MissingError, UnsupportedError
from escalade_apps.classify.images import Unreadable
from escalade_apps.classify.prediction import Guess
from escalade_apps.ray.prediction import Network, Predictor, require_counts
from escalade_apps.ray.storage import source

try:
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import JSONResponse
except ImportError as error:
    raise MissingError(
        f"serving over HTTP needs Ray Serve, which cannot be imported ({error}): pip install 'escalade[ray]'"
    ) from error

_SETTINGS: Mapping[str, Callable[[str], Any]] = {
    "network": str, "labels": str, "device": str, "batch": int, "top": int, "wait": float, "replicas": int,
    "gpus": float,
}  # fmt: skip
"""Arguments of `serve run`, and their parsers."""
_BAD_REQUEST, _NOT_ALLOWED, _TOO_LARGE = 400, 405, 413
_MAX_BYTES = 64 * 2**20
"""Largest encoded image."""
_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Bucket bounds of the batch-size histogram."""


class Classifier:
    """Ray Serve deployment with one engine per replica."""

    def __init__(self, network: Network, device: str | None, batch: int, top: int, wait: float) -> None:
        self._predictor = Predictor(network, device=device, batch=batch, top=top)
        self._lock = threading.Lock()  # health checks run between requests, in another thread
        self._classify.set_max_batch_size(batch)
        self._classify.set_batch_wait_timeout_s(wait)
        self._images = Counter("escalade_images", "Images that were classified.")
        self._unreadable = Counter("escalade_unreadable_images", "Images that could not be read.")
        self._batches = Histogram("escalade_batch_images", "Images in a batch.", boundaries=list(_BOUNDS))
        self._guesses([_black()])  # make plans and kernels before the first request

    async def __call__(self, request: Request) -> JSONResponse:
        """Classify the image in the request's body."""
        if request.method != "POST":
            return JSONResponse({"error": "POST the bytes of an image"}, _NOT_ALLOWED)
        body = await request.body()
        if len(body) > _MAX_BYTES:
            return JSONResponse({"error": f"the image is larger than {_MAX_BYTES:,} bytes"}, _TOO_LARGE)
        found = await self._classify(body)
        if isinstance(found, Unreadable):
            return JSONResponse({"error": f"the image cannot be read: {found.reason}"}, _BAD_REQUEST)
        return JSONResponse({"top": [guess.as_dict() for guess in found], **self._predictor.made_by})

    @serve.batch
    async def _classify(self, images: list[bytes]) -> list[tuple[Guess, ...] | Unreadable]:
        found = await asyncio.to_thread(self._guesses, images)
        unreadable = sum(isinstance(each, Unreadable) for each in found)
        self._batches.observe(len(found))
        for counter, counted in ((self._images, len(found) - unreadable), (self._unreadable, unreadable)):
            if counted:
                counter.inc(counted)
        return found

    def _guesses(self, images: Sequence[bytes]) -> list[tuple[Guess, ...] | Unreadable]:
        """Return the guesses for each image, in order."""
        files = [source(str(number), contents) for number, contents in enumerate(images)]
        with self._lock:
            predictions, unreadable = self._predictor.predict(files)
        results: dict[Any, tuple[Guess, ...] | Unreadable] = {each.file: each for each in unreadable}
        results |= {each.file: each.guesses for each in predictions}
        return [results[file] for file in files]

    def check_health(self) -> None:
        """Classify a black image. Ray Serve calls this every few seconds and replaces the replica if it raises."""
        (found,) = self._guesses([_black()])
        if isinstance(found, Unreadable) or not all(0 <= guess.probability <= 1 for guess in found):
            raise LaunchError(f"the engine returned {found} for a black image")


def application(settings: Mapping[str, str]) -> Any:
    """Build the application of `serve run escalade_apps.ray.serving:application NAME=VALUE ...`.

    `network` is an engine file compiled with `normalize`, `labels` a file of class labels. `batch` is the largest
    batch, and `wait` the seconds to wait for a batch to fill. Each of `replicas` replicas has an engine on `gpus` GPUs,
    which may be a fraction, or 0 for a cluster without GPUs.
    """
    unknown = [name for name in settings if name not in _SETTINGS]
    if unknown or "network" not in settings:
        raise UnsupportedError(
            f"settings {', '.join(settings) or 'none'}: network=FILE is required, and supported are "
            f"{', '.join(_SETTINGS)}"
        )
    try:
        values = {name: _SETTINGS[name](value) for name, value in settings.items()}
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"a setting is not a number: {error}") from error
    require_counts(**{name: values[name] for name in ("batch", "top", "replicas") if name in values})
    for name in ("wait", "gpus"):
        if not 0 <= values.get(name, 0) < math.inf:
            raise UnsupportedError(f"{name}={values[name]}: must be finite and not negative")
    network = Network.read(values["network"], values.get("labels"))
    deployment = serve.deployment(
        num_replicas=values.get("replicas", 1), ray_actor_options={"num_gpus": values.get("gpus", 1)}
    )(Classifier)
    return deployment.bind(
        network,
        values.get("device"),
        values.get("batch", 32),
        values.get("top", 5),
        values.get("wait", 0.005),
    )


def _black() -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", (1, 1)).save(encoded, "PNG")
    return encoded.getvalue()
