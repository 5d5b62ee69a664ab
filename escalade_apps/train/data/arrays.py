"""NumPy .npz archives with images `x` and labels `y`."""

from __future__ import annotations

import pathlib
import zipfile

import numpy as np
import torch

from escalade.errors import UnsupportedError
from escalade.terminal_text import counted, printable
from escalade_apps.train.data.images import Images


def read(path: pathlib.Path) -> Images:
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
