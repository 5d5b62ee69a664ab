"""Tests of verification: rungs with known kinds of cheating or failure, and correct rungs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from escalade.device.run import TwinOptions
from escalade.device.twin import Order
from escalade.ops import OPERATIONS
from escalade.ops.base.accuracy import relative_error
from escalade.ops.base.dtypes import STORAGE
from escalade.ops.softmax import SoftmaxOperation, SoftmaxProblem
from escalade.tune.verification import WORST_ELEMENT, Outcome, VerificationCase, compare, jobs, verify
from tests.bench.fake import Scale, ScaleProblem, rung

CPU = torch.device("cpu")


def judged(fault: str, size: int = 100, slip: float = 1.0) -> Outcome:
    (outcome,) = verify(
        Scale(rung("suspect", fault, slip=slip)), CPU, problems=[ScaleProblem(size)], layouts=["nchw"]
    )
    return outcome


def test_a_right_rung_passes() -> None:
    outcome = judged("none")
    assert outcome.passed and not outcome.failed
    assert outcome.error == 0.0 and outcome.tolerance and outcome.seconds > 0


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("unwritten", "1 of 100 outputs are NaN"),
        ("mutates", "it changed its input x"),
        ("wrong_element", "its error is"),
        ("uses_workspace", "100 of 100 outputs are NaN"),
        ("raises", "ZeroDivisionError: no tile divides this"),
    ],
)
def test_a_rung_that_is_not_right_fails_with_a_reason(fault: str, sentence: str) -> None:
    outcome = judged(fault)
    assert outcome.failed and not outcome.passed
    assert sentence in outcome.failure


def test_one_wrong_element_among_very_many_is_seen() -> None:
    """Small relative to the norm of the whole, and wrong all the same."""
    problem = ScaleProblem(1_000_000)
    case = VerificationCase(Scale(rung("suspect")), problem, CPU, 1)
    suspect = rung("suspect", "wrong_element", slip=1e-4)
    outcome = case.check(suspect, "nchw", suspect.configs(problem)[0])
    assert outcome.error is not None and outcome.tolerance is not None
    assert outcome.error <= outcome.tolerance, "the case is not what it is meant to be"
    assert outcome.failed and "one output is off" in outcome.failure


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_an_element_may_be_off_by_its_own_rounding(dtype: str) -> None:
    """Softmax has elements fifty times as large as a typical one, and so are their rounding errors."""
    case = VerificationCase(SoftmaxOperation(), SoftmaxProblem(1000, 1000, dtype), CPU, 1)
    output = case.expected.to(STORAGE[dtype])
    best = relative_error(output, case.expected)
    tolerance = case.operation.ladder.rung("block_per_row").tolerance(case.problem, best)
    off = float((output.double() - case.expected).abs().max())
    typical = float(case.expected.square().mean()) ** 0.5
    assert off > WORST_ELEMENT * tolerance * typical, "the case is not what it is meant to be"
    assert compare(output, case.expected, tolerance)[0] == ""

    largest = int(case.expected.argmax())
    common = int((case.expected - typical).abs().argmin())
    for which, slip in ((largest, 5 * torch.finfo(output.dtype).eps), (common, 0.2)):
        wrong = output.clone()
        wrong.view(-1)[which] *= 1 + slip
        failure, error = compare(wrong, case.expected, tolerance)
        assert error <= tolerance, "it is seen because it stands out"
        assert "one output is off" in failure


def rows_like(count: int, length: int = 64) -> torch.Tensor:
    """Rows that resemble each other, like a network's logits."""
    generator = torch.Generator().manual_seed(5)
    common = torch.randn(length, generator=generator, dtype=torch.float64)
    return common + 0.05 * torch.randn(count, length, generator=generator, dtype=torch.float64)


def _zeroed(y: torch.Tensor) -> None:
    y[100] = 0


def _swapped(y: torch.Tensor) -> None:
    y[[7, 8]] = y[[8, 7]]


def _scaled(y: torch.Tensor) -> None:
    y[9] *= 1.045


def _one_element(y: torch.Tensor) -> None:
    y[11, 3] += 0.3


@pytest.mark.share(7)
@pytest.mark.parametrize("shape", [(65536, 64), (65536, 4, 4, 4)])
@pytest.mark.parametrize("harm", [_zeroed, _swapped, _scaled, _one_element])
def test_one_row_that_is_wrong_among_thousands_is_seen(
    harm: Callable[[torch.Tensor], None], shape: tuple[int, ...]
) -> None:
    """Too small to show in the norm of the whole."""
    expected, tolerance = rows_like(65536), 4.5e-3
    output = expected.half()
    assert compare(output.view(shape), expected.view(shape), tolerance)[0] == ""
    harm(output)
    failure, error = compare(output.view(shape), expected.view(shape), tolerance)
    assert error <= tolerance, "the case is not what it is meant to be"
    assert ("row 9 of 65536 is off" if harm is _scaled else "one output is off") in failure


def test_a_row_may_be_as_large_as_it_is() -> None:
    """Rounding is proportional, so a row a thousand times as large is no reason to refuse it."""
    expected = rows_like(4096)
    expected[3] *= 1000
    expected[4] /= 1000
    error = 1e-3 * torch.randn(
        expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    assert compare(expected * (1 + error), expected, 2e-3)[0] == ""
    wrong = expected * (1 + error)
    wrong[4] = 0
    assert compare(wrong, expected, 2e-3)[0] == "", (
        "beside rows that are a thousand times as large it is nothing"
    )


@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (1,), (), (8, 8, 1), (4, 16)])
def test_a_result_of_another_shape_is_wrong_even_if_it_could_be_spread(shape: tuple[int, ...]) -> None:
    expected = torch.full((8, 8), 3.0, dtype=torch.float64)
    failure, error = compare(torch.full(shape, 3.0), expected, 1.0)
    assert f"shape {shape} instead of (8, 8)" in failure and math.isnan(error)
    assert math.isnan(relative_error(torch.full(shape, 3.0), expected))


def test_a_result_that_is_transposed_is_wrong() -> None:
    square = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert "its error is" in compare(square.t(), square, 0.1)[0]
    assert "shape (4, 8) instead of (8, 4)" in compare(square[:4], square[:, :4], 9.0)[0]


@pytest.mark.parametrize(("dtype", "unit"), [("fp32", 2.0**-24), ("fp16", 2.0**-11), ("bf16", 2.0**-8)])
def test_a_sloppy_peer_allows_a_rung_no_more(
    dtype: str, unit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two roundings to the dtype, and twice the error of plain fp32 sums of that length."""
    linear = OPERATIONS["linear"]
    problem = replace(linear.parse("96to8_b5_bias"), dtype=dtype)
    honest = VerificationCase(linear, problem, CPU, 1).peer_error
    real = linear.peer
    monkeypatch.setattr(linear, "peer", lambda problem, inputs: 1.05 * real(problem, inputs))
    sloppy = VerificationCase(linear, problem, CPU, 1).peer_error
    most = math.sqrt(2) * unit + 2 * 2.0**-24 * math.sqrt(1 + 96 / 6)
    assert honest < most and sloppy == pytest.approx(most)
    for one in linear.ladder.supporting(problem):
        assert one.tolerance(problem, sloppy) <= max(2 * most, 2.0**-20)


def test_an_unsupporting_rung_is_skipped_with_its_reason() -> None:
    (outcome,) = verify(Scale(rung("right")), CPU, layouts=["nhwc"])
    assert outcome.refusal == "right takes nchw, not nhwc"
    assert not outcome.passed and not outcome.failed


def test_inputs_and_reference_are_made_once_for_all_rungs_and_configs() -> None:
    operation = Scale(rung("one"), rung("two", below="one"))
    outcomes = list(verify(operation, CPU, configs="all"))
    assert [outcome.passed for outcome in outcomes].count(True) == 6
    assert operation.inputs_made == 1


def test_one_rung_that_harms_its_input_does_not_harm_the_next() -> None:
    operation = Scale(rung("vandal", "mutates"), rung("right"))
    outcomes = {outcome.rung: outcome for outcome in verify(operation, CPU, layouts=["nchw"])}
    assert outcomes["vandal"].failed and outcomes["right"].passed


def test_a_failing_support_check_is_a_failure_not_a_crash() -> None:
    class Broken(type(rung("x"))):  # type: ignore[misc]
        def supports(self, problem: ScaleProblem) -> str | None:
            raise KeyError("tile")

    broken = Broken("broken", "", None, None)
    outcomes = {
        outcome.rung: outcome for outcome in verify(Scale(broken, rung("right")), CPU, layouts=["nchw"])
    }
    assert outcomes["broken"].failed and "KeyError" in outcomes["broken"].failure
    assert outcomes["right"].passed


def test_shuffled_threads_and_checked_accesses() -> None:
    options = TwinOptions(Order(seed=7), checks=True)
    (outcome,) = verify(Scale(rung("right")), CPU, layouts=["nchw"], options=options)
    assert outcome.passed, outcome.failure


def test_seeds_give_other_inputs_and_the_same_seed_the_same() -> None:
    operation = Scale(rung("right"))
    first, again, other = (
        VerificationCase(operation, ScaleProblem(10), CPU, seed).inputs["x"] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_jobs_ask_every_rung_in_every_layout() -> None:
    planned = jobs(Scale(rung("one"), rung("two")), CPU, configs="all")
    assert [(j.rung.name, j.problem.layout, j.config is None) for j in planned].count(
        ("one", "nchw", False)
    ) == 3
    assert sum(bool(job.refusal) for job in planned) == 2


def test_few_outputs_are_allowed_their_random_deviation() -> None:
    """Three cancelling sums may all be small relative to their rounding; many, or large ones, are an error."""

    def failure(outputs: int, error: float) -> str:
        expected = torch.ones(outputs, dtype=torch.float64)
        return compare((expected * (1 + error)).float(), expected, 1e-6)[0]

    assert failure(3, 4e-6) == ""
    assert "more than the" in failure(3, 1e-5)
    assert "more than the 1" in failure(1000, 4e-6)
