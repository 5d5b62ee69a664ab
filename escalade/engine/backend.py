"""`torch.compile(model, backend="escalade")`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from escalade.engine.capture import capture
from escalade.engine.engine import Engine
from escalade.engine.forms import STORAGE, require_dtype
from escalade.errors import UnsupportedError
from escalade.ops.precision import tf32_allowed

logger = logging.getLogger("escalade")
OPTIONS = ("dtype",)


def escalade_backend(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """Compiles what Dynamo has traced. `options={"dtype": "fp16"}` asks for a dtype; the default is the model's own.

    Where gradients are wanted PyTorch runs the model itself: an engine is for inference.
    """
    unknown = set(options or {}) - set(OPTIONS)
    if unknown:
        raise UnsupportedError(
            f"backend escalade has no option {', '.join(sorted(unknown))}; it has {', '.join(OPTIONS)}"
        )
    dtype = (options or {}).get("dtype")
    if dtype is not None:
        require_dtype(dtype)
    if dtype == "fp8":
        raise UnsupportedError(
            "backend escalade has no calibration, which fp8 needs; use escalade.compile(model, ..., dtype='fp8', "
            "calibration=batches)"
        )
    return _Traced(module, example_inputs, dtype)


class _Traced:
    """A traced module whose weights come as inputs: an engine holds them, and is made again if they change."""

    def __init__(
        self, module: torch.fx.GraphModule, example_inputs: Sequence[Any], dtype: str | None
    ) -> None:
        self._module = module
        self._sources = _Sources.of(module, example_inputs)
        self._dtype = dtype
        self._engine: Engine | None = None
        self._made_for: tuple[Any, ...] | None = None
        self._said = False

    def __call__(self, *inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in inputs):
            self._say(
                "gradients are asked for, so PyTorch runs this model itself; call it under torch.no_grad() or "
                "torch.inference_mode() to use Escalade"
            )
            return self._module(*inputs)
        sources = self._sources
        weights = [inputs[position] for position in sources.weights]
        numbers = tuple(inputs[position] for position in sources.numbers)
        tensors = [inputs[position] for position in sources.tensors]
        key = (numbers, *((weight.data_ptr(), _version(weight)) for weight in weights))
        try:
            if self._made_for != key:
                self._engine, self._made_for = None, key
                self._engine = self._compile(weights, numbers, tensors)
            if self._engine is not None:
                return self._engine(*tensors)
        except UnsupportedError as error:
            self._say(f"PyTorch runs this part of the model itself: {error}")
        return self._module(*inputs)

    def _compile(self, weights: list[torch.Tensor], numbers: tuple[Any, ...], tensors: list[Any]) -> Engine:
        if not tensors:
            raise UnsupportedError("it takes no tensors")
        graph = capture(_Bound(self._module, self._sources, weights, numbers), tensors)
        if graph.changes_inputs:
            raise UnsupportedError("it writes to its inputs, which an engine leaves as they are")
        return Engine(graph, self._dtype or _dtype_of(weights or tensors), tensors[0].device)

    def _say(self, message: str) -> None:
        if not self._said:
            self._said = True
            logger.warning(message)


@dataclass(frozen=True)
class _Sources:
    """What Dynamo gives a traced module, by position."""

    weights: tuple[int, ...]
    tensors: tuple[int, ...]
    sizes: dict[int, tuple[int, int]]
    """Numbers that are sizes of tensors: of which, and which of its dimensions."""
    numbers: tuple[int, ...]
    """Numbers of any other kind."""

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
        tensors = [p for p in range(len(example_inputs)) if is_tensor[p] and p not in weights]
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
        numbers = [p for p in range(len(example_inputs)) if not is_tensor[p] and p not in sizes]
        return _Sources(tuple(sorted(weights)), tuple(tensors), sizes, tuple(numbers))


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
        for position, weight in zip(sources.weights, weights, strict=True):
            self.register_buffer(f"weight{position}", weight.detach())

    def forward(self, *tensors: torch.Tensor) -> Any:
        sources = self._sources
        given: dict[int, Any] = {position: getattr(self, f"weight{position}") for position in sources.weights}
        given |= dict(zip(sources.tensors, tensors, strict=True))
        given |= dict(zip(sources.numbers, self._numbers, strict=True))
        given |= {position: given[tensor].shape[d] for position, (tensor, d) in sources.sizes.items()}
        return self._module[0](*[given[position] for position in sorted(given)])


def _version(weight: torch.Tensor) -> int:
    """Grows with every change in place; tensors made for inference cannot be changed outside of it."""
    return 0 if weight.is_inference() else weight._version


def _is_buffer(placeholder: torch.fx.Node) -> bool:
    """Dynamo marks the module's own buffers by where they come from."""
    source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return "_buffers" in (name() if callable(name) else name)


def _dtype_of(tensors: Sequence[torch.Tensor]) -> str:
    """The weights' own; fp32 allows TF32 where PyTorch does."""
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    for name, storage in STORAGE.items():
        if storage == dtype and name != "tf32":
            return "tf32" if name == "fp32" and tf32_allowed() else name
    raise UnsupportedError(f"weights of {dtype}: escalade takes float32, float16 and bfloat16")
