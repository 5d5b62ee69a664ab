"""`torch.compile(model, backend="escalade")`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from escalade.engine.capture.any_size import AnySize
from escalade.engine.engine import Engine
from escalade.engine.graph.forms import STORAGE, require_dtype
from escalade.engine.graph.graph import Graph
from escalade.engine.training.parts import compile_for_training
from escalade.engine.weight_guard import Watched
from escalade.errors import UnsupportedError
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
    """Compiles what Dynamo has traced. `options={"dtype": "fp16"}` asks for a dtype; the default is the model's own.

    Every call compares the weights with those that the engine was made of, since not every way to change them can be
    noticed otherwise. `"frozen": True` promises that they are changed by PyTorch's operators alone, outside of
    inference mode, and spares that.

    Where gradients are wanted, AOTAutograd's graphs forward and backward are plans whose weights are inputs: they are
    the caller's, as they are at each call. Types are then the model's own and autocast's; of dtypes tf32 counts.
    """
    unknown = set(options or {}) - set(OPTIONS)
    if unknown:
        raise UnsupportedError(
            f"backend escalade has no option {', '.join(sorted(unknown))}; it has {', '.join(OPTIONS)}"
        )
    dtype = (options or {}).get("dtype")
    if dtype is not None:
        dtype = require_dtype(dtype)
    if dtype == "fp8":
        raise UnsupportedError(
            "backend escalade has no calibration, which fp8 needs; use escalade.compile(model, ..., dtype='fp8', "
            "calibration=batches)"
        )
    frozen = (options or {}).get("frozen", False)
    if not isinstance(frozen, bool):
        raise UnsupportedError(f"frozen={frozen!r}: backend escalade takes True or False")
    if torch.is_grad_enabled() and any(
        isinstance(one, torch.Tensor) and one.requires_grad for one in example_inputs
    ):
        products = dtype if dtype in ("fp32", "tf32") else "tf32" if tf32_allowed() else "fp32"
        return compile_for_training(module, example_inputs, products, _Saying())
    return _Traced(module, example_inputs, dtype, frozen)


class _Saying:
    """Says something once."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, message: str) -> None:
        if not self._said:
            self._said = True
            logger.warning(message)


class _Traced:
    """A traced module whose weights come as inputs: an engine has a copy of them, and is made again if they change."""

    def __init__(
        self, module: torch.fx.GraphModule, example_inputs: Sequence[Any], dtype: str | None, frozen: bool
    ) -> None:
        self._module = module
        self._sources = _Sources.of(module, example_inputs)
        self._own = [*module.parameters(), *module.buffers()]
        """Tensors that the traced module has instead of taking them."""
        self._dtype = dtype
        self._frozen = frozen
        self._held: _Held | None = None
        self._say = _Saying()

    def __call__(self, *inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in inputs):
            return self._module(*inputs)  # it was traced for calls without gradients
        sources = self._sources
        weights = [*(inputs[position] for position in sources.weights), *self._own]
        numbers = sources.numbers_among(inputs)
        tensors = [inputs[position] for position in sources.tensors]
        if not self._frozen and _is_recording(weights):
            self._say(
                "a CUDA graph is being recorded, in which nobody compares weights, so PyTorch runs this model itself; "
                'options={"frozen": True} says that they do not change'
            )
            return self._module(*inputs)
        try:
            held = self._held
            if held is None or not held.serves(weights, numbers):
                self._held = held = None  # its memory is free for the next
                self._held = held = self._hold(weights, numbers, tensors)
            if held.engine is not None:
                return held.engine(*tensors)
        except UnsupportedError as error:
            self._say(f"PyTorch runs this part of the model itself: {error}")
        return self._module(*inputs)

    def _hold(self, weights: list[torch.Tensor], numbers: tuple[Any, ...], tensors: list[Any]) -> _Held:
        engine, watched = None, None
        try:
            watched = Watched(weights)
            engine = self._compile(watched.copies, numbers, tensors)
        except UnsupportedError as error:
            self._say(f"PyTorch runs this part of the model itself: {error}")
        unwatched = self._frozen or engine is None  # what PyTorch runs, it runs with the weights as they are
        return _Held(engine, numbers, _counted(weights), None if unwatched else watched)

    def _compile(self, weights: list[torch.Tensor], numbers: tuple[Any, ...], tensors: list[Any]) -> Engine:
        if not tensors:
            raise UnsupportedError("it takes no tensors")
        dtype = self._dtype or _dtype_of(weights or tensors)
        # PyTorch compiles a model for the autocast that it is called in.
        bound = _Bound(self._module, self._sources, weights, numbers)
        captured = AnySize(bound, tensors, owned=weights, autocast=True)
        return Engine(
            _unchanging(captured.graph),
            dtype,
            tensors[0].device,
            others=lambda shapes: _unchanging(captured.graph_for(shapes)),
        )


@dataclass(frozen=True)
class _Held:
    """An engine, or that there can be none, and what it was made of."""

    engine: Engine | None
    numbers: tuple[Any, ...]
    counted: list[tuple[int, int]]
    watched: Watched | None

    def serves(self, weights: list[torch.Tensor], numbers: tuple[Any, ...]) -> bool:
        if numbers != self.numbers:
            return False
        return self.counted == _counted(weights) if self.watched is None else self.watched.hold_for(weights)


@dataclass(frozen=True)
class _Sources:
    """What Dynamo gives a traced module, by position."""

    weights: tuple[int, ...]
    tensors: tuple[int, ...]
    sizes: dict[int, tuple[int, int]]
    """Numbers that are sizes of tensors: of which, and which of its dimensions."""
    numbers: tuple[int, ...]
    """Numbers of any other kind."""
    boxed: frozenset[int]
    """The numbers that come as tensors, of which the module asks for the number."""

    def numbers_among(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(inputs[p].item() if p in self.boxed else inputs[p] for p in self.numbers)

    @staticmethod
    def of(module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> _Sources:
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
        return _Sources(tuple(sorted(weights)), tuple(tensors), sizes, tuple(numbers), frozenset(boxed))


class _Bound(torch.nn.Module):
    """The traced module with its weights and numbers in place; it takes the other tensors."""

    def __init__(
        self,
        module: torch.fx.GraphModule,
        sources: _Sources,
        weights: Sequence[torch.Tensor],
        numbers: Sequence[Any],
    ) -> None:
        super().__init__()
        self._module = [module]  # not a submodule: it has no weights of its own
        self._sources = sources
        self._numbers = numbers
        for position, weight in zip(sources.weights, weights, strict=False):  # behind them the module's own
            self.register_buffer(f"weight{position}", weight.detach())

    def forward(self, *tensors: torch.Tensor) -> Any:
        sources = self._sources
        given: dict[int, Any] = {position: getattr(self, f"weight{position}") for position in sources.weights}
        given |= dict(zip(sources.tensors, tensors, strict=True))
        for position, number in zip(sources.numbers, self._numbers, strict=True):
            given[position] = _Boxed(number) if position in sources.boxed else number
        given |= {position: given[tensor].shape[d] for position, (tensor, d) in sources.sizes.items()}
        return self._module[0](*[given[position] for position in sorted(given)])


@dataclass(frozen=True)
class _Boxed:
    """A number in the place of a tensor that holds it."""

    number: float

    def item(self) -> float:
        return self.number


def _unchanging(graph: Graph) -> Graph:
    if graph.writes_inputs:
        raise UnsupportedError("it writes to its inputs, which an engine leaves as they are")
    return graph


def _counted(weights: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """The weights' addresses, and the changes that PyTorch has counted; for tensors made in inference mode it does
    not."""
    return [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]


def _is_recording(weights: Sequence[torch.Tensor]) -> bool:
    return any(weight.is_cuda for weight in weights) and torch.cuda.is_current_stream_capturing()


def _is_buffer(placeholder: torch.fx.Node) -> bool:
    """Dynamo marks the module's own buffers by where they come from."""
    source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return "_buffers" in (name() if callable(name) else name)


def _is_number(placeholder: torch.fx.Node) -> bool:
    """Whether nothing but its number is asked of a tensor: where sizes are symbols, Dynamo makes tensors of the model's
    own numbers, an `eps` or a factor, which might change too."""
    return bool(placeholder.users) and all(
        user.op == "call_method" and user.target == "item" for user in placeholder.users
    )


def _dtype_of(tensors: Sequence[torch.Tensor]) -> str:
    """The weights' own; fp32 allows TF32 where PyTorch does."""
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    for name, storage in STORAGE.items():
        if storage == dtype and name != "tf32":
            return "tf32" if name == "fp32" and tf32_allowed() else name
    raise UnsupportedError(f"weights of {dtype}: escalade takes float32, float16 and bfloat16")
