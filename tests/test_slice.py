"""The slice chosen by the date: reproducible per date, different between dates, and failures can be repeated."""

from __future__ import annotations

import datetime
import shlex
from dataclasses import replace
from itertools import islice

import pytest
import torch

from escalade.ops import OPERATIONS
from tests import slice
from tests.support import WEEK, of_the_day

PIECE = slice.Piece("softmax", "naive", "1_b4", "fp32", "flat", 1, 7, False)


def test_a_date_chooses_the_same_pieces_every_time() -> None:
    first, again, other = (
        list(islice(slice.pieces(date), 12)) for date in ("2026-01-02 0", "2026-01-02 0", "x")
    )
    assert first == again != other
    assert len({piece.rung for piece in first}) > 4
    for piece in first:
        assert slice.Piece.parse(str(piece)) == piece


def test_plans_of_networks_are_a_source_of_pieces() -> None:
    first, again = (list(slice.planned_pieces("x", "varied/espcn/*")) for _ in range(2))
    assert first == again and "conv2d" in {piece.operation for piece in first}
    for piece in first:
        assert slice.Piece.parse(str(piece)) == piece
        operation = OPERATIONS[piece.operation]
        problem = replace(operation.parse(piece.problem), dtype=piece.dtype, layout=piece.layout)
        assert problem.batch <= 3 and piece.config < len(operation.ladder.rung(piece.rung).configs(problem))


def test_a_failure_prints_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slice, "pieces", lambda seed: iter([PIECE, PIECE]))
    assert slice.run("any", 1000) == (2, [])
    wrong = torch.full((4, 1), 2.0, dtype=torch.float64)
    monkeypatch.setattr(type(OPERATIONS["softmax"]), "reference", lambda *_: wrong)
    count, failures = slice.run("any", 0)
    assert count == 1 and len(failures) == 1
    *_, option, words = shlex.split(failures[0].splitlines()[-1])
    capsys.readouterr()
    assert slice.main([option, words]) == 1
    assert "naive on 1_b4 fp32 flat with threads=" in capsys.readouterr().out
    monkeypatch.undo()
    assert slice.main([option, words]) == 0


@pytest.mark.parametrize("count", [0, 1, 2, 5, 7, 20, 61])
def test_every_case_of_a_share_runs_within_a_week(count: int) -> None:
    cases, monday = list(range(count)), datetime.date(2026, 12, 28)
    for share in range(1, WEEK + 1):
        days = [monday + datetime.timedelta(day) for day in range(share)]
        runs = [of_the_day(cases, share, day, "tests/x.py::test") for day in days]
        assert {case for run in runs for case in run} == {*cases}, "all of them"
        assert all(-(-count // share) >= len(run) >= min(1, count) for run in runs), "a share of them a day"
        assert runs[0] == of_the_day(cases, share, days[0], "tests/x.py::test"), "the same for the same day"
    with pytest.raises(ValueError, match=r"share\(8\) .* at most 7"):
        of_the_day(cases, 8, monday, "tests/x.py::test")


def test_a_case_that_is_named_runs_on_any_day() -> None:
    for day in range(WEEK):
        assert of_the_day(["case"], WEEK, datetime.date(2026, 12, 28 + day % 4), "tests/x.py::test") == [
            "case"
        ]
