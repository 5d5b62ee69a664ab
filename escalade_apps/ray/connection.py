"""This process as a driver of a cluster of Ray's."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator

import ray

from escalade.errors import UnsupportedError
from escalade.terminal_text import printable

_LOCAL = "local"
"""The address of a cluster that is this machine, and ends with this process."""
_PATIENCE = 5.0
"""Seconds that a machine has to answer. Ray itself tries for more than a minute."""


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Inside, this process is a driver of the cluster at an address, unless it is one of some cluster already."""
    if ray.is_initialized():
        yield
        return
    told = logging.getLogger("ray.data")  # of how it runs what; a command has words and a bar of its own
    before = told.level
    options = {"include_dashboard": False} if address == _LOCAL else {}
    try:
        _knock(address)
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise UnsupportedError(
            f"there is no Ray at {printable(address)} ({printable(error)}); --ray takes HOST:PORT of a cluster's head, "
            "auto on one of its machines, or local"
        ) from error
    try:
        told.setLevel(logging.ERROR)
        yield
    finally:
        told.setLevel(before)
        ray.shutdown()


def _knock(address: str) -> None:
    """Sees whether anybody listens at HOST:PORT; other addresses are Ray's to find."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), _PATIENCE).close()
