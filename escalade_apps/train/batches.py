"""Batches on the device: from memory there if the images fit, else streamed through pinned memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from escalade.device.streams import dedicated_stream
from escalade_apps.train.augmentation import Augmentation, Moves, moved
from escalade_apps.train.data.images import Images
from escalade_apps.train.randomness import generator

RESIDENT_SHARE = 0.25
"""How much of the memory that is free on a GPU the images may take to stay there."""
_AHEAD = 3
"""Batches that are on their way while one is trained on."""


@dataclass(frozen=True)
class Batch:
    """Some images and what is on them, on the device."""

    pixels: torch.Tensor
    """uint8, [images, rows, columns, channels]."""
    labels: torch.Tensor | None

    def images(self, normalization: Normalization) -> torch.Tensor:
        """Floats, [images, 3, rows, columns] in channels_last; grey is red, green and blue alike."""
        pixels = self.pixels
        if pixels.shape[3] == 1:
            pixels = pixels.expand(-1, -1, -1, 3)
        mean, scale = normalization.on(pixels.device)
        return pixels.to(torch.float32).sub_(mean).mul_(scale).permute(0, 3, 1, 2)


class Normalization:
    """Bytes to what a network takes: (byte / 255 - mean) / std, channel by channel."""

    def __init__(self, mean: Sequence[float] = (0, 0, 0), std: Sequence[float] = (1, 1, 1)) -> None:
        self._mean = torch.tensor(mean) * 255
        self._scale = 1 / (torch.tensor(std) * 255)
        self._there: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if device not in self._there:
            self._there[device] = self._mean.to(device), self._scale.to(device)
        return self._there[device]

    def undone(self, images: torch.Tensor) -> torch.Tensor:
        """Bytes, [images, rows, columns, 3], of what a network takes or gives."""
        mean, scale = self.on(images.device)
        values = images.permute(0, 2, 3, 1).float() / scale + mean
        return values.round().clamp(0, 255).to(torch.uint8)


def order(seed: int, epoch: int, images: int) -> torch.Tensor:
    """In which order an epoch takes the images."""
    return torch.randperm(images, generator=generator(seed, "order", epoch))


class Batches:
    """The batches of one process: its part of every batch of all processes."""

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
        """`resident` says whether the images stay on the device; without it they do if there is room."""
        self._batch, self._device, self._seed, self._augmentation = batch, device, seed, augmentation
        self._share = batch // processes
        self._first = rank * self._share
        self.steps = len(images) // batch
        """Steps of an epoch. What is left over is in another epoch's batches, which have another order."""
        self.resident = _fits(images, device) if resident is None else resident
        self._images = images
        if self.resident:
            labels = None if images.labels is None else images.labels.to(device)
            self._images = Images(images.pixels.to(device), labels, images.classes)

    def epoch(self, number: int, first: int = 0) -> Generator[Batch, None, None]:
        """The batches of an epoch in their order, from the `first` on."""
        count = len(self._images)
        drawn = order(self._seed, number, count)
        moves = self._augmentation.moves(self._seed, number, count) if self._augmentation else None
        if self.resident:
            drawn = drawn.to(self._device)
            moves = moves and moves.to(self._device)
            for step in range(first, self.steps):
                indices = self._part(drawn, step)
                yield _moved(self._images.some(indices), moves and moves.some(indices))
            return
        wanted = (self._part(drawn, step) for step in range(first, self.steps))
        with closing(_streamed(self._images, wanted, self._share, self._device)) as stream:
            for indices, images in stream:
                yield _moved(images, moves and moves.some(indices).to(self._device))

    def _part(self, drawn: torch.Tensor, step: int) -> torch.Tensor:
        start = step * self._batch + self._first
        return drawn[start : start + self._share]


def in_order(
    images: Images, batch: int, device: torch.device, *, rank: int = 0, processes: int = 1
) -> Iterator[Batch]:
    """One process's part of all images, as they are: none is left out, the last batch is smaller."""
    for start in range(rank, len(images), batch * processes):
        part = torch.arange(start, min(start + batch * processes, len(images)), processes)
        some = images.some(part)
        labels = None if some.labels is None else some.labels.to(device, non_blocking=True)
        yield Batch(some.pixels.to(device, non_blocking=True), labels)


def _moved(images: Images, moves: Moves | None) -> Batch:
    return Batch(images.pixels if moves is None else moved(images.pixels, moves), images.labels)


def _fits(images: Images, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return images.pixels.nbytes <= free * RESIDENT_SHARE


class _Slot:
    """Memory that one batch passes through on its way: pinned, so that the copy needs no processor."""

    def __init__(self, images: Images, batch: int, pinned: bool) -> None:
        self.pixels = torch.empty(batch, *images.pixels.shape[1:], dtype=torch.uint8, pin_memory=pinned)
        labelled = images.labels is not None
        self.labels = torch.empty(batch, dtype=torch.int64, pin_memory=pinned) if labelled else None
        self.copied: torch.cuda.Event | None = None

    def fill(self, images: Images, indices: torch.Tensor) -> None:
        if self.copied is not None:
            self.copied.synchronize()
        torch.index_select(images.pixels, 0, indices, out=self.pixels)
        if images.labels is not None and self.labels is not None:
            torch.index_select(images.labels, 0, indices, out=self.labels)

    def send(self, device: torch.device, stream: torch.cuda.Stream | None, classes: int) -> Images:
        """The batch on the device; without a stream it is copied at once."""
        if stream is None:
            labels = None if self.labels is None else self.labels.to(device, copy=True)
            return Images(self.pixels.to(device, copy=True), labels, classes)
        with torch.cuda.stream(stream):
            pixels = self.pixels.to(device, non_blocking=True)
            labels = None if self.labels is None else self.labels.to(device, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record(stream)
        return Images(pixels, labels, classes)


def _streamed(
    images: Images, wanted: Iterator[torch.Tensor], batch: int, device: torch.device
) -> Generator[tuple[torch.Tensor, Images], None, None]:
    """The batches of these indices, gathered and sent by a thread of their own while others are trained on."""
    on_gpu = device.type == "cuda"
    stream = dedicated_stream(device) if on_gpu else None
    ready: queue.Queue[tuple[torch.Tensor, Images, torch.cuda.Event | None] | BaseException | None]
    ready = queue.Queue(_AHEAD)
    ended = threading.Event()

    def gather() -> None:
        try:
            slots = [_Slot(images, batch, on_gpu) for _ in range(_AHEAD)]
            for number, indices in enumerate(wanted):
                if ended.is_set():
                    return
                slot = slots[number % _AHEAD]
                slot.fill(images, indices)
                ready.put((indices, slot.send(device, stream, images.classes), slot.copied))
            ready.put(None)
        except BaseException as error:  # told where the batches are used: here nobody would hear of it
            ready.put(error)

    thread = threading.Thread(target=gather, name="escalade-batches", daemon=True)
    thread.start()
    try:
        while (found := ready.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            indices, sent, copied = found
            if copied is not None:
                here = torch.cuda.current_stream(device)
                here.wait_event(copied)
                for each in (sent.pixels, sent.labels):
                    if each is not None:
                        each.record_stream(here)
            yield indices, sent
    finally:
        ended.set()
        while thread.is_alive():
            while not ready.empty():
                ready.get()
            thread.join(0.01)
