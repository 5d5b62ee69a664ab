"""Rungs over the rows of a matrix, shared by softmax and top_k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Recipe
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.launch import launch
from escalade.ops.base.problem import Problem
from escalade.ops.base.rung import Rung, ThreadsConfig
from escalade.ops.shared import columns


class RowProblem(Problem, Protocol):
    """`batch` rows of `classes` elements."""

    @property
    def classes(self) -> int: ...


R = TypeVar("R", bound=RowProblem)


def launch_rows(problem: RowProblem, program: Program, grid: int, threads: int) -> Recipe:
    return launch(program, grid, threads, Buffer("x"), Buffer("y"), problem.batch, problem.classes)


@dataclass(frozen=True)
class PerRow(Rung[R, ThreadsConfig]):
    """The kernel `operation`/`name`.cu, with one thread or one warp per row."""

    operation: str
    row_threads: int
    threads: tuple[int, ...]

    def supports(self, problem: R) -> str | None:
        return columns.refusal_of_dense(self.name, getattr(problem, "inner", 1))

    def configs(self, problem: R) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in self.threads)

    def recipe(self, problem: R, config: ThreadsConfig) -> Recipe:
        grid = ceil_div(problem.batch * self.row_threads, config.threads)
        return launch_rows(problem, self.program(problem), grid, config.threads)

    def program(self, problem: R) -> Program:
        return Program.of(f"{self.operation}/{self.name}.cu", problem=problem)
