"""Criteria for a training step: each of its tensors against float64, by PyTorch's own error in the same dtype.

The tensors are the losses of a few steps, the momenta (sums of gradients), and the changes of parameters and buffers.
Sizes differ by orders of magnitude between layers, and the gradient of a bias in front of a BatchNorm is nothing but
rounding. So each tensor is judged separately, relative to its own size: by its norm, its gain (the component of the
error along the tensor), its worst row and its worst element. Each may be a small factor larger than PyTorch's. All
tensors of a kind together have a limit that does not depend on PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from escalade.tune.verification import CHANCE
from escalade_bench.networks.judging import LEAST, TIMES, tolerance

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
            return math.nan, f"it has {len(results)} results, not {len(self.expected)}"
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
