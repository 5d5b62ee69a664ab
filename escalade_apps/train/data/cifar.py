"""CIFAR-10 as its authors publish it: the binary version, and the Python version, of which no code is run."""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from escalade import files
from escalade.errors import UnsupportedError
from escalade.terminal_text import printable
from escalade_apps.train.data.images import Images

CLASSES, SIDE, CHANNELS = 10, 32, 3
_PIXELS = CHANNELS * SIDE * SIDE
_RECORD = 1 + _PIXELS
TRAINING, TESTING = tuple(f"data_batch_{number}" for number in range(1, 6)), ("test_batch",)


def read_binary(folder: pathlib.Path, names: tuple[str, ...]) -> Images:
    """Files of records: a byte with the class, then red, green and blue, a plane each."""
    return _joined([_binary(folder / f"{name}.bin") for name in names])


def read_pickled(folder: pathlib.Path, names: tuple[str, ...]) -> Images:
    """Files of Python's pickle with a dictionary: `data`, a row an image, and `labels`."""
    return _joined([_pickled(folder / name) for name in names])


def _binary(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    contents = _contents(path)
    if not contents or len(contents) % _RECORD:
        raise UnsupportedError(
            f"{printable(path)} has {len(contents):,} bytes, and CIFAR-10's binary version has {_RECORD:,} for each "
            "image: it is truncated or something else"
        )
    records = np.frombuffer(contents, np.uint8).reshape(-1, _RECORD)
    return records[:, 1:], _labels(path, records[:, 0])


def _pickled(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        found = _Reader(io.BytesIO(_contents(path)), encoding="bytes").load()
    except UnsupportedError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to ask for
        raise UnsupportedError(
            f"{printable(path)} cannot be read as CIFAR-10's Python version, it is truncated or something else: "
            f"{printable(str(error) or type(error).__name__)}"
        ) from error
    entries = {_text(name): value for name, value in found.items()} if isinstance(found, Mapping) else {}
    data, labels = entries.get("data"), entries.get("labels")
    if not isinstance(data, _Array) or not isinstance(labels, list):
        raise UnsupportedError(f"{printable(path)} is a pickle without the `data` and `labels` of CIFAR-10")
    pixels = data.as_numpy(path)
    if len(pixels) != len(labels):
        raise UnsupportedError(f"{printable(path)} has {len(pixels)} images and {len(labels)} labels")
    if not all(isinstance(label, int) for label in labels):
        raise UnsupportedError(f"{printable(path)} has labels that are no whole numbers")
    return pixels, _labels(path, np.asarray(labels, np.int64))


def _contents(path: pathlib.Path) -> bytes:
    contents = files.read(path)
    if contents is None:
        raise UnsupportedError(
            f"{printable(path.parent)} has no {path.name}, and CIFAR-10 is not whole without it"
        )
    return contents


def _labels(path: pathlib.Path, labels: np.ndarray) -> np.ndarray:
    wrong = labels[(labels < 0) | (labels >= CLASSES)]
    if len(wrong):
        raise UnsupportedError(
            f"{printable(path)} has a class {wrong[0]}, and CIFAR-10 has {CLASSES}: it is damaged or something else"
        )
    return labels.astype(np.int64)


def _joined(parts: list[tuple[np.ndarray, np.ndarray]]) -> Images:
    planes = np.concatenate([pixels for pixels, _ in parts]).reshape(-1, CHANNELS, SIDE, SIDE)
    labels = np.concatenate([labels for _, labels in parts])
    pixels = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
    return Images(torch.from_numpy(pixels), torch.from_numpy(labels), CLASSES)


def _text(name: Any) -> Any:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


class _Dtype:
    """An array's dtype in a pickle: its name is all that is kept."""

    def __init__(self, name: Any = "", *rest: Any) -> None:
        self.name = _text(name)

    def __setstate__(self, state: Any) -> None: ...


class _Array:
    """An array in a pickle: bytes and what they mean, of which numpy makes nothing before they are looked at."""

    shape: Any = ()
    dtype: Any = None
    contents: Any = b""

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.dtype, by_columns, self.contents = state
        if by_columns:
            raise pickle.UnpicklingError("its pixels lie column by column")

    def as_numpy(self, path: pathlib.Path) -> np.ndarray:
        """Rows of pixels, if it is that."""
        shape = tuple(self.shape) if isinstance(self.shape, tuple | list) else ()
        rows = shape[0] if len(shape) == 2 and shape[1] == _PIXELS else -1
        if not isinstance(self.dtype, _Dtype) or self.dtype.name not in ("u1", "uint8") or rows < 0:
            raise UnsupportedError(f"{printable(path)}: CIFAR-10's images are rows of {_PIXELS:,} bytes")
        if not isinstance(self.contents, bytes | bytearray) or len(self.contents) != rows * _PIXELS:
            raise UnsupportedError(f"{printable(path)} is truncated: it says that there are {rows} images")
        return np.frombuffer(self.contents, np.uint8).reshape(rows, _PIXELS)


def _empty_array(*_: Any) -> _Array:
    return _Array()


def _filled_array(contents: Any, dtype: Any, shape: Any, order: Any = "C", *_: Any) -> _Array:
    made = _Array()
    made.__setstate__((1, shape, dtype, order != "C", contents))
    return made


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    """Bytes, which pickles of old protocols spell as text."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for text in {encoding!r}")
    return text.encode("latin1")


_MEANT: dict[tuple[str, str], Callable[..., Any]] = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _empty_array for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _filled_array for core in ("core", "_core")},
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encoded,
}
"""What a pickle of arrays names, and what is called in its place."""


class _Reader(pickle.Unpickler):
    """A pickle is a program. This one can make lists, dictionaries, numbers, texts and arrays, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _MEANT:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, and only arrays are read from pickles"
            )
        return _MEANT[module, name]
