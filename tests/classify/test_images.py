"""Image files: which are found, and whether their pixels match torchvision's transforms."""

from __future__ import annotations

import os
import pathlib
import re
import struct
import threading
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, features

from escalade.errors import UnsupportedError
from escalade_apps.classify.images import Crop, DecodedImage, Unreadable, decode, find, read_all
from escalade_apps.classify.reading import chunks, decode_all

PHOTOGRAPH = Crop(256, 224)


def smooth(height: int, width: int) -> np.ndarray:
    """An asymmetric image whose channels all differ."""
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack(
        [rows * 255 // height, columns * 255 // width, (rows + columns) * 255 // (height + width)], -1
    ).astype(np.uint8)


def saved(path: pathlib.Path, pixels: np.ndarray, **options: object) -> pathlib.Path:
    Image.fromarray(pixels).save(path, **options)  # type: ignore[arg-type]
    return path


def test_files_and_folders_are_found_in_order(tmp_path: pathlib.Path) -> None:
    for name in ("b/2.JPG", "b/1.png", "b/notes.txt", "b/deeper/0.jpeg", "a.webp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found, closed = find([tmp_path / "odd.name", tmp_path / "b", tmp_path / "a.webp"])
    assert not closed
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        "odd.name", "b/1.png", "b/2.JPG", "b/deeper/0.jpeg", "a.webp",
    ]  # fmt: skip
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedError, match="no images in .*empty; supported suffixes"):
        find([tmp_path / "empty"])


@pytest.mark.parametrize(
    ("height", "width"), [(300, 401), (401, 300), (256, 256), (256, 341), (100, 177), (1000, 700)]
)
def test_pixels_are_resized_and_cropped_as_by_torchvision(
    height: int, width: int, tmp_path: pathlib.Path
) -> None:
    pixels = smooth(height, width)
    shorter = min(height, width)
    size = (int(256 * height / shorter), int(256 * width / shorter))
    x = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    resized = F.interpolate(x, size, mode="bilinear", antialias=True, align_corners=False)[0]
    top, left = round((size[0] - 224) / 2), round((size[1] - 224) / 2)
    expected = resized[:, top : top + 224, left : left + 224].permute(1, 2, 0).numpy()
    found = decode(saved(tmp_path / "x.png", pixels), PHOTOGRAPH)
    assert found.shape == (224, 224, 3) and found.dtype == np.uint8
    assert np.abs(found - expected).max() <= 1.01


@pytest.mark.parametrize("crop", [PHOTOGRAPH, Crop(36, 33), Crop(40, 32)])
def test_crops_are_rounded_as_torchvision_rounds(crop: Crop) -> None:
    """Sizes are rounded down, and corners to nearest even."""
    sizes = [(width, height) for width in range(3, 60, 4) for height in (3, 5, 37, 58, 211)]
    begins, ends = crop.boxes(np.array(sizes))
    for (width, height), begin, end in zip(sizes, begins, ends, strict=True):
        shorter = min(width, height)
        resized = int(crop.resize * width / shorter), int(crop.resize * height / shorter)
        corner = tuple(round((length - crop.side) / 2) for length in resized)
        assert crop.resized(width, height) == resized and crop.corner(*resized) == corner
        scales = np.array((width, height)) / resized
        assert begin == pytest.approx(corner * scales) and end - begin == pytest.approx(crop.side * scales)


def test_photographs_are_turned_upright(tmp_path: pathlib.Path) -> None:
    pixels = smooth(224, 224)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees clockwise
    file = saved(tmp_path / "x.png", np.ascontiguousarray(np.rot90(pixels)), exif=exif)
    assert np.array_equal(decode(file, Crop(224, 224)), pixels)


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["jpg", "png", "16.png", "tif", "lzw.tif"])
def test_every_orientation_is_turned_once(turn: int, kind: str, tmp_path: pathlib.Path) -> None:
    """Pillow turns some TIFFs by itself."""
    upright = smooth(64, 64)[:, :, 2]
    upright[:32, :32] = 255
    turned = np.rot90(upright, {3: 2, 6: 1, 7: 1, 8: -1, 5: 1}.get(turn, 0))
    lies = {2: np.fliplr(turned), 4: np.flipud(turned), 5: np.flipud(turned), 7: np.fliplr(turned)}.get(
        turn, turned
    )
    exif = Image.Exif()
    exif[0x0112] = turn
    options: dict[str, object] = {"compression": "tiff_lzw"} if kind == "lzw.tif" else {}
    wide = lies.astype(np.uint16) * 257 if kind == "16.png" else lies
    file = saved(tmp_path / f"x.{kind}", np.ascontiguousarray(wide), exif=exif, **options)
    assert np.abs(decode(file, Crop(64, 64))[:, :, 0].astype(int) - upright).mean() < 3


SIZE = 64
RAMP = (np.arange(SIZE * SIZE).reshape(SIZE, SIZE) * 16).astype(np.uint16)
"""A gradient from black to white."""


def tiff(
    path: pathlib.Path, pixels: bytes, bits: int, *, order: str = "<", photometric: int = 1, kind: int = 1
) -> pathlib.Path:
    """Gray, in one uncompressed strip; `kind` is the sample format: unsigned, signed, floating-point."""
    tags = {
        256: SIZE, 257: SIZE, 258: bits, 259: 1, 262: photometric,
        273: 8, 277: 1, 278: SIZE, 279: len(pixels), 339: kind,
    }  # fmt: skip
    fields = b"".join(
        struct.pack(f"{order}HHI", tag, 4, 1) + struct.pack(f"{order}I", value) for tag, value in tags.items()
    )
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8 + len(pixels))
    path.write_bytes(head + pixels + struct.pack(f"{order}H", len(tags)) + fields + bytes(4))
    return path


def twelve_bits(values: np.ndarray) -> bytes:
    pairs = values.reshape(-1, 2).astype(np.uint32)
    words = pairs[:, 0] << 12 | pairs[:, 1]
    return np.stack([words >> 16, words >> 8 & 255, words & 255], -1).astype(np.uint8).tobytes()


def pgm(path: pathlib.Path, values: np.ndarray, most: int) -> pathlib.Path:
    path.write_bytes(b"P5 %d %d %d\n" % (SIZE, SIZE, most) + values.astype(">u2").tobytes())
    return path


GREY = {
    "png": lambda folder: saved(folder / "x.png", RAMP),
    "tif": lambda folder: saved(folder / "x.tif", RAMP),
    "lzw.tif": lambda folder: saved(folder / "x.tif", RAMP, compression="tiff_lzw"),
    "jp2": lambda folder: saved(folder / "x.jp2", RAMP, irreversible=False),
    "little": lambda folder: tiff(folder / "x.tif", RAMP.astype("<u2").tobytes(), 16),
    "big": lambda folder: tiff(folder / "x.tif", RAMP.astype(">u2").tobytes(), 16, order=">"),
    "white is zero": lambda folder: tiff(
        folder / "x.tif", (65535 - RAMP).astype("<u2").tobytes(), 16, photometric=0
    ),
    "12 bits": lambda folder: tiff(folder / "x.tif", twelve_bits(RAMP >> 4), 12),
    "pgm": lambda folder: pgm(folder / "x.pgm", RAMP, 65535),
    "pgm 12 bits": lambda folder: pgm(folder / "x.pgm", RAMP >> 4, 4095),
}


@pytest.mark.parametrize("kind", GREY)
def test_gray_of_more_than_8_bits_ranges_from_black_to_white(kind: str, tmp_path: pathlib.Path) -> None:
    if kind == "jp2" and not features.check("jpg_2000"):
        pytest.skip("this Pillow knows no JPEG 2000")
    file = GREY[kind](tmp_path)
    found = decode(file, Crop(SIZE, SIZE)).astype(int)
    assert np.array_equal(found[:, :, 0], found[:, :, 1]) and np.array_equal(found[:, :, 0], found[:, :, 2])
    assert np.abs(found[:, :, 0] - RAMP / 257).max() <= 1


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("float.tif", lambda path: saved(path, (RAMP / 65535).astype(np.float32))),
        ("integer.tif", lambda path: saved(path, RAMP.astype(np.int32))),
        ("signed16.tif", lambda path: tiff(path, RAMP.astype("<i2").tobytes(), 16, kind=2)),
        ("signed8.tif", lambda path: tiff(path, (RAMP >> 8).astype(np.int8).tobytes(), 8, kind=2)),
        ("float.pfm", lambda path: path.write_bytes(b"Pf\n64 64\n-1.0\n" + RAMP.astype("<f4").tobytes())),
    ],
)
def test_pixels_whose_white_is_not_known_are_refused(name: str, make: Any, tmp_path: pathlib.Path) -> None:
    make(tmp_path / name)
    (found,) = decode_all([tmp_path / name], Crop(SIZE, SIZE), ahead=1)
    assert isinstance(found, Unreadable)
    # Pillow itself may not support such a file.
    assert "does not define which value is white" in found.reason or "Pillow supports" in found.reason


COLOUR = (204, 102, 51)  # a color of the usual palette


@pytest.mark.parametrize(
    ("mode", "suffix", "expected"),
    [
        ("1", "png", (255, 255, 255)),
        ("L", "png", (127, 127, 127)),
        ("LA", "png", (127, 127, 127)),
        ("PA", "tif", COLOUR),
        ("P", "gif", COLOUR),
        ("RGBA", "png", COLOUR),
        ("RGBA", "tif", COLOUR),
        ("CMYK", "tif", COLOUR),
        ("CMYK", "jpg", COLOUR),
        ("YCbCr", "jpg", COLOUR),
        ("LAB", "tif", (119, 119, 119)),
    ],
)
def test_every_kind_of_image_becomes_rgb(
    mode: str, suffix: str, expected: tuple[int, int, int], tmp_path: pathlib.Path
) -> None:
    file = tmp_path / f"x.{suffix}"
    plain = Image.new("RGB", (40, 40), COLOUR)
    if mode == "LAB" and not features.check("littlecms2"):
        pytest.skip("this Pillow converts no such colours")
    if mode == "LAB":  # halfway to white, without a color; its two axes are signed
        Image.frombytes("LAB", (40, 40), bytes((127, 0, 0)) * 1600).save(file)
    elif mode == "1":
        Image.new("1", (40, 40), 1).save(file)
    elif mode == "PA":
        plain.convert("P").convert("PA").save(file)
    else:
        plain.convert(mode).save(file)
    found = decode(file, Crop(32, 32))
    assert found.shape == (32, 32, 3)
    assert np.abs(found.astype(int) - expected).max() <= 4


def test_a_photograph_is_decoded_without_copies_of_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = saved(tmp_path / "x.jpg", smooth(300, 401))
    expected = decode(file, PHOTOGRAPH)

    def refused(image: Image.Image) -> Image.Image:
        raise AssertionError(f"{image} is copied")

    monkeypatch.setattr(Image.Image, "copy", refused)
    assert np.array_equal(decode(file, PHOTOGRAPH), expected)


@pytest.mark.parametrize("name", ["x.jpg", "x.png"])
def test_a_file_that_is_too_large_for_memory_is_read_in_pieces(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = saved(tmp_path / name, smooth(300, 401))
    expected = decode(file, PHOTOGRAPH)
    assert read_all(file) is not None
    monkeypatch.setattr("escalade_apps.classify.images._MAX_SINGLE_READ", 1000)
    assert read_all(file) is None and np.array_equal(decode(file, PHOTOGRAPH), expected)


@pytest.mark.parametrize("transparency", [0, bytes((0, 128, 255))])
def test_a_palette_with_transparency_keeps_its_colors(transparency: object, tmp_path: pathlib.Path) -> None:
    image = Image.new("P", (32, 32), 2)
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    image.paste(0, (0, 0, 16, 32))
    image.save(tmp_path / "x.png", transparency=transparency)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = decode(tmp_path / "x.png", Crop(32, 32))
    assert found[0, 0].tolist() == [10, 20, 30] and found[0, 31].tolist() == [70, 80, 90]


@pytest.mark.parametrize("suffix", ["gif", "tif", "webp", "png"])
def test_of_several_frames_the_first_counts(suffix: str, tmp_path: pathlib.Path) -> None:
    if suffix == "webp" and not features.check("webp"):
        pytest.skip("this Pillow knows no WebP")
    first, *others = (Image.new("RGB", (32, 32), (shade, shade, shade)) for shade in (200, 100, 50))
    first.save(tmp_path / f"x.{suffix}", save_all=True, append_images=others)
    assert np.abs(decode(tmp_path / f"x.{suffix}", Crop(32, 32)).astype(int) - 200).max() <= 3


def test_an_image_that_would_fill_the_memory_is_refused(tmp_path: pathlib.Path) -> None:
    file = saved(tmp_path / "x.png", smooth(40, 40))
    contents = bytearray(file.read_bytes())
    contents[16:24] = struct.pack(">II", 200_000, 200_000)
    contents[29:33] = struct.pack(">I", zlib.crc32(contents[12:29]))
    file.write_bytes(contents)
    (found,) = decode_all([file], PHOTOGRAPH, ahead=1)
    assert isinstance(found, Unreadable) and re.search(r"more than [\d,]+ pixels", found.reason)


def test_a_missing_file_is_not_waited_for(tmp_path: pathlib.Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "pipe.png")
    (tmp_path / "folder" / "dangling.png").symlink_to("nowhere")
    (tmp_path / "folder" / "folder.png").mkdir()
    files, closed = find([tmp_path / "folder", pathlib.Path("/dev/null")])
    assert not closed
    reasons = {
        each.file.name: each.reason
        for each in decode_all(files, PHOTOGRAPH, 1)
        if isinstance(each, Unreadable)
    }
    assert reasons == {
        "pipe.png": "not a regular file", "dangling.png": "no such file", "null": "not a regular file",
    }  # fmt: skip


def test_a_folder_that_cannot_be_opened_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/1.png", "closed/2.png", "z/3.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    files, closed = find([tmp_path])
    assert [file.name for file in files] == ["1.png", "3.png"]
    assert closed == [Unreadable(tmp_path / "closed", "the folder cannot be opened: Permission denied")]
    with pytest.raises(
        UnsupportedError, match="no images in .*closed: the folder cannot be opened: Permission denied"
    ):
        find([tmp_path / "closed"])


def test_images_come_in_order_and_damaged_ones_in_their_place(tmp_path: pathlib.Path) -> None:
    files = [
        saved(tmp_path / f"{number:02}.jpg", np.full((40, 50, 3), 10 * number, np.uint8))
        for number in range(20)
    ]
    whole = files[3].read_bytes()
    files[3].write_bytes(whole[: len(whole) // 2])
    files[7].write_text("no image at all")
    files[9] = tmp_path / "missing.jpg"
    files[11] = saved(tmp_path / "thin.png", np.zeros((20000, 1, 3), np.uint8))
    found = list(decode_all(files, PHOTOGRAPH, ahead=4))
    assert [each.file for each in found] == files
    reasons = {number: each.reason for number, each in enumerate(found) if isinstance(each, Unreadable)}
    assert reasons.keys() == {3, 7, 9, 11}
    assert (
        "truncated" in reasons[3].lower() and "Pillow supports" in reasons[7] and "no such file" in reasons[9]
    )
    assert "20000 pixels resize to" in reasons[11]
    for number, each in enumerate(found):
        if isinstance(each, DecodedImage):
            assert abs(int(each.pixels.mean()) - 10 * number) <= 2


def test_every_core_has_a_share_of_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("escalade_apps.classify.reading.cores", lambda: 4)
    for count, sizes in ((3, [1] * 3), (9, [2, 2, 2, 2, 1]), (100, [16] * 6 + [4])):
        parts = list(chunks(range(count), 16))
        assert [len(part) for part in parts] == sizes
        assert [each for part in parts for each in part] == list(range(count))


def test_closing_early_leaves_no_thread(tmp_path: pathlib.Path) -> None:
    file = saved(tmp_path / "x.png", smooth(40, 40))
    pictures = decode_all([file] * 1000, Crop(32, 32), ahead=8)
    next(pictures)
    pictures.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("escalade-decode")]
