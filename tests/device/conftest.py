"""A folder of kernels that a test may write to, and a card that is made up."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import pytest

from escalade.device import nvrtc, sources
from tests.bench.fake_cuda import card as card

Write = Callable[[str, str], None]


def _forget() -> None:
    for cached in (sources.read, sources.included, sources._declared, sources._struct):
        cached.cache_clear()


@pytest.fixture
def write_kernel(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a file under a folder that stands in for `escalade/kernels`."""
    folder = tmp_path / "kernels"
    # The twin goes on finding headers in the real folder, and so with the runtime that is built already.
    for module in (sources, nvrtc):
        monkeypatch.setattr(module, "KERNELS", folder)

    def write(name: str, text: str) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        _forget()  # files are read once a process; only a test changes them

    yield write
    _forget()


@pytest.fixture
def empty_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The default cache in a folder of its own."""
    monkeypatch.setenv("ESCALADE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
