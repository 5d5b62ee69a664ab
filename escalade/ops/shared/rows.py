"""Operations on the rows of a matrix: sizes, checks, rungs, and conversion of PyTorch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require, require_at_least
from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.launch import launch
from escalade.ops.base.problem import Problem
from escalade.ops.base.rung import Rung, ThreadsConfig
from escalade.ops.shared import columns

LAYOUTS = ("flat",)


def check_fields(operation: str, problem: Any, dtypes: tuple[str, ...], sizes: Mapping[str, int]) -> None:
    """Check dtype, layout and batch, and that every size is between 1 and 2^30 - 1."""
    require(operation, "dtype", problem.dtype, dtypes)
    require(operation, "layout", problem.layout, LAYOUTS)
    if problem.batch < 0:
        raise UnsupportedError(f"{problem.batch} rows: the number must not be negative")
    require_at_least(1, sizes)
    for what, value in {"rows": problem.batch, **sizes}.items():
        if value >= 2**30:
            raise UnsupportedError(f"{value} {what}: {operation} supports fewer than 2^30; split them")


def check_dtypes(operation: str, **dtypes: str) -> None:
    """Check dtypes of single tensors by field; empty ones are not used."""
    for field, dtype in dtypes.items():
        if dtype:
            require(operation, field, dtype, DTYPES)


# --- rungs


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


# --- tensors


def sizes(x: torch.Tensor) -> tuple[int, int]:
    """Return the number of rows, over all dimensions but the last, and their length."""
    return x.shape[:-1].numel(), x.shape[-1]


def empty_like(x: torch.Tensor, length: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return empty rows, with the length and the dtype of x unless they are given."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] if length is None else length), dtype=dtype)
