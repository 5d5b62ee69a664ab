"""Properties that all options of all commands share."""

from __future__ import annotations

import importlib
import pathlib
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from escalade import cli, files
from escalade.commands import options
from escalade.errors import EscaladeError, OutOfMemory, UnsupportedError
from tests.commands.support import run

READ = {"images", "weights", "labels", "data", "classes", "judge", "against", "root"}
"""Paths that commands read."""
READ_FROM_RESULTS = {"measure", "report", "tables"}


def every_option() -> Iterator[tuple[str, str, Any, Any]]:
    """Every option of every command: name, type and typer's settings."""
    for command in cli.COMMANDS:
        function = importlib.import_module(f"escalade.commands.{command}").command
        for name, hint in typing.get_type_hints(function, include_extras=True).items():
            if name != "return":
                kind, told = typing.get_args(hint)
                yield command, name, kind, told


def takes(kind: Any, wanted: type) -> bool:
    return kind is wanted or wanted in typing.get_args(kind)


def test_every_file_and_folder_that_is_written_is_tried_before_the_run(tmp_path: pathlib.Path) -> None:
    occupied = tmp_path / "occupied"
    occupied.touch()
    written = 0
    for command, name, kind, told in every_option():
        if (
            not takes(kind, pathlib.Path)
            or name in READ
            or (name == "results" and command in READ_FROM_RESULTS)
        ):
            continue
        assert told.callback is not None, f"{command} --{name} is found not to be writable after the work"
        ending = ".png" if name == "plot" else ""
        with pytest.raises(files.FileError, match=r"cannot be written: .*occupied is not a folder"):
            told.callback(occupied / f"x{ending}")
        assert told.callback(tmp_path / "new" / f"x{ending}") and not (tmp_path / "new").exists()
        written += 1
    assert written > 15


def test_every_number_has_bounds() -> None:
    unbounded = [
        f"{command} --{name}"
        for command, name, kind, told in every_option()
        if takes(kind, int) and (told.min is None or told.max is None)
    ]
    assert not unbounded


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_has_a_short_name_too(name: str) -> None:
    asked = run(name, "-h")
    assert asked.exit_code == 0 and "Usage: " in asked.output and "--help" in asked.output


@pytest.mark.parametrize(
    ("arguments", "kind", "sentence"),
    [
        ("explain lenet -b 100000000", OutOfMemory, "lenet for a batch of 100,000,000: needs at least"),
        ("verify relu -p relu_999999999999", OutOfMemory, "GiB are available"),
        ("ladder conv2d -p 64to64_56_k3s1_b0", UnsupportedError, "a batch of at least 1"),
        ("layers 64to64_56_k3s1_b0 --direction weight_gradient", UnsupportedError, "a batch of at least 1"),
        ("bench lenet --plot x.txt", UnsupportedError, "x.txt: --plot writes .png, .svg or .pdf files"),
    ],
)
def test_impossible_options_are_refused_before_any_work(
    arguments: str, kind: type[EscaladeError], sentence: str
) -> None:
    result = run(*arguments.split())
    assert isinstance(result.exception, kind) and sentence in str(result.exception), result


def test_records_are_added_to_no_file_that_holds_something_else(tmp_path: pathlib.Path) -> None:
    (tmp_path / "other.json").write_bytes(bytes(range(256)))
    result = run("count", "relu", "--json", str(tmp_path / "other.json"))
    assert isinstance(result.exception, EscaladeError) and "line 1 is not JSON" in str(result.exception)


@pytest.mark.parametrize("text", ["0", "-1", "1e3", "³", str(options.MAX_COUNT + 1), "1" * 5000])
def test_lists_of_numbers_have_bounds(text: str) -> None:
    result = run("layers", "resnet18", "--batch", f"8,{text}")
    assert result.exit_code == 2 and "is not an integer from 1 to" in " ".join(result.output.split())
