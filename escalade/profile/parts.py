"""What is profiled, part by part, and which launch that a profiler saw belongs to which part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from escalade.device.recipe import KernelCall, Recipe
from escalade.errors import EscaladeError


@dataclass(frozen=True)
class Part:
    """A step of a plan, or the one call of a rung."""

    name: str
    """The name of its NVTX range."""
    operation: str
    problem: str
    dtype: str
    """The dtype whose rate of products bounds it."""
    rung: str
    """The rung of Escalade's ladder, or who does it instead."""
    kernels: list[str] | None
    """The kernels that it launches, in order; None where PyTorch launches what it likes."""
    flops: int = 0
    """Operations of the plain algorithm; 0 where nobody has counted them."""
    bytes: int = 0
    """The fewest that it moves; 0 where nobody has counted them."""


Pieces = Callable[[], Iterator[tuple[Part, Callable[[], object]]]]
"""The parts with what runs each: it is run before the next one is asked for."""


@dataclass(frozen=True)
class Target:
    """What is profiled: all its kernels are compiled, and its tensors are there."""

    title: str
    device: torch.device
    pieces: Pieces

    def run(self) -> list[Part]:
        """Launches every part once, in a range of its name; the parts."""
        done = []
        for part, call in self.pieces():
            with _marked(part.name, self.device):
                call()
            done.append(part)
        return done

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def _marked(name: str, device: torch.device) -> Iterator[None]:
    """A range for PyTorch's profiler, and one of NVTX for Nsight's."""
    with torch.profiler.record_function(name):
        if device.type != "cuda":
            yield
            return
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


def entries(recipe: Recipe) -> list[str]:
    """The kernels that a recipe launches, in order."""
    return [step.program.entry for step in recipe.steps if isinstance(step, KernelCall)]


def together(parts: Iterable[Part]) -> list[Part]:
    """Neighbours whose kernels nobody knows are one part: what they launch cannot be told apart."""
    found: list[Part] = []
    for part in parts:
        if found and part.kernels is None and found[-1].kernels is None:
            before = found.pop()
            part = Part(
                f"{before.name}, {part.name}",
                ", ".join(dict.fromkeys((*before.operation.split(", "), part.operation))),
                "",
                part.dtype,
                part.rung,
                None,
                before.flops + part.flops,
                before.bytes + part.bytes,
            )
        found.append(part)
    return found


def shared_out(parts: Sequence[Part], launched: Sequence[str]) -> list[int]:
    """The part that each launch belongs to, by the names of kernels in the order in which they were launched.

    What no part expects is PyTorch's where PyTorch's turn is, else a copy in front of the part that comes next.
    """
    expected: list[tuple[int, str | None]] = []
    for number, part in enumerate(parts):
        expected += [(number, None)] if part.kernels is None else [(number, name) for name in part.kernels]
    owners: list[int] = []
    at = 0
    for name in launched:
        ahead = at
        while ahead < len(expected) and expected[ahead][1] is None:
            ahead += 1
        if ahead < len(expected) and _plain(name) == expected[ahead][1]:
            owners.append(expected[ahead][0])
            at = ahead + 1
        else:
            owners.append(expected[min(at, len(expected) - 1)][0])
    missing = [name for _, name in expected[at:] if name is not None]
    if missing:
        raise EscaladeError(
            f"the profiler saw {len(launched)} launches, and none of {', '.join(dict.fromkeys(missing))} among the "
            f"last; they began with {', '.join(map(_plain, launched[:3])) or 'nothing'}"
        )
    return owners


def _plain(kernel: str) -> str:
    """A kernel's name without its parameters."""
    return kernel.split("(")[0].strip()
