"""Random convolutions, measurements of all their candidates, and scores of choices by them."""

from __future__ import annotations

import io
import json
import math
import pathlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from escalade import cli, ops
from escalade.commands import selection, tune, tuning
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS
from escalade.ops.base.cards import typical_card
from escalade.ops.choose.choice import estimated
from escalade.ops.choose.table import SHIPPED, key_of, read
from escalade.ops.conv2d import Conv2dProblem
from escalade.tune import judgement, samples, search
from escalade.tune.samples import Sample, SamplesError
from escalade.tune.sweep import MOST_BYTES, MOST_FLOPS, UNTUNED, problems
from tests.bench.fake import Scale, ScaleProblem, rung

CPU = torch.device("cpu")
PROBLEM = Conv2dProblem.parse("64to64_56_k3s1_b8", "fp32", "nhwc")
RECORDED = pathlib.Path(__file__).parents[2] / "results/h200/conv2d_sweep.jsonl"


# --- the problems


def test_the_sweep_is_reproducible_and_a_larger_one_extends_it() -> None:
    assert problems(40) == problems(60)[:40]
    assert problems(40) != problems(40, seed=1)
    assert len(set(problems(300))) == 300


def test_the_sweep_stays_within_bounds_and_has_everything() -> None:
    swept = problems(300)
    assert all(p.flops <= MOST_FLOPS and p.bytes <= MOST_BYTES for p in swept)
    assert all(min(p.channels, p.filters) >= 3 and 1 <= p.batch <= 256 for p in swept)
    assert {p.dtype for p in swept} == {"fp16", "bf16", "fp32", "tf32", "fp8"}
    assert {(p.filter_height, p.filter_width) for p in swept} == {
        (1, 1),
        (3, 3),
        (5, 5),
        (7, 7),
        (1, 7),
        (7, 1),
    }
    assert {p.stride for p in swept} == {(1, 1), (2, 2)} and {p.dilation for p in swept} == {(1, 1), (2, 2)}
    assert any(1 < p.groups < p.channels for p in swept)
    assert any(1 < p.groups == p.channels for p in swept)
    assert any(p.channels % 8 for p in swept) and sum(p.channels % 64 == 0 for p in swept) > 100


def test_every_problem_has_a_name_that_leads_back_and_a_choice() -> None:
    for problem in (*problems(60), *UNTUNED):
        assert Conv2dProblem.parse(problem.name, problem.dtype, problem.layout) == problem
        assert estimated(OPERATIONS["conv2d"], problem, typical_card("sm_90a")).problem == problem


def test_untuned_problems_are_in_no_table() -> None:
    assert len(set(UNTUNED)) == 20 and {p.batch for p in UNTUNED} == {3}
    assert all(7 <= p.channels <= 300 for p in UNTUNED)
    assert {(5, 5), (1, 7)} <= {(p.filter_height, p.filter_width) for p in UNTUNED}
    assert any(p.dilation == (2, 2) for p in UNTUNED)
    for path in SHIPPED.glob("*.json"):
        assert not any(key_of("conv2d", p) in read(path, "shipped").entries for p in UNTUNED)


# --- measuring


def sample(
    rung: str, us: float | None, config: dict[str, Any] | None = None, of: int = 1, **rest: Any
) -> Sample:
    problem = rest.pop("problem", PROBLEM)
    return Sample(
        "conv2d", problem.name, problem.dtype, problem.layout, "sm_90a", rung, config or {}, us,
        "" if us else "it is wrong", of,
    )  # fmt: skip


def test_samples_are_read_back_and_truncated_ones_dropped(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "folder" / "sweep.jsonl"
    other = replace(PROBLEM, batch=9)
    whole = [sample("a", 1.5, {"tile": 4}, of=2), sample("b", None, of=2)]
    samples.append(path, whole)
    samples.append(path, [sample("a", 2.0, of=2, problem=other)])
    assert samples.load(path) == {key_of("conv2d", PROBLEM): whole}
    with path.open("a") as file:
        file.write('{"operation": "conv')
    assert samples.resume(path) == {key_of("conv2d", PROBLEM): whole}
    assert len(path.read_text().splitlines()) == 2 and len(list(path.parent.iterdir())) == 1


def test_a_file_of_something_else_is_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    with pytest.raises(SamplesError, match=r"other.jsonl, line 1, is not a measured candidate"):
        samples.load(path)
    assert samples.load(tmp_path / "none.jsonl") == {}


@pytest.mark.parametrize("text", ["a letter to a friend", "a letter to a friend\n", '{"a": 1}', "[1, 2]\n"])
def test_a_file_of_something_else_is_never_overwritten(text: str, tmp_path: pathlib.Path) -> None:
    """Also with a single line, which could be taken as truncated."""
    path = tmp_path / "letter.txt"
    path.write_text(text)
    for use in (samples.load, samples.resume):
        with pytest.raises(SamplesError, match="line 1, is not a measured candidate"):
            use(path)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("field", "value"),
    [("us", "fast"), ("us", float("nan")), ("config", []), ("rung", 3), ("of", 1.5), ("of", 0), ("of", True)],
)
def test_a_field_that_is_wrong_is_named(field: str, value: object, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "sweep.jsonl"
    samples.append(path, [sample("a", 1.0)])
    line = json.dumps({**json.loads(path.read_text()), field: value})
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(SamplesError, match=rf"line 2, is not a measured candidate: has .* as its {field}"):
        samples.load(path)


def test_fields_of_a_later_version_survive_resuming_a_sweep(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "sweep.jsonl"
    samples.append(path, [sample("a", 1.0)])
    line = json.dumps({**json.loads(path.read_text()), "watts": 300}) + "\n"
    path.write_text(line)
    assert samples.resume(path) == {key_of("conv2d", PROBLEM): [sample("a", 1.0)]}
    assert path.read_text() == line


def test_sweeps_at_once_lose_nothing(tmp_path: pathlib.Path) -> None:
    """One starts while others write; two measure the same problem."""
    path = tmp_path / "sweep.jsonl"
    together = threading.Barrier(4)

    def work(writer: int) -> None:
        together.wait()
        for number in range(10):
            samples.resume(path)
            problem = replace(PROBLEM, batch=1 + 10 * (writer % 3) + number)
            samples.append(path, [sample(name, 1.0, of=3, problem=problem) for name in "abc"])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert [len(found) for found in samples.load(path).values()] == [3] * 30
    assert [entry.name for entry in tmp_path.iterdir()] == ["sweep.jsonl"]


@pytest.fixture
def with_operation(monkeypatch: pytest.MonkeyPatch) -> Scale:
    operation = Scale(rung("right"), rung("wrong", "wrong_element", below="right"))
    monkeypatch.setattr("escalade.ops.OPERATIONS", {"scale": operation})
    return operation


def test_every_config_is_measured_and_wrong_ones_have_no_time(with_operation: Scale) -> None:
    found = search.samples(ops.operation("scale"), ScaleProblem(100), CPU)
    assert [(s.rung, s.config["threads"]) for s in found] == [
        (name, threads) for name in ("right", "wrong") for threads in (64, 32, 128)
    ]
    assert all(s.us and not s.failure for s in found[:3])
    assert all(s.us is None and s.failure for s in found[3:])
    assert {s.of for s in found} == {6}


def test_the_fastest_is_one_that_is_right(with_operation: Scale) -> None:
    entry = search.fastest(ops.operation("scale"), ScaleProblem(100), CPU)
    assert entry.rung == "right" and entry.median_us > 0


def test_candidates_with_much_larger_estimates_are_not_measured() -> None:
    found = search.candidates(ops.operation("conv2d"), PROBLEM, typical_card("sm_90a"))
    assert "direct" not in {candidate.rung.name for candidate in found}
    estimates = [candidate.rung.estimate(PROBLEM, candidate.config) for candidate in found]
    figures = [us for us in estimates if us is not None]
    assert len(figures) > 3 and max(figures) <= search.MAX_ESTIMATE_RATIO * min(figures)


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch, with_operation: Scale) -> Callable[..., None]:
    """The CPU in place of a GPU: kernels run on the twin and need no precompilation."""
    for module in (selection, tuning):
        monkeypatch.setattr(module, "require_gpu", lambda what: CPU)
    monkeypatch.setattr(tuning, "architecture", lambda index: "sm_90a")
    monkeypatch.setattr(tuning, "precompile", lambda programs, here, done: [done(p) for p in programs])
    monkeypatch.setattr(
        tuning.sweeping, "problems", lambda count, seed: tuple(ScaleProblem(100 + n) for n in range(count))
    )
    monkeypatch.setattr(tuning, "SWEPT", "scale")

    def interrupted_after(count: int) -> None:
        real, left = search.samples, [count]

        def limited(*arguments: Any) -> list[Sample]:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return real(*arguments)

        monkeypatch.setattr(search, "samples", limited)

    return interrupted_after


def test_a_sweep_resumes_where_it_stopped(
    as_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "sweep.jsonl"
    real = search.samples
    as_gpu(2)
    with pytest.raises(KeyboardInterrupt):
        tuning.sweep_into(path, 4, 0)
    stopped = samples.load(path)
    assert len(stopped) == 2
    monkeypatch.setattr(search, "samples", real)
    tuning.sweep_into(path, 4, 0)
    found = samples.load(path)
    assert len(found) == 4 and all(found[key] == stopped[key] for key in stopped)


def test_a_sweep_measures_only_missing_problems(
    as_gpu: Callable[..., None], with_operation: Scale, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "sweep.jsonl"
    tuning.sweep_into(path, 1, 0)
    first = path.read_text()
    made = with_operation.inputs_made
    tuning.sweep_into(path, 3, 0)
    assert with_operation.inputs_made == made + 2
    assert path.read_text().startswith(first) and len(samples.load(path)) == 3


def test_named_problems_are_tuned_into_a_table_once(
    as_gpu: Callable[..., None], with_operation: Scale, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "card.json"
    named = (["scale"], ["scale_50", "scale_60"], ["fp32"], ["nchw"])
    tune.command(*named, table=path)
    entries = read(path, "mine").entries
    assert set(entries) == {"scale scale_50 fp32 nchw", "scale scale_60 fp32 nchw"}
    made = with_operation.inputs_made
    tune.command(*named, table=path)
    assert with_operation.inputs_made == made
    tune.command(*named, table=path, again=True)
    assert with_operation.inputs_made > made


def test_problems_need_one_operation(as_gpu: Callable[..., None], tmp_path: pathlib.Path) -> None:
    for names in ([], ["scale", "scale"]):
        with pytest.raises(UnsupportedError, match="--problem needs one operation"):
            tune.command(names, ["scale_50"], table=tmp_path / "card.json")
    with pytest.raises(UnsupportedError, match="name a network to tune"):
        tune.command([], table=tmp_path / "card.json")


# --- judging


def swept(path: pathlib.Path, chosen_us: float | None, best_us: float = 10.0) -> None:
    choice = estimated(OPERATIONS["conv2d"], PROBLEM, typical_card("sm_90a"))
    other = next(config for config in choice.rung.configs(PROBLEM) if config != choice.config)
    samples.append(
        path,
        [
            sample(choice.rung.name, chosen_us, choice.config.as_dict(), of=2),
            sample(choice.rung.name, best_us, other.as_dict(), of=2),
        ],
    )


@pytest.mark.parametrize(("chosen_us", "holds"), [(10.0, True), (19.9, True), (20.1, False), (None, False)])
def test_a_choice_beyond_twice_the_best_fails(
    tmp_path: pathlib.Path, chosen_us: float | None, holds: bool
) -> None:
    path = tmp_path / "sweep.jsonl"
    swept(path, chosen_us)
    text = io.StringIO()
    assert tuning.choices_hold(path, Console(file=text, width=160)) is holds
    assert PROBLEM.name in text.getvalue()
    if chosen_us:
        assert f"{chosen_us / 10:.2f} at worst" in text.getvalue()


def test_a_choice_that_was_not_measured_is_not_judged(tmp_path: pathlib.Path) -> None:
    """The choice may be newer than the file; but a file needs some problems that can be scored."""
    path = tmp_path / "sweep.jsonl"
    samples.append(path, [sample("fused_epilogue", 3.0, {"tile_m": 1})])
    (verdict,) = judgement.judge(samples.load(path))
    assert verdict.chosen_us is None and verdict.reason.startswith("not measured")
    assert not tuning.choices_hold(path, Console(file=io.StringIO()))
    shown = io.StringIO()
    right = judgement.Verdict("other", "window", "window", 1.0, 1.0)
    assert judgement.show([verdict, right], (), Console(file=shown, width=200))
    assert "1 choice not in the file" in shown.getvalue()
    failed = replace(right, chosen_us=None)
    assert not judgement.show([verdict, right, failed], (), Console(file=shown, width=200))


def test_the_documented_command_succeeds_on_the_recorded_sweep() -> None:
    assert tuning.choices_hold(RECORDED, Console(file=io.StringIO()))


def test_the_worst_comes_first_and_rungs_are_calibrated(tmp_path: pathlib.Path) -> None:
    choice = estimated(OPERATIONS["conv2d"], PROBLEM, typical_card("sm_90a"))
    us = choice.rung.estimate(PROBLEM, choice.config)
    assert us is not None
    other = replace(PROBLEM, batch=9)
    path = tmp_path / "sweep.jsonl"
    swept(path, 3 * us, us)
    samples.append(path, [sample("fused_epilogue", None, {}, problem=other)])
    verdicts = judgement.judge(samples.load(path))
    assert [verdict.key for verdict in verdicts] == [key_of("conv2d", other), key_of("conv2d", PROBLEM)]
    assert verdicts[1].ratio == pytest.approx(3.0)
    (calibration,) = judgement.calibrations(samples.load(path))
    assert calibration.rung == choice.rung.name and calibration.count == 2
    assert calibration.high > 2.0


def test_nothing_to_judge_is_reported(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UnsupportedError, match="no measured problems"):
        tuning.choices_hold(tmp_path / "none.jsonl", Console(file=io.StringIO()))


def test_no_choice_takes_more_than_twice_the_best_of_the_recorded_sweep() -> None:
    verdicts = judgement.judge(samples.load(RECORDED))
    assert len(verdicts) == 71
    beyond = [v for v in verdicts if v.ratio > judgement.BOUND and not newer_than_the_sweep(v)]
    assert not [f"{v.key}: {v.chosen} {v.ratio:.2f} {v.reason}" for v in beyond]


def newer_than_the_sweep(verdict: judgement.Verdict) -> bool:
    """Return True if the choice did not exist when the sweep was recorded, and expects no more than the bound."""
    measured = samples.load(RECORDED)[verdict.key]
    is_new = verdict.reason.startswith("not measured")
    if not is_new and any(sample.rung == verdict.chosen for sample in measured):
        return False
    problem = measured[0].parsed()
    card = typical_card(measured[0].architecture or None)
    chosen = ops.operation("conv2d").ladder.rung(verdict.chosen).on(card)
    estimates = [chosen.estimate(problem, config) or math.inf for config in chosen.configs(problem)]
    return min(estimates) < judgement.BOUND * verdict.best_us


# --- the command line


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(cli.app, ["tune", *arguments])
    return result.exit_code, result.output + str(result.exception or "")


def test_the_command_judges_a_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "sweep.jsonl"
    swept(path, 25.0)
    code, output = run("--judge", str(path))
    assert code == 1 and "2.50 at worst; 1 above 2" in output


@pytest.mark.parametrize(
    "arguments",
    [("--sweep", "3", "--judge", "x"), ("resnet18", "--sweep", "3"), ("--judge", "x", "--problem", "y")],
)
def test_one_thing_at_a_time(arguments: tuple[str, ...]) -> None:
    code, output = run(*arguments)
    assert code == 2 and "mutually exclusive" in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
@pytest.mark.parametrize("arguments", [("resnet18",), ("--sweep", "3"), ("conv2d", "-p", "8to8_9_k3s1_b1")])
def test_measuring_needs_a_gpu(arguments: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    code, output = run(*arguments)
    assert code == 1 and "tuning needs a GPU" in output
