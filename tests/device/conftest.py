"""A folder of kernels that tests may change, and a fake card."""

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
    """Write a file below a folder that replaces `escalade/kernels`."""
    folder = tmp_path / "kernels"
    # The twin still finds headers in the real folder, so the runtime that is already built fits.
    for module in (sources, nvrtc):
        monkeypatch.setattr(module, "KERNELS", folder)

    def write(name: str, text: str) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        _forget()  # files are read once per process; only a test changes them

    yield write
    _forget()


@pytest.fixture
def empty_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The default cache in a separate folder."""
    monkeypatch.setenv("ESCALADE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
