"""Other programs: where they are found, and which state of this process they inherit."""

from __future__ import annotations

import errno
import os
import pathlib

import pytest

from escalade import subprocesses
from escalade.device.twin import toolchain
from escalade.errors import CompileError
from escalade_bench.measure import records as store

COSINE = {"x.cpp": "#include <cmath>\nint main() { return std::cos(0.0) > 2; }\n"}


def script(path: pathlib.Path, text: str) -> pathlib.Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("path", [".", "", "here:", ":{rest}", ".:{rest}", "./here:{rest}"])
def test_no_program_of_the_current_folder_is_run(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    (tmp_path / "here").mkdir()
    for folder in (tmp_path, tmp_path / "here"):
        script(folder / "ls", "echo trapped")
    rest = os.environ["PATH"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", path.format(rest=rest))
    found = subprocesses.find_program("ls")
    assert found is None or (os.path.isabs(found) and tmp_path not in pathlib.Path(found).parents)
    assert "trapped" not in subprocesses.output("ls")
    if rest in os.environ["PATH"]:
        assert "here" in subprocesses.output("ls")


def test_a_missing_failing_or_hanging_program_returns_nothing(tmp_path: pathlib.Path) -> None:
    assert subprocesses.output("no such program") == ""
    assert subprocesses.output(script(tmp_path / "fails", "echo text; exit 3")) == ""
    assert subprocesses.output(script(tmp_path / "hangs", "exec sleep 60"), timeout=0.2) == ""
    assert subprocesses.output(script(tmp_path / "binary", r"printf 'a\377b'")) == "a�b"


@pytest.mark.parametrize("name", ["CPATH", "CPLUS_INCLUDE_PATH"])
def test_headers_of_the_environment_are_not_read(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for header in ("cmath", "math.h", "bits/c++config.h"):
        (tmp_path / header).parent.mkdir(exist_ok=True)
        (tmp_path / header).write_text("#error trapped\n")
    monkeypatch.setenv(name, str(tmp_path))
    toolchain.run(["-fsyntax-only", "x.cpp"], "a test", COSINE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GCC_EXEC_PREFIX", "{folder}/"),
        ("COMPILER_PATH", "{folder}"),
        ("DEPENDENCIES_OUTPUT", "{folder}/written"),
        ("SUNPRO_DEPENDENCIES", "{folder}/written"),
        ("LD_RUN_PATH", "{folder}"),
    ],
)
def test_the_environment_does_not_affect_the_compiler(
    name: str, value: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder contains a fake linker and assembler."""
    folder = tmp_path / "trap"
    folder.mkdir()
    for program in ("as", "ld", "collect2", "cc1plus"):
        script(folder / program, "echo trapped >&2; exit 1")
    results = []
    for number in range(2):
        toolchain.run(["-fPIC", "x.cpp", "-lm", "-o", tmp_path / f"{number}"], "a test", COSINE)
        results.append((tmp_path / f"{number}").read_bytes())
        monkeypatch.setenv(name, value.format(folder=folder))
    assert results[0] == results[1]
    assert not (folder / "written").exists()


def test_programs_see_nothing_else_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"PATH", "LC_ALL", "HOME", "TMPDIR", "TMP", "TEMP", "LD_LIBRARY_PATH"}
    for name in (
        *seen,
        "LIBRARY_PATH",
        "LD_PRELOAD",
        "LANGUAGE",
        "LANG",
        "C_INCLUDE_PATH",
        "GCC_COMPARE_DEBUG",
    ):
        monkeypatch.setenv(name, "/a:relative::/b")
    found = subprocesses.environment()
    assert found.keys() == seen and found.pop("LC_ALL") == "C"
    assert set(found.values()) == {"/a:/b"}, "none depends on the current folder"


def test_a_full_disk_is_not_taken_for_an_error_in_the_source() -> None:
    with pytest.raises(OSError) as caught:
        toolchain.run(["-S", "x.cpp", "-o", "/dev/full"], "a test", COSINE)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(CompileError, match="cannot compile a test"):
        toolchain.run(["-S", "x.cpp", "-o", "/dev/null"], "a test", {"x.cpp": "int main() {"})


def test_git_ignores_the_environment(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record's commit is that of the package, whatever repository the caller is in."""
    if subprocesses.find_program("git") is None:
        pytest.skip("there is no git here")
    subprocesses.run(["git", "init", "-q", tmp_path / "other"])
    found = []
    for value in ("", str(tmp_path / "other" / ".git")):
        store.commit.cache_clear()
        if value:
            monkeypatch.setenv("GIT_DIR", value)
        found.append(store.commit())
    store.commit.cache_clear()
    assert found[0] == found[1] != ""
