"""A compiled network, called like the model, with a cache of plans for the input sizes it has seen."""

from __future__ import annotations

import gc
import logging
import pathlib
import tempfile
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.utils import _pytree as pytree

from escalade.device.nvrtc import add_bundled
from escalade.engine.aot import NO_ARTIFACTS, AotArtifacts
from escalade.engine.cached_plan import GuardedPlan
from escalade.engine.calibration import write_ranges
from escalade.engine.calibration_report import ASSUMED_BATCH, CalibrationReport, report
from escalade.engine.call_queue import CallQueue, Pending
from escalade.engine.calls import Calls
from escalade.engine.comparison import Comparison, compare
from escalade.engine.cpp_export import export as export_plans
from escalade.engine.explain import Explanation, explain_plan
from escalade.engine.file import read, to_device, write
from escalade.engine.graph.forms import STORAGE, is_dense, require_dense
from escalade.engine.graph.graph import Graph
from escalade.engine.graph.trees import flatten
from escalade.engine.networks import GraphProvider, Shapes, format_call, format_shape
from escalade.engine.passes import FusionLevel
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.program import PlanProgram
from escalade.engine.plan_cache import PlanCache
from escalade.engine.settings import DEFAULT_PLANS, TWIN, Settings, require_device, require_gpu
from escalade.engine.streaming import stream
from escalade.engine.weight_update import SourceModel, require_entries
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import QUANTIZED

logger = logging.getLogger("escalade")

_transforms_active = torch._C._are_functorch_transforms_active
_is_traced = torch.compiler.is_dynamo_compiling


class Engine(torch.nn.Module):
    """A network compiled for one dtype. Call it like the model; `stream` feeds it from host memory.

    It may be called from any thread and on any stream. A new batch or image size is planned at its first call, which
    takes a fraction of a second; later calls allocate nothing that lasts except their results.

    It is a module, so it can be part of another one: always in evaluation mode, without parameters; `to` moves it to
    another device. Pickling stores what `save` writes. Its weights are copies of the model's: after changing the
    model, call `refresh`, or pass a state dict to `load_state_dict`.
    """

    def __init__(
        self,
        graph: Graph,
        dtype: str,
        device: torch.device | str,
        plans: int = DEFAULT_PLANS,
        fusion: FusionLevel = FusionLevel.fused,
        measured: bool = False,
        buffers: int = 1,
        graph_provider: GraphProvider | None = None,
        memory: str | int | None = None,
        fixed_batch: int | None = None,
        source: SourceModel | None = None,
    ) -> None:
        """Build an engine from a captured graph; see `escalade.compile` for the options.

        `graph_provider` captures graphs for input sizes that `graph` does not cover; `source` is the model that it
        captures, for `refresh`. With `fixed_batch`, a batch size,
        the engine is deterministic: every call is computed in batches of that size.
        """
        super().__init__()
        super().train(False)
        module_attributes = {*vars(self)}
        self._settings = Settings.of(dtype, device, plans, fusion, measured, buffers, memory, fixed_batch)
        self._settings.check(graph)
        self._graph_provider = graph_provider
        self._source = source
        self._sharing_weights = weakref.WeakSet((self,))
        """Engines with the same weights: this one and its copies."""
        self._arguments = graph.arguments
        positional, keywords = pytree.tree_unflatten(range(len(graph.inputs)), self._arguments)
        self._positional = positional == tuple(range(len(graph.inputs))) and not keywords
        self._keyword_names = tuple(keywords)
        self._positional_names = graph.parameters
        self._lock = threading.Lock()
        """Guards lazy creation of the call queue, and moves to another device."""
        self._warned_no_gradients = False
        self._call_queue: CallQueue | None = None
        self._plans = PlanCache(graph, self._settings, graph_provider)
        self._artifacts_source = "the engine"
        """The file that plans and machine code came from, for warnings."""
        self._engine_attributes = {*vars(self), "_engine_attributes"} - module_attributes
        """Names of the attributes set here; a copy of the engine copies all others."""

    @property
    def dtype(self) -> str:
        """The dtype that the engine was compiled for."""
        return self._settings.dtype

    @property
    def device(self) -> torch.device:
        """The device of the inputs: the CPU for the twin."""
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
        if _is_traced():  # torch.compile of a module that contains this engine
            return torch.compiler.disable(super().__call__)(*arguments, **keywords)
        if len(arguments) == 1 and not keywords:
            plans, x = self._plans, arguments[0]
            hit = plans.last
            if hit is None or type(x) is not torch.Tensor or not hit.matches(x):
                hit = _find_hit(plans, x)
            if hit is not None and not x.requires_grad and not _transforms_active() and not self._has_hooks:
                cached = hit.cached
                cached.last_use = next(plans.uses)
                results = cached.calls.call(arguments)
                return results[0] if cached.returns_one_tensor else self.unflatten(results, cached.calls.plan)
        return super().__call__(*arguments, **keywords)  # with the caller's hooks

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the model. Results are written to `out` if it is given (and is not an argument of the model): tensors in
        the structure that the model returns, or a sequence of them.
        """
        remaining = self._positional_names[len(arguments) :]
        out = None if "out" in (*self._keyword_names, *remaining) else keywords.pop("out", None)
        tensors = self.flatten(arguments, keywords)
        self._check_inputs(tensors)
        is_one = len(arguments) == 1 and not keywords and isinstance(arguments[0], torch.Tensor)
        cached = self._plans.of(tensors, _signature(tensors[0]) if is_one else None)
        if out is None:
            return self.unflatten(cached.calls.call(tensors), cached.calls.plan)
        cached.calls.call(tensors, cached.check_out(out, tensors[0].device))
        return out

    def submit(self, *arguments: Any, **keywords: Any) -> Pending:
        """Call asynchronously and return a future of the result, which can also be awaited.

        The call runs in a thread and on a stream of the engine, ordered after the work already enqueued on the caller's
        stream. When the future completes, the GPU has finished, so no stream needs to wait. Up to `buffers` calls of a
        plan run at once.
        """
        with self._lock:
            if self._call_queue is None:
                self._call_queue = CallQueue(self._settings.buffers)
            queue = self._call_queue
        first = arguments[0] if len(arguments) == 1 and keywords.keys() <= {"out"} else None
        is_ready = isinstance(first, torch.Tensor) and _signature(first) in self._plans.by_signature
        return queue.submit(partial(self, *arguments, **keywords), self.device, is_ready)

    @property
    def _has_hooks(self) -> bool:
        return bool(self._forward_hooks or self._forward_pre_hooks)

    def train(self, mode: bool = True) -> Engine:
        """Do nothing: an engine always computes what the model does in evaluation mode."""
        return self

    def compile(self, *arguments: Any, **keywords: Any) -> None:
        """Do nothing: an engine is already compiled."""

    def extra_repr(self) -> str:
        """Return the inputs, outputs, dtype, device and planned batch sizes."""
        results = (format_shape(self._captured.shape_of(name)) for name in self._captured.outputs)
        batches = self._plans.batches()
        ready = f", ready for batches of {', '.join(map(str, batches))}" if batches else ""
        return f"{format_call(self._captured)} -> {', '.join(results)}, {self.dtype} on {self._settings.where}{ready}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Engine:
        """Implement `to`, `cuda`, `half` and the like, which PyTorch applies to each tensor of a module."""
        own = torch.empty(0, dtype=STORAGE[self.dtype], device=self.device)
        wanted = fn(own)
        if wanted.dtype is not own.dtype:
            raise UnsupportedError(
                f"this engine computes in {self.dtype} and cannot be converted to {wanted.dtype}; compile the model "
                f"with dtype={wanted.dtype}"
            )
        if wanted.device != own.device:
            require_device(wanted.device)
            settings, graph_provider = self._settings.on(wanted.device), self._graph_provider
            if graph_provider is not None:
                graph_provider = partial(_graph_on_device, graph_provider, wanted.device)
            plans = self._plans.for_device(to_device(self._captured, wanted.device), settings, graph_provider)
            with self._lock:
                self._settings, self._graph_provider, self._plans, self._call_queue = (
                    settings,
                    graph_provider,
                    plans,
                    None,
                )
            self._use_artifacts()
        return self

    def __copy__(self) -> Engine:
        """Return an engine with plans of its own. It shares the weights, which can then no longer be replaced."""
        made = Engine(
            self._captured, self.dtype, graph_provider=self._graph_provider, **self._settings.options
        )
        made._source, made._sharing_weights = self._source, self._sharing_weights
        made._sharing_weights.add(made)
        made._plans.artifacts = self._plans.artifacts
        made._artifacts_source = self._artifacts_source
        for name, value in self._caller_attributes().items():
            vars(made)[name] = value.copy() if isinstance(value, dict) else value  # dicts hold the hooks
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        made = copy(self)
        vars(made).update(deepcopy(self._caller_attributes(), memo))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "engine")
            write(self._captured, self.dtype, path, self._plans.artifacts)
            return _unpickle, (path.read_bytes(), self._settings.options), self._caller_attributes()

    def _caller_attributes(self) -> dict[str, Any]:
        """Return the attributes of the module (hooks included) and those that the caller has set."""
        return {name: value for name, value in vars(self).items() if name not in self._engine_attributes}

    def _check_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse inputs without data, and warn once about inputs that require gradients."""
        is_traced = torch.jit.is_tracing() or any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if _transforms_active() or is_traced:
            raise UnsupportedError(
                "an engine needs tensors with data; apply torch.func transforms (vmap, grad), torch.jit.trace and fake "
                "tensors to the model instead"
            )
        require_dense(tensors, "an input is", "an engine takes dense tensors")
        if self._warned_no_gradients or not torch.is_grad_enabled():
            return
        if any(tensor.requires_grad for tensor in tensors):
            self._warned_no_gradients = True
            logger.warning(
                "an input requires gradients, but an engine's results have none. Train the model itself; for inference "
                "call the engine under torch.no_grad()"
            )

    def refresh(self) -> None:
        """Read the parameters and buffers of the model again, for example after training it further.

        The new weights take the place of the old ones in all plans and CUDA graphs, without planning again. Raises
        UnsupportedError, and changes nothing, if the model no longer exists, if names or shapes have changed, or if the
        plans depend on the old values. Results of calls that run at the same time are undefined.
        """
        if self._source is None:
            raise UnsupportedError(
                "this engine was loaded from a file or unpickled, so it has no model to read weights from; pass them "
                "to engine.load_state_dict"
            )
        self._replace_weights(self._source.current())

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Replace the weights with those of a state dict of the model, as `refresh` does; the model is not changed.

        The dict needs every key of the model's; with `strict=False`, missing keys leave their weights as they are, and
        unknown ones are ignored.
        """
        shapes = self._captured.state_shapes
        if assign:
            raise UnsupportedError("assign=True: an engine copies weights into its own memory; leave it out")
        if shapes is None:
            raise UnsupportedError(
                "this engine does not know the names of its weights: it comes from a file of an earlier version, or "
                "its model's state dict has more than tensors. Load the weights into the model and compile it again"
            )
        if not isinstance(state_dict, Mapping):
            raise UnsupportedError(
                f"the state dict is of type {type(state_dict).__name__}; pass weights by name, as model.state_dict()"
            )
        missing = [name for name in shapes if name not in state_dict]
        unexpected = [name for name in state_dict if name not in shapes]
        wanted = dict(shapes) if strict else {name: shapes[name] for name in shapes if name in state_dict}
        given = dict(state_dict) if strict else {name: state_dict[name] for name in wanted}
        require_entries(given, wanted, "the state dict")
        self._replace_weights(given)
        return _IncompatibleKeys(missing, unexpected)

    def _replace_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        if len(self._sharing_weights) > 1:
            gc.collect()
        if len(self._sharing_weights) > 1:
            raise UnsupportedError(
                "this engine shares its weights with a copy of it (copy.copy, copy.deepcopy); delete the copy, or "
                "compile the model again"
            )
        self._plans.replace_weights(weights, {} if self._source is None else self._source.kept)

    def unflatten(self, results: list[torch.Tensor], plan: Plan) -> Any:
        """Return a call's results in the structure that the model returns."""
        structure = plan.graph.structure
        return results[0] if structure.is_leaf() else pytree.tree_unflatten(results, structure)

    def plan(self, *arguments: Any, **keywords: Any) -> Plan:
        """Return the plan for inputs like these, creating it if necessary."""
        return self.calls(self.flatten(arguments, keywords)).plan

    def plan_for(self, card: Card, *arguments: Any) -> Plan:
        """Return the plan for inputs like these on a card that need not be present."""
        return self._plans.plan_for(card, self.flatten(arguments, {}))

    def explain(self, *arguments: Any, **keywords: Any) -> Explanation:
        """Describe the plan for inputs like these, step by step; without inputs, the plan used last."""
        plan = self.plan(*arguments, **keywords) if arguments or keywords else self._plans.latest()
        if plan is None:
            raise UnsupportedError("the engine has no plan yet; pass inputs like those of a call to explain")
        return explain_plan(plan, device=self._settings.where)

    def calibration_report(self) -> CalibrationReport:
        """Describe the range that calibration chose for each layer, how much of it saturates, and the error.

        Its dtypes are those of the plan used last; before the first plan, those for a batch of 32.
        """
        if self.dtype not in QUANTIZED:
            raise UnsupportedError(f"the engine's dtype is {self.dtype}; only int8 and fp8 are calibrated")
        optimized, plan = self._plans.networks.first.optimized("nchw"), self._plans.latest()
        batch = ASSUMED_BATCH if plan is None else plan.batch
        return report(self._captured, optimized, self.dtype, batch, Card.of(self._settings.device))

    def save_ranges(self, path: Any) -> None:
        """Write the ranges of an int8 or fp8 engine as JSON, for `compile(..., calibration=path)`."""
        if self.dtype not in QUANTIZED:
            raise UnsupportedError(f"the engine's dtype is {self.dtype}; only int8 and fp8 have ranges")
        write_ranges(path, self._captured, self._plans.networks.first.optimized("nchw"), self.dtype)

    @torch.inference_mode(False)
    @torch.no_grad()
    def compare(self, *arguments: Any, **keywords: Any) -> Comparison:
        """Time the plan for inputs like these against PyTorch on the GPU, per step and as a whole."""
        require_gpu("compare", TWIN if self.on_twin else self.device)
        tensors = self.flatten(arguments, keywords)
        cached = self._plans.of(tensors)
        plan, device = cached.calls.plan, tensors[0].device
        program = KernelProgram(plan, self._plans.constants[device], device)
        return compare(program, cached.network.captured, tensors, cached.batch)

    def program(self, *tensors: torch.Tensor) -> PlanProgram:
        """Return the plan for inputs like these on static memory: fill `inputs`, `run`, read `outputs`."""
        return self.calls(tensors).program

    def calls(self, tensors: Sequence[torch.Tensor]) -> Calls:
        """Return the callable plan for inputs like these."""
        return self._plans.of(tensors).calls

    def stream(
        self, batches: Iterable[Any], *, depth: int = 2, then: Callable[[Any], Any] | None = None
    ) -> Generator[Any, None, None]:
        """Yield the results of host batches in order, as CPU tensors, copies overlapped with compute.

        Args:
            batches: Host tensors or NumPy arrays, or tuples of them for several inputs; sizes may vary. A batch is
                copied before the next one is requested; only pinned tensors are read in place.
            depth: Number of batches staged while one is computed.
            then: Function applied to each result on the engine's device, before it is copied back.
        """
        return stream(self, batches, depth=depth, then=then)

    def save(self, path: Any, *, kernels: bool | str | Sequence[str] = False) -> None:
        """Save the network for `escalade.load`, for the example's image size and any batch size.

        `kernels=True` adds the engine's plans and machine code for its GPU: on such a card the file loads without a
        compiler. Pass architectures by name (`"sm_90a"`) for GPUs that are not present.
        """
        artifacts = self._plans.build_artifacts(kernels) if kernels else NO_ARTIFACTS
        write(self._captured, self.dtype, path, artifacts)

    def export_cpp(self, folder: Any, *, kernels: bool | str = True) -> pathlib.Path:
        """Write the engine's plans for a C++ program, and the sources that run them, into a folder.

        A plan is written for each set of inputs that the engine has seen, with machine code for its own GPU, or for the
        architecture that `kernels` names. Returns the path of the file that `escalade::Engine` reads.

        Raises:
            UnsupportedError: A plan has steps that PyTorch computes; the message names them.
        """
        cards = self._plans.cards_for(kernels)
        if len(cards) != 1:
            raise UnsupportedError(f"kernels={kernels!r}: plans for a C++ program are for one architecture")
        (card,) = cards
        plans = (plan for _, plan in self._plans.plans_to_save(card, only_kernels=True))
        return export_plans(folder, card, self.dtype, plans)

    def set_artifacts(self, artifacts: AotArtifacts, source: str) -> None:
        """Use plans and machine code from a file, on this GPU and on any that the engine is moved to later."""
        self._plans.artifacts = artifacts
        self._artifacts_source = source
        self._use_artifacts()

    def _use_artifacts(self) -> None:
        """Register the machine code for this GPU, and warn if the plans are for other cards."""
        if self._settings.where != "cuda":
            return
        card, artifacts = Card.of(self.device), self._plans.artifacts
        if mismatch := artifacts.explain_mismatch(card):
            logger.warning("%s: %s", self._artifacts_source, mismatch)
        add_bundled(artifacts.codes.get(str(card.architecture), {}))

    def prepare(self, several: Sequence[Sequence[torch.Tensor]]) -> None:
        """Plan ahead for inputs like each of these, compiling the kernels of all plans together."""
        self._plans.prepare(several)

    def flatten(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a call in the order of the graph's inputs."""
        plain = self._positional and not keywords and len(arguments) == len(self._captured.inputs)
        if plain and all(type(value) is torch.Tensor for value in arguments):
            return tuple(arguments)
        remaining = self._positional_names[len(arguments) :]
        if keywords.keys() == {*self._keyword_names, *remaining}:
            # Arguments that were positional in the example may be passed by name, as to the model's forward.
            arguments = (*arguments, *(keywords[name] for name in remaining))
            keywords = {name: keywords[name] for name in self._keyword_names}
        tensors, structure = flatten((tuple(arguments), dict(keywords)))
        if structure != self._arguments:
            raise UnsupportedError(
                f"these arguments differ in structure from those the model was compiled with; call the engine with "
                f"{format_call(self._captured)}"
            )
        return tuple(tensors)


def _find_hit(plans: PlanCache, x: Any) -> GuardedPlan | None:
    """Return the cached plan for a call with this one tensor, and try it first at the next call."""
    if type(x) is not torch.Tensor or not is_dense(x):
        return None
    signature = _signature(x)
    hit = plans.by_signature.get(signature)
    if hit is not None:
        plans.last = hit
        if signature not in plans.by_signature:  # evicted by another thread in the meantime
            plans.last = None
    return hit


def _signature(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.device, x.is_contiguous() or x.stride()


def _unpickle(data: bytes, options: dict[str, Any]) -> Engine:
    """Rebuild a pickled engine from the bytes that `save` writes."""
    require_device(options["device"])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "engine")
        path.write_bytes(data)
        home = torch.device("cpu" if options["device"] == TWIN else options["device"])
        graph, dtype, artifacts = read(path, home)
    engine = Engine(graph, dtype, **options)
    engine.set_artifacts(artifacts, "a pickled engine")
    return engine


def _graph_on_device(graph_provider: GraphProvider, device: torch.device, shapes: Shapes) -> Graph:
    """Capture a graph for an engine that was moved to another device after compilation."""
    return to_device(graph_provider(shapes), device)
