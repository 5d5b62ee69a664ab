"""The rungs that are chosen by default."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from escalade.device import nvrtc
from escalade.device.recipe import KernelCall
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS
from escalade.ops.base.card import SHARED_BYTES
from escalade.ops.base.cards import typical_card
from escalade.ops.base.rung import Config
from escalade.ops.choose.choice import Choice, choose, estimated
from escalade.ops.choose.table import Entry, Table, key_of
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from escalade.tune.sweep import UNTUNED, problems
from tests.bench.fake import Scale, ScaleProblem, ScaleRung

CPU = torch.device("cpu")


def chosen(name: str, dtype: str = "fp32", layout: str = "nchw") -> tuple[str, str]:
    choice = choose(OPERATIONS["conv2d"], Conv2dProblem.parse(name, dtype, layout), CPU)
    assert choice.config in choice.rung.configs(choice.problem)
    return choice.rung.name, choice.problem.layout


def test_tensor_cores_are_worth_a_conversion() -> None:
    assert chosen("64to64_56_k3s1_b8", "fp16", "nhwc")[1] == "nhwc"
    assert chosen("64to64_56_k3s1_b8", "fp16", "nchw")[1] == "nhwc"
    assert chosen("64to64_56_k3s1_b8", "fp32", "nchw")[1] == "nchw"


def test_large_filters_go_through_the_frequency_domain() -> None:
    assert chosen("32to32_64_k31s1_b2")[0] == "fft"
    assert chosen("32to32_64_k31s1g32_b2")[0] == "fft_fused"
    assert "fft" not in chosen("32to32_64_k31s2_b2")[0], "FFT takes stride 1 only"


def test_winograd_is_for_many_pixels() -> None:
    """Before Hopper, where three wgmma products of halves are faster still."""
    many, few = (
        Conv2dProblem.parse(name, "fp32", "nhwc") for name in ("128to128_28_k3s1_b256", "512to512_7_k3s1_b1")
    )
    assert estimated(OPERATIONS["conv2d"], many, typical_card("sm_80")).rung.name.startswith("winograd")
    assert estimated(OPERATIONS["conv2d"], many, typical_card("sm_90a")).rung.name == "wgmma_split"
    assert estimated(OPERATIONS["conv2d"], few, typical_card("sm_80")).rung.name == "tensor_core_split"


def test_few_filters_are_not_left_to_the_matrix_product() -> None:
    """Measured on an H200: 592 µs against 9,171."""
    assert chosen("1to4_86_k7s1p0_b10000")[0] == "tuned"


def test_groups_have_a_rung() -> None:
    problem = Conv2dProblem.parse("8to8_10_k3s1g4_b1")
    assert choose(OPERATIONS["conv2d"], problem, CPU).rung.supports(problem) is None


def test_a_rung_by_name_is_taken_as_it_is() -> None:
    problem = Conv2dProblem.parse("64to64_56_k3s1_b8", "fp16", "nchw")
    choice = choose(OPERATIONS["conv2d"], problem, CPU, "tuned")
    assert choice.problem == problem and choice.why == "asked for by name"
    with pytest.raises(UnsupportedError, match="fused_epilogue of conv2d cannot compute"):
        choose(OPERATIONS["conv2d"], problem, CPU, "fused_epilogue")
    with pytest.raises(UnsupportedError, match="no rung 'fastest'"):
        choose(OPERATIONS["conv2d"], problem, CPU, "fastest")


# --- by estimates


@dataclass(frozen=True)
class Estimated(ScaleRung):
    us: tuple[float | None, ...] = (None,)
    """By config."""
    floor: float = 0.0

    def estimate(self, problem: ScaleProblem, config: Config) -> float | None:
        return self.us[self.configs(problem).index(config) % len(self.us)]

    def least(self, problem: ScaleProblem) -> float:
        return self.floor


class Unasked(Estimated):
    def configs(self, problem: ScaleProblem) -> Any:
        raise AssertionError("what cannot win must not be asked for its configs")


def rung(name: str, *us: float | None, kind: type[Estimated] = Estimated, floor: float = 0.0) -> Estimated:
    return kind(name, "a rung of the tests", None, None, us=us, floor=floor)


def preferring(*rungs: Estimated, avoid: frozenset[str] = frozenset()) -> Choice:
    return choose(Scale(*rungs), ScaleProblem(8), CPU, avoid=avoid)


@pytest.mark.parametrize(
    ("first", "second", "third", "wanted"),
    [
        ((5.0,), (3.0,), (4.0,), "second"),
        ((3.0,), (3.0,), (3.0,), "first"),
        ((None,), (3.0,), (1.0,), "first"),
        ((5.0,), (None,), (1.0,), "first"),
        ((5.0,), (3.0,), (None,), "second"),
    ],
)
def test_the_least_estimate_wins_up_to_the_first_rung_that_has_none(
    first: tuple[float | None],
    second: tuple[float | None],
    third: tuple[float | None],
    wanted: str,
) -> None:
    choice = preferring(rung("first", *first), rung("second", *second), rung("third", *third))
    assert choice.rung.name == wanted
    assert ("estimate" in choice.why) == (first != (None,))


def test_the_best_config_is_taken_and_the_estimate_said() -> None:
    choice = preferring(rung("only", 7.5, 2.5, 9.0))
    assert choice.config == choice.rung.configs(ScaleProblem(8))[1] and "2.5 µs" in choice.why


def test_what_cannot_win_is_not_looked_at() -> None:
    choice = preferring(rung("first", 4.0), rung("second", 1.0, kind=Unasked, floor=4.0), rung("third", 2.0))
    assert choice.rung.name == "third"


def test_what_failed_before_is_passed_over() -> None:
    rungs = rung("first", 4.0), rung("second", 5.0)
    assert preferring(*rungs, avoid=frozenset({"scale/first"})).rung.name == "second"
    with pytest.raises(UnsupportedError, match="no rung of scale can compute"):
        preferring(*rungs, avoid=frozenset({"scale/first", "scale/second"}))


class AnyLayout(Estimated):
    def supports(self, problem: ScaleProblem) -> str | None:
        return None


class Converting(Scale):
    def forms(self, rung: str, problem: ScaleProblem) -> tuple[ScaleProblem, ...]:
        return (problem, replace(problem, layout="nchw"))


def test_an_estimate_includes_the_conversions() -> None:
    given, card = ScaleProblem(8, layout="nhwc"), typical_card("sm_90a")
    conversion = estimated(Converting(rung("converted", 100.0)), given, card).us
    assert conversion is not None and conversion > 101.0
    for us, wanted in ((conversion - 1.0, "as it is"), (conversion + 1.0, "converted")):
        rungs = rung("as it is", us, kind=AnyLayout), rung("converted", 100.0)
        for order in (rungs, rungs[::-1]):
            choice = estimated(Converting(*order), given, card)
            assert (choice.rung.name, choice.us) == (wanted, min(us, conversion))


def test_a_rung_that_refuses_the_problem_is_not_taken_from_a_table() -> None:
    given = ScaleProblem(8, layout="nhwc")
    rungs = rung("refuses", 1.0), rung("takes it", 2.0, kind=AnyLayout)
    config = rungs[0].configs(given)[1]
    for name, wanted in (("refuses", None), ("takes it", config)):
        table = Table("mine", {key_of("scale", given): Entry(name, config.as_dict(), 1.0)})
        choice = choose(Scale(*rungs), given, CPU, decided=table)
        assert choice.rung.name == "takes it" and (wanted is None or choice.config == wanted)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_90a"])
def test_a_choice_fits_the_gpu(architecture: str) -> None:
    for problem in UNTUNED:
        choice = estimated(OPERATIONS["conv2d"], problem, typical_card(architecture))
        assert architecture in choice.rung.architectures
        steps = choice.rung.recipe(choice.problem, choice.config).steps
        shared = max(step.shared_bytes for step in steps if isinstance(step, KernelCall))
        assert shared <= SHARED_BYTES[architecture]


def test_a_choice_compiles_nothing_and_is_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(*_: object) -> None:
        raise AssertionError("a choice needs no kernel")

    monkeypatch.setattr(nvrtc, "compile_program", compile)
    first = [estimated(OPERATIONS["conv2d"], problem, typical_card("sm_90a")) for problem in UNTUNED]
    assert [
        estimated(OPERATIONS["conv2d"], replace(problem), typical_card("sm_90a")) for problem in UNTUNED
    ] == first


def test_estimates_grow_with_the_work() -> None:
    for name in (
        "fused_epilogue",
        "tma_wgmma",
        "tensor_core_split",
        "implicit_gemm",
        "winograd_f4_split",
        "fft",
    ):
        one = Conv2dOperation.ladder.rung(name)
        dtype = "fp16" if name in ("fused_epilogue", "tma_wgmma") else "fp32"
        small, large = (
            Conv2dProblem.parse(f"128to128_28_k3s1_b{batch}", dtype, "nhwc") for batch in (64, 256)
        )
        least = [min(one.estimate(p, config) or 0.0 for config in one.configs(p)) for p in (small, large)]
        assert 2.0 < least[1] / least[0] < 5.0, name


@pytest.mark.parametrize(
    ("name", "rung_name", "dtype", "measured"),
    [
        ("128to128_28_k3s1_b256", "fused_epilogue", "fp16", 139.4),
        ("64to64_56_k3s1_b1_bias+relu", "fused_epilogue", "fp16", 3.89),
        ("128to128_28_k3s1_b256", "tensor_core_split", "fp32", 993.8),
        ("128to128_28_k3s1_b256", "winograd_f4_split", "fp32", 396.0),
        ("128to128_28_k3s1_b256", "implicit_gemm", "fp32", 1384.6),
        ("32to32_64_k31s1_b32", "fft", "fp32", 175.7),
    ],
)
def test_estimates_are_near_what_an_h200_took(name: str, rung_name: str, dtype: str, measured: float) -> None:
    one = Conv2dOperation.ladder.rung(rung_name)
    problem = Conv2dProblem.parse(name, dtype, "nhwc")
    least = min(one.estimate(problem, config) or 0.0 for config in one.configs(problem))
    assert measured / 1.4 < least < measured * 1.4


def test_the_last_resort_is_estimated_with_caution() -> None:
    """`direct` took this long on an H200, longer than its rate for odd shapes: another rung is worth trying first."""
    one, problem = (
        Conv2dOperation.ladder.rung("direct"),
        Conv2dProblem.parse("64to64_56_k3s1_b256", "fp32", "nhwc"),
    )
    for config in one.configs(problem):
        assert 118173.0 < (one.estimate(problem, config) or 0.0) < 4 * 118173.0


def test_every_preferred_rung_of_conv2d_has_estimates() -> None:
    """A rung without an estimate ends the search, whatever later ones could do."""
    operation = Conv2dOperation()
    asked: Counter[str] = Counter()
    for problem in problems(60):
        for name in operation.preferred(problem):
            one = operation.ladder.rung(name)
            if asked[name] < 8 and one.supports(problem) is None:
                asked[name] += 1
                assert one.estimate(problem, one.configs(problem)[0]), f"{name} on {problem.name}"


def test_every_operation_still_has_a_choice() -> None:
    for operation in OPERATIONS.values():
        for problem in operation.small_problems:
            if any(
                r.supports(problem) is None for r in map(operation.ladder.rung, operation.preferred(problem))
            ):
                choice = choose(operation, problem, CPU)
                assert choice.config in choice.rung.configs(choice.problem) and choice.why
