"""Datasets as downloaded: read in full, or refused with a sentence."""

from __future__ import annotations

import gzip
import os
import pathlib
import pickle
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image

from escalade.errors import UnsupportedError
from escalade_apps.train.data import Dataset, Images, read
from escalade_apps.train.data.images import split

RANDOM = np.random.default_rng(1)
PIXELS = RANDOM.integers(0, 256, (12, 3, 32, 32), np.uint8)
LABELS = RANDOM.integers(0, 10, 12)


def dataset(where: object, side: int = 8, held_out: float = 0.25, seed: int = 0) -> Dataset:
    return read(str(where), side=side, held_out=held_out, seed=seed)


def refused(where: object, *said: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        dataset(where)
    assert all(text in str(error.value) for text in said), str(error.value)
    assert len(str(error.value).splitlines()) == 1


def write_binary(folder: pathlib.Path) -> None:
    records = np.concatenate([LABELS[:, None].astype(np.uint8), PIXELS.reshape(12, -1)], 1)
    for number in range(6):
        name = f"data_batch_{number + 1}.bin" if number < 5 else "test_batch.bin"
        (folder / name).write_bytes(records[2 * number : 2 * number + 2].tobytes())


def write_pickled(folder: pathlib.Path, protocol: int) -> None:
    for number in range(6):
        some = slice(2 * number, 2 * number + 2)
        batch = {b"data": PIXELS[some].reshape(2, -1), b"labels": [int(label) for label in LABELS[some]]}
        name = f"data_batch_{number + 1}" if number < 5 else "test_batch"
        (folder / name).write_bytes(pickle.dumps(batch, protocol))


@pytest.mark.parametrize("protocol", [None, 2, 5])
def test_cifar_is_read_in_both_versions(tmp_path: pathlib.Path, protocol: int | None) -> None:
    folder = tmp_path / ("cifar-10-batches-bin" if protocol is None else "cifar-10-batches-py")
    folder.mkdir()
    if protocol is None:
        write_binary(folder)
    else:
        write_pickled(folder, protocol)
    for where in (tmp_path, folder):
        found = dataset(where)
        pixels = torch.cat([found.train.pixels, found.test.pixels]).permute(0, 3, 1, 2)
        assert (len(found.train), len(found.test), found.train.classes) == (10, 2, 10)
        assert torch.equal(pixels, torch.from_numpy(PIXELS))
        assert found.train.labels is not None and found.train.labels.tolist() == LABELS[:10].tolist()


class Command:
    """Unpickling it runs a command."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_runs_nothing(tmp_path: pathlib.Path) -> None:
    write_pickled(tmp_path, 2)
    first = tmp_path / "data_batch_1"
    first.write_bytes(pickle.dumps({"data": Command(tmp_path / "made"), "labels": [1]}))
    refused(tmp_path, "data_batch_1 cannot be read", "mkdir", "only arrays are read")
    assert not (tmp_path / "made").exists()
    for damaged, said in (
        (pickle.dumps({"data": PIXELS[:2].reshape(2, -1), "labels": [1]}), "2 images and 1 labels"),
        (
            pickle.dumps({"data": PIXELS[:1].reshape(1, -1).astype(float), "labels": [1]}),
            "rows of 3,072 bytes",
        ),
        (pickle.dumps([1, 2]), "without the `data` and `labels`"),
        (pickle.dumps({"data": PIXELS[:2].reshape(2, -1), "labels": [1, 10]}), "a class 10"),
        (b"\x80\x05garbage", "cannot be read"),
    ):
        first.write_bytes(damaged)
        refused(tmp_path, "data_batch_1", said)
    write_pickled(tmp_path, 2)
    first.write_bytes(first.read_bytes()[:-100])
    refused(tmp_path, "data_batch_1 cannot be read", "truncated")


def test_a_binary_file_that_is_not_whole_is_refused(tmp_path: pathlib.Path) -> None:
    write_binary(tmp_path)
    (tmp_path / "data_batch_4.bin").write_bytes(b"\x01" * 3072)
    refused(tmp_path, "data_batch_4.bin has 3,072 bytes", "truncated or another file")
    (tmp_path / "data_batch_4.bin").write_bytes(b"\x63" * 3073)
    refused(tmp_path, "data_batch_4.bin has a class 99")
    (tmp_path / "data_batch_4.bin").unlink()
    refused(tmp_path, "has no data_batch_4.bin")


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def test_idx_files_are_read_packed_or_not(tmp_path: pathlib.Path) -> None:
    grey, labels = PIXELS[:, 0, :28, :28], LABELS.astype(np.uint8)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(grey))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    (tmp_path / "t10k-images.idx3-ubyte").write_bytes(idx(grey[:2]))
    refused(tmp_path, "no t10k-labels")
    (tmp_path / "t10k-labels.idx1-ubyte").write_bytes(idx(labels[:2]))
    found = dataset(tmp_path)
    assert found.train.pixels.shape == (12, 28, 28, 1) and len(found.test) == 2
    assert found.train.pixels.numpy().tobytes() == grey.tobytes()

    (tmp_path / "t10k-labels.idx1-ubyte").write_bytes(idx(labels[:2] * 0 + 77))
    refused(tmp_path, "78 classes in its test images")
    (tmp_path / "t10k-images.idx3-ubyte").write_bytes(idx(grey[:2, :8]))
    refused(tmp_path, "(28, 28, 1)", "(8, 28, 1)")
    images = tmp_path / "train-images-idx3-ubyte"
    for damaged, said in (
        (idx(grey)[:-1], "is truncated: the sizes 12x28x28 need 9,408 bytes, and it has 9,407"),
        (idx(grey) + b"\0", "longer than its header says"),
        (idx(grey)[:9], "truncated in its header"),
        (b"\x89PNG etc", "is not an IDX file"),
        (idx(labels), "with 1 dimensions"),
        (gzip.compress(idx(grey))[:-9], "cannot be read as an IDX file"),
        (idx(grey[:3]), "3 images and"),
        (idx(np.concatenate((grey, grey[:1]))), "13 images and"),
    ):
        images.write_bytes(damaged)
        refused(tmp_path, "train-images-idx3-ubyte", said)


def test_a_folder_a_class(tmp_path: pathlib.Path) -> None:
    for name, colour in (("cats", (250, 0, 0)), ("dogs", (0, 0, 250))):
        (tmp_path / name).mkdir()
        for number in range(4):
            Image.new("RGB", (9 + number, 12), colour).save(tmp_path / name / f"{number}.png")
    found = dataset(tmp_path)
    assert (len(found.train), len(found.test), found.train.classes) == (6, 2, 2)
    for part in (found.train, found.test):
        assert part.labels is not None and part.pixels.shape[1:] == (8, 8, 3)
        assert torch.equal(part.pixels[:, 0, 0, 2] == 250, part.labels == 1)
    (tmp_path / "cats" / "9.jpg").write_bytes(b"no image")
    refused(tmp_path, "1 of 9 images", "9.jpg: not an image")


def test_archives_of_arrays(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "some.npz"
    np.savez(path, x=PIXELS.transpose(0, 2, 3, 1), y=LABELS)
    found = dataset(path, held_out=0)
    assert torch.equal(found.train.pixels, found.test.pixels) and len(found.train) == 12
    np.savez(path, x=PIXELS.astype(np.float32))
    refused(path, "needs an array x of uint8")
    np.savez(path, x=PIXELS.transpose(0, 2, 3, 1), y=LABELS[:3])
    refused(path, "a class index for each of the 12 images")
    path.write_bytes(b"PK no archive")
    refused(path, "cannot be read as an .npz archive")


def test_images_held_out_are_not_trained_on() -> None:
    images = Images(torch.arange(40, dtype=torch.uint8).view(40, 1, 1, 1), torch.arange(40), 40)
    parts = [split("numbers", images, 0.25, seed) for seed in (0, 0, 1)]
    for each in parts:
        assert (len(each.train), len(each.test)) == (30, 10)
        found = torch.cat([each.train.pixels, each.test.pixels]).flatten()
        assert sorted(found.tolist()) == list(range(40))
        for part in (each.train, each.test):
            assert part.labels is not None and part.labels.tolist() == part.pixels.flatten().tolist()
            assert part.labels.tolist() == sorted(part.labels.tolist())
    assert torch.equal(parts[0].test.pixels, parts[1].test.pixels)
    assert not torch.equal(parts[0].test.pixels, parts[2].test.pixels)
    assert images.select(torch.tensor([2, 1])).checksum() != images.select(torch.tensor([1, 2])).checksum()
    assert images.checksum() != Images(images.pixels, torch.arange(1, 41), 41).checksum()


def test_a_folder_may_have_a_part_to_test_by(tmp_path: pathlib.Path) -> None:
    """Classes are those of the training split, in alphabetical order, whatever the other split lacks."""
    colors = {"ant": (250, 0, 0), "bee": (0, 250, 0), "cat": (0, 0, 250)}
    for part, names in (("train", ("cat", "ant", "bee")), ("val", ("cat",))):
        for name in names:
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (9, 9), colors[name]).save(tmp_path / part / name / "1.png")
    found = dataset(tmp_path)
    for images, labels in ((found.train, [0, 1, 2]), (found.test, [2])):
        assert images.labels is not None and images.labels.tolist() == labels and images.classes == 3
        assert images.pixels[:, 0, 0].argmax(1).tolist() == labels


def test_a_folder_without_a_dataset_gets_advice(tmp_path: pathlib.Path) -> None:
    refused(tmp_path / "nowhere", "nowhere does not exist", "CIFAR-10")
    refused(tmp_path, "is not a dataset", "IDX files")
    refused("synthetic:many", "synthetic:many")


def test_synthetic_images_are_the_same_every_time_and_have_classes() -> None:
    first, again, other = dataset("synthetic:100"), dataset("synthetic:100"), dataset("synthetic:100", seed=1)
    assert first.train.checksum() == again.train.checksum() != other.train.checksum()
    assert first.train.checksum() != first.test.checksum()
    assert first.train.labels is not None and first.train.labels.bincount().tolist() == [10] * 10
