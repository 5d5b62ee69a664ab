"""LRU cache of the plans of an engine, bounded in number and memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch

from escalade.device.cuda import architecture_of
from escalade.device.nvrtc import is_bundled
from escalade.device.precompilation import CompileAhead
from escalade.device.program import Program as DeviceProgram
from escalade.device.strides import empty, layout_of
from escalade.device.torch_private import FAST_PATHS
from escalade.engine.aot import (
    NO_ARTIFACTS,
    AotArtifacts,
    SavedPlan,
    build_artifacts,
    cards_for,
)
from escalade.engine.cached_plan import CachedPlan, GuardedPlan, SpecializedGraph
from escalade.engine.calls import BufferedCalls, Calls, DirectCalls
from escalade.engine.check import check_sizes
from escalade.engine.comparison import faster_in_pytorch
from escalade.engine.fixed_batch import FixedBatchCalls
from escalade.engine.graph.forms import InputFormat
from escalade.engine.graph.graph import Batch, Graph
from escalade.engine.networks import GraphProvider, Network, Networks
from escalade.engine.nodes.evaluate import own_arithmetic
from escalade.engine.passes import FusionLevel, for_batch
from escalade.engine.plan.constants import ConstantCache
from escalade.engine.plan.kernels import PlanKernels, avoid_failed, compile_plans
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.planner import make_plan
from escalade.engine.plan.reference_program import ReferenceProgram
from escalade.engine.plan.stepwise import program_for
from escalade.engine.settings import Settings
from escalade.engine.weight_update import weight_update
from escalade.errors import CompileError, ToolError, UnsupportedError
from escalade.gc_pause import gc_paused
from escalade.ops import OPERATIONS
from escalade.ops.base.card import Card, DeviceOrCard
from escalade.ops.base.dtypes import QUANTIZED
from escalade.terminal_text import counted

logger = logging.getLogger("escalade")

MAX_SIGNATURES = 64
"""Limit for guarded inputs: the number of different strides is unbounded."""
InputSignature = tuple[Any, ...]
"""Shape, dtype, device and strides of the one tensor of a call."""


class PlanCache:
    """Plans for the inputs seen so far, ready to be called; the least recently used is evicted for a new one."""

    def __init__(self, graph: Graph, settings: Settings, graph_provider: GraphProvider | None) -> None:
        self.networks = Networks(graph, settings, graph_provider)
        self._settings = settings
        self._planning = threading.Lock()
        """Held while a plan is created; calls of existing plans do not wait for it."""
        self._lock = threading.Lock()
        """Guards the tables below; only held briefly."""
        self.uses = count()
        self._avoid = frozenset() if settings.fixed_batch is None else _batch_dependent_rungs()
        self.artifacts = NO_ARTIFACTS
        """Plans and machine code from a file; plans are rebuilt from the decisions in it where it has them."""
        self.constants: dict[torch.device, ConstantCache] = {}
        """Weights, shared by the plans on one device."""
        self.cached: dict[tuple[Any, ...], CachedPlan] = {}
        self.by_signature: dict[InputSignature, GuardedPlan] = {}
        """Plans of calls with one tensor; read without the lock."""
        self.last: GuardedPlan | None = None
        """The plan found last; read without the lock."""

    def for_device(self, graph: Graph, settings: Settings, graph_provider: GraphProvider | None) -> PlanCache:
        """Return an empty cache for the graph on another device."""
        made = PlanCache(graph, settings, graph_provider)
        made._avoid, made.artifacts = self._avoid, self.artifacts
        return made

    def batches(self) -> list[int]:
        with self._lock:
            return sorted({cached.calls.plan.batch for cached in self.cached.values()})

    def latest(self) -> Plan | None:
        """Return the plan used last."""
        with self._lock:
            found = max(self.cached.values(), key=lambda cached: cached.last_use, default=None)
        return None if found is None else found.calls.plan

    def of(self, tensors: Sequence[torch.Tensor], signature: InputSignature | None = None) -> CachedPlan:
        """Return the plan for these inputs, creating it if necessary; later calls find it by `signature`."""
        if self._settings.fixed_batch is not None and not self._has_fixed_batch(tensors):
            return self._fixed_batch_calls(tensors, self._settings.fixed_batch)
        return self._for_whole_batch(tensors, signature)

    def _for_whole_batch(
        self, tensors: Sequence[torch.Tensor], signature: InputSignature | None = None
    ) -> CachedPlan:
        """Return the plan for the whole batch, not split."""
        key = _key(tensors)
        found = self.cached.get(key)
        if found is None:
            with self._planning:
                # Another thread may have created it while this one waited for the lock.
                found = self.cached.get(key) or self._create(key, tensors)
        found.last_use = next(self.uses)
        if signature is not None:
            with self._lock:
                if len(self.by_signature) >= MAX_SIGNATURES:
                    self.by_signature, self.last = {}, None
                if self.cached.get(key) is found:
                    self.by_signature[signature] = GuardedPlan(found, FAST_PATHS.guard(tensors))
        return found

    def _has_fixed_batch(self, tensors: Sequence[torch.Tensor]) -> bool:
        return any(
            tensor.shape[0] == first.times * (self._settings.fixed_batch or 0)
            for entry, tensor in zip(self.networks.first.captured.inputs, tensors, strict=False)
            if tensor.dim() and entry.shape and isinstance(first := entry.shape[0], Batch)
        )

    def _fixed_batch_calls(self, tensors: Sequence[torch.Tensor], size: int) -> CachedPlan:
        """Return calls that split a batch into batches of `size`."""
        with self._planning:
            network, batch = self.networks.of(tensors)
        if not batch:
            return self._for_whole_batch(tensors)
        cached = self.of(_empty_batch(network.captured, tensors, size))
        return CachedPlan(FixedBatchCalls(cached.calls, network.captured, size, batch), network, batch)

    def prepare(self, several: Sequence[Sequence[torch.Tensor]]) -> None:
        """Plan ahead for inputs like each of these, compiling the kernels of all plans together."""
        if self._settings.fixed_batch is not None:
            several = [
                _empty_batch(self.networks.first.captured, tensors, self._settings.fixed_batch)
                for tensors in several
            ]
            several = [*{_key(tensors): tensors for tensors in several}.values()]
        if len(several) > self._settings.plans:
            raise UnsupportedError(
                f"{counted(len(several), 'plan')} requested, but the engine keeps {self._settings.plans}; pass "
                f"plans={len(several)}"
            )
        with self._planning:
            new = {_key(tensors): tensors for tensors in several if _key(tensors) not in self.cached}
            planned = [(key, tensors, *self.networks.of(tensors)) for key, tensors in new.items()]
            plans = [self._plan_inputs(network, batch, tensors) for _, tensors, network, batch in planned]
            total, memory = sum(self._bytes_of(plan) for plan, _ in plans), self._settings.memory
            if memory is not None and total > memory and len(plans) > 1:
                raise UnsupportedError(
                    f"these {len(plans)} plans need {total / 2**20:.1f} MiB for values and packed weights, but memory= "
                    f"allows {memory / 2**20:.1f}; plan fewer sizes and batches ahead, or compile with more memory="
                )
            if self._settings.where != "cpu":
                try:
                    compile_plans([plan for plan, _ in plans], self._settings.device)
                except ToolError as error:
                    raise self._without_compiler(error, self._settings.device) from error
            for (key, tensors, network, batch), (plan, specialized) in zip(planned, plans, strict=True):
                self._insert(key, network, batch, tensors, plan, specialized)

    def _create(self, key: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> CachedPlan:
        network, batch = self.networks.of(tensors)
        return self._insert(key, network, batch, tensors, *self._plan_inputs(network, batch, tensors))

    def _insert(
        self,
        key: tuple[Any, ...],
        network: Network,
        batch: int,
        tensors: Sequence[torch.Tensor],
        plan: Plan,
        specialized: SpecializedGraph,
    ) -> CachedPlan:
        """Make a new plan callable and cache it. Evict first: there may be no memory for both."""
        with self._lock:
            while len(self.cached) >= self._settings.plans:
                self._evict_oldest()
        calls, specialized = self._make_calls(network, batch, tensors, plan, specialized)
        made = CachedPlan(calls, network, batch, specialized)
        with self._lock:
            self.cached[key] = made
            made.last_use = next(self.uses)
            self.networks.retain(cached.network for cached in self.cached.values())
        return made

    def _evict_oldest(self) -> None:
        oldest = min(self.cached, key=lambda key: self.cached[key].last_use)
        evicted = self.cached.pop(oldest)
        self.by_signature = {key: one for key, one in self.by_signature.items() if one.cached is not evicted}
        self.last = None

    def _evict_for(self, plan: Plan) -> None:
        """Evict plans until a new one fits into the engine's memory limit."""
        memory = self._settings.memory
        if memory is None:
            return
        needed = self._bytes_of(plan)
        if needed > memory:
            raise UnsupportedError(
                f"this plan needs {needed / 2**20:.1f} MiB for values and packed weights, but memory= allows "
                f"{memory / 2**20:.1f}; use a smaller batch or smaller images, or compile with more memory="
            )
        with self._lock:
            while sum(self._bytes_of(cached.calls.plan) for cached in self.cached.values()) + needed > memory:
                self._evict_oldest()

    def _bytes_of(self, plan: Plan) -> int:
        """Return the memory of a plan with all its sets of buffers."""
        return plan.arena_bytes * self._settings.buffers + plan.persistent_bytes

    @gc_paused()
    @torch.inference_mode(False)
    @torch.no_grad()
    def _plan_inputs(
        self, network: Network, batch: int, tensors: Sequence[torch.Tensor]
    ) -> tuple[Plan, SpecializedGraph]:
        """Plan for these inputs, using the decisions in the engine's file if it has any for them."""
        device = tensors[0].device
        formats = _checked_formats(network, batch, tensors)
        inputs = tuple((tuple(tensor.shape), InputFormat.of(tensor)) for tensor in tensors)
        saved = self.artifacts.plan_for(Card.of(device), inputs)
        here = architecture_of(device)
        expected = CompileAhead(here) if here and not saved else None
        specialized = self._specialized(network, device, batch, formats)
        planner = self._planner(specialized)
        if not saved:
            return planner(expected=expected), specialized
        plan = planner(saved.in_pytorch, decided=saved.decided)
        self._warn_of_recompilation(plan, saved.architecture)
        return plan, specialized

    @torch.inference_mode(False)  # its buffers must be usable in and out of inference mode
    @torch.no_grad()
    def _make_calls(
        self,
        network: Network,
        batch: int,
        tensors: Sequence[torch.Tensor],
        plan: Plan,
        specialized: SpecializedGraph,
    ) -> tuple[Calls, SpecializedGraph]:
        """Make a plan callable. If a kernel does not compile, warn once and plan again without its rung."""
        device = tensors[0].device
        while True:
            self._evict_for(plan)
            constants = self.constants.setdefault(device, ConstantCache(self._settings.dtype, device))
            if self._settings.where == "cpu":
                return ReferenceProgram(plan, constants), specialized
            try:
                if self._settings.measured and plan.steps:
                    measured = faster_in_pytorch(PlanKernels(plan, constants, device), tensors)
                    plan = self._planner(specialized)(measured)
                if plan.is_direct:
                    return DirectCalls(plan, constants, device), specialized
                program = program_for(plan, constants, device)
                return BufferedCalls(program, self._settings.buffers), specialized
            except ToolError as error:
                raise self._without_compiler(error, device) from error
            except CompileError as error:
                self._avoid = avoid_failed(plan, error, self._avoid)
                plan, specialized = self._plan_inputs(network, batch, tensors)

    def _without_compiler(self, error: ToolError, device: torch.device) -> ToolError:
        """Return the error with the sizes that the engine's file has kernels for."""
        served = self.artifacts.served(Card.of(device))
        if not served:
            return error
        return ToolError(f"{error}. Without a compiler this engine serves what its file has kernels for: inputs "
                         f"{'; '.join(served)}")  # fmt: skip

    @gc_paused()
    @torch.inference_mode(False)
    @torch.no_grad()
    def plan_for(self, card: Card, tensors: Sequence[torch.Tensor]) -> Plan:
        """Plan for inputs like these on a card that need not be present, without compiling."""
        with self._planning:
            network, batch = self.networks.of(tensors)
        return self.planner(network, card, batch, _checked_formats(network, batch, tensors))()

    def planner(
        self, network: Network, place: DeviceOrCard, batch: int, formats: Mapping[str, InputFormat]
    ) -> Callable[..., Plan]:
        """Return `make_plan` with the arguments for a batch size, device and input formats bound."""
        return self._planner(self._specialized(network, place, batch, formats))

    def _planner(self, specialized: SpecializedGraph) -> Callable[..., Plan]:
        settings, one = self._settings, specialized
        arguments = (one.graph, settings.dtype, one.place, one.formats, one.avoid, settings.fusion)
        return partial(make_plan, *arguments, deterministic=settings.fixed_batch is not None)

    def _specialized(
        self, network: Network, place: DeviceOrCard, batch: int, formats: Mapping[str, InputFormat]
    ) -> SpecializedGraph:
        images = self._image_layout(formats.values())
        graph = self.specialize(network.optimized(images), batch, place, self._avoid)
        self.networks.pool.share(graph)
        return SpecializedGraph(graph, formats, images, place, self._avoid)

    def specialize(self, optimized: Graph, batch: int, place: DeviceOrCard, avoid: frozenset[str]) -> Graph:
        """Return an optimized graph for one batch size, as plans are made of it."""
        settings = self._settings
        with own_arithmetic("fp32", settings.device):
            return for_batch(optimized, settings.dtype, batch, settings.fusion, Card.of(place), avoid)

    @torch.inference_mode(False)
    @torch.no_grad()
    def replace_weights(self, weights: Mapping[str, torch.Tensor], kept: Mapping[str, torch.Tensor]) -> None:
        """Write new weights, by their names in the model, into the plans' memory; `kept` is the copy that later
        captures use. Raises UnsupportedError, and changes nothing, if that takes another plan."""
        with self._planning:
            if self._settings.dtype in QUANTIZED:
                raise UnsupportedError(
                    f"an {self._settings.dtype} engine's ranges were measured with the old weights; compile the model "
                    "again, with calibration="
                )
            update = weight_update(
                self.networks.known,
                [*self.cached.values()],
                self.constants.values(),
                self.specialize,
                weights,
                kept,
            )
            devices = [device for device in self.constants if device.type == "cuda"]
            for device in devices:  # calls in flight read the old weights
                torch.cuda.synchronize(device)
            update.write()
            for key, cached in self.cached.items():
                *_, device = key[0]
                with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                    cached.calls.repack()
            for device in devices:  # later calls, on any stream, read the new ones
                torch.cuda.synchronize(device)

    def _warn_of_recompilation(self, plan: Plan, architecture: str) -> None:
        absent = [program for program in plan.programs if not is_bundled(program, architecture)]
        if absent:
            logger.warning(
                "%d of the plan's %d kernels differ from those in the file, which another version of Escalade wrote; "
                "compiling them again",
                len(absent),
                len(plan.programs),
            )

    def _image_layout(self, formats: Iterable[InputFormat]) -> str:
        """Return the layout a plan reads images in: `nhwc` if all of them are channels_last (results are then, too)."""
        layouts = {each.layout for each in formats} - {"flat"}
        fused = self._settings.fusion is FusionLevel.fused
        return "nhwc" if layouts == {"nhwc"} and fused else "nchw"

    def build_artifacts(self, kernels: bool | str | Sequence[str]) -> AotArtifacts:
        """Return plans and machine code for the inputs seen so far, for each card in `kernels`."""
        plans: list[SavedPlan] = []
        programs: dict[str, list[DeviceProgram]] = {}
        for card in self.cards_for(kernels):
            for saved, plan in self.plans_to_save(card):
                plans.append(saved)
                programs.setdefault(str(card.architecture), []).extend(plan.programs)
        return build_artifacts(plans, programs)

    def cards_for(self, kernels: bool | str | Sequence[str]) -> list[Card]:
        """Return the cards to save kernels for: the engine's own GPU, or a typical card per named architecture."""
        return cards_for(kernels, self._own_card(), self._settings.where)

    def plans_to_save(self, card: Card, *, only_kernels: bool = False) -> Iterator[tuple[SavedPlan, Plan]]:
        """Yield the plan on a card for each set of inputs seen so far, with its decisions.

        With `only_kernels`, nodes that PyTorch computes because it was measured to be faster get kernels.
        """
        with self._lock:
            met = {
                tuple((tuple(shape), form) for shape, form, _ in key): cached
                for key, cached in self.cached.items()
                if cached.network is self.networks.first
            }
        if not met:
            raise UnsupportedError(
                "the engine has no plan to save kernels of yet; call it, or `plan`, with inputs like those to come"
            )
        for inputs, cached in met.items():
            pairs = zip(self.networks.first.captured.inputs, inputs, strict=True)
            formats = {entry.name: form for entry, (_, form) in pairs}
            planned = self.planner(cached.network, card, cached.batch, formats)
            is_own = card == self._own_card()
            saved = SavedPlan.of(cached.calls.plan if is_own else planned(), card, inputs)
            yield saved, planned({} if only_kernels else saved.in_pytorch, decided=saved.decided)

    def _own_card(self) -> Card | None:
        return Card.of(self._settings.device) if self._settings.where == "cuda" else None


def _checked_formats(network: Network, batch: int, tensors: Sequence[torch.Tensor]) -> dict[str, InputFormat]:
    """Return the formats of inputs by name; a graph from a file is checked at their sizes first."""
    if batch and not network.captured.is_trusted:
        check_sizes(network.captured, batch)
    pairs = zip(network.captured.inputs, tensors, strict=True)
    return {entry.name: InputFormat.of(tensor) for entry, tensor in pairs}


def _key(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return the cache key: inputs with equal keys share a plan."""
    return tuple((tensor.shape, InputFormat.of(tensor), tensor.device) for tensor in tensors)


def _empty_batch(graph: Graph, tensors: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
    """Return uninitialized tensors like these in a batch of `size`."""
    made = []
    for entry, tensor in zip(graph.inputs, tensors, strict=True):
        first = entry.shape[0] if entry.shape else None
        shape = (first.times * size, *tensor.shape[1:]) if isinstance(first, Batch) else tensor.shape
        made.append(empty(shape, tensor.dtype, layout_of(tensor), tensor.device))
    return made


def _batch_dependent_rungs() -> frozenset[str]:
    """Return the rungs whose result for an item depends on the other items of the batch."""
    return frozenset(
        f"{operation.name}/{rung.name}"
        for operation in OPERATIONS.values()
        for rung in operation.ladder
        if rung.scales_across_batch
    )
