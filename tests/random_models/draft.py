"""A network under construction: statements are kept if PyTorch can run them and their results are well conditioned."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn

from escalade.ops.base.accuracy import relative_error
from tests.random_models.program import Text, run_exactly, run_rounded

T = TypeVar("T")
BATCHES = (2, 3, 1)
LARGEST = 64.0
"""Largest magnitude of a value's elements, far below fp16 overflow."""
WORST_ERROR = 0.1
"""Relative to float64, of PyTorch in bf16. Beyond it a value is mostly rounding, and no test of a kernel."""


class Skip(Exception):
    """A rule that no value drawn so far fits."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of networks: few, so that models share kernels, which take seconds to compile."""

    channels: tuple[int, ...]
    images: tuple[tuple[int, int], ...]
    features: tuple[int, ...]
    statements: tuple[int, int]


SMALL = Sizes((4, 8, 5), ((6, 6), (5, 3)), (8, 12), (4, 9))
WIDE = Sizes(
    (3, 8, 16, 24, 13, 64, 1),
    ((6, 6), (7, 5), (14, 14), (16, 16), (31, 17), (1, 1)),
    (8, 24, 10, 64),
    (4, 16),
)


@dataclass(frozen=True)
class Value:
    """A tensor of the network so far. `size` excludes the batch; it has `lead` rows per item."""

    name: str
    lead: int
    size: tuple[int, ...]
    dtype: torch.dtype
    is_exact: bool
    """True if float64, fp32 and bf16 agree on every bit: only such values may be compared, rounded or used as
    indices."""

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point

    def __str__(self) -> str:
        return self.name


@dataclass
class Draft:
    """A network under construction."""

    text: Text
    random: random.Random
    sizes: Sizes
    values: list[Value] = field(default_factory=list)
    _modules: list[str] = field(default_factory=list)

    # --- for rules

    def one(self, options: Sequence[T]) -> T:
        if not options:
            raise Skip
        return self.random.choice(options)

    def pick(self, wanted: Callable[[Value], bool] = lambda value: True) -> Value:
        """Return a value that a rule supports, preferably one of the latest."""
        offered = [value for value in self.values if wanted(value)]
        return self.one(offered[-4:] if self.random.random() < 0.7 else offered)

    def rank(self, *ranks: int) -> Value:
        """Return a floating-point value with this many dimensions after the batch."""
        return self.pick(lambda v: v.is_float and v.lead > 0 and len(v.size) in ranks)

    def image(self) -> Value:
        return self.rank(3)

    def device(self, x: Value) -> str:
        """The argument that creates a tensor on x's device."""
        return "" if self.text.on_host else f", device={x}.device"

    def module(self, made: str) -> str:
        name = f"m{len(self.text.modules) + len(self._modules)}"
        self._modules.append(f"self.{name} = {made}")
        return f"self.{name}"

    def buffer(self, made: str) -> str:
        name = f"b{len(self.text.modules) + len(self._modules)}"
        self._modules.append(f'self.register_buffer("{name}", {made})')
        return f"self.{name}"

    # --- growing

    def grow(self, rule: Rule) -> bool:
        """Add the statement of a rule, if it holds. `NEW` in it is a new name; without it, it is an expression."""
        self._modules = []
        try:
            written = rule(self)
        except Skip:
            return False
        new = f"v{len(self.text.body)}"
        body = (written if "NEW" in written else f"NEW = {written}").replace("NEW", new)
        candidate = self.text.with_lines(self._modules, body.split("\n"))
        values = known(candidate)
        if values is None:
            return False
        self.text, self.values = candidate, values
        return True


Rule = Callable[[Draft], str]


def known(text: Text) -> list[Value] | None:
    """Return all values of the network; None if PyTorch refuses it, or its numbers are ill-conditioned."""
    everything = text.returning("{k: v for k, v in locals().items() if isinstance(v, torch.Tensor)}")
    first, second, *_ = BATCHES
    try:
        model = everything.module()
        runs = {batch: _plain(copy.deepcopy(model), everything, batch) for batch in BATCHES}
        inputs = everything.draw(first)
        exact = run_exactly(copy.deepcopy(model), inputs)
        coarse = run_rounded(model, inputs, "bf16")
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    found = []
    for name, value in runs[first].items():
        shape, other = tuple(value.shape), tuple(runs[second][name].shape)
        lead = shape[0] // first if shape != other else 0
        other_is_alike = other[1:] == shape[1:] and shape[0] == lead * first
        if not value.numel() or (shape != other and not other_is_alike):
            return None
        if not _is_good(value, exact[name], coarse[name]):
            return None
        same = torch.equal(value.double(), exact[name].double()) and torch.equal(value, coarse[name])
        found.append(Value(name, lead, shape[1:] if lead else shape, value.dtype, same))
    return found


def _plain(model: nn.Module, text: Text, batch: int) -> dict[str, torch.Tensor]:
    """Return every value by name, in fp32. Training also needs PyTorch's gradients, which in-place writes can
    prevent."""
    with torch.set_grad_enabled(text.training):
        found: dict[str, torch.Tensor] = model(*text.draw(batch))
        learned = [value.square().mean() for value in found.values() if value.requires_grad]
        if learned:
            torch.stack(learned).sum().backward()
    return {name: value.detach() for name, value in found.items()}


def _is_good(value: torch.Tensor, exact: torch.Tensor, coarse: torch.Tensor) -> bool:
    if not value.is_floating_point():
        return torch.equal(value, exact) and torch.equal(value, coarse)
    if not value.isfinite().all() or value.abs().max() > LARGEST or not coarse.isfinite().all():
        return False
    return relative_error(coarse, exact) <= WORST_ERROR
