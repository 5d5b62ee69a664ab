"""What PyTorch logs of what it refuses, which whoever asked says in a sentence."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unlogged(*modules: str) -> Iterator[None]:
    """Modules of PyTorch log nothing of this thread: what they raise will be said."""
    thread = threading.get_ident()

    def is_anothers(record: logging.LogRecord) -> bool:
        return record.thread != thread

    reports = [logging.getLogger(name) for name in modules]
    for log in reports:
        log.addFilter(is_anothers)
    try:
        yield
    finally:
        for log in reports:
            log.removeFilter(is_anothers)
