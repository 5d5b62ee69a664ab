"""CIFAR-10 as published: the binary version, and the Python version, unpickled without running code from it."""

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
    """Read binary files of records: one byte for the class, then a red, a green and a blue plane."""
    return _joined([_binary(folder / f"{name}.bin") for name in names])


def read_pickled(folder: pathlib.Path, names: tuple[str, ...]) -> Images:
    """Read pickle files of a dictionary: `data`, one row per image, and `labels`."""
    return _joined([_pickled(folder / name) for name in names])


def _binary(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    contents = _contents(path)
    if not contents or len(contents) % _RECORD:
        raise UnsupportedError(
            f"{printable(path)} has {len(contents):,} bytes, not a multiple of CIFAR-10's {_RECORD:,} bytes per image: "
            "it is truncated or another file"
        )
    records = np.frombuffer(contents, np.uint8).reshape(-1, _RECORD)
    return records[:, 1:], _labels(path, records[:, 0])


def _pickled(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        found = _ArrayUnpickler(io.BytesIO(_contents(path)), encoding="bytes").load()
    except UnsupportedError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise UnsupportedError(
            f"{printable(path)} cannot be read as CIFAR-10's Python version, it is truncated or another file: "
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
        raise UnsupportedError(f"{printable(path)} has labels that are not integers")
    return pixels, _labels(path, np.asarray(labels, np.int64))


def _contents(path: pathlib.Path) -> bytes:
    contents = files.read(path)
    if contents is None:
        raise UnsupportedError(
            f"{printable(path.parent)} has no {path.name}; CIFAR-10 is incomplete without it"
        )
    return contents


def _labels(path: pathlib.Path, labels: np.ndarray) -> np.ndarray:
    wrong = labels[(labels < 0) | (labels >= CLASSES)]
    if len(wrong):
        raise UnsupportedError(
            f"{printable(path)} has a class {wrong[0]}, and CIFAR-10 has {CLASSES}: it is damaged or another file"
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
    """Stand-in for np.dtype, of which only the name is kept."""

    def __init__(self, name: Any = "", *rest: Any) -> None:
        self.name = _text(name)

    def __setstate__(self, state: Any) -> None: ...


class _Array:
    """Stand-in for np.ndarray: bytes, shape and dtype, to be validated before NumPy sees them."""

    shape: Any = ()
    dtype: Any = None
    contents: Any = b""

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.dtype, is_fortran, self.contents = state
        if is_fortran:
            raise pickle.UnpicklingError("its pixels are in column-major order")

    def as_numpy(self, path: pathlib.Path) -> np.ndarray:
        """Return [images, pixels]. Raises UnsupportedError if the array is anything else."""
        shape = tuple(self.shape) if isinstance(self.shape, tuple | list) else ()
        rows = shape[0] if len(shape) == 2 and shape[1] == _PIXELS else -1
        if not isinstance(self.dtype, _Dtype) or self.dtype.name not in ("u1", "uint8") or rows < 0:
            raise UnsupportedError(f"{printable(path)}: CIFAR-10's images are rows of {_PIXELS:,} bytes")
        if not isinstance(self.contents, bytes | bytearray) or len(self.contents) != rows * _PIXELS:
            raise UnsupportedError(f"{printable(path)} is truncated: it should have {rows} images")
        return np.frombuffer(self.contents, np.uint8).reshape(rows, _PIXELS)


def _empty_array(*_: Any) -> _Array:
    return _Array()


def _filled_array(contents: Any, dtype: Any, shape: Any, order: Any = "C", *_: Any) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order != "C", contents))
    return array


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    # Pickle protocols before 3 store bytes as latin1 text.
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it has text in {encoding!r}")
    return text.encode("latin1")


_REPLACEMENTS: dict[tuple[str, str], Callable[..., Any]] = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _empty_array for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _filled_array for core in ("core", "_core")},
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encoded,
}
"""Names that a pickle of arrays refers to, and the stand-ins called instead."""


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles only built-in containers, numbers, strings and arrays: a pickle can call any function otherwise."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _REPLACEMENTS:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}; only arrays are read from pickles")
        return _REPLACEMENTS[module, name]
