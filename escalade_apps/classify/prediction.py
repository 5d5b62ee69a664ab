"""Stream images through an engine and return the most probable classes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch

from escalade.engine import Engine
from escalade_apps.classify.decoders import PILLOW, Decoder, decoder_for
from escalade_apps.classify.images import Crop, Source, Unreadable


class Guess(NamedTuple):
    """Class index, its label and its probability."""

    number: int
    label: str
    probability: float

    def as_dict(self) -> dict[str, Any]:
        """Return it as results are written: in JSON, in tables and in responses."""
        return {"class": self.number, "label": self.label, "probability": self.probability}


class Prediction(NamedTuple):
    """Most probable classes of an image, in descending order."""

    file: Source
    guesses: tuple[Guess, ...]


def predict(
    engine: Engine,
    files: Sequence[Source],
    crop: Crop,
    labels: Sequence[str],
    *,
    batch: int,
    top: int,
    skipped: Callable[[Unreadable], None],
    decoder: Decoder | None = None,
) -> Generator[Prediction, None, None]:
    """Yield predictions in the order of the files. `skipped` is called with each unreadable file, in another thread."""
    sent: deque[list[Source]] = deque()
    inputs = batches(files, crop, batch, sent, skipped, decoder or decoder_for(engine.device))
    # top_classes runs on the engine's device, so that a few values per image are copied back instead of all logits.
    best = partial(top_classes, top=min(top, len(labels)))
    with closing(inputs), closing(engine.stream(inputs, then=best)) as results:
        for result in results:
            # zip drops the padding rows of the last batch.
            for file, classes, probabilities in zip(
                sent.popleft(), *(each.tolist() for each in result), strict=False
            ):
                names = [labels[number] for number in classes]
                yield Prediction(file, tuple(map(Guess, classes, names, probabilities)))


def warm_up(engine: Engine, crop: Crop, batch: int, top: int) -> None:
    """Run an engine on a GPU once, so that lazily loaded code is loaded."""
    if engine.device.type == "cuda":
        for _ in engine.stream([example(batch, crop)], then=partial(top_classes, top=top)):
            pass


def top_classes(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and the probabilities of the `top` most probable classes of each row, in descending order."""
    probabilities, classes = logits.float().softmax(1).topk(top)
    return classes, probabilities


def example(batch: int, crop: Crop) -> torch.Tensor:
    """Return a batch with the shape, dtype and strides that `predict` passes to the engine."""
    return torch.zeros(batch, crop.side, crop.side, 3, dtype=torch.uint8).permute(0, 3, 1, 2)


def first_images(files: Sequence[Source], crop: Crop, batch: int) -> list[torch.Tensor]:
    """Return the first batch, to calibrate with, or an empty list if no file can be read."""
    with closing(batches(files, crop, batch, deque(), lambda image: None)) as inputs:
        return [images.clone() for images in islice(inputs, 1)]


def batches(
    files: Sequence[Source],
    crop: Crop,
    batch: int,
    sent: deque[list[Source]],
    skipped: Callable[[Unreadable], None],
    decoder: Decoder = PILLOW,
) -> Generator[torch.Tensor, None, None]:
    """Yield a decoder's batches. The files of a batch are appended to `sent` before it is yielded."""
    with closing(decoder.batches(files, crop, batch)) as decoded:
        for each in decoded:
            for image in each.skipped:
                skipped(image)
            if each.files:
                sent.append(each.files)
                yield each.images
