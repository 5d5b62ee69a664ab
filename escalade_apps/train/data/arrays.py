"""Images in array files: NumPy .npz archives, and IDX files, the format of MNIST and Fashion-MNIST."""

from __future__ import annotations

import gzip
import math
import pathlib
import struct
import zipfile
import zlib
from typing import BinaryIO, cast

import numpy as np
import torch

from escalade.errors import UnsupportedError
from escalade.terminal_text import counted, printable
from escalade_apps.train.data.images import Images

_UNSIGNED_BYTES = 8
_GZIP = b"\x1f\x8b"
_MAX_DIMENSIONS = 4


def read_npz(path: pathlib.Path) -> Images:
    """Read an archive. `x` is uint8, [count, rows, columns] or [count, rows, columns, channels]; `y` is optional."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in ("x", "y") if name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise UnsupportedError(
            f"{printable(path)} cannot be read as an .npz archive of arrays: {printable(error)}"
        ) from error
    pixels, labels = arrays.get("x"), arrays.get("y")
    if pixels is not None and pixels.ndim == 3:
        pixels = pixels[..., None]
    if pixels is None or pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[3] not in (1, 3):
        raise UnsupportedError(
            f"{printable(path)} needs an array x of uint8, [count, rows, columns, channels] with 1 or 3 channels"
        )
    if labels is None:
        return Images(torch.from_numpy(pixels), None)
    if labels.shape != (len(pixels),) or labels.dtype.kind not in "iu" or (len(labels) and labels.min() < 0):
        raise UnsupportedError(
            f"{printable(path)}: y is {labels.dtype}, {list(labels.shape)}; it must hold a class index for each of the "
            f"{counted(len(pixels), 'image')}"
        )
    numbers = torch.from_numpy(labels.astype(np.int64))
    return Images(torch.from_numpy(pixels), numbers, int(numbers.max()) + 1 if len(numbers) else 0)


def find_idx(folder: pathlib.Path, part: str, kind: str) -> pathlib.Path | None:
    """Return the file with the `images` or `labels` of `train` or `t10k`, under any of its common names."""
    for path in sorted(folder.glob(f"{part}-{kind}[-.]idx[134]-ubyte*")):
        if path.name.endswith(("-ubyte", "-ubyte.gz")):
            return path
    return None


def read_idx(images: pathlib.Path, labels: pathlib.Path) -> Images:
    """Read images of three dimensions (gray) or four (channels last), and labels of one dimension."""
    pixels, classes = _read_idx_file(images, (3, 4)), _read_idx_file(labels, (1,))
    if len(pixels) != len(classes):
        raise UnsupportedError(
            f"{printable(images)} has {counted(len(pixels), 'image')} and {printable(labels)} "
            f"{counted(len(classes), 'label')}"
        )
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    if not len(pixels) or pixels.shape[3] not in (1, 3):
        raise UnsupportedError(
            f"{printable(images)} has shape {pixels.shape}; images must have 1 or 3 channels"
        )
    numbers = torch.from_numpy(classes.astype(np.int64))
    return Images(torch.from_numpy(pixels), numbers, int(numbers.max()) + 1)


def _read_idx_file(path: pathlib.Path, dimensions: tuple[int, ...]) -> np.ndarray:
    try:
        with open(path, "rb") as plain:
            is_gzipped = plain.read(len(_GZIP)) == _GZIP
            plain.seek(0)
            if not is_gzipped:
                return _parse_idx(path, plain, dimensions)
            with gzip.GzipFile(fileobj=plain) as unzipped:
                return _parse_idx(path, cast(BinaryIO, unzipped), dimensions)
    except UnsupportedError:
        raise
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UnsupportedError(
            f"{printable(path)} cannot be read as an IDX file: {printable(reason)}"
        ) from error


def _parse_idx(path: pathlib.Path, file: BinaryIO, dimensions: tuple[int, ...]) -> np.ndarray:
    # Two zeros, type, number of dimensions; big-endian sizes; values.
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or not 1 <= head[3] <= _MAX_DIMENSIONS:
        raise UnsupportedError(
            f"{printable(path)} is not an IDX file: it starts with {head.hex(' ') or 'nothing'}"
        )
    if head[2] != _UNSIGNED_BYTES or head[3] not in dimensions:
        wanted = " or ".join(map(str, dimensions))
        raise UnsupportedError(
            f"{printable(path)} is an IDX file of type {head[2]:#04x} with {head[3]} dimensions; "
            f"unsigned bytes ({_UNSIGNED_BYTES:#04x}) with {wanted} dimensions are supported"
        )
    sizes_bytes = file.read(4 * head[3])
    if len(sizes_bytes) < 4 * head[3]:
        raise UnsupportedError(f"{printable(path)} is truncated in its header")
    sizes = struct.unpack(f">{head[3]}I", sizes_bytes)
    wanted_bytes = math.prod(sizes)
    values = bytearray()
    # In parts and only one byte too far, so that a wrong header or a gzip bomb cannot exhaust memory.
    while len(values) <= wanted_bytes and (part := file.read(min(wanted_bytes + 1 - len(values), 1 << 24))):
        values += part
    if len(values) != wanted_bytes:
        how = "truncated" if len(values) < wanted_bytes else "longer than its header says"
        raise UnsupportedError(
            f"{printable(path)} is {how}: the sizes {'x'.join(map(str, sizes))} need {wanted_bytes:,} bytes, "
            f"and it has {len(values):,}{'' if len(values) < wanted_bytes else ' or more'}"
        )
    return np.frombuffer(values, np.uint8).reshape(sizes)
