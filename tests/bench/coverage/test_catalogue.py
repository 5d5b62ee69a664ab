"""Networks by the module of their constructors: which are found, by name or all, and the error if there are none."""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch

from escalade.errors import UnsupportedError
from escalade_bench.coverage.catalogue import entries

MODULE = """
from torch import nn

def small() -> nn.Linear:
    return nn.Linear(2, 2)

def plain():
    return nn.Linear(3, 3)

def wrong():
    return 7

def sized(width: int) -> nn.Module: ...
def unknown() -> "Nowhere": ...

class Net(nn.Module): ...

class Rows:
    def __init__(self, shape):
        self.example_shape = shape

    def __call__(self) -> nn.Module:
        return nn.Linear(self.example_shape[-1], 2)

rows = Rows((4, 2))
"""


@pytest.fixture
def module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of constructors in the command's current folder."""
    (tmp_path / "own_networks.py").write_text(MODULE)
    (tmp_path / "broken_networks.py").write_text("import nowhere_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_networks", raising=False)
    return "own_networks"


def test_unasked_only_what_is_known_to_be_a_network_is_called(module: str) -> None:
    assert [entry.name for entry in entries(module)] == ["small", "Net", "rows"]
    assert [entry.name for entry in entries(module, "^s")] == ["small"]
    (plain,) = entries(f"{module}:plain")
    assert plain.make()(plain.make().weight).shape == (3, 3)
    (wrong,) = entries(f"{module}:wrong")
    with pytest.raises(UnsupportedError, match="it gives a int, not an nn.Module"):
        wrong.make()


def test_a_constructor_may_say_what_it_takes(module: str) -> None:
    assert [entry.item for entry in entries(module)] == [None, None, (4, 2)]
    (own,) = entries(f"{module}:rows")
    assert own.make()(torch.zeros(3, *(own.item or ()))).shape == (3, 4, 2)
    sys.modules[module].rows.example_shape = (4, 0)
    with pytest.raises(UnsupportedError, match=r"rows.example_shape is \(4, 0\); it is a tuple of the sizes"):
        entries(module)
    assert [entry.name for entry in entries(f"{module}:plain")] == ["plain"]  # that package is not to blame


@pytest.mark.parametrize(
    ("wanted", "only", "sentence"),
    [
        ("nowhere.at.all", None, "there is no module 'nowhere.at.all' here.*pip install nowhere"),
        ("broken_networks", None, "broken_networks cannot be imported: No module named 'nowhere_at_all'"),
        (
            "own_networks:sized",
            None,
            "no network 'sized' that takes no arguments; it has small, plain, wrong, unknown, Net, rows",
        ),
        ("own_networks:", None, "no network '' that takes no arguments"),
        ("own_networks", "resnet", "no network that 'resnet' finds; it has small, Net, rows"),
        ("own_networks", "(", r"--only '\(' is no regular expression"),
        ("string", None, "string has no networks"),
    ],
)
def test_what_is_not_there_is_said(module: str, wanted: str, only: str | None, sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        entries(wanted, only)


def test_torchvision_need_not_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "torchvision.models", raising=False)
    with pytest.raises(UnsupportedError, match="pip install torchvision"):
        entries("torchvision")
