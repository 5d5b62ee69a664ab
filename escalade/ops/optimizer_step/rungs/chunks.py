"""Tensors cut into chunks, a block each: the rungs of optimizer_step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from escalade.device.program import Constant, Macro, Program
from escalade.device.recipe import Addresses, Buffer, Ints, KernelCall, Recipe, Workspace
from escalade.ops.base.dtypes import element, full_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.optimizer_step.problem import OptimizerStepProblem
from escalade.ops.optimizer_step.rules import GRADIENT, PARAMETER, STEP
from escalade.ops.shared.pointwise import PacksConfig

_TABLE_BYTES = 32_000
"""What the table of a launch may take: CUDA 12.1 and later pass 32,764 bytes of parameters."""
_ADDRESS_BYTES, _CHUNK_BYTES = 8, 8
_MEETING = Buffer("meeting")
_MEETING_BYTES = 8
_IN_FLIGHT = 8
"""Accesses of 16 bytes that a thread has under way by itself, about."""
_SINGLE_SHARE = 0.6
"""The share of the rate of memory that accesses of 4 bytes reach: a guess, between what pointwise kernels do."""


@dataclass(frozen=True)
class Chunks(Rung[OptimizerStepProblem]):
    together: bool
    """Whether a launch has all tensors that its table has room for, or one."""
    wide: bool
    """Whether an access has 16 bytes, or one element."""

    def supports(self, problem: OptimizerStepProblem) -> str | None:
        return None

    def configs(self, problem: OptimizerStepProblem) -> tuple[Config, ...]:
        """Offers as many packs a thread as there are registers for and as leave enough blocks to go round."""
        every = [PacksConfig(threads, packs) for threads in (256, 128, 512) for packs in (4, 2, 1)]
        most = max(1, _IN_FLIGHT // len(problem.read(0)))
        fits = (
            config
            for config in every
            if config.packs <= most
            and ceil_div(problem.elements, self._chunk(problem, config)) >= self.card.filling
        )
        default = next(fits, PacksConfig(packs=1))
        return (default, *(config for config in every if config != default))

    def recipe(self, problem: OptimizerStepProblem, config: Config) -> Recipe:
        assert isinstance(config, PacksConfig)
        groups = list(self._groups(problem))
        steps = [self._step(problem, config, group, group is groups[-1]) for group in groups]
        if problem.checked:
            steps = [*(self._look(problem, config, group) for group in groups), *steps]
        return Recipe(tuple(steps), (Workspace(_MEETING.name, _MEETING_BYTES, zeroed=True),))

    def estimate(self, problem: OptimizerStepProblem, config: Config) -> float:
        launches = len(list(self._groups(problem))) * (2 if problem.checked else 1)
        moved = problem.bytes / (1.0 if self.wide else _SINGLE_SHARE)
        return self.card.microseconds(0, moved, launches)

    def tolerance(self, problem: OptimizerStepProblem, peer_error: float) -> float:
        """A copy may be rounded to the other neighbour of what the reference is rounded to."""
        tolerance = super().tolerance(problem, peer_error)
        return max(tolerance, {"fp16": 2.0**-11, "bf16": 2.0**-8}.get(problem.copy, 0.0))

    def _chunk(self, problem: OptimizerStepProblem, config: PacksConfig) -> int:
        """Elements of a block."""
        return config.threads * config.packs * self._vector

    @property
    def _vector(self) -> int:
        return full_vector("fp32") if self.wide else 1

    def _groups(self, problem: OptimizerStepProblem) -> Iterator[range]:
        """The tensors of each launch."""
        each = _CHUNK_BYTES + _ADDRESS_BYTES * (len(problem.read(0)) + len(problem.written(0)))
        most = _TABLE_BYTES // each if self.together else 1
        for first in range(0, len(problem.sizes), most):
            yield range(first, min(first + most, len(problem.sizes)))

    def _constants(
        self, problem: OptimizerStepProblem, config: PacksConfig, group: range
    ) -> dict[str, Constant]:
        return {
            "Gradient": element(problem.dtype), "TENSORS": len(group),
            "TENSORS_ROUNDED": 1 << (len(group) - 1).bit_length() >> 1, "STATES": len(problem.state),
            "HAS_COPY": bool(problem.copy), "VECTOR": self._vector, "PACKS": config.packs, "THREADS": config.threads,
        }  # fmt: skip

    def _table(
        self, problem: OptimizerStepProblem, config: PacksConfig, group: range
    ) -> tuple[Addresses, Ints, int]:
        """The addresses and sizes of a launch's tensors, and how many chunks these have."""
        read = [Buffer(name) for tensor in group for name in problem.read(tensor)]
        written = [Buffer(name) for tensor in group for name in problem.written(tensor)]
        sizes = [problem.sizes[tensor] for tensor in group]
        counts = [ceil_div(size, self._chunk(problem, config)) for size in sizes]
        *first, chunks = accumulate(counts, initial=0)
        return Addresses((*read, *written)), Ints((*first, *sizes)), chunks

    def _step(
        self, problem: OptimizerStepProblem, config: PacksConfig, group: range, counts: bool
    ) -> KernelCall:
        addresses, sizes, chunks = self._table(problem, config, group)
        constants: dict[str, Constant] = {
            **self._constants(problem, config, group),
            **_expressed(problem),
            "Copy": element(problem.copy or "fp32"),
            "CHECKED": problem.checked,
            "COUNTS": counts,
        }
        return KernelCall(
            Program.of("optimizer_step/chunks.cu", "optimizer_step_chunks", constants),
            (chunks, 1, 1),
            (config.threads, 1, 1),
            (addresses, sizes, Buffer("scalars"), Buffer("counts"), Buffer("counted"), _MEETING),
            overlap=True,
        )

    def _look(self, problem: OptimizerStepProblem, config: PacksConfig, group: range) -> KernelCall:
        addresses, sizes, chunks = self._table(problem, config, group)
        constants = self._constants(problem, config, group)
        return KernelCall(
            Program.of("optimizer_step/chunks_finite.cu", "optimizer_step_chunks_finite", constants),
            (chunks, 1, 1),
            (config.threads, 1, 1),
            (addresses, sizes, _MEETING),
            overlap=True,
        )


def _expressed(problem: OptimizerStepProblem) -> dict[str, Constant]:
    """The expression as chunks.cu takes it: what depends on scalars and the step alone, and the rest."""
    scalars = {name: f"scalars[{number}]" for number, name in enumerate(problem.scalars)}
    once, names, rest = problem.program.parted((*problem.scalars, STEP))
    lines, results = once.statements({**scalars, STEP: "step"})
    lines += [f"uniform.at[{number}] = {result};" for number, result in enumerate(results)]
    places = {
        **{name: f"array[{number}]" for number, name in enumerate((PARAMETER, GRADIENT, *problem.state))},
        **{name: f"uniform.at[{number}]" for number, name in enumerate(names)},
    }
    return {
        **rest.constants("fp32"),
        "ONCE": Macro(" ".join(lines)),
        "UNIFORMS": max(1, len(names)),
        "INPUTS": Macro(", ".join(places[name] for name in rest.inputs)),
    }


# Predictions are for AdamW over the 62 tensors of ResNet-18 in fp32: 11.7 M elements of 28 bytes, 327 MB: 77 us at the
# rate of a copy.
RUNGS: tuple[Rung[OptimizerStepProblem], ...] = (
    Chunks("per_tensor", "a launch a tensor, an element an access", None, None, together=False, wide=False),
    Chunks(
        "one_launch",
        "one launch for all tensors, found by halving in a table among its parameters",
        below="per_tensor",
        # 62 launches of 2 us each and the time of memory, against that time alone.
        predicted_gain=2.0,
        together=True,
        wide=False,
    ),
    Chunks(
        "vectorised",
        "16 bytes an access, several of each array under way in a thread",
        below="one_launch",
        # Four loads of 4 bytes in each of 2,048 threads are 32 KiB under way on a multiprocessor, half of what memory
        # takes to be busy.
        predicted_gain=1.3,
        together=True,
        wide=True,
    ),
)
