"""`torch.compile(model, backend="escalade")`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from escalade.engine.capture.export import AnySize
from escalade.engine.engine import Engine
from escalade.engine.graph.forms import STORAGE, require_dtype
from escalade.engine.graph.graph import Graph
from escalade.engine.training.parts import compile_for_training
from escalade.engine.weight_guard import WeightSnapshot
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import QUANTIZED
from escalade.ops.base.switches import tf32_allowed

logger = logging.getLogger("escalade")
OPTIONS = ("dtype", "frozen")


def escalade_backend(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """Compile a module traced by Dynamo. `options={"dtype": "fp16"}` selects a dtype; the default is the model's own.

    Every call compares the weights' contents with those the engine was built from, because some changes leave no trace
    in PyTorch's version counters. `"frozen": True` skips that: it promises that only PyTorch operators outside
    inference mode change the weights.

    If gradients are required, AOTAutograd's forward and backward graphs become plans that read the caller's weights as
    inputs. Dtypes are then the model's own and autocast's; the option only selects fp32 or tf32.
    """
    unknown = set(options or {}) - set(OPTIONS)
    if unknown:
        raise UnsupportedError(
            f"backend escalade has no option {', '.join(sorted(unknown))}; its options are {', '.join(OPTIONS)}"
        )
    dtype = (options or {}).get("dtype")
    if dtype is not None:
        dtype = require_dtype(dtype)
    if dtype in QUANTIZED:
        raise UnsupportedError(
            f"dtype {dtype} needs calibration, which backend escalade does not support; use escalade.compile(model, "
            f"..., dtype='{dtype}', calibration=batches)"
        )
    frozen = (options or {}).get("frozen", False)
    if not isinstance(frozen, bool):
        raise UnsupportedError(f"frozen={frozen!r}: pass True or False")
    if torch.is_grad_enabled() and any(
        isinstance(one, torch.Tensor) and one.requires_grad for one in example_inputs
    ):
        products = dtype if dtype in ("fp32", "tf32") else "tf32" if tf32_allowed() else "fp32"
        return compile_for_training(module, example_inputs, products, _WarnOnce())
    return _TracedModule(module, example_inputs, dtype, frozen)


class _WarnOnce:
    """Logs only the first of its warnings."""

    def __init__(self) -> None:
        self._has_warned = False

    def __call__(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(message)


class _TracedModule:
    """A traced module that receives its weights as inputs. Its engine holds a copy and is rebuilt when they change."""

    def __init__(
        self, module: torch.fx.GraphModule, example_inputs: Sequence[Any], dtype: str | None, frozen: bool
    ) -> None:
        self._module = module
        self._roles = _InputRoles.of(module, example_inputs)
        self._module_tensors = [*module.parameters(), *module.buffers()]
        """Tensors that are attributes of the traced module instead of inputs."""
        self._dtype = dtype
        self._frozen = frozen
        self._state: _CompiledState | None = None
        self._warn = _WarnOnce()

    def __call__(self, *inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in inputs):
            return self._module(*inputs)  # the module was traced for inference
        roles = self._roles
        weights = [*(inputs[position] for position in roles.weights), *self._module_tensors]
        numbers = roles.numbers_in(inputs)
        tensors = [inputs[position] for position in roles.tensors]
        if not self._frozen and _is_capturing(weights):
            self._warn(
                "weights cannot be compared during CUDA graph capture, so PyTorch runs this model itself; pass "
                'options={"frozen": True} if they do not change'
            )
            return self._module(*inputs)
        try:
            state = self._state
            if state is None or not state.is_current(weights, numbers):
                self._state = state = None  # free its memory before building the next
                self._state = state = self._build(weights, numbers, tensors)
            if state.engine is not None:
                return state.engine(*tensors)
        except UnsupportedError as error:
            self._warn(f"PyTorch runs this part of the model itself: {error}")
        return self._module(*inputs)

    def _build(
        self, weights: list[torch.Tensor], numbers: tuple[Any, ...], tensors: list[Any]
    ) -> _CompiledState:
        engine, snapshot = None, None
        try:
            snapshot = WeightSnapshot(weights)
            engine = self._compile(snapshot.copies, numbers, tensors)
        except UnsupportedError as error:
            self._warn(f"PyTorch runs this part of the model itself: {error}")
        skips_check = self._frozen or engine is None  # PyTorch always reads the current weights
        return _CompiledState(engine, numbers, _versions_of(weights), None if skips_check else snapshot)

    def _compile(self, weights: list[torch.Tensor], numbers: tuple[Any, ...], tensors: list[Any]) -> Engine:
        if not tensors:
            raise UnsupportedError("it has no tensor inputs")
        dtype = self._dtype or _dtype_of(weights or tensors)
        # Dynamo guards on autocast state, so it can be captured as it is now.
        bound = _BoundModule(self._module, self._roles, weights, numbers)
        captured = AnySize(bound, tensors, owned=weights, autocast=True)
        return Engine(
            _require_no_mutation(captured.graph),
            dtype,
            tensors[0].device,
            graph_provider=lambda shapes: _require_no_mutation(captured.graph_for(shapes)),
        )


@dataclass(frozen=True)
class _CompiledState:
    """An engine (None if the module cannot be compiled), and the weights and numbers it was built from."""

    engine: Engine | None
    numbers: tuple[Any, ...]
    versions: list[tuple[int, int]]
    snapshot: WeightSnapshot | None

    def is_current(self, weights: list[torch.Tensor], numbers: tuple[Any, ...]) -> bool:
        if numbers != self.numbers:
            return False
        return (
            self.versions == _versions_of(weights)
            if self.snapshot is None
            else self.snapshot.matches(weights)
        )


@dataclass(frozen=True)
class _InputRoles:
    """Roles of a traced module's inputs, by position."""

    weights: tuple[int, ...]
    tensors: tuple[int, ...]
    sizes: dict[int, tuple[int, int]]
    """Numbers that are sizes: the position of the tensor, and the dimension."""
    numbers: tuple[int, ...]
    """All other numbers."""
    boxed: frozenset[int]
    """Numbers passed as tensors that the module only calls `item` on."""

    def numbers_in(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(inputs[p].item() if p in self.boxed else inputs[p] for p in self.numbers)

    @staticmethod
    def of(module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> _InputRoles:
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        values = [node.meta.get("example_value") for node in placeholders]
        is_tensor = [isinstance(value, torch.Tensor) for value in example_inputs]
        weights = {
            position
            for position, value in enumerate(example_inputs)
            if isinstance(value, torch.nn.Parameter)
            or (is_tensor[position] and _is_buffer(placeholders[position]))
        }
        boxed = {p for p, node in enumerate(placeholders) if is_tensor[p] and _is_number(node)}
        tensors = [p for p in range(len(example_inputs)) if is_tensor[p] and p not in weights | boxed]
        sizes: dict[int, tuple[int, int]] = {}
        for position, value in enumerate(values):
            if not isinstance(value, torch.SymInt):
                continue
            found = [
                (source, dimension)
                for source in tensors
                for dimension, size in enumerate(values[source].shape)
                if isinstance(size, torch.SymInt) and size.node.expr == value.node.expr
            ]
            if found:
                sizes[position] = found[0]
        known = {*weights, *tensors, *sizes}
        numbers = [p for p in range(len(example_inputs)) if p not in known]
        return _InputRoles(tuple(sorted(weights)), tuple(tensors), sizes, tuple(numbers), frozenset(boxed))


class _BoundModule(torch.nn.Module):
    """The traced module with its weights and numbers bound; it takes the remaining tensors."""

    def __init__(
        self,
        module: torch.fx.GraphModule,
        roles: _InputRoles,
        weights: Sequence[torch.Tensor],
        numbers: Sequence[Any],
    ) -> None:
        super().__init__()
        self._module = [module]  # in a list, so that it is not registered as a submodule
        self._roles = roles
        self._numbers = numbers
        for position, weight in zip(roles.weights, weights, strict=False):  # the module's own tensors follow
            self.register_buffer(f"weight{position}", weight.detach())

    def forward(self, *tensors: torch.Tensor) -> Any:
        roles = self._roles
        arguments: dict[int, Any] = {
            position: getattr(self, f"weight{position}") for position in roles.weights
        }
        arguments |= dict(zip(roles.tensors, tensors, strict=True))
        for position, number in zip(roles.numbers, self._numbers, strict=True):
            arguments[position] = _BoxedNumber(number) if position in roles.boxed else number
        arguments |= {position: arguments[tensor].shape[d] for position, (tensor, d) in roles.sizes.items()}
        return self._module[0](*[arguments[position] for position in sorted(arguments)])


@dataclass(frozen=True)
class _BoxedNumber:
    """Placeholder for a tensor that holds one number."""

    number: float

    def item(self) -> float:
        return self.number


def _require_no_mutation(graph: Graph) -> Graph:
    if graph.writes_inputs:
        raise UnsupportedError("it writes to its inputs, which engines do not support")
    return graph


def _versions_of(weights: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the address and version counter of each weight; inference tensors have no counter."""
    return [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]


def _is_capturing(weights: Sequence[torch.Tensor]) -> bool:
    return any(weight.is_cuda for weight in weights) and torch.cuda.is_current_stream_capturing()


def _is_buffer(placeholder: torch.fx.Node) -> bool:
    """Return True for a buffer of the module, which only Dynamo's source annotation reveals."""
    source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return "_buffers" in (name() if callable(name) else name)


def _is_number(placeholder: torch.fx.Node) -> bool:
    """Return True if a tensor is only used through `item`.

    With dynamic shapes Dynamo wraps the model's own floats, such as an `eps` or a factor, in tensors.
    """
    return bool(placeholder.users) and all(
        user.op == "call_method" and user.target == "item" for user in placeholder.users
    )


def _dtype_of(tensors: Sequence[torch.Tensor]) -> str:
    """Return the dtype of the weights; float32 maps to tf32 where PyTorch allows TF32."""
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    for name, storage in STORAGE.items():
        if storage == dtype and name != "tf32":
            return "tf32" if name == "fp32" and tf32_allowed() else name
    raise UnsupportedError(f"weights of {dtype}: Escalade supports float32, float16 and bfloat16")
