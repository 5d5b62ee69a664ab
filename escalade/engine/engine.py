"""A compiled network: plans for the sizes that it has met, and calls that look like the model's own."""

from __future__ import annotations

import logging
import pathlib
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from escalade import parsing
from escalade.device.nvrtc import is_offered, offer
from escalade.device.program import Program as DeviceProgram
from escalade.engine.calls import BufferedCalls, Calls, DirectCalls, HostCalls
from escalade.engine.carried import NOTHING, Carried, KeptPlan, cards_for, carry
from escalade.engine.check import check_sizes
from escalade.engine.comparison import Comparison, compare, faster_in_pytorch
from escalade.engine.explain import Explanation, explain_plan
from escalade.engine.file import elsewhere, read, write
from escalade.engine.graph.forms import STORAGE, InputFormat, require_dtype
from escalade.engine.graph.graph import Batch, Graph, fixed
from escalade.engine.graph.trees import flatten
from escalade.engine.network import Network, Others, Shapes, spell
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.arithmetic import own_arithmetic
from escalade.engine.passes import for_batch
from escalade.engine.passes.fusion_level import FusionLevel
from escalade.engine.pieces import Pieces, require_apart
from escalade.engine.plan.constants import Constants, Pool, require_finite
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.engine.plan.kernels import Kernels, compile_together
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.planner import make_plan
from escalade.engine.plan.program import Program
from escalade.engine.plan.reference_program import ReferenceProgram
from escalade.engine.plan.stepwise import SteppedProgram, pays_stepwise
from escalade.engine.streaming import stream
from escalade.engine.submitted import Pending, Submitted
from escalade.errors import CompileError, UnsupportedError
from escalade.ops import OPERATIONS
from escalade.ops.base.card import Card, Place

logger = logging.getLogger("escalade")

MOST_PLANS = 8
"""Sizes (and input types) that an engine keeps ready; the one not used for longest goes first."""
_MOST_SIGHTS = 64
"""Kinds of inputs that a call recognises at first sight; strides may differ without end."""
TWIN = "twin"
_transforms_active = torch._C._are_functorch_transforms_active
_IMAGE_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


class Engine(torch.nn.Module):
    """A network compiled for one dtype. Call it like the model; `stream` feeds it from host memory.

    It may be called from any thread and on any stream. A new batch or image size is planned when it first comes, which
    takes part of a second; calls after that allocate nothing that lasts but their results.

    It is a module, for a place among others: always in evaluation mode, without parameters, and `to` moves it to
    another device. Pickled it is what `save` writes.
    """

    def __init__(
        self,
        graph: Graph,
        dtype: str,
        device: torch.device | str,
        plans: int = MOST_PLANS,
        fusion: FusionLevel = FusionLevel.fused,
        measured: bool = False,
        buffers: int = 1,
        others: Others | None = None,
        memory: str | int | None = None,
        pieces: int | None = None,
    ) -> None:
        """A plan is `measured` by timing its steps beside PyTorch when it is made: the faster is kept for each.
        Calls of one plan on different streams overlap in up to so many sets of `buffers`. Sizes that the graph is not
        for are asked of `others`. Values and packed weights of all plans take no more than `memory`: bytes, or "2GiB".
        With `pieces`, a batch size, it is deterministic: every call is computed in batches of that size.
        """
        super().__init__()
        super().train(False)
        dtype = require_dtype(dtype)
        require_device(device)
        if pieces is not None and (measured or (device != TWIN and torch.device(device).type == "cpu")):
            raise UnsupportedError(
                "deterministic=True is for Escalade's kernels, on cuda or on the twin and without measured=True: "
                "PyTorch's operators, which compute on the CPU, may add up in another order for another batch"
            )
        if measured:
            _require_gpu("measured=True", device)
        require_finite(graph)
        if dtype == "fp8" and not graph.ranges:
            raise UnsupportedError(
                "dtype fp8 needs the ranges of the network's values: compile with calibration=batches, a few batches "
                "that look like the data to come"
            )
        if dtype == "fp8" and fusion is not FusionLevel.fused:
            raise UnsupportedError(f"fp8 is for fused plans; {fusion} runs in fp32, tf32, fp16 and bf16")
        self.dtype = dtype
        self.device = torch.device("cpu" if device == TWIN else device)
        self.on_twin = device == TWIN
        for name, number in {"plans": plans, "buffers": buffers}.items():
            if not isinstance(number, int) or number < 1:
                raise UnsupportedError(f"{name}={number!r}: a whole number of them is kept, at least one")
        self.fusion = fusion
        self._measured = measured
        self._others = others
        self._arguments = graph.arguments
        given, named = pytree.tree_unflatten(range(len(graph.inputs)), self._arguments)
        self._positional = given == tuple(range(len(graph.inputs))) and not named
        self._names = tuple(named)
        self._most_plans = plans
        self._memory = _in_bytes(memory)
        self._pieces = pieces
        self._turns = count()
        self._avoid = frozenset() if pieces is None else _scaling_together()
        self._carried = NOTHING
        self._most_buffers = buffers
        self._making = threading.Lock()
        """Held while a plan is made; calls of those that there are do not wait for it."""
        self._lock = threading.Lock()
        """Held while the tables of plans change, which takes no time."""
        self._said_no_gradients = False
        self._submitted: Submitted | None = None
        self._begin(graph)

    def _begin(self, graph: Graph) -> None:
        """Without any plan: for the graph as it is captured for the engine's device."""
        self._pool = Pool()
        self._first = self._network(graph)
        self._networks = [self._first]
        """The networks that there are plans of, and the first."""
        self._constants: dict[torch.device, Constants] = {}
        """Weights, shared by the plans on one device."""
        self._plans: dict[tuple[Any, ...], _Kept] = {}
        self._sights: dict[tuple[Any, ...], _Kept] = {}
        """Plans by what a call with one tensor sees of it, read without the lock."""

    def _network(self, graph: Graph) -> Network:
        if self._pieces is not None:
            require_apart(graph)
        made = Network(graph, self.dtype, self.fusion, self.device, self._pool)
        made.optimised("nchw")
        return made

    @property
    def _captured(self) -> Graph:
        return self._first.captured

    @property
    def _where(self) -> str:
        """What runs the plans: `cuda`, `twin`, or `cpu`, PyTorch's operators."""
        return TWIN if self.on_twin else self.device.type

    @property
    def graph(self) -> Graph:
        """The graph as it was captured, for inputs of the example's sizes."""
        return self._captured

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if len(arguments) == 1 and not keywords and type(x := arguments[0]) is torch.Tensor:
            kept = self._sights.get(_sight(x))
            if kept is not None and not x.requires_grad and not _transforms_active() and not self._has_hooks:
                kept.turn = next(self._turns)
                results = kept.calls.call(arguments)
                return results[0] if kept.returns_one_tensor else self.returned(results, kept.calls.plan)
        return super().__call__(*arguments, **keywords)  # with the caller's hooks

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """What a call does between the hooks that a module may have. Results are written to `out`, if it is given: in
        the structure that the model returns, or a sequence of tensors; unless `out` is an argument of the model's.
        """
        out = None if "out" in self._names else keywords.pop("out", None)
        tensors = self.flatten(arguments, keywords)
        self._look_at(tensors)
        sight = _sight(arguments[0]) if len(arguments) == 1 and not keywords else None
        kept = self._kept(tensors, sight)
        if out is None:
            return self.returned(kept.calls.call(tensors), kept.calls.plan)
        kept.calls.call(tensors, self._rooms(out, kept, tensors[0].device))
        return out

    def _rooms(self, out: Any, kept: _Kept, device: torch.device) -> list[torch.Tensor]:
        """The caller's tensors for the results of a plan."""
        plan, captured = kept.calls.plan, kept.network.captured
        rooms, structure = flatten(out)
        as_sequence = isinstance(out, tuple | list) and len(out) == len(rooms)
        if len(rooms) != len(plan.graph.outputs) or not (structure == plan.graph.structure or as_sequence):
            raise UnsupportedError(
                f"out has {len(rooms)} tensors; it is what the engine returns, or a tuple or list of its "
                f"{len(plan.graph.outputs)} tensors"
            )
        types = (getattr(torch, name) for name in plan.graph.output_types)
        for room, name, dtype in zip(rooms, captured.outputs, types, strict=True):
            wanted = (fixed(captured.shape_of(name), kept.batch), dtype, device)
            if (tuple(room.shape), room.dtype, room.device) != wanted:
                raise UnsupportedError(
                    f"out has a {room.dtype} of {tuple(room.shape)} on {room.device}; this result is a {dtype} of "
                    f"{wanted[0]} on {device}"
                )
            if room.requires_grad:
                raise UnsupportedError(
                    "out requires gradients, and an engine's results have none; give a tensor that requires none"
                )
        return rooms

    def submit(self, *arguments: Any, **keywords: Any) -> Pending:
        """A call that nobody waits for: a future of its result, to be awaited or asked.

        It runs in a thread and on a stream of the engine's own, behind what the caller's stream has been given so far.
        When the result is there, it has been computed; the caller's stream need not wait for anything. As many calls
        run at once as a plan has sets of buffers.
        """
        with self._lock:
            if self._submitted is None:
                self._submitted = Submitted(self._most_buffers)
            submitted = self._submitted
        first = arguments[0] if len(arguments) == 1 and keywords.keys() <= {"out"} else None
        is_ready = isinstance(first, torch.Tensor) and _sight(first) in self._sights
        return submitted.submit(partial(self, *arguments, **keywords), self.device, is_ready)

    @property
    def _has_hooks(self) -> bool:
        return bool(self._forward_hooks or self._forward_pre_hooks)

    def train(self, mode: bool = True) -> Engine:
        """Changes nothing: an engine computes what the model does in evaluation mode, whatever stands beside it."""
        return self

    def extra_repr(self) -> str:
        """What it takes and returns, where it runs, and the batch sizes that it has plans for."""
        returned = (spell(self._captured.shape_of(name)) for name in self._captured.outputs)
        with self._lock:
            batches = sorted({kept.calls.plan.batch for kept in self._plans.values()})
        ready = f", ready for batches of {', '.join(map(str, batches))}" if batches else ""
        return f"{self._taken()} -> {', '.join(returned)}, {self.dtype} on {self._where}{ready}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Engine:
        """What PyTorch does to each tensor of a module in `to`, `cuda`, `half` and the like."""
        own = torch.empty(0, dtype=STORAGE[self.dtype], device=self.device)
        wanted = fn(own)
        if wanted.dtype is not own.dtype:
            raise UnsupportedError(
                f"this engine computes in {self.dtype}, and keeps to it; compile the model with "
                f"dtype={wanted.dtype} for another that does so"
            )
        if wanted.device != own.device:
            require_device(wanted.device)
            with self._making, self._lock:
                self.device, self.on_twin, self._submitted = wanted.device, False, None
                self._begin(elsewhere(self._captured, self.device))
                if self._others is not None:
                    self._others = partial(_moved, self._others, self.device)
        return self

    def __copy__(self) -> Engine:
        """Another engine with plans of its own. The weights are the same tensors: nobody writes to them."""
        return Engine(self._captured, self.dtype, others=self._others, **self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        return copy(self)

    def __reduce__(self) -> tuple[Any, ...]:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "engine")
            self.save(path)
            return _restored, (path.read_bytes(), self._options)

    @property
    def _options(self) -> dict[str, Any]:
        """How it was asked for, beside its network and dtype."""
        device = TWIN if self.on_twin else self.device
        return {
            "device": device, "plans": self._most_plans, "fusion": self.fusion, "measured": self._measured,
            "buffers": self._most_buffers, "memory": self._memory, "pieces": self._pieces,
        }  # fmt: skip

    def _look_at(self, tensors: Sequence[torch.Tensor]) -> None:
        """What a call's inputs promise, and an engine does not keep."""
        is_traced = torch.jit.is_tracing() or any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if _transforms_active() or is_traced:
            raise UnsupportedError(
                "an engine takes tensors with contents: transforms of torch.func (vmap, grad), torch.jit.trace and "
                "tracing with fake tensors work on the model, not on what it was compiled to"
            )
        if self._said_no_gradients or not torch.is_grad_enabled():
            return
        if any(tensor.requires_grad for tensor in tensors):
            self._said_no_gradients = True
            logger.warning(
                "an input requires gradients, and an engine's results have none: it is for inference. Train the model "
                "itself; where no gradients are wanted, call the engine under torch.no_grad()"
            )

    def returned(self, results: list[torch.Tensor], plan: Plan) -> Any:
        """A call's results in the structure that the model returns."""
        structure = plan.graph.structure
        return results[0] if structure.is_leaf() else pytree.tree_unflatten(results, structure)

    def plan(self, *arguments: Any, **keywords: Any) -> Plan:
        """The plan for inputs like these."""
        return self.calls(self.flatten(arguments, keywords)).plan

    def explain(self, *arguments: Any, **keywords: Any) -> Explanation:
        """The plan for inputs like these, step by step; without inputs the plan that was used last."""
        if arguments or keywords:
            return explain_plan(self.plan(*arguments, **keywords), device=self._where)
        with self._lock:
            latest = max(self._plans.values(), key=lambda kept: kept.turn, default=None)
        if latest is None:
            raise UnsupportedError("there is no plan yet: give explain inputs like those of a call")
        return explain_plan(latest.calls.plan, device=self._where)

    @torch.inference_mode(False)
    @torch.no_grad()
    def compare(self, *arguments: Any, **keywords: Any) -> Comparison:
        """The plan for inputs like these beside PyTorch on the GPU, step by step and as a whole: it is timed here."""
        _require_gpu("compare", TWIN if self.on_twin else self.device)
        tensors = self.flatten(arguments, keywords)
        kept = self._kept(tensors)
        plan, device = kept.calls.plan, tensors[0].device
        program = KernelProgram(plan, self._constants[device], device)
        return compare(program, kept.network.captured, tensors, kept.batch)

    def program(self, *tensors: torch.Tensor) -> Program:
        """The plan for inputs like these over memory of its own: its static inputs and outputs, and `run`."""
        return self.calls(tensors).program

    def calls(self, tensors: Sequence[torch.Tensor]) -> Calls:
        """The plan for inputs like these, made ready to be called with them."""
        return self._kept(tensors).calls

    def stream(self, batches: Iterable[Any], *, depth: int = 2) -> Generator[Any, None, None]:
        """Results of host batches in order, copies overlapped with compute; see `escalade.engine.streaming`."""
        return stream(self, batches, depth=depth)

    def save(self, path: Any, *, kernels: bool | str | Sequence[str] = False) -> None:
        """The network in one file, for `escalade.load`: as it is for inputs of the example's sizes, and any batch.

        With `kernels=True` the plans that the engine has on its GPU go along, with their machine code: loaded on such
        a card, they need no compiler. Architectures that are named (`"sm_90a"`) need not be here.
        """
        write(self._captured, self.dtype, path, self._carry(kernels) if kernels else NOTHING)

    def take(self, given: Carried, origin: str) -> None:
        """Plans and machine code that a file has brought, if they are for this GPU; what is missing is said."""
        if self._where != "cuda":
            return
        card = Card.of(self.device)
        if missing := given.missing(card):
            logger.warning("%s: %s", origin, missing)
        self._carried = given
        offer(given.codes.get(str(card.architecture), {}))

    def _carry(self, kernels: bool | str | Sequence[str]) -> Carried:
        """The plans for the inputs that the engine has met, on each card."""
        own = Card.of(self.device) if self._where == "cuda" else None
        cards = cards_for(kernels, own, self._where)
        with self._lock:
            met = {
                tuple((tuple(shape), form) for shape, form, _ in key): kept
                for key, kept in self._plans.items()
                if kept.network is self._first
            }
        if not met:
            raise UnsupportedError(
                "there is no plan to save kernels of yet: call the engine, or `plan`, with inputs like those to come"
            )
        plans: list[KeptPlan] = []
        programs: dict[str, list[DeviceProgram]] = {}
        for card in cards:
            for inputs, kept in met.items():
                given = zip(self._captured.inputs, inputs, strict=True)
                formats = {entry.name: form for entry, (_, form) in given}
                planned = self._planner(kept.network, card, kept.batch, formats)
                plans.append(KeptPlan.of(kept.calls.plan if card == own else planned(), card, inputs))
                again = planned(plans[-1].in_pytorch, decided=plans[-1].decided)
                programs.setdefault(str(card.architecture), []).extend(again.programs)
        return carry(plans, programs)

    def flatten(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """The tensors of a call in the order of the graph's inputs."""
        plain = self._positional and not keywords and len(arguments) == len(self._captured.inputs)
        if plain and all(type(value) is torch.Tensor for value in arguments):
            return tuple(arguments)
        if keywords.keys() == set(self._names):
            keywords = {name: keywords[name] for name in self._names}
        tensors, structure = flatten((tuple(arguments), dict(keywords)))
        if structure != self._arguments:
            raise UnsupportedError(
                f"the engine is called like the model it was compiled from: with {self._taken()}"
            )
        return tuple(tensors)

    def _taken(self) -> str:
        """What a call gives, as a reader wants to hear it: tensors by name and sizes, other values as they are."""
        inputs = [_Spelled(f"{given.name} {spell(given.shape)}") for given in self._captured.inputs]
        given, named = pytree.tree_unflatten(inputs, self._arguments)
        return ", ".join([*map(repr, given), *(_by_name(name, value) for name, value in named.items())])

    def _kept(self, tensors: Sequence[torch.Tensor], sight: tuple[Any, ...] | None = None) -> _Kept:
        """The plan for these, to be recognised by `sight` from now on."""
        if self._pieces is not None and not self._is_piece(tensors):
            return self._in_pieces(tensors, self._pieces)
        key = _key(tensors)
        found = self._plans.get(key)
        if found is None:
            with self._making:
                found = self._plans.get(key) or self._made(key, tensors)
        found.turn = next(self._turns)
        if sight is not None:
            with self._lock:
                if len(self._sights) >= _MOST_SIGHTS:
                    self._sights = {}
                if self._plans.get(key) is found:
                    self._sights[sight] = found
        return found

    def _is_piece(self, tensors: Sequence[torch.Tensor]) -> bool:
        return any(
            tensor.shape[0] == first.times * (self._pieces or 0)
            for given, tensor in zip(self._captured.inputs, tensors, strict=False)
            if tensor.dim() and given.shape and isinstance(first := given.shape[0], Batch)
        )

    def _in_pieces(self, tensors: Sequence[torch.Tensor], size: int) -> _Kept:
        """Calls of a batch of another size than that of the pieces."""
        with self._making:
            network, batch = self._network_for(tensors)
        kept = self._kept(_in_batch(network.captured, tensors, size))
        return _Kept(Pieces(kept.calls, network.captured, size, batch), network, batch)

    def prepare(self, several: Sequence[Sequence[torch.Tensor]]) -> None:
        """Makes plans for inputs like each of these ahead, with the kernels of all of them compiled together."""
        if self._pieces is not None:
            several = [_in_batch(self._captured, tensors, self._pieces) for tensors in several]
            several = [*{_key(tensors): tensors for tensors in several}.values()]
        if len(several) > self._most_plans:
            raise UnsupportedError(
                f"{len(several)} plans are asked for, and the engine keeps {self._most_plans}; give it "
                f"plans={len(several)}"
            )
        with self._making:
            new = {_key(tensors): tensors for tensors in several if _key(tensors) not in self._plans}
            planned = [(key, tensors, *self._network_for(tensors)) for key, tensors in new.items()]
            plans = [self._planned(network, batch, tensors) for _, tensors, network, batch in planned]
            together = sum(self._bytes(each.plan) for each in plans)
            if self._memory is not None and together > self._memory and len(plans) > 1:
                raise UnsupportedError(
                    f"these {len(plans)} plans need {together / 2**20:.1f} MiB for values and packed weights, and the "
                    f"engine's may have {self._memory / 2**20:.1f}; ask for fewer, or compile with more memory="
                )
            if self._where != "cpu":
                compile_together([each.plan for each in plans], self.device)
            for (key, tensors, network, batch), plan in zip(planned, plans, strict=True):
                self._keep(key, network, batch, tensors, plan)

    def _made(self, key: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> _Kept:
        network, batch = self._network_for(tensors)
        return self._keep(key, network, batch, tensors, self._planned(network, batch, tensors))

    def _keep(
        self,
        key: tuple[Any, ...],
        network: Network,
        batch: int,
        tensors: Sequence[torch.Tensor],
        planned: _Planned,
    ) -> _Kept:
        """A new plan, ready for calls. Who makes way for it goes first: there may be no memory for both."""
        with self._lock:
            while len(self._plans) >= self._most_plans:
                self._drop_oldest()
        made = _Kept(self._make(network, batch, tensors, planned), network, batch)
        with self._lock:
            self._plans[key] = made
            made.turn = next(self._turns)
            used = dict.fromkeys((self._first, *(kept.network for kept in self._plans.values())))
            self._networks = [*used]
        return made

    def _drop_oldest(self) -> None:
        oldest = min(self._plans, key=lambda key: self._plans[key].turn)
        gone = self._plans.pop(oldest)
        self._sights = {sight: kept for sight, kept in self._sights.items() if kept is not gone}

    def _make_room(self, plan: Plan) -> None:
        """Has as many plans go as are in the way of a new one's memory."""
        if self._memory is None:
            return
        needed = self._bytes(plan)
        if needed > self._memory:
            raise UnsupportedError(
                f"this plan needs {needed / 2**20:.1f} MiB for values and packed weights, and the engine's plans may "
                f"have {self._memory / 2**20:.1f}; take a smaller batch or smaller images, or compile with more memory="
            )
        with self._lock:
            while sum(self._bytes(kept.calls.plan) for kept in self._plans.values()) + needed > self._memory:
                self._drop_oldest()

    def _bytes(self, plan: Plan) -> int:
        """What a plan keeps for itself, in as many sets of buffers as it may have."""
        return plan.arena_bytes * self._most_buffers + plan.lasting_bytes

    def _network_for(self, tensors: Sequence[torch.Tensor]) -> tuple[Network, int]:
        """What the model does with inputs that the engine can take, and their batch size."""
        if len(tensors) != len(self._captured.inputs):
            raise UnsupportedError(f"{len(tensors)} tensors; the engine takes {len(self._captured.inputs)}")
        for given, tensor in zip(self._captured.inputs, tensors, strict=True):
            if tensor.device.type != self.device.type:
                raise UnsupportedError(
                    f"{given.name} is on {tensor.device}, the engine runs on "
                    f"{'the twin (CPU tensors)' if self.on_twin else self.device}; move it there"
                )
            if tensor.device != tensors[0].device:
                raise UnsupportedError(
                    f"the inputs are on {tensors[0].device} and {tensor.device}; they must be on one device"
                )
            if tensor.dim() != len(given.shape):
                self._first.refuse([tuple(each.shape) for each in tensors])
            if tensor.dim() and not tensor.shape[0]:
                raise UnsupportedError("a batch of 0: there is nothing to run")
            self._check_type(given.name, given.dtype, tensor)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        for network in self._networks:
            if (batch := network.batch_of(shapes)) is not None:
                return network, batch
        return self._another(shapes)

    def _another(self, shapes: Shapes) -> tuple[Network, int]:
        """What the model does with inputs of sizes that are new."""
        if self._others is None:
            self._first.refuse(shapes)
        assert self._others is not None
        try:
            network = self._network(self._others(shapes))
        except UnsupportedError as error:
            names = (given.name for given in self._captured.inputs)
            given = ", ".join(f"{name} {list(shape)}" for name, shape in zip(names, shapes, strict=True))
            raise UnsupportedError(
                f"the model, compiled with {self._taken()}, cannot be compiled with {given}: {error}"
            ) from error
        batch = network.batch_of(shapes)
        assert batch is not None, "it was captured for these"
        self._networks = [*self._networks, network]
        return network, batch

    def _check_type(self, name: str, expected: str, tensor: torch.Tensor) -> None:
        wanted = getattr(torch, expected)
        if not wanted.is_floating_point:
            if tensor.dtype != wanted:
                raise UnsupportedError(f"{name} is {tensor.dtype}; the model takes {wanted}")
            return
        if tensor.dtype == torch.uint8 and not any(
            node.inputs.get("x") == name and operator_of(node).normalises(node)
            for node in self._first.optimised("nchw")
        ):
            raise UnsupportedError(
                f"{name} is uint8; compile the model with normalize=(mean, std) and the engine will take images so"
            )
        if tensor.dtype not in _IMAGE_TYPES:
            raise UnsupportedError(
                f"{name} is {tensor.dtype}; an engine takes float32, float16, bfloat16 and uint8"
            )

    @torch.inference_mode(False)
    @torch.no_grad()
    def _planned(self, network: Network, batch: int, tensors: Sequence[torch.Tensor]) -> _Planned:
        """The plan for these, with what the engine's file has brought for it."""
        device = tensors[0].device
        if not network.captured.is_sound:
            check_sizes(network.captured, batch)
        given = zip(network.captured.inputs, tensors, strict=True)
        formats = {entry.name: InputFormat.of(tensor) for entry, tensor in given}
        inputs = tuple((tuple(tensor.shape), InputFormat.of(tensor)) for tensor in tensors)
        brought = self._carried.plan_for(Card.of(device), inputs)
        planner = self._planner(network, device, batch, formats)
        if not brought:
            return _Planned(planner(), planner)
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
            constants = self._constants.setdefault(device, Constants(self.dtype, device))
            if self._where == "cpu":
                return HostCalls(ReferenceProgram(plan, constants), network.output_types)
            try:
                if self._measured:
                    plan = planned.planner(faster_in_pytorch(Kernels(plan, constants, device), tensors))
                if plan.is_direct:
                    return DirectCalls(plan, constants, device, network.output_types)
                kind = SteppedProgram if pays_stepwise(plan, Card.of(device)) else KernelProgram
                return BufferedCalls(kind(plan, constants, device), network.output_types, self._most_buffers)
            except CompileError as error:
                failed = failing_rung(plan, error)
                if failed is None or failed in self._avoid:
                    raise
                logger.warning("%s did not compile; the next rung takes its place. %s", failed, error)
                self._avoid |= {failed}
                planned = self._planned(network, batch, tensors)

    def _planner(
        self, network: Network, place: Place, batch: int, formats: Mapping[str, InputFormat]
    ) -> Callable[..., Plan]:
        """`make_plan` for inputs in these formats, somewhere."""
        optimised = network.optimised(self._images(formats.values()))
        with own_arithmetic("fp32", self.device):
            graph = for_batch(optimised, self.dtype, batch, self.fusion, Card.of(place), self._avoid)
        self._pool.share(graph)
        deterministic = self._pieces is not None
        given = (graph, self.dtype, place, formats, self._avoid, self.fusion)
        return partial(make_plan, *given, deterministic=deterministic)

    def _say_uncarried(self, plan: Plan, architecture: str) -> None:
        absent = [program for program in plan.programs if not is_offered(program, architecture)]
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
        fused = self.fusion is FusionLevel.fused and self.dtype != "fp8"
        return "nhwc" if layouts == {"nhwc"} and fused else "nchw"


def require_device(device: torch.device | str) -> None:
    if device == TWIN:
        return
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):  # no device that PyTorch knows
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise UnsupportedError(f"device {device}: an engine runs on cuda, on cpu, or on the twin")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("device cuda: there is no GPU here; device='cpu' and device='twin' need none")


def _require_gpu(what: str, device: torch.device | str) -> None:
    """For what times kernels beside PyTorch's operators."""
    if device == TWIN or torch.device(device).type != "cuda":
        where = "the twin" if device == TWIN else f"device {device}"
        raise UnsupportedError(
            f"{what} times kernels beside PyTorch's operators on a GPU; this engine runs on {where}"
        )


def failing_rung(plan: Plan, error: CompileError) -> str | None:
    """The rung whose program the message names."""
    for step in plan.steps:
        if not (step.recipe and step.choice and step.lowered):
            continue
        if any(str(program) in str(error) for program in step.recipe.programs):
            return f"{step.lowered.operation.name}/{step.choice.rung.name}"
    return None


def _moved(others: Others, device: torch.device, shapes: Shapes) -> Graph:
    """The graph of an engine that was moved to a device after it was made."""
    return elsewhere(others(shapes), device)


class _Spelled(str):
    """Words that are no text of the caller's, and stand without quotes."""

    __repr__ = str.__str__


def _by_name(name: str, value: Any) -> str:
    return repr(value) if isinstance(value, _Spelled) else f"{name}={value!r}"


def _sight(x: torch.Tensor) -> tuple[Any, ...]:
    """What a call sees of its one tensor."""
    return x.shape, x.dtype, x.device, x.is_contiguous() or x.stride()


def _restored(data: bytes, options: dict[str, Any]) -> Engine:
    """An engine of the bytes that `save` has written, as pickle finds it again."""
    require_device(options["device"])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "engine")
        path.write_bytes(data)
        graph, dtype, _ = read(path, torch.device("cpu" if options["device"] == TWIN else options["device"]))
    return Engine(graph, dtype, **options)


def _key(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What inputs have in common that one plan is for."""
    return tuple((tensor.shape, InputFormat.of(tensor), tensor.device) for tensor in tensors)


def _in_batch(graph: Graph, tensors: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
    """Tensors like these, without contents, in a batch of that size."""
    made = []
    for given, tensor in zip(graph.inputs, tensors, strict=True):
        first = given.shape[0] if given.shape else None
        shape = (first.times * size, *tensor.shape[1:]) if isinstance(first, Batch) else tensor.shape
        last = InputFormat.of(tensor).layout == "nhwc"
        order = torch.channels_last if last else torch.contiguous_format
        made.append(torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=order))
    return made


def _scaling_together() -> frozenset[str]:
    """Rungs whose results for an item depend on the others."""
    return frozenset(
        f"{operation.name}/{rung.name}"
        for operation in OPERATIONS.values()
        for rung in operation.ladder
        if rung.scales_together
    )


def _in_bytes(memory: str | int | None) -> int | None:
    try:
        found = parsing.size(memory) if isinstance(memory, str) else memory
    except ValueError as error:
        raise UnsupportedError(f"memory={memory!r}: {error}") from error
    if found is not None and (isinstance(found, bool) or not isinstance(found, int) or found < 1):
        raise UnsupportedError(f"memory={memory!r}: it is a number of bytes, or a text such as '2GiB'")
    return found


@dataclass(frozen=True)
class _Planned:
    """A plan, and what makes another with some nodes left to PyTorch."""

    plan: Plan
    planner: Callable[..., Plan]


class _Kept:
    """Calls of a plan, what it is of, and when it was used last."""

    def __init__(self, calls: Calls, network: Network, batch: int) -> None:
        self.calls = calls
        self.network = network
        self.batch = batch
        self.returns_one_tensor = calls.plan.graph.structure.is_leaf()
        self.turn = 0
