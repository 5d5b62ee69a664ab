"""The plans of an engine: made for the inputs that come, a bounded number of them kept, in bounded memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch

from escalade.device.cuda import architecture_of
from escalade.device.nvrtc import is_bundled
from escalade.device.precompilation import CompileAhead
from escalade.device.program import Program as DeviceProgram
from escalade.device.strides import empty, layout_of
from escalade.device.torch_private import FAST_PATHS
from escalade.engine.aot import NOTHING, Carried, KeptPlan, cards_for, carry
from escalade.engine.calls import BufferedCalls, Calls, DirectCalls, HostCalls
from escalade.engine.check import check_sizes
from escalade.engine.comparison import faster_in_pytorch
from escalade.engine.fixed_batch import Pieces
from escalade.engine.graph.forms import InputFormat
from escalade.engine.graph.graph import Batch, Graph
from escalade.engine.network import Network, Others
from escalade.engine.networks import Networks
from escalade.engine.nodes.arithmetic import own_arithmetic
from escalade.engine.passes import for_batch
from escalade.engine.passes.fusion_level import FusionLevel
from escalade.engine.plan.constants import ConstantCache
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.engine.plan.kernels import PlanKernels, compile_plans
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.planner import make_plan
from escalade.engine.plan.reference_program import ReferenceProgram
from escalade.engine.plan.stepwise import StepwiseProgram, is_faster_stepwise
from escalade.engine.settings import Settings
from escalade.errors import CompileError, UnsupportedError
from escalade.gc_pause import gc_paused
from escalade.ops import OPERATIONS
from escalade.ops.base.card import Card, Place

logger = logging.getLogger("escalade")

MOST_SIGHTS = 64
"""Kinds of inputs that a call recognises at first sight; strides may differ without end."""
Sight = tuple[Any, ...]
"""What a call with one tensor sees of it."""


class Kept:
    """Calls of a plan, what it is of, and when it was used last."""

    def __init__(self, calls: Calls, network: Network, batch: int) -> None:
        self.calls = calls
        self.network = network
        self.batch = batch
        self.returns_one_tensor = calls.plan.graph.structure.is_leaf()
        self.turn = 0


class Seen(NamedTuple):
    """A plan, and whether a tensor is one like that which its calls were given: its sizes, and all else."""

    kept: Kept
    is_like: Callable[..., bool]


@dataclass(frozen=True)
class _Planned:
    """A plan, and what makes another with some nodes left to PyTorch."""

    plan: Plan
    planner: Callable[..., Plan]


class Plans:
    """Plans for the inputs that have come, ready for calls; the one not used for longest makes way for a new one."""

    def __init__(self, graph: Graph, settings: Settings, others: Others | None) -> None:
        self.networks = Networks(graph, settings, others)
        self._settings = settings
        self._making = threading.Lock()
        """Held while a plan is made; calls of those that there are do not wait for it."""
        self._lock = threading.Lock()
        """Held while the tables of plans change, which takes no time."""
        self.turns = count()
        self._avoid = frozenset() if settings.pieces is None else _scaling_together()
        self.carried = NOTHING
        """What a file has brought for GPUs."""
        self.constants: dict[torch.device, ConstantCache] = {}
        """Weights, shared by the plans on one device."""
        self.kept: dict[tuple[Any, ...], Kept] = {}
        self.sights: dict[Sight, Seen] = {}
        """Plans by what a call with one tensor sees of it, read without the lock."""
        self.last: Seen | None = None
        """The one that was found last, without the lock too."""

    def elsewhere(self, graph: Graph, settings: Settings, others: Others | None) -> Plans:
        """For the graph on another device, without any plan yet."""
        made = Plans(graph, settings, others)
        made._avoid, made.carried = self._avoid, self.carried
        return made

    def take(self, given: Carried) -> None:
        """Plans that a file has brought; those to be made are made as they were."""
        self.carried = given

    def batches(self) -> list[int]:
        """The batch sizes that there are plans for."""
        with self._lock:
            return sorted({kept.calls.plan.batch for kept in self.kept.values()})

    def latest(self) -> Plan | None:
        """The plan that was used last."""
        with self._lock:
            found = max(self.kept.values(), key=lambda kept: kept.turn, default=None)
        return None if found is None else found.calls.plan

    def of(self, tensors: Sequence[torch.Tensor], sight: Sight | None = None) -> Kept:
        """The plan for these, to be recognised by `sight` from now on."""
        if self._settings.pieces is not None and not self._is_piece(tensors):
            return self._in_pieces(tensors, self._settings.pieces)
        return self._whole(tensors, sight)

    def _whole(self, tensors: Sequence[torch.Tensor], sight: Sight | None = None) -> Kept:
        """The plan for all of a batch at once."""
        key = _key(tensors)
        found = self.kept.get(key)
        if found is None:
            with self._making:
                found = self.kept.get(key) or self._made(key, tensors)
        found.turn = next(self.turns)
        if sight is not None:
            with self._lock:
                if len(self.sights) >= MOST_SIGHTS:
                    self.sights, self.last = {}, None
                if self.kept.get(key) is found:
                    self.sights[sight] = Seen(found, FAST_PATHS.guard(tensors))
        return found

    def _is_piece(self, tensors: Sequence[torch.Tensor]) -> bool:
        return any(
            tensor.shape[0] == first.times * (self._settings.pieces or 0)
            for given, tensor in zip(self.networks.first.captured.inputs, tensors, strict=False)
            if tensor.dim() and given.shape and isinstance(first := given.shape[0], Batch)
        )

    def _in_pieces(self, tensors: Sequence[torch.Tensor], size: int) -> Kept:
        """Calls of a batch of another size than that of the pieces."""
        with self._making:
            network, batch = self.networks.of(tensors)
        if not batch:
            return self._whole(tensors)
        kept = self.of(_in_batch(network.captured, tensors, size))
        return Kept(Pieces(kept.calls, network.captured, size, batch), network, batch)

    def prepare(self, several: Sequence[Sequence[torch.Tensor]]) -> None:
        """Makes plans for inputs like each of these ahead, with the kernels of all of them compiled together."""
        if self._settings.pieces is not None:
            several = [
                _in_batch(self.networks.first.captured, tensors, self._settings.pieces) for tensors in several
            ]
            several = [*{_key(tensors): tensors for tensors in several}.values()]
        if len(several) > self._settings.plans:
            raise UnsupportedError(
                f"{len(several)} plans are asked for, and the engine keeps {self._settings.plans}; give it "
                f"plans={len(several)}"
            )
        with self._making:
            new = {_key(tensors): tensors for tensors in several if _key(tensors) not in self.kept}
            planned = [(key, tensors, *self.networks.of(tensors)) for key, tensors in new.items()]
            plans = [self._planned(network, batch, tensors) for _, tensors, network, batch in planned]
            together, memory = sum(self._bytes(each.plan) for each in plans), self._settings.memory
            if memory is not None and together > memory and len(plans) > 1:
                raise UnsupportedError(
                    f"these {len(plans)} plans need {together / 2**20:.1f} MiB for values and packed weights, and the "
                    f"engine's may have {memory / 2**20:.1f}; ask for fewer, or compile with more memory="
                )
            if self._settings.where != "cpu":
                compile_plans([each.plan for each in plans], self._settings.device)
            for (key, tensors, network, batch), plan in zip(planned, plans, strict=True):
                self._keep(key, network, batch, tensors, plan)

    def _made(self, key: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> Kept:
        network, batch = self.networks.of(tensors)
        return self._keep(key, network, batch, tensors, self._planned(network, batch, tensors))

    def _keep(
        self,
        key: tuple[Any, ...],
        network: Network,
        batch: int,
        tensors: Sequence[torch.Tensor],
        planned: _Planned,
    ) -> Kept:
        """A new plan, ready for calls. Who makes way for it goes first: there may be no memory for both."""
        with self._lock:
            while len(self.kept) >= self._settings.plans:
                self._drop_oldest()
        made = Kept(self._make(network, batch, tensors, planned), network, batch)
        with self._lock:
            self.kept[key] = made
            made.turn = next(self.turns)
            self.networks.keep(kept.network for kept in self.kept.values())
        return made

    def _drop_oldest(self) -> None:
        oldest = min(self.kept, key=lambda key: self.kept[key].turn)
        gone = self.kept.pop(oldest)
        self.sights = {sight: seen for sight, seen in self.sights.items() if seen.kept is not gone}
        self.last = None

    def _make_room(self, plan: Plan) -> None:
        """Has as many plans go as are in the way of a new one's memory."""
        memory = self._settings.memory
        if memory is None:
            return
        needed = self._bytes(plan)
        if needed > memory:
            raise UnsupportedError(
                f"this plan needs {needed / 2**20:.1f} MiB for values and packed weights, and the engine's plans may "
                f"have {memory / 2**20:.1f}; take a smaller batch or smaller images, or compile with more memory="
            )
        with self._lock:
            while sum(self._bytes(kept.calls.plan) for kept in self.kept.values()) + needed > memory:
                self._drop_oldest()

    def _bytes(self, plan: Plan) -> int:
        """What a plan keeps for itself, in as many sets of buffers as it may have."""
        return plan.arena_bytes * self._settings.buffers + plan.persistent_bytes

    @gc_paused()
    @torch.inference_mode(False)
    @torch.no_grad()
    def _planned(self, network: Network, batch: int, tensors: Sequence[torch.Tensor]) -> _Planned:
        """The plan for these, with what the engine's file has brought for it."""
        device = tensors[0].device
        if batch and not network.captured.is_trusted:
            check_sizes(network.captured, batch)
        given = zip(network.captured.inputs, tensors, strict=True)
        formats = {entry.name: InputFormat.of(tensor) for entry, tensor in given}
        inputs = tuple((tuple(tensor.shape), InputFormat.of(tensor)) for tensor in tensors)
        brought = self.carried.plan_for(Card.of(device), inputs)
        here = architecture_of(device)
        expected = CompileAhead(here) if here and not brought else None
        planner = self.planner(network, device, batch, formats)
        if not brought:
            return _Planned(planner(expected=expected), planner)
        plan = planner(brought.in_pytorch, decided=brought.decided)
        self._say_uncarried(plan, brought.architecture)
        return _Planned(plan, planner)

    @torch.inference_mode(False)  # its memory is used by calls in any mode
    @torch.no_grad()
    def _make(
        self, network: Network, batch: int, tensors: Sequence[torch.Tensor], planned: _Planned
    ) -> Calls:
        """A kernel that does not compile is passed over for the next rung, and said so once."""
        device = tensors[0].device
        while True:
            plan = planned.plan
            self._make_room(plan)
            constants = self.constants.setdefault(device, ConstantCache(self._settings.dtype, device))
            if self._settings.where == "cpu":
                return HostCalls(ReferenceProgram(plan, constants), network.output_types)
            try:
                if self._settings.measured and plan.steps:
                    plan = planned.planner(faster_in_pytorch(PlanKernels(plan, constants, device), tensors))
                if plan.is_direct:
                    return DirectCalls(plan, constants, device, network.output_types)
                kind = StepwiseProgram if is_faster_stepwise(plan, Card.of(device)) else KernelProgram
                return BufferedCalls(
                    kind(plan, constants, device), network.output_types, self._settings.buffers
                )
            except CompileError as error:
                failed = failing_rung(plan, error)
                if failed is None or failed in self._avoid:
                    raise
                logger.warning("%s did not compile; the next rung takes its place. %s", failed, error)
                self._avoid |= {failed}
                planned = self._planned(network, batch, tensors)

    @gc_paused()
    @torch.inference_mode(False)
    @torch.no_grad()
    def plan_for(self, card: Card, tensors: Sequence[torch.Tensor]) -> Plan:
        """Plan for inputs like these on a card that need not be here; nothing is compiled for it."""
        with self._making:
            network, batch = self.networks.of(tensors)
        if batch and not network.captured.is_trusted:
            check_sizes(network.captured, batch)
        given = zip(network.captured.inputs, tensors, strict=True)
        formats = {entry.name: InputFormat.of(tensor) for entry, tensor in given}
        return self.planner(network, card, batch, formats)()

    def planner(
        self, network: Network, place: Place, batch: int, formats: Mapping[str, InputFormat]
    ) -> Callable[..., Plan]:
        """`make_plan` for inputs in these formats, somewhere."""
        settings = self._settings
        optimised = network.optimised(self._images(formats.values()))
        with own_arithmetic("fp32", settings.device):
            graph = for_batch(optimised, settings.dtype, batch, settings.fusion, Card.of(place), self._avoid)
        self.networks.pool.share(graph)
        deterministic = settings.pieces is not None
        given = (graph, settings.dtype, place, formats, self._avoid, settings.fusion)
        return partial(make_plan, *given, deterministic=deterministic)

    def _say_uncarried(self, plan: Plan, architecture: str) -> None:
        absent = [program for program in plan.programs if not is_bundled(program, architecture)]
        if absent:
            logger.warning(
                "%d of the plan's %d kernels are others than when the file was made, by another version of Escalade: "
                "they are compiled again",
                len(absent),
                len(plan.programs),
            )

    def _images(self, formats: Iterable[InputFormat]) -> str:
        """How a plan takes images: in channels_last if all of them come so, and then it returns them as they lie. FP8's
        ranges are those of the plan for PyTorch's order."""
        layouts = {each.layout for each in formats} - {"flat"}
        fused = self._settings.fusion is FusionLevel.fused and self._settings.dtype != "fp8"
        return "nhwc" if layouts == {"nhwc"} and fused else "nchw"

    def carry(self, kernels: bool | str | Sequence[str]) -> Carried:
        """The plans for the inputs that the engine has met, on each card."""
        own = Card.of(self._settings.device) if self._settings.where == "cuda" else None
        cards = cards_for(kernels, own, self._settings.where)
        with self._lock:
            met = {
                tuple((tuple(shape), form) for shape, form, _ in key): kept
                for key, kept in self.kept.items()
                if kept.network is self.networks.first
            }
        if not met:
            raise UnsupportedError(
                "there is no plan to save kernels of yet: call the engine, or `plan`, with inputs like those to come"
            )
        plans: list[KeptPlan] = []
        programs: dict[str, list[DeviceProgram]] = {}
        for card in cards:
            for inputs, kept in met.items():
                given = zip(self.networks.first.captured.inputs, inputs, strict=True)
                formats = {entry.name: form for entry, (_, form) in given}
                planned = self.planner(kept.network, card, kept.batch, formats)
                plans.append(KeptPlan.of(kept.calls.plan if card == own else planned(), card, inputs))
                again = planned(plans[-1].in_pytorch, decided=plans[-1].decided)
                programs.setdefault(str(card.architecture), []).extend(again.programs)
        return carry(plans, programs)


def failing_rung(plan: Plan, error: CompileError) -> str | None:
    """The rung whose program the message names."""
    for step in plan.steps:
        if not (step.recipe and step.choice and step.lowered):
            continue
        if any(str(program) in str(error) for program in step.recipe.programs):
            return f"{step.lowered.operation.name}/{step.choice.rung.name}"
    return None


def _key(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What inputs have in common that one plan is for."""
    return tuple((tensor.shape, InputFormat.of(tensor), tensor.device) for tensor in tensors)


def _in_batch(graph: Graph, tensors: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
    """Tensors like these, without contents, in a batch of that size."""
    made = []
    for given, tensor in zip(graph.inputs, tensors, strict=True):
        first = given.shape[0] if given.shape else None
        shape = (first.times * size, *tensor.shape[1:]) if isinstance(first, Batch) else tensor.shape
        made.append(empty(shape, tensor.dtype, layout_of(tensor), tensor.device))
    return made


def _scaling_together() -> frozenset[str]:
    """Rungs whose results for an item depend on the others."""
    return frozenset(
        f"{operation.name}/{rung.name}"
        for operation in OPERATIONS.values()
        for rung in operation.ladder
        if rung.scales_together
    )
