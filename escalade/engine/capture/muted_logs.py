"""Suppression of PyTorch log messages about failures that the caller reports itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def muted(*modules: str) -> Iterator[None]:
    """Drop what these PyTorch modules log from this thread."""
    thread = threading.get_ident()

    def is_from_other_thread(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [logging.getLogger(name) for name in modules]
    for logger in loggers:
        logger.addFilter(is_from_other_thread)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_from_other_thread)
