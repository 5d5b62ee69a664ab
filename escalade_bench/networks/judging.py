"""Tolerances of a network's results against float64, from PyTorch's own error in the same dtype on the same inputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from escalade.engine.graph.forms import STORAGE
from escalade.ops.base.accuracy import relative_error
from escalade.ops.base.switches import precision, round_to_tf32
from escalade.terminal_text import counted
from escalade.tune.verification import CHANCE, UNIT_ROUNDOFF, compare
from escalade_bench.peers.network import tensors

TIMES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 2.0, "int8": 2.0}
"""Factors on PyTorch's own error. In fp32 split operands (22 bits) and Winograd's transforms lose a bit or two; in TF32
Hopper's tensor cores truncate x where others round (docs/hopper.md). In 16 bits both are below the rounding of the
dtype.
"""
LEAST = {"fp32": 2.0**-22, "tf32": 2.0**-9, "fp16": 2.0**-12, "bf16": 2.0**-9, "fp8": 0.25, "int8": 0.1}
"""Smallest tolerance: a few results of PyTorch may be nearly exact by chance, and its TF32 may be fp32."""
MOST = {"fp32": 1e-5, "tf32": 5e-3, "fp16": 5e-3, "bf16": 4e-2, "fp8": 0.25, "int8": 0.1}
"""Largest tolerance, however large PyTorch's error is. PyTorch has no networks in FP8 and INT8: there the tolerance is
a random walk of 16 roundings to 2^-4, and to 1/127 of the largest value."""
_LAST_BIT = {
    "fp32": 2.0**-23,
    "tf32": 2.0**-10,
    "fp16": 2.0**-10,
    "bf16": 2.0**-7,
    "fp8": 2.0**-3,
    "int8": 2.0**-6,
}
PEERS = 2.0
"""Factor on the tolerance for peers."""
LEAST_ROWS = 8
"""Smallest number of rows to measure PyTorch's own error on; with fewer it varies too much."""


def tolerance(dtype: str, own: float, most: float = 1.0) -> float:
    """Return the tolerance from PyTorch's own error; `most` is a factor on the usual largest tolerance."""
    own = math.inf if math.isnan(own) else own
    return min(most * MOST[dtype], max(LEAST[dtype], TIMES[dtype] * own))


class Judge(Protocol):
    """Decides whether results are correct."""

    @property
    def expected(self) -> tuple[torch.Tensor, ...]: ...
    @property
    def tolerance(self) -> float: ...
    def judge(self, results: Sequence[torch.Tensor], times: float = 1.0) -> tuple[float, str]: ...


@dataclass(frozen=True)
class Standard:
    """The expected results of a network, and PyTorch's error of each in a dtype."""

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
        """Return the error of all results together, and the first failure or an empty string.

        `times` is a factor on the tolerance. Each result is checked like a kernel's: shape, NaN, norm, rows, elements.
        """
        if len(results) != len(self.expected):
            return math.nan, f"it has {counted(len(results), 'result')}, not {len(self.expected)}"
        failures, errors = [], []
        for number, (result, expected, own) in enumerate(zip(results, self.expected, self.own, strict=True)):
            allowed = times * tolerance(self.dtype, own, self.most)
            failure, error = compare(result.to(expected.device), expected, allowed)
            errors.append(error)
            if failure:
                failures.append(f"result {number}: {failure}" if len(results) > 1 else failure)
        return self._together(errors), failures[0] if failures else ""

    def _together(self, errors: Sequence[float]) -> float:
        """Combine errors relative to each result into one relative to all of them."""
        norms = [float(torch.linalg.vector_norm(expected)) or 1.0 for expected in self.expected]
        return math.hypot(*(e * n for e, n in zip(errors, norms, strict=True))) / math.hypot(*norms)


def standard(
    model: nn.Module, x: torch.Tensor, dtype: str, expected: torch.Tensor, chunk: int = 16
) -> Standard:
    """Return the standard of a network of one result, by PyTorch's error on these inputs."""
    return Standard(dtype, (expected,), own_errors(model, x, dtype, (expected,), chunk)[len(x)])


def own_errors(
    model: nn.Module,
    x: torch.Tensor,
    dtype: str,
    expected: Sequence[torch.Tensor],
    chunk: int = 16,
    trials: int = 1,
    counts: Iterable[int] = (),
) -> dict[int, tuple[float, ...]]:
    """Return PyTorch's error of each result, on all inputs and on the first `counts` of them; the largest of `trials`
    over inputs that differ by their rounding.

    Sums are in fp32, as on a GPU. Some CPUs sum 16-bit products in 16 bits, and none has TF32. There, weights and the
    results of every operator are rounded, and computed in fp32. PyTorch may sum in a favorable order, so its error
    counts as at least half the error of running sums.
    """
    least = 2 * _running_sum(model) / TIMES[dtype]
    found = {count: (least,) * len(expected) for count in {len(x), *counts}}
    its = copy.deepcopy(model).to(x.device)
    with torch.no_grad(), unsearched(dtype):
        if x.is_cuda:
            its = its.to(STORAGE[dtype])
        else:
            for tensor in (*its.parameters(), *its.buffers()):
                tensor.copy_(_rounded(tensor, dtype))
        for trial in range(trials):
            parts = nudged(x, dtype, trial).split(chunk)
            if x.is_cuda:
                results = joined([its(part.to(STORAGE[dtype])) for part in parts])
            else:
                with _Rounded(dtype):
                    results = joined([its(_rounded(part, dtype)) for part in parts])
            for count, known in found.items():
                pairs = zip(results, expected, strict=True)
                errors = [relative_error(y[:count].to(right.device), right[:count]) for y, right in pairs]
                found[count] = tuple(map(_larger, known, errors))
    return found


def _larger(one: float, other: float) -> float:
    """Return the larger number; NaN if either is NaN."""
    return other if math.isnan(other) or other > one else one


def _running_sum(model: nn.Module) -> float:
    """Return the expected error of a model's longest sum of products, summed sequentially in fp32: a random walk."""
    lengths = [weight[0].numel() for weight in model.parameters() if weight.dim() > 1 and len(weight)]
    return UNIT_ROUNDOFF["fp32"] * math.sqrt(1 + max(lengths, default=0) / 6)


@contextmanager
def unsearched(dtype: str) -> Iterator[None]:
    """Compute in a dtype with the kernels of cuDNN's heuristics: its search takes up to a minute per network.

    PyTorch caches the first choice per convolution, which would keep peers from searching. Deterministic choices are
    cached separately.
    """
    cudnn: Any = torch.backends.cudnn
    before = cudnn.deterministic
    with precision(dtype):  # which restores `benchmark`
        cudnn.benchmark, cudnn.deterministic = False, True
        try:
            yield
        finally:
            cudnn.deterministic = before


def nudged(x: torch.Tensor, dtype: str, number: int) -> torch.Tensor:
    """Return the inputs for number 0; for others, inputs perturbed by less than the rounding of the dtype."""
    if not number:
        return x
    generator = torch.Generator(x.device).manual_seed(number)
    noise = torch.rand(x.shape, generator=generator, device=x.device).to(x) - 0.5
    return x * (1 + noise * _LAST_BIT[dtype])


def joined(parts: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Concatenate the results of consecutive batches, one or several in any structure."""
    return tuple(torch.cat(pieces) for pieces in zip(*map(tensors, parts), strict=True))


class _Rounded(TorchFunctionMode):
    """Rounds the results of every operator to the dtype."""

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
    """Fill tensors with NaN (ones for integers), so that unwritten elements are detected."""
    with torch.inference_mode():  # required for results of inference mode
        for tensor in tensors:
            tensor.fill_(math.nan if tensor.is_floating_point() else 1)


def fresh(
    call: Callable[[], Any],
    results: Callable[[Any], Sequence[torch.Tensor]],
    restart: Callable[[], object] = lambda: None,
) -> Sequence[torch.Tensor]:
    """Return the results of a call, after filling the memory that it reuses with NaN."""
    restart()
    spoil(results(call()))
    restart()
    return results(call())


GRADIENTS, UPDATES = "gradient", "update"
_STATISTICS = ("error", "gain", "worst row", "worst element")
_EXTREMES = 2.0
"""Additional factor for the gain, the worst row and the worst element, which vary more than a norm."""
_ROW, _ELEMENT = 4.0, 8.0
"""Smallest limits of the worst row and the worst element, as multiples of the norm's."""
_GAIN = 0.01
"""Smallest limit of a gain. It catches a scaled tensor whose norm is within a tolerance widened by grown errors."""
_NOISE = 0.5
"""Relative error of PyTorch from which a tensor is only rounding noise; ours may have the same error again."""
_MANY = 64
"""Elements from which the gain of random rounding errors is negligible."""


def errors(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [tensor, (norm, gain, row, element)] relative to the expected tensors, with one wait for the device."""
    found = [_errors(one.to(right.device), right) for one, right in zip(results, expected, strict=True)]
    return torch.stack(found).cpu()


def _errors(result: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    rows = expected.shape[0] if expected.dim() else 1
    right = expected.reshape(rows, -1)
    off = result.double().reshape(rows, -1) - right
    size = torch.linalg.vector_norm(right)
    size = torch.where(size > 0, size, 1.0)
    typical = size / expected.numel() ** 0.5
    scale = _rms(right).clamp(min=typical)
    return torch.stack((
        torch.linalg.vector_norm(off) / size,
        (off * right).sum().abs() / size**2,
        (_rms(off) / scale).amax(),
        (off.abs().amax(1) / scale).amax(),
    ))  # fmt: skip


def _rms(rows: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(rows, dim=1) / rows.shape[1] ** 0.5


def _failure(what: str, error: float, limit: float) -> str:
    return f"{what} is {error:.2e}, more than the {limit:.2e} allowed"


@dataclass(frozen=True)
class StepStandard:
    """The expected tensors after a step, and PyTorch's errors."""

    dtype: str
    names: tuple[str, ...]
    """Kind and name of each tensor: `gradient of features.0.weight`."""
    expected: tuple[torch.Tensor, ...]
    """The tensors in float64."""
    trials: torch.Tensor
    """PyTorch's errors in the dtype, of several trials: [trial, tensor, 4]."""
    most: float = 1.0
    """Factor on the usual largest tolerance of all tensors of a kind together."""
    rounding: float = 0.0
    """Error of all updates together because parameters are kept in fp32: an update may be as small as their ulp."""

    @property
    def tolerance(self) -> float:
        """Largest error of all gradients together."""
        return self._together_limit(GRADIENTS)

    def judge(self, results: Sequence[torch.Tensor], times: float = 1.0) -> tuple[float, str]:
        """Return the error of all gradients together, and the worst failure or an empty string.

        `times` is a factor on every limit.
        """
        if len(results) != len(self.expected):
            return math.nan, f"it has {counted(len(results), 'result')}, not {len(self.expected)}"
        for name, result, right in zip(self.names, results, self.expected, strict=True):
            if result.shape != right.shape:
                shapes = f"{tuple(result.shape)}, not {tuple(right.shape)}"
                return math.nan, f"{name}: its result has shape {shapes}"
        found = errors(results, self.expected)
        gradients = self._together(found, GRADIENTS)
        unwritten = found.isnan().any(1)
        if unwritten.any():
            return gradients, f"{self.names[int(unwritten.int().argmax())]}: there are NaN in it"
        ratios = found / (times * self.limits)
        worst, what = divmod(int(ratios.argmax()), len(_STATISTICS))
        if ratios[worst, what] > 1:
            error, limit = float(found[worst, what]), float(times * self.limits[worst, what])
            return gradients, _failure(f"{self.names[worst]}: its {_STATISTICS[what]}", error, limit)
        for kind in self._kinds:
            error, limit = self._together(found, kind), times * self._together_limit(kind)
            if error > limit:
                return gradients, _failure(f"{kind}: its error", error, limit)
        return gradients, ""

    @cached_property
    def limits(self) -> torch.Tensor:
        """The largest norm, gain, row and element of each tensor."""
        times, own = TIMES[self.dtype], self.trials.amax(0).nan_to_num(math.inf)
        norms, gains = own[:, 0].clone(), own[:, 1].clone()
        for kind, members in self._kinds.items():
            known = [at for at in members if self._numbers[at] >= _MANY and own[at, 0] < _NOISE]
            norms[members] = norms[members].clamp(min=self._own_together(kind))
            gains[members] = gains[members].clamp(
                min=float(own[known, 1].square().mean().sqrt()) if known else 0
            )
        numbers = torch.tensor(self._numbers, dtype=torch.float64)
        lengths = numbers / torch.tensor([float(one.shape[0]) if one.dim() else 1.0 for one in self.expected])
        norm = (times * norms).clamp(min=LEAST[self.dtype]) * CHANCE ** (-1 / numbers.clamp(min=2))
        norm = torch.where(own[:, 0] > _NOISE, 2 * norm, norm)
        extreme = _EXTREMES * times
        gain = torch.maximum(extreme * gains, 4 * norm / numbers.sqrt()).clamp(min=_GAIN)
        row = torch.maximum(extreme * own[:, 2], norm * (_ELEMENT / lengths.sqrt()).clamp(min=_ROW))
        element = torch.maximum(extreme * own[:, 3], _ELEMENT * norm)
        return torch.stack((norm, gain, row, element), 1)

    @cached_property
    def _kinds(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for number, name in enumerate(self.names):
            found.setdefault(name.partition(" ")[0], []).append(number)
        return found

    @cached_property
    def _numbers(self) -> list[int]:
        return [one.numel() for one in self.expected]

    @cached_property
    def _sizes(self) -> torch.Tensor:
        sizes = torch.stack([torch.linalg.vector_norm(one) for one in self.expected]).cpu()
        return torch.where(sizes > 0, sizes, 1.0)

    def _together(self, found: torch.Tensor, kind: str) -> float:
        """Return the error of all tensors of a kind, relative to all of them."""
        sizes = self._sizes[self._kinds[kind]]
        return float((found[self._kinds[kind], 0] * sizes).norm() / sizes.norm())

    def _own_together(self, kind: str) -> float:
        return max(self._together(trial.nan_to_num(math.inf), kind) for trial in self.trials)

    def _together_limit(self, kind: str) -> float:
        number = sum(self._numbers[at] for at in self._kinds[kind])
        allowed = tolerance(self.dtype, self._own_together(kind), self.most)
        if kind == UPDATES:
            allowed = max(allowed, 2 * self.rounding)
        return allowed * float(CHANCE ** (-1 / max(2, number)))
