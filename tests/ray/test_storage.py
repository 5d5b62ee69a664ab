"""Paths and URIs: files found, read and classified, without a cluster; and Escalade without Ray."""

from __future__ import annotations

import io
import pathlib
import socket

import numpy as np
import pytest

from escalade.errors import UnsupportedError
from escalade_apps.classify.prediction import predict
from tests import fresh
from tests.ray.networks import picture

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'escalade[ray]'")
fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed: pip install 'escalade[ray]'")

from escalade_apps.ray import Network, Predictor  # noqa: E402
from escalade_apps.ray.jobs import connected  # noqa: E402
from escalade_apps.ray.storage import Folder, find  # noqa: E402

NAMES = ("a b/1.png", "a b/2 #%20?.PNG", "c/3.png", "c/notes.txt")


def encoded(number: int) -> bytes:
    written = io.BytesIO()
    picture(number).save(written, "PNG")
    return written.getvalue()


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Images in folders, and the same in memory, as an object store like S3."""
    memory = fsspec.filesystem("memory")
    for number, name in enumerate(NAMES):
        place = tmp_path / "bucket" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(encoded(40 * number))
        if "#" not in name:  # those URIs cannot spell them
            memory.pipe(f"/bucket/{name}", encoded(40 * number))
    return tmp_path / "bucket"


def test_uris_and_paths_give_the_same(folder: pathlib.Path, network: pathlib.Path) -> None:
    predictor = Predictor(Network.read(network), device="cpu", batch=2, top=3)
    paths, closed = find([str(folder), str(folder / "c" / "3.png")])
    assert paths == [str(folder / name) for name in NAMES[:3]] and closed == []
    uris, _ = find([folder.as_uri()])
    assert uris == [(folder / name).as_uri() for name in NAMES[:3]]
    memory, _ = find(["fsspec+memory://bucket"])
    assert memory == [f"fsspec+memory://bucket/{name}" for name in (NAMES[0], NAMES[2])]

    def guesses(names: list[str], **columns: object) -> list[list[object]]:
        table = predictor({"path": np.array(names, object), **columns})  # type: ignore[dict-item]
        return [
            [row[column] for column in ("rank", "class", "probability")]
            for row in table.sort_by([("file", "ascending"), ("rank", "ascending")]).to_pylist()
        ]

    found = guesses(paths)
    engine, network_of = predictor.engine, predictor.network
    alone = predict(
        engine, [pathlib.Path(path) for path in paths], network_of.crop, network_of.labels,
        batch=2, top=3, skipped=lambda image: pytest.fail(image.reason),
    )  # fmt: skip
    assert [row[1:] for row in found] == [
        [guess.number, pytest.approx(guess.probability)] for each in alone for guess in each.guesses
    ]
    assert guesses(uris) == found
    assert guesses(memory) == found[:3] + found[6:]
    contents = np.array([encoded(0), encoded(80)], object)
    assert guesses(["gone/1", "gone/2"], bytes=contents) == found[:3] + found[6:]
    (gone,) = predictor({"path": np.array([f"{folder.as_uri()}/gone.png"], object)}).to_pylist()
    assert gone["unreadable"] == "no such file" and gone["rank"] is None


def test_folders_hold_whole_files(tmp_path: pathlib.Path) -> None:
    for folder in (
        Folder(str(tmp_path / "a")),
        Folder((tmp_path / "b c").as_uri()),
        Folder("fsspec+memory://r"),
    ):
        assert folder.names() == set() and folder.read("x") is None
        folder.make()
        folder.write("x", b"one")
        folder.write("x", b"two")
        assert folder.names() == {"x"} and folder.read("x") == b"two"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("s3://user:secret@bucket/images", "user name or password"),
        ("nosuch://bucket/images", "not a URI that pyarrow supports"),
        ("fsspec+memory://empty", "no images in|no such file"),
    ],
)
def test_unreadable_files_are_a_sentence(name: str, sentence: str) -> None:
    fsspec.filesystem("memory").makedirs("/empty", exist_ok=True)
    with pytest.raises(UnsupportedError, match=sentence) as refused:
        find([name])
    assert "secret" not in str(refused.value)


def test_an_address_without_a_server_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # another test's cluster may still run
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (
        pytest.raises(UnsupportedError, match=f"no Ray at 127.0.0.1:{port} .*refused"),
        connected(f"127.0.0.1:{port}"),
    ):
        pytest.fail("nobody is there")


def test_ray_is_imported_only_on_request(network: pathlib.Path) -> None:
    done = fresh.python(
        "-c",
        "import sys, escalade.cli, escalade.commands.classify\n"
        "assert not {'ray', 'pyarrow'} & set(sys.modules)\n"
        "sys.modules['ray'] = None\n"
        f"sys.argv = 'escalade classify . --network {network} --ray local --output results'.split()\n"
        "escalade.cli.main()",
    )
    assert done.returncode == 1 and "pip install 'escalade[ray]'" in done.stderr, done.stderr
