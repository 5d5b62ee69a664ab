"""The tool: its report of mutants that are noticed, that survive, and that are stale."""

from __future__ import annotations

import pathlib
import subprocess
from dataclasses import replace

import pytest

from tests.mutants.__main__ import ALL, ROOT, exit_status, run, selected
from tests.mutants.mutant import Mutant
from tests.mutants.runner import Outcome

NOTICED = Mutant("toy/noticed", "toy.py", "a + b", "a - b", ("test_toy.py",))
UNNOTICED = replace(NOTICED, name="toy/unnoticed", new="b + a")
STALE = replace(NOTICED, name="toy/stale", old="return")
MISPLACED = replace(NOTICED, name="toy/misplaced", tests=("test_toy.py::test_absent",))


@pytest.fixture
def toy(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # two thirds of pytest's startup time
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    root = tmp_path / "toy"
    root.mkdir()
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / "toy.py").write_text("def add(a, b):\n    return a + b  # return\n")
    (root / "conftest.py").write_text(
        'def pytest_addoption(parser):\n    parser.addoption("--seed")\n    parser.addoption("--sample")\n'
    )
    (root / "test_toy.py").write_text("import toy\n\ndef test_add():\n    assert toy.add(1, 2) == 3\n")
    return root


def test_outcomes(toy: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in toy.glob("*.py")}
    # In this order: the second must not run the bytecode of the first, which has the same size.
    assert run([NOTICED, UNNOTICED, STALE, MISPLACED], toy, tmp_path / "cache", False, imported=()) == 1
    lines = [line.partition(" (")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "killed   toy/noticed",
        "SURVIVED toy/unnoticed",
        "stale    toy/stale",
        "broken   toy/misplaced",
        "1 killed, 1 SURVIVED, 1 stale, 1 broken",
    ]
    assert {path: path.read_bytes() for path in toy.glob("*.py")} == before
    (toy / "test_toy.py").write_text("def test_add():\n    assert False\n")
    assert (
        run([NOTICED], toy, tmp_path / "cache", imported=()) == 1
    )  # killed, if the test had not failed already
    assert "fail without any mutant" in capsys.readouterr().out


def test_one_survivor_in_twenty_passes() -> None:
    def status(**counts: int) -> int:
        return exit_status({outcome: counts.get(outcome.name.lower(), 0) for outcome in Outcome})

    assert status(killed=19, survived=1) == 0
    assert status(killed=18, survived=1) == status(killed=99, stale=1) == status(killed=99, broken=1) == 1


def test_few_mutants_are_stale() -> None:
    """When a changed line makes a mutant stale, write the same bug for the new line. A few may wait for that."""
    stale = [mutant.name for mutant in ALL if mutant.planted(ROOT) is None]
    assert len(stale) <= len(ALL) // 10, stale
    assert len({mutant.name for mutant in ALL}) == len(ALL)
    missing = {test for mutant in ALL for test in mutant.tests if not (ROOT / test.split("::")[0]).exists()}
    assert not missing


def test_parts_are_all_of_the_mutants() -> None:
    parts = [mutant.name for number in range(1, 8) for mutant in selected([], f"{number}/7")]
    assert sorted(parts) == sorted(mutant.name for mutant in ALL)
    with pytest.raises(SystemExit, match="expected K/N"):
        selected([], "8/7")
