"""Class names: from files, from torchvision, or none."""

from __future__ import annotations

import os
import pathlib
import sys
import types

import pytest

from escalade.errors import UnsupportedError
from escalade_apps.classify.labels import class_labels


def written(path: pathlib.Path, text: str) -> pathlib.Path:
    path.write_text(text)
    return path


def test_a_line_each_or_a_json_list(tmp_path: pathlib.Path) -> None:
    assert class_labels(3, written(tmp_path / "l.txt", "cat\ngreat dog \nbird\n\n")) == [
        "cat",
        "great dog",
        "bird",
    ]
    assert class_labels(2, written(tmp_path / "l.json", '["cat", "dog, great"]')) == ["cat", "dog, great"]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("l.txt", "cat\ndog\n", "has 2 labels; the network has 3 classes"),
        ("l.json", '["cat", "dog"]', "has 2 labels; the network has 3 classes"),
        ("l.json", '["cat", 3, 4]', "a list of strings"),
        ("l.json", '{"0": "cat"}', "a list of strings"),
        ("l.json", '["cat", ', "is not JSON"),
        ("l.json", "[" * 100_000, "is not JSON.*nested"),
    ],
)
def test_mistakes_are_named(name: str, text: str, sentence: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        class_labels(3, written(tmp_path / name, text))


def test_a_file_that_is_not_there_or_no_text(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot be read as labels"):
        class_labels(3, tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    os.mkfifo(tmp_path / "pipe")
    for name in ("binary", "pipe"):
        with pytest.raises(UnsupportedError, match="cannot be read as labels"):
            class_labels(3, tmp_path / name)


def test_imagenet_has_torchvisions_class_names_if_available(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"thing {number}" for number in range(1000)]
    weights = types.SimpleNamespace(IMAGENET1K_V1=types.SimpleNamespace(meta={"categories": names}))
    module = types.ModuleType("torchvision.models")
    module.ResNet18_Weights = weights  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", module)
    assert class_labels(1000, None) == names
    assert class_labels(3, None) == ["0", "1", "2"]
    monkeypatch.setitem(sys.modules, "torchvision.models", None)  # importing it fails
    assert class_labels(1000, None)[999] == "999"
