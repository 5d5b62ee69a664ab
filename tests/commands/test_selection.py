"""Rungs, problems, dtypes and layouts by name: each name must select something."""

from __future__ import annotations

import pytest

from tests.bench.fake import Scale, ScaleProblem, ScaleRung, rung
from tests.commands.support import said_by


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("verify", "scale", "--layout", "nhwc"),
            "nothing to verify for layout nhwc: right takes nchw, not nhwc",
        ),
        (("verify", "--layout", "nhwc"), "nothing to verify for layout nhwc"),
        (("verify", "scale", "--layout", "nchw", "--layout", "nhwc"), "nothing to verify for layout nhwc"),
        (("verify", "scale", "--rung", "right", "--rung", "picky"), "nothing to verify for rung picky"),
        (("verify", "scale", "--rung", "picky"), "nothing to verify for rung picky: it takes nothing"),
        (("verify", "--rung", "nosuch"), "scale has no rung 'nosuch'"),
        (("ladder", "scale", "--layout", "nhwc"), "nothing to measure for layout nhwc"),
        (("ladder", "scale", "--rung", "picky"), "nothing to measure for rung picky"),
        (("precompile", "scale", "--layout", "nhwc"), "nothing to compile for layout nhwc"),
        (("precompile", "scale", "--rung", "picky"), "nothing to compile for rung picky"),
        (("precompile", "scale", "--rung", "newest", "--arch", "sm_80"), "its kernels are for sm_90a"),
    ],
)
def test_nothing_to_do_is_a_mistake(
    arguments: tuple[str, ...],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An error too if one of several names selects nothing."""

    class Picky(ScaleRung):
        def supports(self, problem: ScaleProblem) -> str | None:
            return "it takes nothing"

    class Newest(ScaleRung):
        @property
        def architectures(self) -> tuple[str, ...]:
            return ("sm_90a",)

    named = {"summary": "a rung", "below": None, "predicted_gain": None}
    rungs = (rung("right"), Picky("picky", **named), Newest("newest", **named))  # type: ignore[arg-type]
    monkeypatch.setattr("escalade.ops.OPERATIONS", {"scale": Scale(*rungs)})
    where = () if arguments[0] == "precompile" else ("--device", "twin")
    assert sentence in said_by(*arguments, *where, monkeypatch=monkeypatch, capsys=capsys)
