"""The choice of decoder does not matter: same images, same refusals, same messages."""

from __future__ import annotations

import enum
import importlib
import io
import pathlib
import sys
import threading
import types
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from PIL import Image

from escalade_apps.classify import jpeg
from escalade_apps.classify.decoders import MAX_MEAN_DIFFERENCE, PILLOW, Decoder, NvJpeg, decoder_for
from escalade_apps.classify.images import Crop, Source, Unreadable
from escalade_apps.classify.resizing import MAX_SCALE

CROP = Crop(36, 32)
CPU = torch.device("cpu")
BATCH = 4


class Mode(enum.Enum):
    RGB = 3


class StandIn(types.ModuleType):
    """The parts of `torchvision.io` that we use, by Pillow: as strict as torchvision, and records its inputs."""

    ImageReadMode = Mode

    def __init__(self) -> None:
        super().__init__("torchvision.io")
        self.given = 0
        self.most = 0

    def decode_jpeg(
        self, contents: Sequence[torch.Tensor], mode: Mode, device: torch.device
    ) -> list[torch.Tensor]:
        images = []
        self.most = max(self.most, len(contents))
        for each in contents:
            try:
                image = Image.open(io.BytesIO(each.numpy().tobytes()))
                image.load()
            except Exception as error:
                raise RuntimeError(str(error)) from error
            assert image.format == "JPEG" and image.mode == "RGB" and mode is Mode.RGB
            images.append(torch.from_numpy(np.array(image)).permute(2, 0, 1).to(device))
        self.given += len(images)
        return images


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    package, module = types.ModuleType("torchvision"), StandIn()
    monkeypatch.setattr(package, "__version__", "0.0.stand-in", raising=False)
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.io", module)
    return module


def photograph(number: int, width: int = 60, height: int = 50) -> Image.Image:
    rows, columns = np.mgrid[0:height, 0:width]
    planes = [128 + 100 * np.sin(rows / 9 + number), 2 * columns + rows, 255 - 3 * rows + number]
    return Image.fromarray(np.stack(planes, -1).clip(0, 255).astype(np.uint8))


def turned(tag: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = tag
    return exif


PLAIN: dict[str, Callable[[pathlib.Path], object]] = {
    "wide.jpg": lambda path: photograph(1).save(path),
    "high.jpg": lambda path: photograph(2, 40, 90).save(path, progressive=True),
    "exact.jpg": lambda path: photograph(3, 36, 44).save(path, quality=95, subsampling=0),
    "small.jpg": lambda path: photograph(4, 20, 17).save(path),
    "upright.jpg": lambda path: photograph(5).save(path, exif=turned(1)),
}
"""Files that a fast decoder supports."""
OTHERS: dict[str, Callable[[pathlib.Path], object]] = {
    "turned.jpg": lambda path: photograph(6).save(path, exif=turned(6)),
    "grey.jpg": lambda path: photograph(7).convert("L").save(path),
    "cmyk.jpg": lambda path: photograph(8).convert("CMYK").save(path),
    "rgb.jpg": lambda path: photograph(9).save(path, keep_rgb=True),
    "several.jpg": lambda path: photograph(10).save(
        path, "MPO", save_all=True, append_images=[photograph(11)]
    ),
    "16.png": lambda path: Image.fromarray(np.full((40, 40), 30000, np.uint16)).save(path),
    "cut.jpg": lambda path: path.write_bytes(saved(photograph(12))[:-300]),
    "cut short.jpg": lambda path: path.write_bytes(saved(photograph(12))[:30]),
    "text.jpg": lambda path: path.write_text("no image"),
    "folder.jpg": lambda path: path.mkdir(),
    "missing.jpg": lambda path: None,
}
"""Files left to Pillow, with its messages."""
DAMAGED = "damaged.jpg"
"""A file that looks intact from outside."""


def saved(image: Image.Image) -> bytes:
    written = io.BytesIO()
    image.save(written, "JPEG")
    return written.getvalue()


@pytest.fixture
def files(tmp_path: pathlib.Path) -> list[pathlib.Path]:
    """Both kinds alternate, and file order differs from folder order."""
    for name, make in {**PLAIN, **OTHERS}.items():
        make(tmp_path / name)
    (tmp_path / DAMAGED).write_bytes(saved(photograph(14))[:-300] + b"\xff\xd9")
    names = [*PLAIN, *OTHERS, DAMAGED]
    return [tmp_path / name for name in names[::2] + names[1::2] + ["wide.jpg"]]


def read(
    decoder: Decoder, files: Sequence[pathlib.Path], size: int = BATCH
) -> tuple[list[Source], torch.Tensor, set[Unreadable]]:
    names: list[Source] = []
    images, refused = [], set()
    for batch in decoder.batches(files, CROP, size):
        names += batch.files
        refused.update(batch.skipped)
        if batch.files:
            assert batch.images.shape == (size, 3, CROP.side, CROP.side)
            assert batch.images.is_contiguous(memory_format=torch.channels_last)
            images.append(batch.images[: len(batch.files)].cpu().clone())
    return names, torch.cat(images).int(), refused


@pytest.mark.parametrize("few", [1, 1000], ids=["processes", "threads"])
def test_a_decoder_on_the_gpu_matches_pillow(
    few: int, stand_in: StandIn, files: list[pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("escalade_apps.classify.reading._MIN_FOR_WORKERS", few)
    decoder = NvJpeg.create(CPU)
    assert decoder is not None and "0.0.stand-in" in decoder.name
    names, images, refused = read(PILLOW, files)
    stand_in.given = 0
    found, same, also_refused = read(decoder, files)
    assert found == names and also_refused == refused
    assert {each.file.name for each in refused} == {
        "cut.jpg", "cut short.jpg", "text.jpg", "folder.jpg", "missing.jpg",
    }  # fmt: skip
    assert torch.equal(same, images)
    assert stand_in.given >= len(PLAIN) + 1, "wide.jpg is there twice"


@pytest.mark.parametrize("size", [1, 3, 8, 20])
def test_decoding_is_batched_by_the_decoders_own_size(
    size: int, stand_in: StandIn, files: list[pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("escalade_apps.classify.decoders._MAX_IMAGES", 8)
    decoder = NvJpeg.create(CPU)
    assert decoder is not None
    many = [file for file in files * 6 if file.name != DAMAGED]
    whole = [file for file in many if file.name in PLAIN]
    for some in (many, whole):
        names, images, refused = read(PILLOW, some, size)
        found, same, also_refused = read(decoder, some, size)
        assert found == names and also_refused == refused
        assert torch.equal(same, images)
    assert stand_in.most == (8 - 8 % size if size < 8 else 8), "whole batches, and no more than that"


def test_an_image_that_would_fill_the_memory_is_left_to_pillow(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "thin.jpg"
    photograph(13, 4000, 1).save(file)
    assert jpeg.read(file, Crop(256, 224)) is None and jpeg.read(file, CROP) is not None


def test_an_image_that_becomes_too_many_times_smaller_is_left_to_pillow(
    stand_in: StandIn, tmp_path: pathlib.Path
) -> None:
    decoder = NvJpeg.create(CPU)
    assert decoder is not None
    crop = Crop(1, 1)
    largest = crop.resize * MAX_SCALE
    stand_in.given = 0
    for number, side in enumerate((largest, largest + 1)):
        photograph(number, side, side).save(tmp_path / f"{number}.jpg")
    (batch,) = decoder.batches(sorted(tmp_path.iterdir()), crop, 2)
    (expected,) = PILLOW.batches(sorted(tmp_path.iterdir()), crop, 2)
    assert torch.equal(batch.images, expected.images) and stand_in.given == 1


@pytest.mark.parametrize("few", [1, 1000], ids=["processes", "threads"])
def test_stopping_early_leaves_no_thread(
    few: int, stand_in: StandIn, files: list[pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("escalade_apps.classify.reading._MIN_FOR_WORKERS", few)
    decoder = NvJpeg.create(CPU)
    assert decoder is not None
    given = decoder.batches(files * 9, CROP, BATCH)
    next(given)
    given.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("escalade-decode")]


def test_batches_in_which_nothing_can_be_read(stand_in: StandIn, tmp_path: pathlib.Path) -> None:
    decoder = NvJpeg.create(CPU)
    assert decoder is not None
    for each in (decoder, PILLOW):
        (batch,) = each.batches([tmp_path / "a.jpg", tmp_path / "b.jpg"], CROP, BATCH)
        assert not batch.files and [image.file.name for image in batch.skipped] == ["a.jpg", "b.jpg"]


def refuse(*_: object, **__: object) -> list[torch.Tensor]:
    raise RuntimeError("not compiled with nvJPEG support")


def red(contents: Sequence[torch.Tensor], **_: object) -> list[torch.Tensor]:
    return [torch.tensor([255, 0, 0], dtype=torch.uint8)[:, None, None].expand(3, 32, 32) for _ in contents]


def test_decoders_that_fail_are_not_used(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    for decode in (refuse, red):
        monkeypatch.setattr(stand_in, "decode_jpeg", decode)
        assert NvJpeg.create(CPU) is None
    monkeypatch.setitem(sys.modules, "torchvision.io", None)  # importing it fails
    assert NvJpeg.create(CPU) is None
    assert decoder_for(CPU) is PILLOW


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_torchvision_matches_pillow(place: str, files: list[pathlib.Path]) -> None:
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # a build for another PyTorch raises all sorts of errors
        pytest.skip(f"torchvision cannot be imported: {error}")
    device = torch.device(place)
    decoder = NvJpeg.create(device)
    if decoder is None:
        pytest.skip("this torchvision does not decode JPEG there")
    assert device == CPU or decoder_for(device).name == decoder.name
    whole = [file for file in files if file.name != DAMAGED]  # decoders differ on these
    names, images, refused = read(PILLOW, whole)
    found, same, also_refused = read(decoder, whole)
    assert found == names and also_refused == refused
    off = (same - images).abs().float().mean((1, 2, 3))
    assert off.max() <= (1 if device == CPU else MAX_MEAN_DIFFERENCE), dict(
        zip(names, off.tolist(), strict=True)
    )


@pytest.mark.parametrize("transform", [0, 1, 2])
def test_colors_other_than_ycbcr_are_left_to_pillow(transform: int) -> None:
    written = io.BytesIO()
    Image.new("RGB", (3, 2)).save(written, "JPEG")
    plain = written.getvalue()
    adobe = b"\xff\xee\x00\x0eAdobe" + bytes([0, 100, 0, 0, 0, 0, transform])
    assert jpeg._size(memoryview(plain)) == (3, 2)
    found = jpeg._size(memoryview(plain[:2] + adobe + plain[2:]))
    assert found == ((3, 2) if transform == 1 else None)
