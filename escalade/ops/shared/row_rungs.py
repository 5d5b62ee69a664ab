"""Rungs over the rows of a matrix, shared by softmax and top_k."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.problem import Problem
from escalade.ops.base.rung import Rung, ThreadsConfig


class RowProblem(Problem, Protocol):
    """`batch` rows of `classes` elements."""

    @property
    def classes(self) -> int: ...


R = TypeVar("R", bound=RowProblem)


def launch(problem: RowProblem, program: Program, grid: int, threads: int) -> Recipe:
    arguments = (Buffer("x"), Buffer("y"), problem.batch, problem.classes)
    return Recipe((KernelCall(program, (grid, 1, 1), (threads, 1, 1), arguments, overlap=True),))


@dataclass(frozen=True)
class PerRow(Rung[R, ThreadsConfig]):
    """A rung with one thread or one warp per row."""

    operation: ClassVar[str]
    row_threads: int
    threads: tuple[int, ...]

    @abstractmethod
    def constants(self, problem: R) -> dict[str, Constant]:
        """Return the parameters of `operation`/`name`.cu."""

    def supports(self, problem: R) -> str | None:
        return None

    def configs(self, problem: R) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in self.threads)

    def recipe(self, problem: R, config: ThreadsConfig) -> Recipe:
        source, entry = f"{self.operation}/{self.name}.cu", f"{self.operation}_{self.name}"
        program = Program.of(source, entry, self.constants(problem))
        return launch(
            problem, program, ceil_div(problem.batch * self.row_threads, config.threads), config.threads
        )
