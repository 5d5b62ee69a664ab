"""The values of a plan while it runs: at their places in the arena, or where PyTorch has put them.

What a step of PyTorch's gives stays where PyTorch's allocator puts it, a view of another value included, so that the
step costs what it costs in PyTorch. It is let go behind its last reader, and its memory is used again. While a CUDA
graph is recorded that memory is of the graph's own pool, and lies where it lies at every replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch

from escalade.device.strides import is_aligned, same_order
from escalade.engine.graph.forms import Form
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.evaluate import compute
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.step import Step


class Values:
    """The values of one run after another; constants are not among them."""

    def __init__(self, plan: Plan, arena: torch.Tensor, bound: Mapping[str, torch.Tensor]) -> None:
        """`bound` are inputs that lie elsewhere at every run, as the plan has them."""
        self._plan = plan
        self.arena = arena
        self._views: dict[str, torch.Tensor] = {}
        """Values at their places in the arena: making a view of one takes as long as all else that a call does."""
        self._bound = bound
        self._outside: torch.Tensor | None = None
        self._apart: dict[str, torch.Tensor] = {}
        self._seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """What is another value's bytes, seen differently, beside that value."""
        self._ends: dict[int, list[str]] = {}
        for name, last in plan.apart.items():
            self._ends.setdefault(last, []).append(name)

    def has_place(self, name: str) -> bool:
        """Whether a value lies at the same address in every run."""
        return name in self._plan.places or name in self._bound

    def at(self, name: str) -> torch.Tensor:
        """A value as it lies, which is good enough for PyTorch."""
        if name in self._bound:
            return self._bound[name]
        if self.has_place(name):
            form, place = self._plan.forms[name], self._plan.places[name]
            if name in self._plan.outside:
                return form.view(self.outside, place - self._plan.arena_bytes)
            if name not in self._views:
                with torch.inference_mode(False):  # for calls in any mode
                    self._views[name] = form.view(self.arena, place)
            return self._views[name]
        if name in self._apart:
            return self._apart[name]
        node = self._plan.graph.nodes[name]
        source = self.at(node.inputs["x"])
        if name not in self._seen or self._seen[name][0] is not source:
            self._seen[name] = source, compute(node, {"x": source}, source.device)
        return self._seen[name][1]

    def move(self, arena: torch.Tensor) -> None:
        """Values lie in that arena from now on."""
        self.arena = arena
        self._views = {}

    @property
    def outside(self) -> torch.Tensor:
        """Memory for what lies in the caller's tensors where there is a call: none until it is asked for."""
        if self._outside is None:
            with torch.inference_mode(False):
                size, device = self._plan.outside_bytes, self.arena.device
                self._outside = torch.empty(size, dtype=torch.uint8, device=device)
        return self._outside

    def forget_outside(self) -> None:
        """Lets go of that memory, until it is asked for again."""
        self._outside = None

    def dense(self, name: str) -> torch.Tensor:
        """A value as a kernel wants it."""
        value = self.at(name)
        if self.has_place(name):
            return value
        formed = self.formed(name, value)
        if name in self._apart:
            self._apart[name] = formed
        else:
            self._seen[name] = self._seen[name][0], formed
        return formed

    def formed(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A value of the type and in the order that the plan has for it, copied only if it is not."""
        return in_form(self._plan.forms[name], value)

    def keep(self, step: Step, result: torch.Tensor) -> None:
        """What a step of PyTorch's has given, in the type that the plan has for it."""
        name = step.node.name
        if self.has_place(name):
            self.at(name).copy_(result)
            return
        own = result.to(self._plan.forms[name].dtype)
        unexpected = self._is_in_arena(own) and not operator_of(step.node).may_share(step.node)
        self._apart[name] = own.clone() if unexpected else own

    def end(self, number: int) -> None:
        """Lets go of what nobody reads behind the step of that number."""
        for name in self._ends.get(number, ()):
            self._apart.pop(name, None)
            self._seen.pop(name, None)

    def _is_in_arena(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self.arena.untyped_storage().data_ptr()


def in_form(form: Form, value: torch.Tensor) -> torch.Tensor:
    """A value of that type and in that order, copied only if it is not."""
    _, strides = _memory(form)
    if same_order(value.shape, value.stride(), strides) and value.dtype is form.dtype and is_aligned(value):
        return value
    return empty(form, value.device).copy_(value)


def empty(form: Form, device: torch.device) -> torch.Tensor:
    """Memory of its own for a value of that form."""
    size, strides = _memory(form)
    flat = torch.empty(size, dtype=torch.uint8, device=device).view(form.dtype)
    return flat.as_strided(form.shape, strides)


@lru_cache(maxsize=4096)
def _memory(form: Form) -> tuple[int, tuple[int, ...]]:
    """The bytes that a value of that form takes by itself, and its strides."""
    size = form.rows * (form.pitch or form.row) * form.dtype.itemsize
    return size, form.view(torch.empty(size, dtype=torch.uint8, device="meta"), 0).stride()
