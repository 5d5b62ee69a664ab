"""A classifier behind HTTP, by Ray Serve: images that come in at about the same time go through the engine together.

`serve run escalade_apps.ray.serving:application network=resnet18.escalade` starts one; `POST` the bytes of an image,
and the answer is JSON.
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
        f"Ray Serve is needed to answer over HTTP, and is not here ({error}): pip install 'escalade[ray]'"
    ) from error

_SETTINGS: Mapping[str, Callable[[str], Any]] = {
    "network": str, "labels": str, "device": str, "batch": int, "top": int, "wait": float, "replicas": int,
    "gpus": float,
}  # fmt: skip
"""What `serve run` may be given, by name."""
_REFUSED, _NOT_ALLOWED, _TOO_LARGE = 400, 405, 413
_MOST_BYTES = 64 * 2**20
"""The bytes that an image may have as it is sent."""
_FULL = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Where the histogram of images in a batch has its bounds."""


class Classifier:
    """One engine, and whatever images are asked about meanwhile."""

    def __init__(self, network: Network, device: str | None, batch: int, top: int, wait: float) -> None:
        self._predictor = Predictor(network, device=device, batch=batch, top=top)
        self._alone = threading.Lock()  # a look at the engine's health comes in between
        self._classify.set_max_batch_size(batch)
        self._classify.set_batch_wait_timeout_s(wait)
        self._images = Counter("escalade_images", "Images that were classified.")
        self._unreadable = Counter("escalade_unreadable_images", "Images that could not be read.")
        self._batches = Histogram("escalade_batch_images", "Images in a batch.", boundaries=list(_FULL))
        self._guesses([_black()])  # plans and kernels are there before the first request

    async def __call__(self, request: Request) -> JSONResponse:
        """The likeliest classes of the image whose bytes are the request's body."""
        if request.method != "POST":
            return JSONResponse({"error": "POST the bytes of an image"}, _NOT_ALLOWED)
        body = await request.body()
        if len(body) > _MOST_BYTES:
            return JSONResponse({"error": f"an image of more than {_MOST_BYTES:,} bytes"}, _TOO_LARGE)
        found = await self._classify(body)
        if isinstance(found, Unreadable):
            return JSONResponse({"error": f"the image cannot be read: {found.reason}"}, _REFUSED)
        guesses = [
            {"class": guess.number, "label": guess.label, "probability": guess.probability} for guess in found
        ]
        return JSONResponse({"top": guesses, **self._predictor.made_by})

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
        """What is known of each image, in their order."""
        files = [source(str(number), contents) for number, contents in enumerate(images)]
        with self._alone:
            predictions, unreadable = self._predictor.predict(files)
        known: dict[Any, tuple[Guess, ...] | Unreadable] = {each.file: each for each in unreadable}
        known |= {each.file: each.guesses for each in predictions}
        return [known[file] for file in files]

    def check_health(self) -> None:
        """Classifies an image: Ray Serve calls this every few seconds, and starts another replica where it fails."""
        (found,) = self._guesses([_black()])
        if isinstance(found, Unreadable) or not all(0 <= guess.probability <= 1 for guess in found):
            raise LaunchError(f"the engine gives {found} for a black image")


def application(settings: Mapping[str, str]) -> Any:
    """What `serve run escalade_apps.ray.serving:application NAME=VALUE ...` runs.

    `network` is the file of an engine that was saved with `normalize`, `labels` the names of its classes. `batch` is
    how many images go through the engine together at most, and `wait` how many seconds the first of them waits for
    others. Each of `replicas` has an engine, on `gpus` of a GPU: 0 is for a cluster without any.
    """
    unknown = [name for name in settings if name not in _SETTINGS]
    if unknown or "network" not in settings:
        raise UnsupportedError(
            f"the settings are {', '.join(settings) or 'none'}; network=FILE is needed, and there are "
            f"{', '.join(_SETTINGS)}"
        )
    try:
        given = {name: _SETTINGS[name](value) for name, value in settings.items()}
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"a setting is no number: {error}") from error
    require_counts(**{name: given[name] for name in ("batch", "top", "replicas") if name in given})
    for name in ("wait", "gpus"):
        if not 0 <= given.get(name, 0) < math.inf:
            raise UnsupportedError(f"{name}={given[name]}: it is a number, 0 or more")
    network = Network.read(given["network"], given.get("labels"))
    deployed = serve.deployment(
        num_replicas=given.get("replicas", 1), ray_actor_options={"num_gpus": given.get("gpus", 1)}
    )(Classifier)
    return deployed.bind(
        network, given.get("device"), given.get("batch", 32), given.get("top", 5), given.get("wait", 0.005)
    )


def _black() -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (1, 1)).save(written, "PNG")
    return written.getvalue()
