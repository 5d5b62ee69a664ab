"""JPEG files to classes, and their bottleneck: `python -m tests.gpu.photographs [files]`.

Creates photograph-like files in memory (500 x 375, 375 x 500, and mixed sizes), and prints images per second of the
decoder alone, as used by `classify`, of the engine alone, and of both together, in fp16 by ResNet-18. The lower of
the first two rates bounds the third. Without nvJPEG the decoder is Pillow. `--results results` stores a
record of each rate.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch
from PIL import Image

import escalade
from escalade.models import resnet18
from escalade_apps.classify.decoders import Batch, Decoder, Pillow, decoder_for
from escalade_apps.classify.images import Crop
from escalade_apps.classify.prediction import example, predict, warm_up
from escalade_bench.measure import records as store
from escalade_bench.report.pages.records import PHOTOGRAPHS

_CROP, _BATCH, _TOP = Crop(256, 224), 128, 5
_DISTINCT = 1500
"""Files per kind; the others are links to them."""
_LARGEST = 640


def make(path: pathlib.Path, number: int, mixed: bool) -> None:
    """Noise whose power falls with the square of its frequency, as in photographs."""
    rng = np.random.default_rng(number)
    size = (500, 375) if rng.random() < 0.7 else (375, 500)
    if mixed and rng.random() < 0.5:
        size = tuple(map(int, rng.integers(300, _LARGEST, 2)))  # type: ignore[assignment]
    wide, high = size
    frequencies = np.hypot(np.fft.fftfreq(high)[:, None], np.fft.rfftfreq(wide)[None]) * wide
    frequencies[0, 0] = 1
    planes = [
        np.fft.irfft2(np.fft.rfft2(rng.standard_normal((high, wide))) / frequencies, (high, wide))
        for _ in range(3)
    ]
    grey, *colours = (46 * plane / plane.std() for plane in planes)
    noise = rng.standard_normal((high, wide)) * 3
    image = np.stack([grey + colours[0] / 3, grey, grey + colours[1] / 3], 2) + 120 + noise[:, :, None]
    subsampling = 2 if number % 5 else 0
    Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(path, quality=90, subsampling=subsampling)


@contextlib.contextmanager
def files(count: int) -> Iterator[dict[str, list[pathlib.Path]]]:
    """This many of each kind, by its name."""
    within = "/dev/shm" if os.path.isdir("/dev/shm") else None
    folder = pathlib.Path(tempfile.mkdtemp(dir=within))
    try:
        made: dict[str, list[pathlib.Path]] = {}
        with ProcessPoolExecutor() as pool:
            for kind, mixed in (("two sizes", False), ("mixed sizes", True)):
                own = [folder / f"{kind} {number}.jpg" for number in range(min(_DISTINCT, count))]
                list(pool.map(make, own, range(len(own)), [mixed] * len(own), chunksize=32))
                made[kind] = [folder / f"{kind} link {number}.jpg" for number in range(count)]
                for number, link in enumerate(made[kind]):
                    link.symlink_to(own[number % len(own)])
        yield made
    finally:
        shutil.rmtree(folder)


def rate(given: Iterable[object], count: int) -> float:
    """Return images per second, from the first request to the end."""
    begin = time.perf_counter()
    for _ in given:
        pass
    torch.cuda.synchronize()
    return count / (time.perf_counter() - begin)


def decoded(decoder: Decoder, given: Sequence[pathlib.Path]) -> Iterator[Batch]:
    return decoder.batches(given, _CROP, _BATCH)


def computed(engine: escalade.Engine, batches: int) -> Iterator[torch.Tensor]:
    images = example(_BATCH, _CROP).to("cuda")
    return (engine(images) for _ in range(batches))


def record(files: str, what: str, rate: float) -> store.Record:
    return store.Record(PHOTOGRAPHS, files, "fp16", "nhwc", _BATCH, "escalade", what, images_per_s=rate)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", nargs="?", type=int, default=10_000, help="files of each kind")
    parser.add_argument("--results", type=pathlib.Path, help="a folder like results/ to file records in")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no GPU here, and images that are classified on one are what this measures")
        return 1
    labels = [str(number) for number in range(1000)]
    normalize = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    engine = escalade.compile(
        resnet18().eval().cuda(), example(_BATCH, _CROP).cuda(), dtype="fp16", normalize=normalize
    )
    warm_up(engine, _CROP, _BATCH, _TOP)
    list(computed(engine, 20))
    engine_alone = rate(computed(engine, 200), 200 * _BATCH)
    print(f"engine alone: {engine_alone:,.0f} images/s")
    records = [record("none", "ResNet-18 alone", engine_alone)]
    with files(asked.count) as made:
        for decoder in dict.fromkeys((decoder_for(engine.device), Pillow(pinned=True))):
            print(decoder.name)
            for kind, given in made.items():
                some = given if decoder is decoder_for(engine.device) else given[: len(given) // 4]
                rate(decoded(decoder, some[:1024]), 1)
                alone = rate(decoded(decoder, some), len(some))
                both = [
                    rate(
                        predict(
                            engine,
                            some,
                            _CROP,
                            labels,
                            batch=_BATCH,
                            top=_TOP,
                            skipped=print,
                            decoder=decoder,
                        ),
                        len(some),
                    )
                    for _ in range(2)
                ]
                title = f"{len(some):,} of {kind}, by {decoder.name}"
                records.append(record(title, "decoded", alone))
                records += [
                    record(title, f"classified, run {n}", each) for n, each in enumerate(both, start=1)
                ]
                print(
                    f"  {kind}, {len(some):,} files: decoded {alone:,.0f}, classified",
                    *(f"{each:,.0f} images/s, {each / alone:.0%}" for each in both), sep="; ", flush=True,
                )  # fmt: skip
    if asked.results:
        origin = store.provenance(torch.device("cuda", 0), "python -m tests.gpu.photographs")
        store.file_away(asked.results, [each.stamped(origin) for each in records])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
