"""Processes that prepare side by side: who measures is alone, and the others go on afterwards."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from escalade.device import measuring_alone


def _is_stopped(process: int) -> bool:
    return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _wait_until_stopped(process: int) -> None:
    """A process stops when it is next scheduled; it goes on with the call that says so."""
    os.waitid(os.P_PID, process, os.WSTOPPED | os.WNOWAIT)


@pytest.mark.skipif(sys.platform != "linux", reason="states of processes are read as Linux has them")
def test_the_others_stand_still_while_one_measures(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring_alone, "_group", None)
    monkeypatch.setattr(measuring_alone, "_SETTLING_SECONDS", 0.0)
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            with measuring_alone.undisturbed():  # of no group: nobody is stopped
                measuring_alone.join(tmp_path)
                (tmp_path / str(other.pid)).touch()
            with pytest.raises(RuntimeError, match="in between"), measuring_alone.undisturbed():
                _wait_until_stopped(other.pid)
                with measuring_alone.undisturbed():
                    pass
                assert _is_stopped(other.pid), "the end of an inner measurement is not that of the outer"
                raise RuntimeError("something goes wrong in between")
            assert not _is_stopped(other.pid)
            with measuring_alone.undisturbed():
                _wait_until_stopped(other.pid)
                measuring_alone.leave(tmp_path, 0)  # whoever measured has died
                assert not _is_stopped(other.pid)
        finally:
            other.kill()
    with measuring_alone.undisturbed():  # it has ended without a word
        pass


def test_waits_for_the_queues_of_stopped_processes() -> None:
    turns = iter([[0.5, 2.5, 0.5], [2.5, 2.5, 2.5], [0.5, 0.51, 0.5], []])
    measuring_alone.wait_until_quiet(lambda: next(turns))
    assert next(turns) == []


def test_waits_no_longer_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring_alone, "_QUIET_SECONDS", 0.01)
    measuring_alone.wait_until_quiet(lambda: [0.5, 2.5])
