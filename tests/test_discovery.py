"""PyTorch finds the backend, installed or not."""

from __future__ import annotations

import pathlib
import sys
import tomllib
from importlib import metadata

import pytest

from escalade import discovery
from escalade.engine.backend import escalade_backend

ROOT = pathlib.Path(__file__).parent.parent


def test_sources_have_the_entry_points_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    expected = {discovery.BACKEND.group: {discovery.BACKEND.name: discovery.BACKEND.value}}
    assert project["name"] == discovery.NAME and project["entry-points"] == expected
    monkeypatch.setattr(sys, "path", [])  # nothing is installed
    (found,) = metadata.entry_points(group="torch_dynamo_backends", name="escalade")
    assert found.load() is escalade_backend
    assert metadata.version("escalade") == discovery.VERSION
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("escalade2")
