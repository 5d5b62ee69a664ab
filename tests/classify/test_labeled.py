"""LabeledImage folders: both forms, class names, and folders without labels."""

from __future__ import annotations

import pathlib

import pytest

from escalade.errors import UnsupportedError
from escalade_apps.classify.labels import LabeledImage, find_labeled, spread


def made(folder: pathlib.Path, *files: str) -> pathlib.Path:
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


def numbers(folder: pathlib.Path, classes: int, names: pathlib.Path | None = None) -> dict[str, int]:
    return {
        str(image.file.relative_to(folder)): image.number for image in find_labeled(folder, classes, names)
    }


def test_a_class_is_the_folder_or_how_the_file_is_named(tmp_path: pathlib.Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("n9\nn1\nn5\n")
    folders = made(
        tmp_path / "folders", "n5/a.png", "n5/deep/b.jpeg", "n9/c.JPG", "n9/notes.txt", "empty/x.txt"
    )
    assert numbers(folders, 3, names) == {"n5/a.png": 2, "n5/deep/b.jpeg": 2, "n9/c.JPG": 0}
    flat = made(tmp_path / "flat", "n1_a_cat.png", "n5_b.png", "n1_c.png")
    assert numbers(flat, 3, names) == {"n1_a_cat.png": 1, "n1_c.png": 1, "n5_b.png": 2}


def test_without_names_classes_are_numbers_or_all_there_are_in_order(tmp_path: pathlib.Path) -> None:
    by_number = made(tmp_path / "numbers", "10/a.png", "2/b.png")
    assert numbers(by_number, 11) == {"10/a.png": 10, "2/b.png": 2}
    every = made(tmp_path / "every", "dog/a.png", "cat/b.png", "eel/c.png")
    assert numbers(every, 3) == {"cat/b.png": 0, "dog/a.png": 1, "eel/c.png": 2}


def test_a_few_are_of_all_classes() -> None:
    images = [LabeledImage(pathlib.Path(str(number)), number // 10) for number in range(100)]
    assert [image.number for image in spread(images, 5)] == [0, 2, 4, 6, 8]
    assert spread(images, None) == spread(images, 1000) == images


@pytest.mark.parametrize(
    ("files", "names", "sentence"),
    [
        (("cat/a.png", "b.png"), None, "both in folders and outside of them, such as b.png"),
        (("b.png",), None, "b.png in .* has no class prefix"),
        (("cat/a.txt",), None, "no images"),
        (("cat/a.png", "dog/b.png"), None, "2 classes .cat, dog., and the network has 3; pass --classes FILE"),
        (("7/a.png", "2/b.png"), None, "labeled 7, .* the network's 3 classes"),
        (("cat/a.png", "emu/b.png"), "cat\ndog\neel", "labeled emu, .*names.txt"),
        (("cat/a.png",), "cat\ndog", "has 2 labels; the network has 3 classes"),
        (("cat/a.png",), "cat\ndog\ncat", "contains cat more than once"),
    ],
)  # fmt: skip
def test_unlabeled_folders_are_rejected(
    tmp_path: pathlib.Path, files: tuple[str, ...], names: str | None, sentence: str
) -> None:
    called = tmp_path / "names.txt"
    called.write_text(names or "")
    with pytest.raises(UnsupportedError, match=sentence):
        find_labeled(made(tmp_path / "data", *files), 3, called if names else None)


def test_a_folder_that_is_not_there_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UnsupportedError, match="gone is not a folder"):
        find_labeled(tmp_path / "gone", 3)
