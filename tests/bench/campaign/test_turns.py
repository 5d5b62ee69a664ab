"""Processes that take turns: only one uses the GPU, none runs beside a timing, and one that exits does not harm
others."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from escalade.device import timing
from escalade.device.timing import begin_turn, exclusive, on_gpu
from escalade_bench.campaign.turns import Crew, Desk


def count_in_turns(desk: Desk, folder: pathlib.Path) -> None:
    """Count as fast as possible; during a turn, send whether another process ran or entered a turn meanwhile."""
    own = folder / str(os.getpid())
    for task in desk.tasks():
        for number in range(200):
            own.write_text(str(number))
        if task.startswith(("exit in", "hang in")):
            with exclusive() if task.endswith("silence") else on_gpu():
                if task.startswith("hang"):
                    time.sleep(3600)
                os._exit(3)
        with on_gpu(lazily=True):
            with on_gpu():  # ends with its own section
                pass
            assert not timing._turn_taken_in
            begin_turn()
            taken = folder / "taken"
            free = not taken.exists()
            taken.touch()
            time.sleep(0.02)
            with exclusive(), exclusive():
                before = counts(folder, own)
                time.sleep(0.05)
                after = counts(folder, own)
            taken.unlink()
        desk.send((task, free, before == after))


def counts(folder: pathlib.Path, own: pathlib.Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.iterdir()) if path != own]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    assert not timing.takes_turns()


def crew(
    folder: pathlib.Path, count: int, tasks: list[str], seconds: float = 300.0
) -> tuple[list[Any], list[Any], list[Any]]:
    received: list[Any] = []
    ended: list[Any] = []
    deadline = time.monotonic() + seconds
    longest = {"hang in silence": 1.0}
    made = Crew(
        count_in_turns, (folder,), received.append, lambda *told: ended.append(told),
        lambda task: longest.get(task, 300.0),
    )  # fmt: skip
    cut = made.run(count, lambda: tasks.pop(0) if tasks else None, lambda: deadline - time.monotonic())
    return received, ended, cut


def test_one_process_at_a_time_has_the_gpu_and_none_runs_beside_a_timing(tmp_path: pathlib.Path) -> None:
    received, ended, cut = crew(tmp_path, 2, list("abcd"))
    assert sorted(received) == [(name, True, True) for name in "abcd"]
    assert sorted(ended) == [(name, False) for name in "abcd"] and cut == []


@pytest.mark.share(7)
@pytest.mark.parametrize("lost", ["exit in a turn", "exit in silence", "hang in silence"])
def test_a_process_that_exits_or_hangs_is_replaced(
    tmp_path: pathlib.Path, lost: str, capfd: pytest.CaptureFixture[str]
) -> None:
    received, ended, cut = crew(tmp_path, 2, [lost, "a", "b"])
    assert sorted(received) == [("a", True, True), ("b", True, True)] and cut == []
    assert sorted(ended) == sorted([("a", False), ("b", False), (lost, True)])
    assert ("count_in_turns" in capfd.readouterr().err) == lost.startswith("hang"), "its traceback"


def test_at_the_end_of_the_time_processes_are_gone(tmp_path: pathlib.Path) -> None:
    assert crew(tmp_path, 2, list("abc"), seconds=0.0) == ([], [], [])


def test_without_others_a_section_costs_nothing() -> None:
    begin_turn()
    with exclusive(), on_gpu(lazily=True):
        begin_turn()
    with pytest.raises(ValueError), exclusive():
        raise ValueError
    assert (timing._sections, timing._silent_sections, timing._turn_taken_in) == (0, 0, 0)
