"""Folders of results, without a cluster: their inputs, progress, and write errors."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from escalade.engine import compile
from escalade.errors import LaunchError, UnsupportedError
from escalade_apps.classify.images import Crop, decode
from escalade_apps.classify.prediction import example
from tests.ray.networks import SIDE, picture

pytest.importorskip("ray", reason="Ray is not installed: pip install 'escalade[ray]'")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install 'escalade[ray]'")
fs = pytest.importorskip("pyarrow.fs", reason="pyarrow is not installed: pip install 'escalade[ray]'")

from escalade_apps.ray import Job, Network, Part, Predictor  # noqa: E402
from escalade_apps.ray.attempts import MAX_CRASHES, Attempts  # noqa: E402
from escalade_apps.ray.jobs import MANIFEST, ShardWriter, _finished_parts  # noqa: E402
from escalade_apps.ray.storage import Folder, find  # noqa: E402

IMAGES = 6


@pytest.fixture
def images(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(IMAGES):
        picture(number).save(folder / f"{number}.png")
    return folder


def constructed(mean: float = 0.0, labels: tuple[str, ...] = ("a", "b", "c")) -> Network:
    """A network without a file, compiled anew."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, SIDE), nn.Flatten()).eval()
    crop = Crop(SIDE, SIDE)
    normalize = (mean, mean, mean), (1.0, 1.0, 1.0)
    engine = compile(model, example(2, crop), dtype="fp32", device="cpu", normalize=normalize)
    return Network.of(engine, crop, labels, "small", "module:small")


def test_the_same_network_recompiled_continues(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
    one, two = constructed(), constructed()
    assert (one.sha256, one.fingerprint) == (two.sha256, two.fingerprint)
    for network in (one, two):
        assert Job([images], tmp_path / "results", network, shard=2).left == [0, 1, 2]


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (lambda network: constructed(mean=0.5), "network is .* there and .* now"),
        (lambda network: constructed(labels=("a", "b", "d")), "labels is .* there and .* now"),
        (lambda network: dataclasses.replace(network, crop=Crop(2 * SIDE, SIDE)), r"crop is \[8, 8\] there"),
        (lambda network: dataclasses.replace(network, sha256="0"), "sha256 is .* there and 0 now"),
        (lambda network: dataclasses.replace(network, dtype="fp16"), "dtype is fp32 there and fp16 now"),
    ],
)
def test_another_network_is_another_job(
    images: pathlib.Path, tmp_path: pathlib.Path, other: Callable[[Network], Network], what: str
) -> None:
    """Also a network with the same weights, whose results would be mixed with those of this one."""
    network = constructed()
    Job([images], tmp_path / "results", network)
    with pytest.raises(UnsupportedError, match=f"results of another job .*{what}"):
        Job([images], tmp_path / "results", other(network))


def test_other_images_and_other_files_are_another_job(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Also the same number of images with other names, or another order: shards would have other contents."""
    network, results = constructed(), tmp_path / "results"
    names = sorted(images.iterdir())
    Job(names, results, network, shard=2, top=3)
    other = images / "other.png"
    for given, settings, what in (
        ([*names[:-1], other], {}, "list is .* there and .* now"),
        (names[::-1], {}, "list is .* there and .* now"),
        (names[:-1], {}, "images is 6 there and 5 now"),
        (names, {"shard": 3}, "shard is 2 there and 3 now"),
        (names, {"top": 2}, "top is 3 there and 2 now"),
        (names, {"form": "csv"}, "format is parquet there and csv now"),
    ):
        with pytest.raises(UnsupportedError, match=f"results of another job .*{what}"):
            Job(given, results, network, **({"shard": 2, "top": 3} | settings))
    known = json.loads((results / MANIFEST).read_text())
    assert known.keys() == {
        "images", "list", "shard", "top", "format", "sha256", "dtype", "network", "crop", "labels",
    }  # fmt: skip


def test_rows_are_the_likeliest_classes_first(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
    network, results = constructed(), tmp_path / "results"
    (images / "3.png").write_text("no image")
    job = Job([images], results, network, batch=3, top=2, shard=4)
    assert [len(each) for each in job._shards] == [4, 2] and job.images == job.images_left == IMAGES
    writer = ShardWriter(job._factory, str(results), "parquet")
    for number, shard in enumerate(job._shards):
        paths = np.array([os.fsencode(each) for each in shard], object)
        done = writer({"path": paths, "shard": np.array([number] * len(shard))})
        assert list(_finished_parts(done)) == [Part(number, len(shard), int(number == 0))]
        rows = pq.read_table(results / f"part-{number:08}.parquet").to_pylist()
        assert {row["shard"] for row in rows} == {number}
        readable = [path for path in shard if not path.endswith("3.png")]
        x = torch.tensor(np.stack([decode(pathlib.Path(path), network.crop) for path in readable]))
        chances = network.engine("cpu")(x.permute(0, 3, 1, 2)).softmax(1).topk(2)
        for place, path in enumerate(readable):
            guesses = [row for row in rows if row["file"] == path]
            assert [row["rank"] for row in guesses] == [1, 2]
            assert [row["class"] for row in guesses] == chances.indices[place].tolist()
            assert [row["label"] for row in guesses] == [network.labels[row["class"]] for row in guesses]
            assert [row["probability"] for row in guesses] == pytest.approx(chances.values[place].tolist())
            assert all(row["unreadable"] is None and row["dtype"] == "fp32" for row in guesses)
    assert Job([images], results, network, batch=2, top=2, shard=4).left == []


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_a_shard_that_is_not_whole_is_not_done(
    images: pathlib.Path, tmp_path: pathlib.Path, form: str
) -> None:
    network, results = constructed(), tmp_path / "results"

    def asked() -> Job:
        return Job([images], results, network, shard=2, form=form)

    job = asked()
    writer = ShardWriter(job._factory, str(results), form)
    for number in range(3):
        paths = np.array([os.fsencode(each) for each in job._shards[number]], object)
        done = writer({"path": paths, "shard": np.array([number] * 2)})
        assert done == {"shard": [number], "images": [2], "unreadable": [0], "failure": [""]}
    assert asked().left == [] and not list((results / "_unfinished").iterdir())
    cut, empty = results / f"part-00000001.{form}", results / f"part-00000002.{form}"
    cut.write_bytes(cut.read_bytes()[:-9])
    empty.write_bytes(b"")
    assert asked().left == [1, 2]


def test_an_image_that_ends_every_process_is_unreadable(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Work in flight when a process dies is retried in smaller parts, and finally an image is given up."""
    network, results, poison = constructed(), tmp_path / "results", 3
    job = Job([images], results, network, batch=2)
    rows = {
        "path": np.array([os.fsencode(each) for each in job._shards[0]], object),
        "shard": np.array([0] * IMAGES),
    }
    folder, name = Folder(results), "part-00000000.parquet"
    ended = []
    while True:  # until a worker reaches the end of the shard, except for writing it
        attempts = Attempts.of(folder, name, IMAGES, 2)
        pieces = attempts.ranges()
        at = next(
            (piece for piece, given_up in pieces if not given_up and piece[0] <= poison < piece[1]), None
        )
        if at is None:
            break
        ended.append(at)
    assert ended == [(0, 6), (2, 4), (3, 4), (3, 4)]
    (results / "_unfinished" / f"{name}.0123456789abcdef").touch()  # as a killed worker may leave
    (results / "_unfinished" / "mine").touch()
    again = Job([images], results, network, batch=2)
    (done,) = _finished_parts(ShardWriter(again._factory, str(results), "parquet")(rows))
    assert done == Part(0, IMAGES, 1)
    table = pq.read_table(results / name).to_pylist()
    (given_up,) = [row for row in table if row["unreadable"]]
    assert (
        given_up["file"] == str(images / f"{poison}.png")
        and "2 worker processes crashed" in given_up["unreadable"]
    )
    assert len({row["file"] for row in table}) == IMAGES
    assert [*Job([images], results, network, batch=2).run()] == []
    assert [each.name for each in (results / "_unfinished").iterdir()] == ["mine"]


def test_a_network_that_ends_every_process_is_given_up(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = Folder(tmp_path)
    folder.make()
    for _ in range(MAX_CRASHES + 1):
        Attempts.of(folder, "part", IMAGES, 2).load()
    with pytest.raises(LaunchError, match="crashed 3 times while loading the network"):
        Attempts.of(folder, "part", IMAGES, 2).load()
    folder.note("part", b"[[0, 6], [2")  # a process may end in the middle of a note
    assert [*Attempts.of(folder, "part", IMAGES, 2).ranges()] == [((0, 6), False)]


@pytest.mark.parametrize("junk", ["", "[]", "\udcff", "[" * 100_000, "null"])
def test_empty_records_are_refused(images: pathlib.Path, tmp_path: pathlib.Path, junk: str) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / MANIFEST).write_text(junk, errors="surrogateescape")
    with pytest.raises(UnsupportedError, match="not a valid manifest"):
        Job([images], tmp_path / "results", constructed())


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "3"])
@pytest.mark.parametrize("name", ["shard", "batch", "top", "workers"])
def test_numbers_that_are_none_are_named(
    images: pathlib.Path, tmp_path: pathlib.Path, name: str, wrong: Any
) -> None:
    with pytest.raises(UnsupportedError, match=f"^{name}={wrong!r}: must be an integer"):
        Job([images], tmp_path / "results", constructed(), **{name: wrong})
    if name in ("batch", "top"):
        with pytest.raises(UnsupportedError, match=f"^{name}={wrong!r}"):
            Predictor(constructed(), device="cpu", **{name: wrong})
    assert not (tmp_path / "results").exists()


def test_names_of_which_none_is_there_begin_no_job(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
    gone = tmp_path / "gone.png"
    for names in ([gone], [str(gone), gone.as_uri()], [gone.as_uri()]):
        with pytest.raises(UnsupportedError, match=r"no such file: .*gone\.png"):
            Job(names, tmp_path / "results", constructed())
    with pytest.raises(UnsupportedError, match="the list of images is empty"):
        find([])
    with pytest.raises(UnsupportedError, match="pass a list of paths and URIs"):
        find(str(images))
    assert not (tmp_path / "results").exists()
    assert find([gone, images])[0] == [str(gone), *sorted(map(str, images.iterdir()))]


def test_a_name_that_is_no_utf8_has_a_path_and_no_uri(images: pathlib.Path) -> None:
    try:
        pathlib.Path(os.fsdecode(os.fsencode(images) + b"/\xff.png")).touch()
    except OSError:
        pytest.skip("this file system takes UTF-8 alone")
    assert len(find([images])[0]) == IMAGES + 1
    with pytest.raises(UnsupportedError, match="a name that is not UTF-8"):
        find([images.as_uri()])


def test_of_two_that_begin_at_once_one_is_first(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = Folder(tmp_path / "results"), Folder(tmp_path / "results")
    one.make()
    reads, looked_too_early = two.read, iter([None])
    monkeypatch.setattr(two, "read", lambda name: next(looked_too_early, reads(name)))
    assert one.write_once("x", b"one") == two.write_once("x", b"two") == b"one"
    assert not list((tmp_path / "results" / "_unfinished").iterdir())
    memory = Folder("fsspec+memory://once")
    memory.make()
    assert memory.write_once("x", b"one") == memory.write_once("x", b"two") == b"one"


class Full:
    """A full file system."""

    def __init__(self) -> None:
        self._local = fs.LocalFileSystem()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._local, name)

    def open_output_stream(self, path: str) -> Any:
        pathlib.Path(path).touch()
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_a_sentence_and_leaves_nothing(
    images: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job([images], tmp_path / "results", constructed())
    writer = ShardWriter(job._factory, str(tmp_path / "results"), "parquet")
    monkeypatch.setattr(writer._folder, "_filesystem", Full())
    done = writer({"path": np.array(job._shards[0], object), "shard": np.array([0] * IMAGES)})
    assert "results cannot be written: " in done["failure"][0] and "No space left" in done["failure"][0]
    with pytest.raises(LaunchError, match="No space left on device"):
        list(_finished_parts(done))
    assert not list((tmp_path / "results" / "_unfinished").iterdir())
    assert json.loads((tmp_path / "results" / MANIFEST).read_text())["images"] == IMAGES
    monkeypatch.setattr(Folder, "make", lambda folder: setattr(folder, "_filesystem", Full()))
    with pytest.raises(UnsupportedError, match="other cannot be written: .*No space left"):
        (tmp_path / "other" / "_unfinished").mkdir(parents=True)
        Job([images], tmp_path / "other", constructed())


def test_a_workers_refusal_is_reported_with_its_sentence(
    images: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    job = Job([images], tmp_path / "results", constructed(), device="nowhere")
    done = ShardWriter(job._factory, str(tmp_path / "results"), "csv")(
        {"path": np.array(job._shards[0], object), "shard": np.array([0] * IMAGES)}
    )
    with pytest.raises(LaunchError, match="device 'nowhere': engines run on"):
        list(_finished_parts(done))


def test_a_batch_that_ended_a_process_is_retried_in_smaller_parts() -> None:
    folder: Any = None
    for ended, wanted in (
        ([], [(0, 5)]),
        ([(0, 5)], [(0, 2), (2, 4), (4, 5)]),
        ([(0, 5), (2, 4)], [(0, 2), (2, 3), (3, 4), (4, 5)]),
    ):
        assert [*Attempts(folder, "shard", 5, 2, ended)._split((0, 5))] == wanted
