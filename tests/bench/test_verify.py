"""The judge is judged: rungs that cheat or fail in the ways that are known, and rungs that are right."""

from __future__ import annotations

import pytest
import torch

from escalade.bench.verify import WORST_ELEMENT, Case, Outcome, compare, jobs, verify
from escalade.device.run import TwinOptions
from escalade.device.twin import Order
from escalade.ops.elements import STORAGE
from escalade.ops.softmax import Softmax, SoftmaxProblem
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
    """Small beside the norm of the whole, and wrong all the same."""
    problem = ScaleProblem(1_000_000)
    case = Case(Scale(rung("suspect")), problem, CPU, 1)
    suspect = rung("suspect", "wrong_element", slip=1e-4)
    outcome = case.check(suspect, "nchw", suspect.configs(problem)[0])
    assert outcome.error is not None and outcome.tolerance is not None
    assert outcome.error <= outcome.tolerance, "the case is not what it is meant to be"
    assert outcome.failed and "one output is off" in outcome.failure


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_an_element_may_be_off_by_its_own_rounding(dtype: str) -> None:
    """Softmax has elements fifty times as large as a typical one, and so are the errors of rounding them."""
    case = Case(Softmax(), SoftmaxProblem(1000, 1000, dtype), CPU, 1)
    tolerance = case.operation.ladder.rung("block_per_row").tolerance(case.problem, case.peer_error)
    output = case.expected.to(STORAGE[dtype])
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


def test_what_a_rung_does_not_take_is_skipped_with_its_sentence() -> None:
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


def test_a_rung_whose_support_cannot_be_asked_is_a_failure_not_a_crash() -> None:
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
    first, again, other = (Case(operation, ScaleProblem(10), CPU, seed).inputs["x"] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_jobs_ask_every_rung_in_every_layout() -> None:
    planned = jobs(Scale(rung("one"), rung("two")), CPU, configs="all")
    assert [(j.rung.name, j.problem.layout, j.config is None) for j in planned].count(
        ("one", "nchw", False)
    ) == 3
    assert sum(bool(job.refusal) for job in planned) == 2
