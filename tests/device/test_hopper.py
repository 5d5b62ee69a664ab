"""Tensor maps, clusters and overlapping launches, on the twin and on the GPU."""

from __future__ import annotations

import pathlib
import shutil

import pytest
import torch

from escalade.device.recipe import Buffer, TiledMap
from escalade.device.sources import KERNELS
from escalade.device.twin import tensor_map
from escalade.errors import UnsupportedError
from tests.device.conftest import Write
from tests.device.hopper_kernels import CHECKS, SOURCES

_HEADERS = {path.name: path.read_text() for path in pathlib.Path(KERNELS, "common").glob("*.cuh")}


@pytest.fixture(autouse=True)
def kernels(write_kernel: Write) -> None:
    for name, text in _HEADERS.items():
        write_kernel(f"common/{name}", text)
    for name, text in SOURCES.items():
        write_kernel(name, text)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the twin needs g++")
@pytest.mark.parametrize("what", CHECKS)
def test_on_the_twin(what: str) -> None:
    CHECKS[what](torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("what", CHECKS)
def test_on_the_gpu(what: str, cuda: torch.device) -> None:
    if torch.cuda.get_device_capability(cuda)[0] != 9:
        pytest.skip("these instructions are Hopper's")
    CHECKS[what](cuda)


def test_a_map_needs_aligned_rows() -> None:
    with pytest.raises(UnsupportedError, match="multiples of 16 bytes"):
        tensor_map.encode(TiledMap(Buffer("x"), "fp16", (9, 4), (8, 4), 0), 0)
