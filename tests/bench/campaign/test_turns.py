"""Processes that take turns: nobody else runs during a turn, and a process that exits harms nobody."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from escalade.device import timing
from escalade.device.timing import begin_turn, exclusive
from escalade_bench.campaign.turns import Crew, Desk


def count_in_turns(desk: Desk, folder: pathlib.Path) -> None:
    """Count as fast as it goes; in a turn, send how far the others counted meanwhile."""
    own = folder / str(os.getpid())
    for task in desk.tasks():
        for number in range(200):
            own.write_text(str(number))
        if task == "exit in a turn":
            with exclusive():
                os._exit(3)
        with exclusive(lazily=True):
            begin_turn()
            with exclusive():  # a section within a section is the same turn
                before = [path.read_text() for path in sorted(folder.iterdir()) if path != own]
                time.sleep(0.05)
                after = [path.read_text() for path in sorted(folder.iterdir()) if path != own]
        desk.send((task, before == after))


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
    made = Crew(count_in_turns, (folder,), received.append, lambda *told: ended.append(told))
    cut = made.run(count, lambda: tasks.pop(0) if tasks else None, lambda: deadline - time.monotonic())
    return received, ended, cut


def test_nobody_else_runs_during_a_turn(tmp_path: pathlib.Path) -> None:
    received, ended, cut = crew(tmp_path, 2, list("abcd"))
    assert sorted(received) == [(name, True) for name in "abcd"], "others ran during a turn"
    assert sorted(ended) == [(name, False) for name in "abcd"] and cut == []


def test_a_process_that_exits_is_replaced(tmp_path: pathlib.Path) -> None:
    received, ended, cut = crew(tmp_path, 1, ["exit in a turn", "a"])
    assert (received, ended, cut) == ([("a", True)], [("exit in a turn", True), ("a", False)], [])


def test_at_the_end_of_the_time_processes_are_gone(tmp_path: pathlib.Path) -> None:
    assert crew(tmp_path, 2, list("abc"), seconds=0.0) == ([], [], [])


def test_without_others_a_section_costs_nothing() -> None:
    begin_turn()
    with exclusive(), exclusive(lazily=True):
        begin_turn()
    with pytest.raises(ValueError), exclusive():
        raise ValueError
    assert timing._sections == 0
