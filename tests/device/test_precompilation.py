"""Compiling ahead, in this process and in workers."""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from escalade.device import compilers
from escalade.device.cache import default_cache
from escalade.device.nvrtc import is_compiled
from escalade.device.precompilation import precompile
from escalade.device.program import Program
from escalade.ops.base.card import H200
from escalade.tune.verification import jobs, programs
from tests.bench.fake import SOURCE, Scale, rung

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def processes_of_the_test() -> Iterator[None]:
    """Start without compilers of another test, in another folder and environment."""
    compilers.stop()
    yield
    compilers.stop()


def test_programs_are_listed_once_and_a_raising_rung_is_left_out() -> None:
    operation = Scale(rung("one"), rung("same"), rung("other", slip=2.0), rung("broken", "raises"))
    found = programs(jobs(operation, CPU, configs="all"))
    assert len(found) == 2


def test_rungs_of_other_architectures_are_left_out() -> None:
    assert programs(jobs(Scale(rung("one")), CPU, card=replace(H200, architecture="sm_75"))) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_compiles_into_the_cache_and_reports_compile_errors(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setenv("ESCALADE_CACHE_DIR", str(tmp_path))
    good = Program.of(SOURCE, "scale", {"FAULT": 0, "SLIP": 1.0})
    broken = Program.of(SOURCE, "scale", {"FAULT": 0})  # SLIP is undefined
    more = [replace(good, constants=(("FAULT", n), ("SLIP", 1.0))) for n in (1, 2, 3)]
    seen: list[Program] = []
    ready: list[Program] = []
    failures = precompile([good, broken, *more], "sm_90a", workers, seen.append, ready.append)
    assert len(seen) == 5
    assert len(ready) == 4 and {*ready} == {good, *more}
    assert [failure.program for failure in failures] == [broken] and "SLIP" in failures[0].message
    assert default_cache().size()[0] == 4


def test_those_begin_first_that_the_compiler_has_most_to_read_of(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Size with headers: a short source may include much."""
    monkeypatch.setenv("ESCALADE_CACHE_DIR", str(tmp_path / "cache"))
    source = 'extern "C" __global__ void nothing() {}\n'
    texts = {
        "short": source,
        "long": source + "// more to read\n" * 100,
        "including": '#include "common/hopper.cuh"\n' + source,
        "middling": source + "// more to read\n" * 10,
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.cu").write_text(text)
    began: list[str] = []

    def compile_all(programs: Sequence[Program], *how: object) -> list[Program]:
        began.extend(pathlib.Path(program.source).stem for program in programs)
        return []

    monkeypatch.setattr(compilers, "compile_all", compile_all)
    precompile([Program.of(str(tmp_path / f"{name}.cu"), "nothing") for name in texts], "sm_90a", 2)
    assert began == ["including", "long", "middling", "short"]


def several(count: int = 4) -> list[Program]:
    return [Program.of(SOURCE, "scale", {"FAULT": 0, "SLIP": 1.0 + number}) for number in range(count)]


@pytest.fixture
def trap(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A current folder with modules that must not be imported; an import would create the file `sprung`."""
    folder = tmp_path / "somewhere"
    code = f"open({str(tmp_path / 'sprung')!r}, 'a').write(__name__)\n"
    for name in (
        "hashlib",
        "pickle",
        "pathlib",
        "typing",
        "usercustomize",
        "escalade/__init__",
        "cuda/__init__",
    ):
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    monkeypatch.chdir(folder)
    return tmp_path / "sprung"


@pytest.mark.parametrize("python_path", [None, ":."])
def test_workers_take_nothing_from_the_current_folder(
    trap: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, python_path: str | None
) -> None:
    """No modules; and no relative cache in the current folder."""
    monkeypatch.setenv("ESCALADE_CACHE_DIR", f"relative to {tmp_path.name}")
    here = pathlib.Path.cwd()
    monkeypatch.chdir(tmp_path)
    default_cache()
    monkeypatch.chdir(here)
    if python_path is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", python_path)
    before = sorted(here.rglob("*"))
    assert precompile(several(), "sm_90a", 2) == []
    assert not trap.exists() and sorted(here.rglob("*")) == before
    assert all(is_compiled(program, "sm_90a") for program in several())


def test_results_that_workers_cannot_store_are_stored_here(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("ESCALADE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))  # already resolved by this process
    with pytest.warns(UserWarning, match="ESCALADE_CACHE_DIR") as said:
        assert precompile(several(), "sm_90a", 2) == []
    assert len(said) == 1
    assert all(is_compiled(program, "sm_90a") for program in several())
    assert not list((tmp_path / "temporary").iterdir()), "the workers leave nothing behind"


def test_damaged_entries_are_recompiled_and_reported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ESCALADE_CACHE_DIR", str(tmp_path))
    assert precompile(several(), "sm_90a", 1) == []
    entries = list(default_cache().directory.glob("*.bin"))
    for path in entries:
        path.write_bytes(path.read_bytes()[:-100])
    capfd.readouterr()
    with pytest.warns(UserWarning, match="was damaged") as said:
        assert precompile(several(), "sm_90a", 2) == []
    assert len(said) == len(entries) == 4
    assert "damaged" not in capfd.readouterr().err, "workers do not say it again"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(is_compiled(program, "sm_90a") for program in several())
