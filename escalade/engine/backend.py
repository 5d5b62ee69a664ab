"""`torch.compile(model, backend="escalade")`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from escalade.engine.capture import capture
from escalade.engine.engine import Engine
from escalade.engine.forms import STORAGE
from escalade.errors import UnsupportedError

logger = logging.getLogger("escalade")
OPTIONS = ("dtype",)


def escalade_backend(
    module: torch.fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """Compiles what Dynamo has traced. `options={"dtype": "fp16"}` asks for a dtype; the default is the model's own.

    Where gradients are wanted PyTorch runs the model itself: an engine is for inference.
    """
    unknown = set(options or {}) - set(OPTIONS)
    if unknown:
        raise UnsupportedError(f"backend escalade has no option {', '.join(sorted(unknown))}; it has {', '.join(OPTIONS)}")
    return _Traced(module, example_inputs, (options or {}).get("dtype"))


class _Traced:
    """A traced module whose weights come as inputs: an engine holds them, and is made again if they change."""

    def __init__(self, module: torch.fx.GraphModule, example_inputs: Sequence[Any], dtype: str | None) -> None:
        self._module = module
        self._weights = [
            position for position, value in enumerate(example_inputs)
            if isinstance(value, torch.nn.Parameter) or _is_buffer(module, position)
        ]  # fmt: skip
        self._dtype = dtype
        self._engine: Engine | None = None
        self._versions: tuple[Any, ...] = ()
        self._said = False

    def __call__(self, *inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in inputs):
            self._say_gradients()
            return self._module(*inputs)
        weights = [inputs[position] for position in self._weights]
        versions = tuple((weight.data_ptr(), weight._version) for weight in weights)
        rest = [value for position, value in enumerate(inputs) if position not in self._weights]
        if self._engine is None or versions != self._versions:
            self._engine = self._compile(weights, rest)
            self._versions = versions
        return self._engine(*[value for value in rest if isinstance(value, torch.Tensor)])

    def _compile(self, weights: list[torch.Tensor], rest: list[Any]) -> Engine:
        wrapped = _Bound(self._module, self._weights, weights, rest)
        tensors = [value for value in rest if isinstance(value, torch.Tensor)]
        graph = capture(wrapped, tensors)
        device = tensors[0].device
        return Engine(graph, self._dtype or _dtype_of(weights or tensors), device)

    def _say_gradients(self) -> None:
        if not self._said:
            self._said = True
            logger.warning(
                "gradients are asked for, so PyTorch runs this model itself; call it under torch.no_grad() or "
                "torch.inference_mode() to use Escalade"
            )


class _Bound(torch.nn.Module):
    """The traced module with its weights in place; it takes the other tensors."""

    def __init__(
        self, module: torch.fx.GraphModule, positions: list[int], weights: list[torch.Tensor], rest: list[Any]
    ) -> None:
        super().__init__()
        self._module = [module]  # not a submodule: it has no weights of its own
        self._positions = positions
        for number, weight in enumerate(weights):
            self.register_buffer(f"weight{number}", weight.detach())
        self._rest = [None if isinstance(value, torch.Tensor) else value for value in rest]

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        rest = iter([next(given) if value is None else value for value in self._rest])
        count = len(self._positions) + len(self._rest)
        weights = {position: getattr(self, f"weight{n}") for n, position in enumerate(self._positions)}
        return self._module[0](*[weights[p] if p in weights else next(rest) for p in range(count)])


def _is_buffer(module: torch.fx.GraphModule, position: int) -> bool:
    """Dynamo marks the module's own buffers by where they come from."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    source = getattr(placeholders[position], "_dynamo_source", None)
    return source is not None and ("_buffers" in source.name() if callable(source.name) else "_buffers" in source.name)


def _dtype_of(tensors: Sequence[torch.Tensor]) -> str:
    """The weights' own; fp32 allows TF32 where PyTorch does."""
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
    for name, storage in STORAGE.items():
        if storage == dtype and name != "tf32":
            allowed = torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32
            return "tf32" if name == "fp32" and allowed else name
    raise UnsupportedError(f"weights of {dtype}: escalade takes float32, float16 and bfloat16")
