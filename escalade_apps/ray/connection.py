"""Connect this process to a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator

import ray

from escalade.errors import UnsupportedError
from escalade.terminal_text import printable

_LOCAL = "local"
"""Ray's address for a new cluster on this machine that ends with this process."""
_CONNECT_SECONDS = 5.0
"""Timeout for a TCP connection. Ray itself would retry for more than a minute."""


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to the cluster at an address, unless this process is already connected to one."""
    if ray.is_initialized():
        yield
        return
    logger = logging.getLogger("ray.data")  # its execution plans would garble our progress bar
    level = logger.level
    options = {"include_dashboard": False} if address == _LOCAL else {}
    try:
        _check_listening(address)
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise UnsupportedError(
            f"no Ray at {printable(address)} ({printable(error)}); pass the HOST:PORT of the cluster's head node, "
            "auto on one of its machines, or local"
        ) from error
    try:
        logger.setLevel(logging.ERROR)
        yield
    finally:
        logger.setLevel(level)
        ray.shutdown()


def _check_listening(address: str) -> None:
    """Open and close a connection to HOST:PORT. Other addresses are left to Ray."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
