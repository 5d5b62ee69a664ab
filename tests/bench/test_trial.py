"""Trials in a climb: input sets, the selection of finalists and winners, and wrong timed results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from escalade import ops
from escalade.device import packing
from escalade.device.recipe import KernelCall, Recipe
from escalade.device.timing import L2_MULTIPLE, Subject, Timing
from escalade.ops.conv2d import Conv2dProblem
from escalade.tune.verification import VerificationCase
from escalade_bench import trial
from escalade_bench.layers import Layer, measure
from escalade_bench.measure.ceilings import Ceilings
from escalade_bench.peers.layer import LayerPeer, WrongPeer, agreement, eager_conv2d, error_of, operator_peers
from escalade_bench.trial import Bench, Settings, Verified, verified_peers
from tests.bench.fake import Scale, ScaleProblem, rung

CPU = torch.device("cpu")
PROBLEM = ScaleProblem(100)
L2 = 2000


def card(l2_bytes: int) -> Ceilings:
    return Ceilings("card", 132, l2_bytes, 227 << 10, 139 << 30, 4000.0, 3900.0, {"fp32": 50.0})


def verified(operation: Scale, problem: ScaleProblem = PROBLEM) -> list[Verified]:
    """Every config of every rung."""
    case = VerificationCase(operation, problem, CPU, 0)
    return [
        Verified(one, problem, config, case.check(one, "nchw", config))
        for one in operation.ladder
        for config in one.configs(problem)
    ]


def bench(operation: Scale, l2_bytes: int = 0, problem: ScaleProblem = PROBLEM) -> Bench:
    return Bench(operation, problem, [], Settings(ceilings=card(l2_bytes) if l2_bytes else None))


def with_scratch(operation: Scale, l2_bytes: int = 0) -> Bench:
    recipes = [one.recipe(PROBLEM, one.configs(PROBLEM)[0]) for one in operation.ladder]
    return Bench(operation, PROBLEM, recipes, Settings(ceilings=card(l2_bytes) if l2_bytes else None))


def test_the_input_sets_are_together_three_times_the_cache() -> None:
    made = bench(Scale(rung("one")), L2)
    sets = made.sets("nchw")
    tensors = [tensor for one in sets for tensor in one.values()]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors), "each has memory of its own"
    assert sum(tensor.nbytes for tensor in tensors) >= L2_MULTIPLE * L2 == 6000
    assert not torch.equal(sets[0]["x"], sets[1]["x"]) and bool(sets[0]["x"].all())


def test_without_ceilings_a_gpu_is_asked_for_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "properties_of", lambda device: card(L2))
    monkeypatch.setattr(torch, "empty", lambda *size, **options: None)  # no such device exists
    made = Bench(Scale(rung("one")), PROBLEM, [], Settings(device=torch.device("cuda", 0)))
    assert made.sets_count == 8, "8 sets of 800 bytes"


def test_every_set_is_worked_on() -> None:
    operation = Scale(rung("one"))
    made = with_scratch(operation, L2)
    for call in made._subject(verified(operation)[0]).calls:
        call()
    sets = made.sets("nchw")
    assert len(sets) == 8
    for tensors in sets:
        assert torch.equal(tensors["y"], 2 * tensors["x"])


# Finalists and winners


@pytest.fixture
def fake_times(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, float]], list[list[str]]]:
    """Set the time of each subject, and return the names of those that were timed together."""

    def install(times: Mapping[str, float]) -> list[list[str]]:
        rounds: list[list[str]] = []

        def fake(given: Sequence[Subject], *rest: Any, **settings: Any) -> dict[str, Timing]:
            rounds.append([subject.name for subject in given])
            us = {subject.name: times[subject.name] for subject in given}
            return {name: Timing(us, us - 1, us + 2, 7, "graph") for name, us in us.items()}

        monkeypatch.setattr(trial, "time_interleaved", fake)
        return rounds

    return install


@pytest.mark.parametrize("order", [(3.0, 1.0, 2.0), (1.0, 2.0, 3.0), (2.0, 3.0, 1.0)])
def test_the_fastest_configs_go_to_the_final_and_the_fastest_of_it_is_kept(
    order: tuple[float, ...], fake_times: Callable[[Mapping[str, float]], list[list[str]]]
) -> None:
    operation = Scale(rung("one"))
    offered = verified(operation)
    times = {one.name: us for one, us in zip(offered, order, strict=True)}
    rounds = fake_times(times)
    made = with_scratch(operation)
    made.on_gpu = True  # on the twin nothing is filtered: no time there is a speed
    final = made.screen(offered)
    ranked = sorted(offered, key=lambda one: times[one.name])
    assert [one.name for one in final] == [one.name for one in ranked[:2]]
    (record,) = made.measure(list(reversed(final)), [])
    assert record.config == ranked[0].config.as_dict()
    assert (record.median_us, record.p20_us, record.p80_us, record.samples) == (1.0, 0.0, 3.0, 7)
    assert len(rounds[0]) == 3 and len(rounds[1]) == 2


# Wrong results when timed


class Idle:
    """Replaces the timed function, and does nothing."""

    def __init__(self, *arguments: Any, **flags: Any) -> None:
        pass

    def bind(self, tensors: Any) -> Callable[[], None]:
        return lambda: None


def test_what_is_verified_but_does_nothing_when_it_is_timed_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operation = Scale(rung("one"))
    offered = verified(operation)[:1]
    assert offered[0].outcome.passed
    monkeypatch.setattr(packing, "Executable", Idle)
    made = with_scratch(operation)
    (record,) = made.measure(offered, [])
    assert "the timed results are wrong: input set 0 of 1 has results that are not written" in record.failure
    assert record.median_us is None and record.rung == "one"


def test_a_result_that_is_written_and_wrong_when_it_is_timed_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wrong in the last set only."""
    operation = Scale(rung("one"))
    offered = verified(operation)[:1]
    made = with_scratch(operation, L2)
    real = packing.Executable

    class Careless(real):  # type: ignore[valid-type, misc]
        def bind(self, tensors: Any) -> Callable[[], None]:
            bound = super().bind(tensors)

            def run() -> None:
                bound()
                if tensors["y"] is made.sets("nchw")[-1]["y"]:
                    tensors["y"][3] *= 1.5

            return run

    monkeypatch.setattr(packing, "Executable", Careless)
    (record,) = made.measure(offered, [])
    assert "the timed results are wrong: " in record.failure and record.median_us is None


def test_a_further_output_that_is_not_written_when_it_is_timed_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operation = ops.operation("conv2d_weight_gradient")
    problem = operation.parse("3to5_7x6_k3s1_b2_bias")
    best = operation.ladder.supporting(problem)[0]
    config = best.configs(problem)[0]
    outcome = VerificationCase(operation, problem, CPU, 0).check(best, "nchw", config)
    offered = [Verified(best, problem, config, outcome)]
    recipe = best.recipe(problem, config)

    def measured() -> str:
        return Bench(operation, problem, [recipe], Settings()).measure(offered, [])[0].failure

    assert outcome.passed and measured() == ""
    real = packing.Executable

    class Forgetful(real):  # type: ignore[valid-type, misc]
        def bind(self, tensors: Any) -> Callable[[], None]:
            (name,) = operation.extra_outputs(problem, CPU)
            return super().bind({**tensors, name: torch.empty_like(tensors[name])})

    monkeypatch.setattr(packing, "Executable", Forgetful)
    assert "the timed results are wrong: input set 0 of 1 has results that are not written" in measured()


def doubled(problem: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return 2 * inputs["x"]


def test_a_peer_whose_timed_result_is_wrong_is_a_record_that_says_so() -> None:
    operation = Scale(rung("one"))
    made = with_scratch(operation)
    calls: list[int] = []

    def turns_wrong(problem: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return (3 if len(calls) > 0 else 2) * inputs["x"]

    peers = [LayerPeer("right", "nchw", doubled), LayerPeer("wrong", "nchw", turns_wrong)]
    case = VerificationCase(operation, PROBLEM, CPU, 0)
    verified, refused = verified_peers(peers, operation, case)
    assert not refused
    calls.append(1)
    right, wrong = made.measure([], verified)
    assert (right.system, right.failure, right.error) == ("right", "", 0.0)
    assert (
        wrong.system == "wrong" and "the timed results are wrong" in wrong.failure and wrong.median_us is None
    )
    assert not made.left_out


@pytest.mark.parametrize(
    "run",
    [
        lambda problem, inputs: 2.01 * inputs["x"],
        lambda problem, inputs: 2 * inputs["x"][:1],
        lambda problem, inputs: 2 * inputs["x"][None],
        lambda problem, inputs: torch.cat([2 * inputs["x"][:-1], inputs["x"][:1] * torch.nan]),
    ],
)
def test_a_peer_that_is_wrong_or_of_another_shape_is_no_peer(run: Any) -> None:
    case = VerificationCase(Scale(rung("one")), PROBLEM, CPU, 0)
    with pytest.raises(WrongPeer):
        error_of(LayerPeer("wrong", "nchw", run), PROBLEM, case.inputs, case.expected)


@pytest.mark.parametrize("output", ["fp8", "int8"])
def test_a_peer_that_quantizes_is_off_by_the_rounding_of_its_results(output: str) -> None:
    operation = ops.OPERATIONS["quantise"]
    problem = replace(operation.problems[0], elements=1000, dtype="fp16", output=output)
    case = VerificationCase(operation, problem, CPU, 0)
    error_of(LayerPeer("torch-flat", "flat", operation.peer), problem, case.inputs, case.expected)
    assert all(agreement(one) > 0 for each in ops.OPERATIONS.values() for one in each.problems)


def test_a_peer_that_gives_its_input_back_does_not_lose_it() -> None:
    """A conversion to the same dtype: poisoning the result must not overwrite the input."""

    class Same(Scale):
        def reference(self, problem: ScaleProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
            return inputs["x"].double()

    made = with_scratch(Same(rung("one")))
    peer = LayerPeer("same", "nchw", lambda problem, inputs: inputs["x"])
    assert [record.system for record in made.measure([], [(peer, 0.0)])] == ["same"]


def test_layers_say_which_peers_were_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "OPERATIONS", {"scale": Scale(rung("right"))})
    said: list[str] = []

    def measured(self: Bench, *arguments: Any) -> list[Any]:
        self.left_out.append("a peer is wrong")
        return []

    monkeypatch.setattr(Bench, "measure", measured)
    measure(Layer("scale", PROBLEM), (), Settings(note=said.append), "layers")
    assert said == ["a peer is wrong"]


# Peers at their best


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_peers_of_convolutions_have_images_and_filters_in_their_layout(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Conv2dProblem.parse("8to16_9_k3s1_b2_bias+res+relu", "fp32", "nchw")
    seen: list[dict[str, torch.Tensor]] = []
    made = Bench(ops.operation("conv2d"), problem, [], Settings())
    for peer in operator_peers(ops.operation("conv2d"), problem):
        if peer.layout != layout:
            continue

        def spy(asked: Any, inputs: Any) -> torch.Tensor:
            seen.append(inputs)
            assert asked == replace(problem, layout=layout)
            return eager_conv2d(asked, inputs)

        for call in made._peer_subject(replace(peer, run=spy)).calls:
            call()
    assert len(seen) == 2, "PyTorch's steps, and cuDNN's fused call"
    expected = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    for inputs in seen:
        for name in ("x", "weight", "residual"):
            assert inputs[name].is_contiguous(memory_format=expected), name


# Resources of a kernel


def test_resources_are_those_of_the_kernel_with_the_most_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Occupancy of two kernels of 128 threads: 3 CTAs at 60 registers, 5 at 40; the second spills 16 bytes."""
    config = rung("one").configs(PROBLEM)[2]
    (call,), (other,) = (one.recipe(PROBLEM, config).steps for one in (rung("one"), rung("two", slip=2.0)))
    assert isinstance(call, KernelCall) and isinstance(other, KernelCall)
    once = replace(call, weights_only=True)
    fat, thin = (
        SimpleNamespace(
            resources=SimpleNamespace(registers=registers, spill_bytes=spilt),
            occupancy=lambda threads, shared, blocks=blocks: blocks,
        )
        for registers, spilt, blocks in ((60, 0, 3), (40, 16, 5))
    )
    loaded = {call.program: fat, other.program: thin}
    monkeypatch.setattr(trial.cuda, "load", lambda program, index: loaded[program])
    found = trial.resources(Recipe((once, other, call)), torch.device("cuda", 0))
    assert found == (60, 16, 3 * 128 / 2048)
    assert trial.resources(Recipe((once,)), torch.device("cuda", 0)) == (None, None, None)
