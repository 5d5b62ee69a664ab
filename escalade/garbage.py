"""Python's search for cyclic garbage, which goes through every object of the process: with PyTorch loaded, a tenth of a
second and more."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_later() -> Iterator[None]:
    """Nothing is searched for meanwhile, by no thread: for moments in which many objects are made, and stay. Their
    number would have Python search for garbage that they are not.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
