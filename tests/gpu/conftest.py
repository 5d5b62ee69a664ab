"""Fixtures of GPU tests: device memory, of which only one test at a time may take much."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator

import pytest
import torch

PATIENCE = 120.0
"""Seconds that a test waits for other processes to free device memory."""


LONGEST = ("test_networks", "test_engine")
"""Files with the longest tests: they come first, so that no worker is left with one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait for each other's memory run in one worker (`--dist loadgroup`), so that the others need not
    wait."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)
    for item in items:
        if "much_memory" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("much memory"))


@pytest.fixture(autouse=True)
def _gives_memory_back() -> Iterator[None]:
    """PyTorch would keep it from the other workers: a float64 reference takes gigabytes."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture
def much_memory(
    tmp_path_factory: pytest.TempPathFactory, cuda: torch.device
) -> Iterator[Callable[[int], None]]:
    """A function that waits for this many bytes of device memory; only one test at a time may hold such a request."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if base.name.startswith("popen-") else base  # pytest-xdist: one per process
    with open(folder / "much-device-memory", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def wait_for(size: int) -> None:
            need = size + (4 << 30)  # margin for references and other processes
            torch.cuda.empty_cache()
            began = time.monotonic()
            while (free := torch.cuda.mem_get_info(cuda)[0]) < need:
                if time.monotonic() - began > PATIENCE:
                    pytest.skip(f"needs {need >> 30} GiB of free device memory; there are {free >> 30}")
                time.sleep(1)

        yield wait_for
        torch.cuda.synchronize(cuda)
        torch.cuda.empty_cache()
