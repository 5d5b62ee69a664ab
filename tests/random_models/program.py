"""A network as text: a class of PyTorch code, built and run from its seed alone, also in float64 and with rounding."""

from __future__ import annotations

import contextlib
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from escalade.engine.graph.forms import STORAGE
from escalade.ops.base.switches import round_to_tf32

GRID = 32
"""Inputs are multiples of 1/GRID below 2, so that bf16, the coarsest dtype, holds them exactly."""


@dataclass(frozen=True)
class Input:
    """One argument of `forward`. `size` excludes the batch."""

    name: str
    size: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def draw(self, batch: int, generator: torch.Generator) -> torch.Tensor:
        numbers = torch.randint(-2 * GRID, 2 * GRID, (batch, *self.size), generator=generator)
        if self.dtype == torch.bool:
            return numbers > 0
        return (numbers / GRID).to(self.dtype) if self.dtype.is_floating_point else numbers % 4


@dataclass(frozen=True)
class Text:
    """The code of a network: declarations of `__init__`, statements of `forward`, and what it returns."""

    seed: int
    inputs: tuple[Input, ...]
    modules: tuple[str, ...] = ()
    body: tuple[str, ...] = ()
    result: str = ""
    training: bool = False
    on_host: bool = False
    """True if it is captured on the CPU for any device: tensors that it creates name no device."""

    def with_lines(self, modules: Sequence[str], body: Sequence[str]) -> Text:
        return replace(self, modules=(*self.modules, *modules), body=(*self.body, *body))

    def returning(self, result: str) -> Text:
        return replace(self, result=result)

    def __str__(self) -> str:
        declared = ["super().__init__()", *self.modules]
        lines = [
            "class Model(nn.Module):",
            "    def __init__(self) -> None:",
            *(f"        {line}" for line in declared),
            "",
            f"    def forward(self, {', '.join(given.name for given in self.inputs)}):",
            *(f"        {line}" for line in self.body),
            f"        return {self.result}",
        ]
        sizes = ", ".join(f"{given.name} {list(given.size)} {given.dtype}" for given in self.inputs)
        host = "; captured on the CPU" if self.on_host else ""
        return "\n".join([f"# seed {self.seed}{host}; inputs behind the batch: {sizes}", *lines])

    def module(self) -> nn.Module:
        """The model, with weights derived from the seed and norms with nontrivial parameters."""
        source, name = str(self), f"<random model {self.seed} {hash(self):x}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        namespace: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "__name__": "random_model"}
        exec(compile(source, name, "exec"), namespace)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model: nn.Module = namespace["Model"]()
            for part in model.modules():
                _unsettle(part)
        return model.train(self.training)

    def draw(self, batch: int, number: int = 0) -> tuple[torch.Tensor, ...]:
        """Inputs for a batch; another number gives other data."""
        generator = torch.Generator().manual_seed(1 + self.seed * 1009 + number * 31 + batch)
        return tuple(given.draw(batch, generator) for given in self.inputs)


def _unsettle(module: nn.Module) -> None:
    """Norms start as identities, which would hide a kernel that ignores their parameters."""
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
        assert module.running_mean is not None and module.running_var is not None
        module.running_mean.uniform_(-0.5, 0.5)
        module.running_var.uniform_(0.5, 1.5)
    norms = nn.BatchNorm1d | nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm | nn.InstanceNorm2d
    if isinstance(module, norms) and module.weight is not None:
        nn.init.uniform_(module.weight, 0.5, 1.5)
        nn.init.uniform_(module.bias, -0.5, 0.5)


def tensors(result: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of a result of any structure, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))


# --- arithmetic


class Exact(TorchFunctionMode):
    """Casts to other floating types give float64, so that a reference has no rounding error."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("half", "bfloat16", "float"):
            return args[0].double()
        args, kwargs = pytree.tree_map_only(torch.dtype, _widest, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


def _widest(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


@contextlib.contextmanager
def exactly() -> Iterator[None]:
    """All arithmetic in float64, including constants that the model creates."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Exact():
            yield
    finally:
        torch.set_default_dtype(before)


class Rounded(TorchFunctionMode):
    """Round every operator's result to a dtype, in place, so that views keep their base."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        written = args[0] if getattr(func, "__name__", "") == "__setitem__" else result
        for tensor in tensors(written):
            round_in_place(tensor, self._dtype)
        return result


def round_in_place(tensor: torch.Tensor, dtype: str) -> None:
    if dtype == "fp32" or tensor.dtype != torch.float32:
        return
    with torch.no_grad(), torch._C.DisableTorchFunction():
        near = round_to_tf32(tensor) if dtype == "tf32" else tensor.to(STORAGE[dtype]).float()
        if not torch.equal(near, tensor):
            tensor.copy_(near)


def wide(values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(value.double() if value.is_floating_point() else value for value in values)


def run_exactly(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Any:
    """Run the model in float64. The model may be modified."""
    model = model.double()
    with torch.no_grad(), exactly():
        return model(*wide(inputs))


def run_rounded(model: nn.Module, inputs: Sequence[torch.Tensor], dtype: str) -> Any:
    """Run as PyTorch on a GPU in a dtype: fp32 sums, rounded storage. The model may be modified."""
    given = [each.clone() for each in inputs]
    for each in (*model.parameters(), *model.buffers(), *given):
        round_in_place(each, dtype)
    with torch.no_grad(), Rounded(dtype):
        return model(*given)
