"""Images through an engine: batches in, the likeliest classes out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch

from escalade.engine import Engine
from escalade_apps.classify.decoders import PILLOW, Decoder, decoder_for
from escalade_apps.classify.images import Crop, Source, Unreadable


class Guess(NamedTuple):
    """A class and how likely it is."""

    number: int
    label: str
    probability: float


class Prediction(NamedTuple):
    """The likeliest classes of an image, the first first."""

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
    """Predictions in the order of the files; those that cannot be read go to `skipped`, from another thread. The
    decoder is the one for the engine's device, if it is not said."""
    sent: deque[list[Source]] = deque()
    given = batches(files, crop, batch, sent, skipped, decoder or decoder_for(engine.device))
    best = partial(likeliest, top=min(top, len(labels)))  # where the engine is: a thousandth is copied back
    with closing(given), closing(engine.stream(given, then=best)) as results:
        for found in results:
            # The last batch is filled up, and zip leaves out what is beyond its files.
            for file, classes, chances in zip(
                sent.popleft(), *(each.tolist() for each in found), strict=False
            ):
                names = [labels[number] for number in classes]
                yield Prediction(file, tuple(map(Guess, classes, names, chances)))


def make_ready(engine: Engine, crop: Crop, batch: int, top: int) -> None:
    """Has an engine on a GPU go through a batch of nothing: what is loaded when it is first used is loaded then."""
    if engine.device.type == "cuda":
        for _ in engine.stream([example(batch, crop)], then=partial(likeliest, top=top)):
            pass


def likeliest(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The classes with the largest numbers in each row, the first first, and their probabilities."""
    chances, classes = logits.float().softmax(1).topk(top)
    return classes, chances


def example(batch: int, crop: Crop) -> torch.Tensor:
    """Images as `predict` gives them to the engine."""
    return torch.zeros(batch, crop.side, crop.side, 3, dtype=torch.uint8).permute(0, 3, 1, 2)


def first_images(files: Sequence[Source], crop: Crop, batch: int) -> list[torch.Tensor]:
    """The first batch as `predict` gives it to the engine, to calibrate with; none if none can be read."""
    with closing(batches(files, crop, batch, deque(), lambda image: None)) as given:
        return [images.clone() for images in islice(given, 1)]


def batches(
    files: Sequence[Source],
    crop: Crop,
    batch: int,
    sent: deque[list[Source]],
    skipped: Callable[[Unreadable], None],
    decoder: Decoder = PILLOW,
) -> Generator[torch.Tensor, None, None]:
    """A decoder's batches, the files of each in `sent` before it comes."""
    with closing(decoder.batches(files, crop, batch)) as made:
        for each in made:
            for image in each.refused:
                skipped(image)
            if each.files:
                sent.append(each.files)
                yield each.images
