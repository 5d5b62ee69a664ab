"""A compiled network: plans for the sizes that it has met, and calls that look like the model's own."""

from __future__ import annotations

import logging
import pathlib
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from escalade.device.nvrtc import add_bundled
from escalade.engine.aot import NOTHING, Carried
from escalade.engine.calls import Calls
from escalade.engine.comparison import Comparison, compare
from escalade.engine.explain import Explanation, explain_plan
from escalade.engine.file import elsewhere, read, write
from escalade.engine.graph.forms import STORAGE, is_dense, require_dense
from escalade.engine.graph.graph import Graph
from escalade.engine.graph.trees import flatten
from escalade.engine.network import Others, Shapes, call_of, spell
from escalade.engine.out_tensors import rooms_in
from escalade.engine.passes.fusion_level import FusionLevel
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.program import PlanProgram
from escalade.engine.plan_cache import Plans, Seen
from escalade.engine.settings import MOST_PLANS, TWIN, Settings, require_device, require_gpu
from escalade.engine.streaming import stream
from escalade.engine.submitted import Pending, Submitted
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card

logger = logging.getLogger("escalade")

_transforms_active = torch._C._are_functorch_transforms_active
_is_traced = torch.compiler.is_dynamo_compiling


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
        of_modules = {*vars(self)}
        self._settings = Settings.of(dtype, device, plans, fusion, measured, buffers, memory, pieces)
        self._settings.require_for(graph)
        self._others = others
        self._arguments = graph.arguments
        given, named = pytree.tree_unflatten(range(len(graph.inputs)), self._arguments)
        self._positional = given == tuple(range(len(graph.inputs))) and not named
        self._names = tuple(named)
        self._placed = graph.parameters
        self._lock = threading.Lock()
        """Held while what submits calls is made."""
        self._said_no_gradients = False
        self._submitted: Submitted | None = None
        self._plans = Plans(graph, self._settings, others)
        self._origin = "the engine"
        """The file that plans and machine code were brought by."""
        self._own = {*vars(self), "_own"} - of_modules
        """Names of what stands here; all else a copy takes over."""

    @property
    def dtype(self) -> str:
        return self._settings.dtype

    @property
    def device(self) -> torch.device:
        return self._settings.device

    @property
    def on_twin(self) -> bool:
        return self._settings.on_twin

    @property
    def fusion(self) -> FusionLevel:
        return self._settings.fusion

    @property
    def _captured(self) -> Graph:
        return self._plans.networks.first.captured

    @property
    def graph(self) -> Graph:
        """The graph as it was captured, for inputs of the example's sizes."""
        return self._captured

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if _is_traced():  # where somebody compiles what the engine stands in
            return torch.compiler.disable(super().__call__)(*arguments, **keywords)
        if len(arguments) == 1 and not keywords:
            plans, x = self._plans, arguments[0]
            seen = plans.last
            if seen is None or type(x) is not torch.Tensor or not seen.is_like(x):
                seen = _seen(plans, x)
            if seen is not None and not x.requires_grad and not _transforms_active() and not self._has_hooks:
                kept = seen.kept
                kept.turn = next(plans.turns)
                results = kept.calls.call(arguments)
                return results[0] if kept.returns_one_tensor else self.returned(results, kept.calls.plan)
        return super().__call__(*arguments, **keywords)  # with the caller's hooks

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """What a call does between the hooks that a module may have. Results are written to `out`, if it is given: in
        the structure that the model returns, or a sequence of tensors; unless `out` is an argument of the model's.
        """
        left = self._placed[len(arguments) :]
        out = None if "out" in (*self._names, *left) else keywords.pop("out", None)
        tensors = self.flatten(arguments, keywords)
        self._look_at(tensors)
        is_one = len(arguments) == 1 and not keywords and isinstance(arguments[0], torch.Tensor)
        kept = self._plans.of(tensors, _sight(tensors[0]) if is_one else None)
        if out is None:
            return self.returned(kept.calls.call(tensors), kept.calls.plan)
        kept.calls.call(tensors, rooms_in(out, kept, tensors[0].device))
        return out

    def submit(self, *arguments: Any, **keywords: Any) -> Pending:
        """A call that nobody waits for: a future of its result, to be awaited or asked.

        It runs in a thread and on a stream of the engine's own, behind what the caller's stream has been given so far.
        When the result is there, it has been computed; the caller's stream need not wait for anything. As many calls
        run at once as a plan has sets of buffers.
        """
        with self._lock:
            if self._submitted is None:
                self._submitted = Submitted(self._settings.buffers)
            submitted = self._submitted
        first = arguments[0] if len(arguments) == 1 and keywords.keys() <= {"out"} else None
        is_ready = isinstance(first, torch.Tensor) and _sight(first) in self._plans.sights
        return submitted.submit(partial(self, *arguments, **keywords), self.device, is_ready)

    @property
    def _has_hooks(self) -> bool:
        return bool(self._forward_hooks or self._forward_pre_hooks)

    def train(self, mode: bool = True) -> Engine:
        """Changes nothing: an engine computes what the model does in evaluation mode, whatever stands beside it."""
        return self

    def compile(self, *arguments: Any, **keywords: Any) -> None:
        """Changes nothing: whatever `torch.compile` would make of it, an engine is compiled already."""

    def extra_repr(self) -> str:
        """What it takes and returns, where it runs, and the batch sizes that it has plans for."""
        returned = (spell(self._captured.shape_of(name)) for name in self._captured.outputs)
        batches = self._plans.batches()
        ready = f", ready for batches of {', '.join(map(str, batches))}" if batches else ""
        return f"{call_of(self._captured)} -> {', '.join(returned)}, {self.dtype} on {self._settings.where}{ready}"

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
            settings, others = self._settings.on(wanted.device), self._others
            if others is not None:
                others = partial(_moved, others, wanted.device)
            plans = self._plans.elsewhere(elsewhere(self._captured, wanted.device), settings, others)
            with self._lock:
                self._settings, self._others, self._plans, self._submitted = settings, others, plans, None
            self._offer()
        return self

    def __copy__(self) -> Engine:
        """Another engine with plans of its own. The weights are the same tensors: nobody writes to them."""
        made = Engine(self._captured, self.dtype, others=self._others, **self._settings.options)
        made._plans.take(self._plans.carried)
        made._origin = self._origin
        for name, value in self._of_the_caller().items():
            vars(made)[name] = value.copy() if isinstance(value, dict) else value  # hooks are each one's own
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        made = copy(self)
        vars(made).update(deepcopy(self._of_the_caller(), memo))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "engine")
            write(self._captured, self.dtype, path, self._plans.carried)
            return _restored, (path.read_bytes(), self._settings.options), self._of_the_caller()

    def _of_the_caller(self) -> dict[str, Any]:
        """What a module has, hooks among it, and what the caller has put beside it."""
        return {name: value for name, value in vars(self).items() if name not in self._own}

    def _look_at(self, tensors: Sequence[torch.Tensor]) -> None:
        """What a call's inputs promise, and an engine does not keep."""
        is_traced = torch.jit.is_tracing() or any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if _transforms_active() or is_traced:
            raise UnsupportedError(
                "an engine takes tensors with contents: transforms of torch.func (vmap, grad), torch.jit.trace and "
                "tracing with fake tensors work on the model, not on what it was compiled to"
            )
        require_dense(tensors, "an input is", "an engine takes dense tensors")
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

    def plan_for(self, card: Card, *arguments: Any) -> Plan:
        """Return the plan that a card would get for inputs like these, here or not."""
        return self._plans.plan_for(card, self.flatten(arguments, {}))

    def explain(self, *arguments: Any, **keywords: Any) -> Explanation:
        """The plan for inputs like these, step by step; without inputs the plan that was used last."""
        plan = self.plan(*arguments, **keywords) if arguments or keywords else self._plans.latest()
        if plan is None:
            raise UnsupportedError("there is no plan yet: give explain inputs like those of a call")
        return explain_plan(plan, device=self._settings.where)

    @torch.inference_mode(False)
    @torch.no_grad()
    def compare(self, *arguments: Any, **keywords: Any) -> Comparison:
        """The plan for inputs like these beside PyTorch on the GPU, step by step and as a whole: it is timed here."""
        require_gpu("compare", TWIN if self.on_twin else self.device)
        tensors = self.flatten(arguments, keywords)
        kept = self._plans.of(tensors)
        plan, device = kept.calls.plan, tensors[0].device
        program = KernelProgram(plan, self._plans.constants[device], device)
        return compare(program, kept.network.captured, tensors, kept.batch)

    def program(self, *tensors: torch.Tensor) -> PlanProgram:
        """The plan for inputs like these over memory of its own: its static inputs and outputs, and `run`."""
        return self.calls(tensors).program

    def calls(self, tensors: Sequence[torch.Tensor]) -> Calls:
        """The plan for inputs like these, made ready to be called with them."""
        return self._plans.of(tensors).calls

    def stream(
        self, batches: Iterable[Any], *, depth: int = 2, then: Callable[[Any], Any] | None = None
    ) -> Generator[Any, None, None]:
        """Results of host batches in order, copies overlapped with compute; see `escalade.engine.streaming`."""
        return stream(self, batches, depth=depth, then=then)

    def save(self, path: Any, *, kernels: bool | str | Sequence[str] = False) -> None:
        """The network in one file, for `escalade.load`: as it is for inputs of the example's sizes, and any batch.

        With `kernels=True` the plans that the engine has on its GPU go along, with their machine code: loaded on such
        a card, they need no compiler. Architectures that are named (`"sm_90a"`) need not be here.
        """
        write(self._captured, self.dtype, path, self._plans.carry(kernels) if kernels else NOTHING)

    def take(self, given: Carried, origin: str) -> None:
        """Plans and machine code that a file has brought, for this GPU or for one that the engine is moved to later."""
        self._plans.take(given)
        self._origin = origin
        self._offer()

    def _offer(self) -> None:
        """Has what was brought for this GPU used, and says what is missing."""
        if self._settings.where != "cuda":
            return
        card, given = Card.of(self.device), self._plans.carried
        if missing := given.missing(card):
            logger.warning("%s: %s", self._origin, missing)
        add_bundled(given.codes.get(str(card.architecture), {}))

    def prepare(self, several: Sequence[Sequence[torch.Tensor]]) -> None:
        """Makes plans for inputs like each of these ahead, with the kernels of all of them compiled together."""
        self._plans.prepare(several)

    def flatten(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """The tensors of a call in the order of the graph's inputs."""
        plain = self._positional and not keywords and len(arguments) == len(self._captured.inputs)
        if plain and all(type(value) is torch.Tensor for value in arguments):
            return tuple(arguments)
        left = self._placed[len(arguments) :]
        if keywords.keys() == {*self._names, *left}:
            # By name too what the example gave in its place, as a model's forward takes it.
            arguments = (*arguments, *(keywords[name] for name in left))
            keywords = {name: keywords[name] for name in self._names}
        tensors, structure = flatten((tuple(arguments), dict(keywords)))
        if structure != self._arguments:
            raise UnsupportedError(
                f"the engine is called like the model it was compiled from: with {call_of(self._captured)}"
            )
        return tuple(tensors)


def _seen(plans: Plans, x: Any) -> Seen | None:
    """The plan of a call with tensors like this one, which the next may be like too."""
    if type(x) is not torch.Tensor or not is_dense(x):
        return None
    sight = _sight(x)
    seen = plans.sights.get(sight)
    if seen is not None:
        plans.last = seen
        if sight not in plans.sights:  # another thread has let it go meanwhile
            plans.last = None
    return seen


def _sight(x: torch.Tensor) -> tuple[Any, ...]:
    """What a call sees of its one tensor."""
    return x.shape, x.dtype, x.device, x.is_contiguous() or x.stride()


def _restored(data: bytes, options: dict[str, Any]) -> Engine:
    """An engine of the bytes that `save` has written, as pickle finds it again."""
    require_device(options["device"])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "engine")
        path.write_bytes(data)
        home = torch.device("cpu" if options["device"] == TWIN else options["device"])
        graph, dtype, carried = read(path, home)
    engine = Engine(graph, dtype, **options)
    engine.take(carried, "a pickled engine")
    return engine


def _moved(others: Others, device: torch.device, shapes: Shapes) -> Graph:
    """The graph of an engine that was moved to a device after it was made."""
    return elsewhere(others(shapes), device)
