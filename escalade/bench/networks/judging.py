"""How far a network's results may be from float64's: by PyTorch's own error, in the same dtype on the same inputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from escalade.bench.peers.network import tensors
from escalade.engine.graph.forms import STORAGE
from escalade.measure.verification import compare
from escalade.ops.base.accuracy import relative_error
from escalade.ops.base.switches import precision, round_to_tf32

TIMES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 2.0}
"""PyTorch's own error. In fp32 operands that are split into halves of 22 bits, and Winograd's transforms, lose a bit or
two; in TF32 Hopper's units cut x off where others round (docs/hopper.md). In 16 bits that is below their rounding.
"""
LEAST = {"fp32": 2.0**-22, "tf32": 2.0**-9, "fp16": 2.0**-12, "bf16": 2.0**-9, "fp8": 0.25}
"""What is allowed in any case: of few results PyTorch's may happen to be nearly exact, and its TF32 may be fp32."""
MOST = {"fp32": 1e-5, "tf32": 5e-3, "fp16": 5e-3, "bf16": 4e-2, "fp8": 0.25}
"""What is allowed at most, however sloppy PyTorch is. PyTorch has no networks in FP8: there it is what 16 roundings to
2^-4 in a row come to, as a random walk."""
_LAST_BIT = {"fp32": 2.0**-23, "tf32": 2.0**-10, "fp16": 2.0**-10, "bf16": 2.0**-7, "fp8": 2.0**-3}
UNTIMED = -1.0
"""In place of the seconds that a system is timed: systems only compile what they need, and nothing is judged."""
PEERS = 2.0
"""How many times as far off a peer may be."""
LEAST_ROWS = 8
"""Rows at least, so that PyTorch's own error is no matter of chance."""


def tolerance(dtype: str, own: float, most: float = 1.0) -> float:
    """The tolerance that follows from PyTorch's own error; `most` is how many times the usual most is allowed."""
    own = math.inf if math.isnan(own) else own
    return min(most * MOST[dtype], max(LEAST[dtype], TIMES[dtype] * own))


@dataclass(frozen=True)
class Standard:
    """What a network should give, each result by itself, and how far from it PyTorch is in a dtype."""

    dtype: str
    expected: tuple[torch.Tensor, ...]
    """The results in float64."""
    own: tuple[float, ...]
    most: float = 1.0

    @property
    def tolerance(self) -> float:
        """The tolerance of all results together."""
        return tolerance(self.dtype, self._together(self.own), self.most)

    def judge(self, results: Sequence[torch.Tensor], times: float = 1.0) -> tuple[float, str]:
        """The error of all results together, and what is wrong with them, if something is.

        `times` as much is allowed. Each result is judged as a kernel's is: its shape, its NaN, its norm, its rows, its
        elements.
        """
        if len(results) != len(self.expected):
            return math.nan, f"it has {len(results)} results, not {len(self.expected)}"
        failures, errors = [], []
        for number, (result, expected, own) in enumerate(zip(results, self.expected, self.own, strict=True)):
            allowed = times * tolerance(self.dtype, own, self.most)
            failure, error = compare(result.to(expected.device), expected, allowed)
            errors.append(error)
            if failure:
                failures.append(f"result {number}: {failure}" if len(results) > 1 else failure)
        return self._together(errors), failures[0] if failures else ""

    def _together(self, errors: Sequence[float]) -> float:
        """Errors relative to each result as one relative to all of them."""
        norms = [float(torch.linalg.vector_norm(expected)) or 1.0 for expected in self.expected]
        return math.hypot(*(e * n for e, n in zip(errors, norms, strict=True))) / math.hypot(*norms)


def standard(
    model: nn.Module, x: torch.Tensor, dtype: str, expected: torch.Tensor, chunk: int = 16
) -> Standard:
    """The standard of a network of one result, by PyTorch's error on these inputs."""
    return Standard(dtype, (expected,), (own_error(model, x, dtype, expected, chunk),))


def own_error(
    model: nn.Module, x: torch.Tensor, dtype: str, expected: torch.Tensor, chunk: int = 16
) -> float:
    """PyTorch's error of a network of one result."""
    return own_errors(model, x, dtype, (expected,), chunk)[0]


def own_errors(
    model: nn.Module, x: torch.Tensor, dtype: str, expected: Sequence[torch.Tensor], chunk: int = 16
) -> tuple[float, ...]:
    """PyTorch's error of each result, as it is on a GPU: the sums in fp32.

    On the CPU that takes help: some processors sum 16-bit products in 16 bits, and there is no TF32. So there the
    weights and the results of every operator are rounded, and fp32 does the rest.
    """
    storage = STORAGE[dtype]
    its = copy.deepcopy(model).to(x.device)
    cudnn: Any = torch.backends.cudnn
    with torch.no_grad(), precision(dtype):
        cudnn.benchmark = False  # a search over every algorithm takes longer than the figure is worth
        if x.is_cuda:
            its = its.to(storage)
            results = [its(part.to(storage)) for part in x.split(chunk)]
        else:
            for tensor in (*its.parameters(), *its.buffers()):
                tensor.copy_(_rounded(tensor, dtype))
            with _Rounded(dtype):
                results = [its(_rounded(part, dtype)) for part in x.split(chunk)]
    found = zip(joined(results), expected, strict=True)
    return tuple(relative_error(result.to(wanted.device), wanted) for result, wanted in found)


def nudged(x: torch.Tensor, dtype: str, number: int) -> torch.Tensor:
    """The inputs themselves as number 0; as any other, moved by less than the dtype rounds away."""
    if not number:
        return x
    generator = torch.Generator(x.device).manual_seed(number)
    noise = torch.rand(x.shape, generator=generator, device=x.device).to(x) - 0.5
    return x * (1 + noise * _LAST_BIT[dtype])


def joined(parts: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """The results of a network, one or several in whichever structure, of batches that follow each other."""
    return tuple(torch.cat(pieces) for pieces in zip(*map(tensors, parts), strict=True))


class _Rounded(TorchFunctionMode):
    """Everything that an operator gives is rounded to the dtype."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return tree_map_only(torch.Tensor, lambda tensor: _rounded(tensor, self._dtype), result)


def _rounded(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    if dtype == "fp32" or tensor.dtype != torch.float32:
        return tensor
    return round_to_tf32(tensor) if dtype == "tf32" else tensor.to(STORAGE[dtype]).float()


def spoil(tensors: Sequence[torch.Tensor]) -> None:
    """NaN throughout (ones where there is no NaN), so that what is not written is seen."""
    with torch.inference_mode():  # for results of inference mode too
        for tensor in tensors:
            tensor.fill_(math.nan if tensor.is_floating_point() else 1)


def fresh(
    call: Callable[[], Any],
    results: Callable[[Any], Sequence[torch.Tensor]],
    restart: Callable[[], object] = lambda: None,
) -> Sequence[torch.Tensor]:
    """What a call gives where memory that is used again holds no earlier, right result of it."""
    restart()
    spoil(results(call()))
    restart()
    return results(call())
