"""Problem, config, rung, ladder: what every operation is made of.

A *problem* is what is asked, a *rung* one way to do it, a *config* the compile-time choices of that
way, a *ladder* the rungs of one operation in the order in which each adds its idea. Tests, `verify`,
the ladder table and the docs iterate the ladders registered in `escalade.ops`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from escalade.device.recipe import Recipe
from escalade.errors import UnsupportedError

ALL_ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")


class Problem(Protocol):
    """What is asked of an operation. Implementations are frozen dataclasses."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def layout(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def flops(self) -> int:
        """Operations of the plain algorithm, whatever a rung really does."""
        ...

    @property
    def bytes(self) -> int:
        """Each input read once, each output written once."""
        ...

    @property
    def rounding(self) -> float:
        """The relative error to expect of the result's sums when they are taken in order in fp32."""
        ...


P = TypeVar("P", bound=Problem)


@dataclass(frozen=True)
class Config:
    """Compile-time choices of a rung; subclasses add their fields."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.as_dict().items())


@dataclass(frozen=True)
class ThreadsConfig(Config):
    threads: int = 256
    """Threads a block."""


@dataclass(frozen=True)
class Rung(ABC, Generic[P]):
    """One way to do an operation: the one below it on the ladder, and one idea."""

    name: str
    summary: str
    """What this rung changes, in one sentence."""
    below: str | tuple[str, ...] | None
    """The rung that this one adds its idea to; several if it depends on the layout, None at the foot of a branch."""
    predicted_gain: float | None
    """How many times faster than the rung below it should be, written down before it was measured."""
    intended_spill: ClassVar[str | None] = None
    """Why a rung's kernels may spill registers; without a reason a spill is a failed test."""

    @abstractmethod
    def supports(self, problem: P) -> str | None:
        """None if this rung can do the problem; otherwise a sentence that says why not."""

    @abstractmethod
    def configs(self, problem: P) -> tuple[Config, ...]:
        """Valid configs for a supported problem; the first is the default."""

    @abstractmethod
    def recipe(self, problem: P, config: Config) -> Recipe:
        """The launches. A pure function; buffers are named as in `Operation.inputs`."""

    def estimate(self, problem: P, config: Config) -> float | None:
        """About the microseconds that it takes on an H200; None from a rung that has no model of itself.

        What `escalade.tune` chooses by where nothing was measured: only comparisons matter.
        """
        return None

    def least(self, problem: P) -> float:
        """Microseconds that no config can beat: what rules a rung out before its configs are made."""
        return 0.0

    @property
    def stands_on(self) -> tuple[str, ...]:
        """`below`, whatever its form."""
        if self.below is None:
            return ()
        return (self.below,) if isinstance(self.below, str) else self.below

    @property
    def architectures(self) -> tuple[str, ...]:
        """The GPU architectures that this rung's kernels compile for."""
        return ALL_ARCHITECTURES

    def refusal(self, problem: P, architecture: str | None) -> str | None:
        """Like `supports`, on a GPU of that architecture; None is the twin, which runs everything."""
        sentence = self.supports(problem)
        if sentence is None and architecture is not None and architecture not in self.architectures:
            return f"its kernels are for {', '.join(self.architectures)}; this GPU is {architecture}"
        return sentence

    def tolerance(self, problem: P, peer_error: float) -> float:
        """The largest error that counts as correct: twice PyTorch's own, in the same dtype and on the same inputs.

        PyTorch may sum in blocks or in pairs; a plain fp32 sum of the problem's length is allowed too.
        """
        return 2 * max(peer_error, problem.rounding)


@dataclass(frozen=True)
class Ladder(Generic[P]):
    """The rungs of one operation, foot to summit."""

    operation: str
    rungs: tuple[Rung[P], ...]

    def __post_init__(self) -> None:
        names = [rung.name for rung in self.rungs]
        if len(set(names)) != len(names):
            raise ValueError(f"the ladder of {self.operation} names a rung twice: {names}")
        for position, rung in enumerate(self.rungs):
            for below in rung.stands_on:
                if below not in names[:position]:
                    raise ValueError(f"rung {rung.name} stands on {below}, which is not below it")

    def __iter__(self) -> Iterator[Rung[P]]:
        return iter(self.rungs)

    def rung(self, name: str) -> Rung[P]:
        for rung in self.rungs:
            if rung.name == name:
                return rung
        known = ", ".join(rung.name for rung in self.rungs)
        raise UnsupportedError(f"{self.operation} has no rung {name!r}; it has {known}")

    def supporting(self, problem: P) -> tuple[Rung[P], ...]:
        return tuple(rung for rung in self.rungs if rung.supports(problem) is None)


Tensors = Mapping[str, torch.Tensor]


class Operation(ABC, Generic[P]):
    """An operation: its ladder, its problems, its one reference, and how PyTorch does it."""

    name: str
    ladder: Ladder[P]
    problems: tuple[P, ...]
    """The problems that `escalade ladder` measures."""
    small_problems: tuple[P, ...]
    """Problems small enough for the twin, that between them reach every branch of the kernels."""
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    weights_stay: ClassVar[bool] = False
    """Whether a ladder times what a network does call by call: without the steps that depend on nothing but weights."""
    weights_change: ClassVar[bool] = False
    """Whether weights are others with every call, as in training: those steps are part of every time then."""

    @abstractmethod
    def preferred(self, problem: P) -> tuple[str, ...]:
        """Names of rungs, the one expected to be fastest first: what is tried where no measurement is at hand."""

    def forms(self, rung: str, problem: P) -> tuple[P, ...]:
        """The problem, and other layouts of it that are worth a conversion for this rung."""
        return (problem,)

    def roundings(self, problem: P) -> int:
        """How many times PyTorch rounds values to the dtype on the way to a result, that of the result among them."""
        return 2

    @abstractmethod
    def parse(self, name: str) -> P:
        """The problem of a name such as `problem.name` gives."""

    @abstractmethod
    def inputs(self, problem: P, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
        """Fresh random inputs, by buffer name."""

    @abstractmethod
    def output(self, problem: P, device: torch.device) -> torch.Tensor:
        """Room for the result (buffer `y`)."""

    @abstractmethod
    def reference(self, problem: P, inputs: Tensors) -> torch.Tensor:
        """The result in float64."""

    def further_outputs(self, problem: P, device: torch.device) -> dict[str, torch.Tensor]:
        """Room for what it computes besides `y`, by buffer name."""
        return {}

    def further_references(self, problem: P, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Those results in float64."""
        return {}

    @abstractmethod
    def peer(self, problem: P, inputs: Tensors) -> torch.Tensor:
        """PyTorch's own result in the problem's dtype: what errors are compared with."""
