"""One problem in one dtype: verified rungs and peers, interleaved over shared inputs and scratch memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from escalade.device import cuda
from escalade.device.gpu import properties_of
from escalade.device.packing import PreparedRecipe
from escalade.device.recipe import KernelCall, Recipe
from escalade.device.timing import ResultCheck, Subject, Timing, on_gpu, rotation, time_interleaved
from escalade.ops.base.operation import Operation
from escalade.ops.base.rung import Config, Rung
from escalade.tune.refusal import failure_reason
from escalade.tune.verification import Outcome, VerificationCase, compare_all, outputs_of, poison
from escalade_bench.measure.ceilings import Ceilings
from escalade_bench.measure.figures import timed
from escalade_bench.measure.records import Record
from escalade_bench.peers.layer import LayerPeer, WrongPeer, agreement, error_of

THREADS_PER_SM = 2048
_ALIGNMENT = 256  # of workspaces, as the allocator has it
_FINALISTS = 2
_CPU = torch.device("cpu")


Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """Settings of a climb: what it times, how long, and where."""

    dtypes: tuple[str, ...] = ()
    """Empty for all of the operation; likewise for layouts and rungs."""
    layouts: tuple[str, ...] = ()
    rungs: tuple[str, ...] = ()
    tune: bool = False
    """True to time every config of every rung and keep the best; otherwise the default config."""
    with_peers: bool = True
    compiled: bool = False
    """True to have torch.compile among the peers, which takes seconds and more per problem and dtype."""
    seed: int = 0
    seconds_each: float = 0.3
    min_rounds: int = 5
    screening_seconds: float = 0.02
    """Seconds for each config of the first pass of tuning."""
    weights_are_constant: bool = False
    """True to leave steps that depend on weights alone out of the time, whatever the operation says."""
    device: torch.device = _CPU
    ceilings: Ceilings | None = None
    say: Say = lambda text: None
    """Gets progress."""
    note: Say | None = None
    """Gets configs that are left out because their timed results are wrong; None for `say`."""


@dataclass(frozen=True)
class Verified:
    """A rung and config with a right result."""

    rung: Rung[Any]
    problem: Any
    config: Config
    outcome: Outcome
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.rung.name} {self.problem.layout} {self.config}"


VerifiedPeer = tuple[LayerPeer, float]
"""A peer with a right result, and its error."""


def verified_peers(
    peers: Iterable[LayerPeer], operation: Operation[Any], case: VerificationCase
) -> tuple[list[VerifiedPeer], list[Record]]:
    """Return the peers with right results, and for each other one a record with the reason."""
    right: list[VerifiedPeer] = []
    refused: list[Record] = []
    for peer in peers:
        problem = replace(case.problem, layout=peer.layout)
        try:
            with on_gpu():  # its first call may choose by timing
                error = error_of(peer, problem, case.inputs_in(peer.layout), case.expected)
        except WrongPeer as wrong:
            refused.append(refusal(operation, problem, peer.system, f"its result is wrong: {wrong}"))
        except Exception as broken:  # a peer may fail in any way: continue with the others
            refused.append(refusal(operation, problem, peer.system, failure_reason(broken)))
        else:
            right.append((peer, error))
    return right, refused


def refusal(operation: Operation[Any], problem: Any, system: str, why: str) -> Record:
    """Return the record of a peer without a time, with the reason."""
    return replace(blank_record(operation, problem, system, ""), failure=why)


def blank_record(operation: Operation[Any], problem: Any, system: str, rung: str) -> Record:
    return Record(operation.name, problem.name, problem.dtype, problem.layout, problem.batch, system, rung)


class Bench:
    """Input sets, outputs and scratch memory of one problem and dtype, and the subjects that share them."""

    def __init__(
        self, operation: Operation[Any], problem: Any, recipes: Sequence[Recipe], settings: Settings
    ) -> None:
        self.operation, self.problem, self.settings = operation, problem, settings
        self.device, self.ceilings = device, ceilings = settings.device, settings.ceilings
        self.on_gpu = device.type == "cuda"
        self.left_out: list[str] = []
        """Configs without a record because their timed results are wrong, and the failures."""
        l2_bytes = ceilings.l2_bytes if ceilings else properties_of(device).l2_bytes if self.on_gpu else 0
        self.sets_count = rotation(problem.bytes, l2_bytes)
        self._sets: dict[str, list[dict[str, torch.Tensor]]] = {}
        self._outputs = tuple(outputs_of(operation, problem, torch.device("meta")))
        self._expected: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
        # All subjects run on one stream, so they can share scratch memory.
        room = max((sum(_aligned(w.bytes) for w in recipe.workspaces) for recipe in recipes), default=0)
        self._scratch = torch.empty(room, dtype=torch.uint8, device=device)

    def _in(self, layout: str) -> Any:
        """Return the problem in another layout."""
        return replace(self.problem, layout=layout)

    def sets(self, layout: str) -> list[dict[str, torch.Tensor]]:
        """Return random inputs and outputs, enough sets to evict each other from the L2."""
        if layout not in self._sets:
            problem = self._in(layout)
            self._sets[layout] = [
                {
                    **self.operation.inputs(problem, self.device, self.settings.seed + 1 + number),
                    **outputs_of(self.operation, problem, self.device),
                }
                for number in range(self.sets_count)
            ]
        return self._sets[layout]

    def screen(self, candidates: Sequence[Verified]) -> list[Verified]:
        """Return the best configs of every rung and layout by short timings."""
        groups: dict[tuple[str, str], list[Verified]] = {}
        for candidate in candidates:
            groups.setdefault((candidate.rung.name, candidate.problem.layout), []).append(candidate)
        kept = []
        for group in groups.values():
            group = [v for v in group if not self._spills(v)] or group
            if len(group) > _FINALISTS and self.on_gpu:
                subjects = [self._subject(v) for v in group]
                wrong: dict[str, str] = {}
                times = time_interleaved(
                    subjects, self.device, seconds_each=self.settings.screening_seconds, min_rounds=3,
                    replay_us=200.0, wrong=wrong,
                )  # fmt: skip
                self._leave_out(wrong)
                right = sorted((v for v in group if v.name in times), key=lambda v: times[v.name].median_us)
                group = right or group  # the measurement reports wrong ones
            kept += group[:_FINALISTS]
        return kept

    def _spills(self, one: Verified) -> bool:
        """True if the compiler spilled registers: such a config is not screened."""
        return bool(resources(one.rung.recipe(one.problem, one.config), self.device)[1])

    def measure(self, verified: Sequence[Verified], peers: Sequence[VerifiedPeer]) -> list[Record]:
        """Time all subjects interleaved, and keep the fastest of a rung's finalists. A wrong result is a failure."""
        subjects = [self._peer_subject(peer) for peer, _ in peers] + [self._subject(v) for v in verified]
        if not subjects:
            return []
        wrong: dict[str, str] = {}
        seconds, rounds = self.settings.seconds_each, self.settings.min_rounds
        times = time_interleaved(subjects, self.device, seconds_each=seconds, min_rounds=rounds, wrong=wrong)
        self._leave_out({v.name: wrong[v.name] for v in verified if v.name in wrong})
        records = [
            self._peer_record(peer, error, times[peer.system])
            if peer.system in times
            else refusal(self.operation, self._in(peer.layout), peer.system, wrong[peer.system])
            for peer, error in peers
        ]
        best: dict[tuple[str, str], Verified] = {}
        for one in sorted(verified, key=lambda v: times[v.name].median_us if v.name in times else math.inf):
            best.setdefault((one.rung.name, one.problem.layout), one)
        return records + [
            timed(self._rung_facts(one), one.problem, times[one.name], self.ceilings)
            if one.name in times
            else replace(self._rung_facts(one), failure=wrong[one.name])
            for one in best.values()
        ]

    def _leave_out(self, wrong: dict[str, str]) -> None:
        label = f"{self.problem.name} {self.problem.dtype}"
        self.left_out += [f"{label}: {name}: {failure}" for name, failure in wrong.items()]

    def _judged(self, layout: str, results: Sequence[Mapping[str, torch.Tensor]], tolerance: float) -> str:
        """Require that every result is written, and compare those of the first and the last set."""
        for number, found in enumerate(results):
            if not found or any(bool(torch.isnan(result.double()).any()) for result in found.values()):
                return f"input set {number} of {len(results)} has results that are not written"
        for number in {0, len(results) - 1}:
            known = self._references(layout, number)
            expected = {name: known[name] for name in results[number]}
            if failure := compare_all(results[number], expected, tolerance):
                return failure
        return ""

    def _references(self, layout: str, number: int) -> dict[str, torch.Tensor]:
        """Return the results of a set in float64."""
        if (layout, number) not in self._expected:
            problem, tensors = self._in(layout), self.sets(layout)[number]
            inputs = {name: tensor for name, tensor in tensors.items() if name not in self._outputs}
            self._expected[layout, number] = {
                "y": self.operation.reference(problem, inputs),
                **self.operation.extra_references(problem, inputs),
            }
        return self._expected[layout, number]

    def _subject(self, one: Verified) -> Subject:
        recipe = one.rung.recipe(one.problem, one.config)
        stay = self.operation.weights_are_constant or self.settings.weights_are_constant
        prepared = PreparedRecipe(recipe, self.device, one.name, weights_are_constant=stay, behind=recipe)
        # Packed weights are kept per set; everything else may be shared.
        workspaces = {} if prepared.packs else self._workspaces(recipe)

        def call_over(tensors: dict[str, torch.Tensor]) -> Callable[[], None]:
            everything = prepared.pack({**tensors, **workspaces})

            def call() -> None:  # arguments are copied at launch, so one executable serves all sets
                prepared.executable.bind(everything)()

            return call

        sets = self.sets(one.problem.layout)
        tolerance = one.outcome.tolerance

        def spoil() -> None:
            self._scratch.fill_(0xFF)
            for result in (tensors[name] for tensors in sets for name in self._outputs):
                poison(result)

        def judge() -> str:
            assert tolerance is not None
            results = [{name: tensors[name] for name in self._outputs} for tensors in sets]
            return self._judged(one.problem.layout, results, tolerance)

        return Subject(one.name, [call_over(tensors) for tensors in sets], ResultCheck(spoil, judge))

    def _workspaces(self, recipe: Recipe) -> dict[str, torch.Tensor]:
        found, start = {}, 0
        for workspace in recipe.workspaces:
            if workspace.zeroed:
                found[workspace.name] = workspace.allocate(self.device)
                continue
            found[workspace.name] = self._scratch[start : start + workspace.bytes]
            start += _aligned(workspace.bytes)
        return found

    def _peer_subject(self, peer: LayerPeer) -> Subject:
        problem = self._in(peer.layout)
        sets = self.sets(peer.layout)
        results: list[torch.Tensor | None] = [None] * len(sets)

        def call_over(number: int) -> Callable[[], None]:
            def call() -> None:  # kept results need memory of their own, as ours have
                results[number] = peer.run(problem, sets[number])

            return call

        def spoil() -> None:
            for result, tensors in zip(results, sets, strict=True):
                if result is not None and not any(_share_memory(result, given) for given in tensors.values()):
                    result.fill_(math.nan)

        def judge() -> str:
            found = [{} if result is None else {"y": result} for result in results]
            return self._judged(peer.layout, found, agreement(problem))

        calls = [call_over(number) for number in range(len(sets))]
        return Subject(peer.system, calls, ResultCheck(spoil, judge))

    def _peer_record(self, peer: LayerPeer, error: float, timing: Timing) -> Record:
        problem = self._in(peer.layout)
        record = replace(
            blank_record(self.operation, problem, peer.system, ""), error=error, note=peer.note()
        )
        return timed(record, problem, timing, self.ceilings)

    def _rung_facts(self, one: Verified) -> Record:
        """Return a rung's record without its time."""
        recipe = one.rung.recipe(one.problem, one.config)
        registers, spill_bytes, occupancy = resources(recipe, self.device)
        return replace(
            blank_record(self.operation, one.problem, "escalade", one.rung.name),
            config=one.config.as_dict(),
            error=one.outcome.error,
            tolerance=one.outcome.tolerance,
            predicted_gain=one.rung.predicted_gain,
            registers=registers,
            spill_bytes=spill_bytes,
            occupancy=occupancy,
            workspace_bytes=recipe.workspace_bytes,
            note=one.note,
        )


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGNMENT) * _ALIGNMENT


def resources(recipe: Recipe, device: torch.device) -> tuple[int | None, int | None, float | None]:
    """Return registers and occupancy of the kernel with the most registers, and the largest spill in bytes."""
    calls = [step for step in recipe.steps if isinstance(step, KernelCall) and not step.weights_only]
    if device.type != "cuda" or not calls:
        return None, None, None
    index = device.index if device.index is not None else torch.cuda.current_device()
    loaded = [(cuda.load(call.program, index), call) for call in calls]
    kernel, call = max(loaded, key=lambda pair: pair[0].resources.registers)
    threads = math.prod(call.block)
    blocks = kernel.occupancy(threads, call.shared_bytes)
    spill_bytes = max(loaded_kernel.resources.spill_bytes for loaded_kernel, _ in loaded)
    return kernel.resources.registers, spill_bytes, blocks * threads / THREADS_PER_SM
