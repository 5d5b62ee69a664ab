"""This process as a driver of a cluster of Ray's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import ray

from escalade.errors import UnsupportedError
from escalade.showing import shown

_LOCAL = "local"
"""The address of a cluster that is this machine, and ends with this process."""


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Inside, this process is a driver of the cluster at an address, unless it is one of some cluster already."""
    if ray.is_initialized():
        yield
        return
    options = {"include_dashboard": False} if address == _LOCAL else {}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UnsupportedError(
            f"there is no Ray at {shown(address)} ({shown(error)}); --ray takes HOST:PORT of a cluster's head, auto on "
            "one of its machines, or local"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()
