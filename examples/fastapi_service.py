"""Classify images over HTTP, with dynamic batching.

    pip install 'escalade[serve]'
    python examples/fastapi_service.py resnet18.escalade --port 8000
    curl --data-binary @photograph.jpg http://127.0.0.1:8000/classify

The file is a saved engine that takes images as bytes: `escalade build --mean --std`, or `engine.save` behind
`escalade.compile(..., normalize=(mean, std))`. It runs on the GPU if there is one, otherwise on the CPU.

A request is decoded in a thread and waits in a queue. One task collects up to a full batch, waiting a moment for more;
`engine.submit` computes it while the next batch is collected. Batches are padded to a power of two, so that there are
few plans, all of them made before the first request is accepted.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import pathlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from PIL import Image, UnidentifiedImageError
from starlette.requests import ClientDisconnect
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

import escalade
from escalade_apps.classify.images import Crop, pixels
from escalade_apps.classify.preparation import classes_of, crop_to, side_of

MAX_BATCH = 32
"""Largest batch size, a power of two."""
WAIT_MS = 2.0
"""Latency budget: milliseconds that the first image of a batch waits for others."""
WAITING = 8 * MAX_BATCH
"""Most waiting images; further requests are rejected with status 503."""
MOST_BYTES = 32 * 2**20
TOP = 5
BODY = {"required": True, "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}}
"""The body of a request for OpenAPI: FastAPI cannot infer it, because the handler reads it as a stream."""

REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The body is no image that can be read"},
    413: {"description": f"The body has more than {MOST_BYTES:,} bytes"},
    503: {"description": "Too many images are waiting"},
}

Guess = TypedDict("Guess", {"class": int, "probability": float})


class Answer(TypedDict):
    """The most probable classes in descending order."""

    top: list[Guess]


class Health(TypedDict):
    """Where the engine runs, and its counts since the start."""

    device: str
    images: int
    batches: int


@dataclass
class Waiting:
    """An image, and the future of its probabilities."""

    image: np.ndarray
    answer: asyncio.Future[torch.Tensor]


class Batcher:
    """Collects single images into batches for the engine, and distributes the results."""

    def __init__(self, engine: escalade.Engine, wait_ms: float) -> None:
        self.classes = classes_of(engine)
        self.crop: Crop = crop_to(side_of(engine.graph.inputs[0].shape))
        self.images = self.batches = 0
        self._engine = engine
        self._wait_seconds = wait_ms / 1000
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue(WAITING)
        self._in_flight: set[asyncio.Task[None]] = set()

    def warm(self) -> None:
        """Plan every batch size, so that no request waits for a plan."""
        size = 1
        while size <= MAX_BATCH:
            self._engine(torch.from_numpy(self._buffer(size)).to(self._engine.device))
            size *= 2

    async def classify(self, image: np.ndarray) -> torch.Tensor:
        waiting = Waiting(image, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(waiting)
        return await waiting.answer

    async def run(self) -> None:
        """Run until canceled; images that were already collected are still answered."""
        try:
            while True:
                # At most two batches in flight: meanwhile a larger one can be collected.
                if len(self._in_flight) >= 2:
                    await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)
                task = asyncio.create_task(self._answer(await self._collect()))
                self._in_flight.add(task)
                task.add_done_callback(self._in_flight.discard)
        finally:
            await asyncio.gather(*self._in_flight)

    async def _collect(self) -> list[Waiting]:
        some = [await self._queue.get()]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._wait_seconds):
                while len(some) < MAX_BATCH:
                    some.append(await self._queue.get())
        return some

    async def _answer(self, some: list[Waiting]) -> None:
        batch = self._buffer(1 << (len(some) - 1).bit_length())
        for row, each in zip(batch.transpose(0, 2, 3, 1), some, strict=False):
            row[:] = each.image
        try:
            images = torch.from_numpy(batch).to(self._engine.device)
            logits = await self._engine.submit(images)
            rows = logits.float().softmax(1).cpu()
        except Exception as error:
            for each in some:
                if not each.answer.done():
                    each.answer.set_exception(error)
            return
        self.images += len(some)
        self.batches += 1
        for each, row in zip(some, rows, strict=False):
            if not each.answer.done():  # the client may have disconnected
                each.answer.set_result(row)

    def _buffer(self, size: int) -> np.ndarray:
        side = self.crop.side
        return np.zeros((size, side, side, 3), np.uint8).transpose(0, 3, 1, 2)


def service(engine: escalade.Engine, wait_ms: float = WAIT_MS) -> FastAPI:
    batcher = Batcher(engine, wait_ms)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(batcher.warm)
        running = asyncio.create_task(batcher.run())
        yield
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    app = FastAPI(title="Escalade", lifespan=lifespan)

    @app.get("/health")
    async def health() -> Health:
        return {"device": str(engine.device), "images": batcher.images, "batches": batcher.batches}

    @app.post("/classify", openapi_extra={"requestBody": BODY}, responses=REFUSALS)
    async def classify(request: Request) -> Answer:
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    raise HTTPException(413, f"an image of more than {MOST_BYTES:,} bytes")
        except ClientDisconnect as error:  # the client has disconnected
            raise HTTPException(400, "the body has no end") from error
        try:
            image = await asyncio.to_thread(_decoded, bytes(body), batcher.crop)
        except UnidentifiedImageError as error:  # its message refers to an object in memory
            raise HTTPException(400, "the body is no image that can be read") from error
        except Exception as error:  # decoders may raise anything for damaged files
            raise HTTPException(400, f"the body is no image that can be read: {error}") from error
        try:
            chances = await batcher.classify(image)
        except asyncio.QueueFull as error:
            raise HTTPException(503, "too many images are waiting; try again later") from error
        likely = chances.topk(min(TOP, batcher.classes))
        pairs = zip(likely.indices.tolist(), likely.values.tolist(), strict=True)
        return {"top": [{"class": number, "probability": chance} for number, chance in pairs]}

    return app


def _decoded(body: bytes, crop: Crop) -> np.ndarray:
    with Image.open(io.BytesIO(body)) as opened:
        return pixels(opened, crop)


def main() -> None:
    parser = argparse.ArgumentParser(description="Images over HTTP through a saved engine.")
    parser.add_argument("engine", type=pathlib.Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--wait-ms", type=float, default=WAIT_MS, help="time that an image waits to fill a batch"
    )
    given = parser.parse_args()
    uvicorn.run(service(escalade.load(given.engine), given.wait_ms), host=given.host, port=given.port)


if __name__ == "__main__":
    main()
