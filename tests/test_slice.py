"""The slice that the date chooses: the same for a date, another for another, and failures that can be repeated."""

from __future__ import annotations

import shlex
from itertools import islice

import pytest
import torch

from escalade.ops import OPERATIONS
from tests import slice

PIECE = slice.Piece("softmax", "naive", "1_b4", "fp32", "flat", 1, 7, False)


def test_a_date_chooses_the_same_pieces_every_time() -> None:
    first, again, other = (
        list(islice(slice.pieces(date), 12)) for date in ("2026-01-02 0", "2026-01-02 0", "x")
    )
    assert first == again != other
    assert len({piece.rung for piece in first}) > 4
    for piece in first:
        assert slice.Piece.parse(str(piece)) == piece


def test_a_failure_says_how_to_repeat_it(
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
