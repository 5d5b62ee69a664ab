"""The network of these tests."""

from __future__ import annotations

import pathlib

import pytest

from tests.ray.networks import save_network


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_network(tmp_path_factory.mktemp("network") / "small.escalade")
