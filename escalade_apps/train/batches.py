"""Batches on the device, from a resident copy of the dataset if it fits, else streamed through pinned memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from escalade.device.streams import dedicated_stream
from escalade_apps.train.augmentation import Augmentation, Moves, generator, moved
from escalade_apps.train.data.images import Images

RESIDENT_SHARE = 0.25
"""Most of a GPU's free memory that a resident dataset may take."""
_AHEAD = 3
"""Batches in flight while one is trained on."""


@dataclass(frozen=True)
class Batch:
    """Images and labels on the device."""

    pixels: torch.Tensor
    """uint8, [images, rows, columns, channels]."""
    labels: torch.Tensor | None

    def images(self, normalization: Normalization) -> torch.Tensor:
        """Return normalized fp32 images, [images, 3, rows, columns] in channels_last. Gray is repeated to RGB."""
        pixels = self.pixels
        if pixels.shape[3] == 1:
            pixels = pixels.expand(-1, -1, -1, 3)
        mean, scale = normalization.on(pixels.device)
        return pixels.to(torch.float32).sub_(mean).mul_(scale).permute(0, 3, 1, 2)


class Normalization:
    """Per-channel normalization of bytes: (byte / 255 - mean) / std."""

    def __init__(self, mean: Sequence[float] = (0, 0, 0), std: Sequence[float] = (1, 1, 1)) -> None:
        self._mean = torch.tensor(mean) * 255
        self._scale = 1 / (torch.tensor(std) * 255)
        self._on_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if device not in self._on_device:
            self._on_device[device] = self._mean.to(device), self._scale.to(device)
        return self._on_device[device]

    def invert(self, images: torch.Tensor) -> torch.Tensor:
        """Return bytes, [images, rows, columns, 3], for normalized images."""
        mean, scale = self.on(images.device)
        values = images.permute(0, 2, 3, 1).float() / scale + mean
        return values.round().clamp(0, 255).to(torch.uint8)


def order(seed: int, epoch: int, images: int) -> torch.Tensor:
    """Return the shuffled image indices of an epoch."""
    return torch.randperm(images, generator=generator(seed, "order", epoch))


class Batches:
    """Training batches of one process: its share of every global batch."""

    def __init__(
        self,
        images: Images,
        batch: int,
        device: torch.device,
        *,
        seed: int,
        augmentation: Augmentation,
        rank: int = 0,
        processes: int = 1,
        resident: bool | None = None,
    ) -> None:
        """Copy the images to the device if `resident`, which defaults to True if they fit."""
        self._batch, self._device, self._seed, self._augmentation = batch, device, seed, augmentation
        self._share = batch // processes
        self._first = rank * self._share
        self.steps = len(images) // batch
        """Steps per epoch. The remainder is dropped; other epochs shuffle it into their batches."""
        self.resident = _fits(images, device) if resident is None else resident
        self._images = images
        if self.resident:
            labels = None if images.labels is None else images.labels.to(device)
            self._images = Images(images.pixels.to(device), labels, images.classes)

    def epoch(self, number: int, first: int = 0) -> Generator[Batch, None, None]:
        """Yield the batches of an epoch, starting at batch `first`."""
        count = len(self._images)
        shuffled = order(self._seed, number, count)
        moves = self._augmentation.moves(self._seed, number, count) if self._augmentation else None
        if self.resident:
            shuffled = shuffled.to(self._device)
            moves = moves and moves.to(self._device)
            for step in range(first, self.steps):
                indices = self._indices(shuffled, step)
                yield _augmented(self._images.select(indices), moves and moves.select(indices))
            return
        batches = (self._indices(shuffled, step) for step in range(first, self.steps))
        with closing(_stream(self._images, batches, self._share, self._device)) as stream:
            for indices, images in stream:
                yield _augmented(images, moves and moves.select(indices).to(self._device))

    def _indices(self, shuffled: torch.Tensor, step: int) -> torch.Tensor:
        start = step * self._batch + self._first
        return shuffled[start : start + self._share]


def sequential_batches(
    images: Images, batch: int, device: torch.device, *, rank: int = 0, processes: int = 1
) -> Iterator[Batch]:
    """Yield this process's share of all images, not shuffled and not augmented. The last batch may be smaller."""
    for start in range(rank, len(images), batch * processes):
        indices = torch.arange(start, min(start + batch * processes, len(images)), processes)
        selected = images.select(indices)
        labels = None if selected.labels is None else selected.labels.to(device, non_blocking=True)
        yield Batch(selected.pixels.to(device, non_blocking=True), labels)


def _augmented(images: Images, moves: Moves | None) -> Batch:
    return Batch(images.pixels if moves is None else moved(images.pixels, moves), images.labels)


def _fits(images: Images, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return images.pixels.nbytes <= free * RESIDENT_SHARE


class _StagingBuffer:
    """Pinned staging buffer for one batch, so that the copy to the GPU is asynchronous."""

    def __init__(self, images: Images, batch: int, pinned: bool) -> None:
        self.pixels = torch.empty(batch, *images.pixels.shape[1:], dtype=torch.uint8, pin_memory=pinned)
        has_labels = images.labels is not None
        self.labels = torch.empty(batch, dtype=torch.int64, pin_memory=pinned) if has_labels else None
        self.copied: torch.cuda.Event | None = None

    def fill(self, images: Images, indices: torch.Tensor) -> None:
        if self.copied is not None:
            self.copied.synchronize()
        torch.index_select(images.pixels, 0, indices, out=self.pixels)
        if images.labels is not None and self.labels is not None:
            torch.index_select(images.labels, 0, indices, out=self.labels)

    def send(self, device: torch.device, stream: torch.cuda.Stream | None, classes: int) -> Images:
        """Copy the batch to the device, asynchronously if there is a stream."""
        if stream is None:
            labels = None if self.labels is None else self.labels.to(device, copy=True)
            return Images(self.pixels.to(device, copy=True), labels, classes)
        with torch.cuda.stream(stream):
            pixels = self.pixels.to(device, non_blocking=True)
            labels = None if self.labels is None else self.labels.to(device, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record(stream)
        return Images(pixels, labels, classes)


def _stream(
    images: Images, batches: Iterator[torch.Tensor], batch: int, device: torch.device
) -> Generator[tuple[torch.Tensor, Images], None, None]:
    """Gather and copy batches of indices in a background thread, ahead of the consumer."""
    on_gpu = device.type == "cuda"
    stream = dedicated_stream(device) if on_gpu else None
    ready: queue.Queue[tuple[torch.Tensor, Images, torch.cuda.Event | None] | BaseException | None]
    ready = queue.Queue(_AHEAD)
    ended = threading.Event()

    def gather() -> None:
        try:
            buffers = [_StagingBuffer(images, batch, on_gpu) for _ in range(_AHEAD)]
            for number, indices in enumerate(batches):
                if ended.is_set():
                    return
                buffer = buffers[number % _AHEAD]
                buffer.fill(images, indices)
                ready.put((indices, buffer.send(device, stream, images.classes), buffer.copied))
            ready.put(None)
        except BaseException as error:  # re-raised in the consumer
            ready.put(error)

    thread = threading.Thread(target=gather, name="escalade-batches", daemon=True)
    thread.start()
    try:
        while (found := ready.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            indices, sent, copied = found
            if copied is not None:
                current = torch.cuda.current_stream(device)
                current.wait_event(copied)
                # Allocated on our stream: without this, the caching allocator could reuse it while `current` reads it.
                for each in (sent.pixels, sent.labels):
                    if each is not None:
                        each.record_stream(current)
            yield indices, sent
    finally:
        ended.set()
        while thread.is_alive():
            while not ready.empty():
                ready.get()
            thread.join(0.01)
