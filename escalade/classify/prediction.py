"""Images through an engine: batches in, the likeliest classes out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import torch

from escalade.classify.decoders import PILLOW, Decoder, decoder_for
from escalade.classify.images import Crop, Source, Unreadable
from escalade.engine import Engine


@dataclass(frozen=True)
class Guess:
    """A class and how likely it is."""

    number: int
    label: str
    probability: float


@dataclass(frozen=True)
class Prediction:
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
) -> Generator[Prediction, None, None]:
    """Predictions in the order of the files; those that cannot be read go to `skipped`, from another thread."""
    sent: deque[list[Source]] = deque()
    given = batches(files, crop, batch, sent, skipped, decoder_for(engine.device))
    with closing(given), closing(engine.stream(given)) as results:
        for logits in results:
            likely = logits.float().softmax(1).topk(min(top, len(labels)), 1)
            # The last batch is filled up, and zip leaves out what is beyond its files.
            for file, chances, classes in zip(
                sent.popleft(), likely.values.tolist(), likely.indices.tolist(), strict=False
            ):
                guesses = (
                    Guess(number, labels[number], chance)
                    for number, chance in zip(classes, chances, strict=True)
                )
                yield Prediction(file, tuple(guesses))


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
