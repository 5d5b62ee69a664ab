"""Image files: which are found, and whether their pixels are what torchvision's transforms give."""

from __future__ import annotations

import pathlib
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from escalade.classify.images import Crop, Picture, Unreadable, decode, decode_all, find
from escalade.errors import UnsupportedError

PHOTOGRAPH = Crop(256, 224)


def smooth(height: int, width: int) -> np.ndarray:
    """Something with a direction, and no two channels alike."""
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
    found = find([tmp_path / "odd.name", tmp_path / "b", tmp_path / "a.webp"])
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        "odd.name", "b/1.png", "b/2.JPG", "b/deeper/0.jpeg", "a.webp",
    ]  # fmt: skip
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedError, match="there are no images in .*empty; files that end in"):
        find([tmp_path / "empty"])


@pytest.mark.parametrize(("height", "width"), [(300, 401), (401, 300), (256, 256), (100, 177), (1000, 700)])
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


def test_photographs_are_turned_upright(tmp_path: pathlib.Path) -> None:
    pixels = smooth(224, 224)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera lay on its side: turn by 90 degrees clockwise
    file = saved(tmp_path / "x.png", np.ascontiguousarray(np.rot90(pixels)), exif=exif)
    assert np.array_equal(decode(file, Crop(224, 224)), pixels)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16"])
def test_every_kind_of_image_becomes_rgb(mode: str, tmp_path: pathlib.Path) -> None:
    image = Image.new("L", (40, 40)) if mode == "I;16" else Image.fromarray(smooth(40, 40))
    file = tmp_path / ("x.tif" if mode == "CMYK" else "x.png")
    image.convert(mode).save(file)
    assert decode(file, Crop(32, 32)).shape == (32, 32, 3)


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
    assert "truncated" in reasons[3].lower() and "Pillow knows" in reasons[7] and "no such file" in reasons[9]
    assert "20000 pixels become" in reasons[11]
    for number, each in enumerate(found):
        if isinstance(each, Picture):
            assert abs(int(each.pixels.mean()) - 10 * number) <= 2


def test_closing_early_leaves_no_thread(tmp_path: pathlib.Path) -> None:
    file = saved(tmp_path / "x.png", smooth(40, 40))
    pictures = decode_all([file] * 1000, Crop(32, 32), ahead=8)
    next(pictures)
    pictures.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("escalade-decode")]
