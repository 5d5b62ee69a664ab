"""Pooling rungs where a thread computes a run of outputs from 16-byte packs."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from math import gcd
from typing import Any, ClassVar, TypeVar

from escalade.device.program import Program
from escalade.device.recipe import Argument, Buffer, Ints, Recipe
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.launch import launch
from escalade.ops.base.naming import spell_pair
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung
from escalade.ops.shared import pooling, prologue
from escalade.ops.shared.pointwise import reciprocal
from escalade.ops.shared.windowed import WindowedImages

BUSY_THREADS = 4 * 2048
"""Threads per SM that fill it four times."""
_BUSY_PACKS = 3 * 1024
"""Threads per SM that fill it several times, each with several packs in flight."""
_FEW_RUNS = 512
"""Threads per SM with two rows each below which one row each is faster: 64 planes of 64, 3x3 with stride 2, take 1.7 us
instead of 2.2 at batch 1."""
_ONE_OUTPUT_REGISTERS = 64
"""Registers per thread with one output: enough for all loads of a 3x3 window to be in flight at once."""
MOST_LOADS = 81
"""Most loads per window, since the kernel unrolls them."""


@dataclass(frozen=True)
class RunConfig(Config):
    rows: int
    columns: int
    """Outputs per thread."""
    threads: int = 128


W = TypeVar("W", bound=WindowedImages)


@dataclass(frozen=True)
class WindowRuns(Rung[W, RunConfig]):
    """A run of outputs per thread, whose overlapping windows are read once."""

    source: str = field(default="", kw_only=True)
    operands: tuple[Argument, ...] = field(default=(), kw_only=True)
    """The kernel's arguments between y and the shape."""
    layout: ClassVar[str]
    most_columns: ClassVar[int]
    """Most window columns that a thread holds at once."""
    pitched: ClassVar[tuple[str, ...]] = ()
    """Tensors that may have a pixel pitch."""

    def supports(self, problem: W) -> str | None:
        if problem.layout != self.layout:
            return f"{self.name} supports layout {self.layout}, not {problem.layout}"
        if problem.dilations != (1, 1):
            return f"{self.name} needs windows without dilation, not {spell_pair(problem.dilations)}"
        if not self.configs(problem):
            return (
                f"{self.name} supports windows of up to {self.most_columns} columns and {MOST_LOADS} pixels"
            )
        if self.threads_for(problem, RunConfig(1, 1)) >= 2**31:
            return f"{self.name} counts threads in 32 bits; {problem.name} needs more"
        return unsupported_pitch(self.name, problem, self.pitched)

    @abstractmethod
    def threads_for(self, problem: W, run: RunConfig) -> int:
        """Return the threads that cover all outputs."""

    @abstractmethod
    def constants(self, problem: W, run: RunConfig) -> dict[str, int]:
        """Return elements per load (`vector`), and other constants of the kernel."""

    def is_busy(self, problem: W, run: RunConfig) -> bool:
        """Return True if such runs keep every SM busy."""
        return self.threads_for(problem, run) >= BUSY_THREADS * self.card.multiprocessors

    def blocks_per_sm(self, run: RunConfig) -> int:
        """Return the CTAs per SM that registers are limited for; 0: no limit."""
        return 0

    def shape(self, problem: W, config: RunConfig) -> Ints:
        """Return the sizes that the kernel takes."""
        return pooling.shape(problem)

    def recipe(self, problem: W, config: RunConfig) -> Recipe:
        p: Any = problem
        generated = prologue.constants(p) if getattr(p, "prologue", "") else {}
        scope: dict[str, Any] = {"problem": p, "config": config, **self.constants(problem, config)}
        scope["blocks_per_sm"] = self.blocks_per_sm(config)
        return launch(
            Program.of(self.source, constants=generated, **scope),
            blocks(self.threads_for(problem, config), config.threads),
            config.threads,
            Buffer("x"), Buffer("y"), *self.operands, self.shape(problem, config),
        )  # fmt: skip


RUNS = tuple(RunConfig(rows, columns) for rows, columns in ((2, 2), (1, 1), (1, 2), (1, 4), (2, 4)))
_SMALL = RunConfig(1, 1, 64)


@dataclass(frozen=True)
class ChannelPacks(WindowRuns[W]):
    """16 bytes of channels per thread, in NHWC."""

    layout = "nhwc"
    most_columns = 11  # four registers each: what fits next to the results
    pitched = ("x", "y")

    def configs(self, problem: W) -> tuple[RunConfig, ...]:
        """Default to 2x2 outputs if that keeps the card busy, else one; in small CTAs if they are few."""
        fitting = [run for run in (*RUNS, _SMALL) if self._fits(problem, run)]
        is_busy = self.threads_for(problem, RUNS[0]) >= _BUSY_PACKS * self.card.multiprocessors
        is_small = self.threads_for(problem, _SMALL) < RUNS[1].threads * self.card.multiprocessors
        default = RUNS[0] if is_busy else _SMALL if is_small else RUNS[1]
        return tuple(sorted(fitting, key=lambda run: run != default))

    def blocks_per_sm(self, run: RunConfig) -> int:
        registers = self.card.registers // _ONE_OUTPUT_REGISTERS
        return registers // run.threads if run.rows * run.columns == 1 else 0

    def _fits(self, problem: W, run: RunConfig) -> bool:
        p = problem
        columns = (run.columns - 1) * p.stride[1] + p.kernel[1]
        rows = (run.rows - 1) * p.stride[0] + p.kernel[0]
        return columns <= self.most_columns and rows * columns <= MOST_LOADS

    def threads_for(self, problem: W, run: RunConfig) -> int:
        p = problem
        vectors = p.channels // widest_vector(p.dtype, p.channels)
        return p.batch * blocks(p.output_height, run.rows) * blocks(p.output_width, run.columns) * vectors

    def constants(self, problem: W, run: RunConfig) -> dict[str, int]:
        return {"vector": widest_vector(problem.dtype, problem.channels)}


@dataclass(frozen=True)
class Folded:
    """Sizes that a kernel of runs takes.

    Planes whose rows are covered by whole windows are one tall plane, unless a prologue needs the channel: a thread
    finds its outputs by one division, and may take several rows of 1-D pools.
    """

    height: int
    output_height: int
    tasks: int
    """Threads that have outputs."""
    runs: tuple[int, int, int]
    """Runs per row of outputs, and their reciprocal."""
    bands: tuple[int, int, int]
    """Bands of rows of outputs per plane, and their reciprocal."""

    @staticmethod
    def of(p: WindowedImages, run: RunConfig) -> Folded:
        planes, height, output_height = p.batch * p.channels, p.height, p.output_height
        apart = p.padding[0] == 0 and p.kernel[0] <= p.stride[0] and height == output_height * p.stride[0]
        if apart and 0 < planes * height < 2**31 and not getattr(p, "prologue", ""):
            planes, height, output_height = 1, planes * height, planes * output_height
        bands, runs = blocks(output_height, run.rows), blocks(p.output_width, run.columns)
        tasks = planes * bands * runs
        return Folded(height, output_height, tasks, (runs, *reciprocal(runs)), (bands, *reciprocal(bands)))


@dataclass(frozen=True)
class RowPacks(WindowRuns[W]):
    """16 bytes of a row of x, in NCHW; runs start at multiples of a pack of x.

    The first configs load as few packs per row and thread as possible: then adjacent lanes load adjacent packs.
    """

    layout = "nchw"
    most_columns = 48

    def configs(self, problem: W) -> tuple[RunConfig, ...]:
        """Default to two rows of outputs if windows overlap and are many, else to packs of one row in larger CTAs.

        1 GB of 2x2 windows take 304 us by either of both in fp32, 17 MB in L2 3.2 us by the default and 3.7 with half
        of the columns and threads.
        """
        p = problem
        vector = widest_vector(p.dtype, p.width)
        least = vector // gcd(vector, p.stride[1])
        sizes = [(rows, times * least) for rows in (2, 1, 4) for times in (1, 2)]
        runs = [RunConfig(*size, threads) for size in sizes for threads in (128, 256)]
        overlap = p.kernel[0] > p.stride[0]
        few = self.threads_for(p, RunConfig(2, least)) < _FEW_RUNS * self.card.multiprocessors
        default = (2, least, 128) if overlap else (1, max(least, widest_vector(p.dtype, p.output_width)), 256)
        if few:
            default = (1, least, 256)

        def distance(run: RunConfig) -> tuple[bool, ...]:
            return run.rows != default[0], run.columns != default[1], run.threads != default[2]

        return tuple(sorted((run for run in runs if self._fits(p, run)), key=distance))

    def _fits(self, problem: W, run: RunConfig) -> bool:
        p = problem
        columns = run.columns * p.stride[1] + p.kernel[1]
        return columns <= self.most_columns and p.kernel[0] * p.kernel[1] <= MOST_LOADS

    def threads_for(self, problem: W, run: RunConfig) -> int:
        return Folded.of(problem, run).tasks

    def shape(self, problem: W, config: RunConfig) -> Ints:
        folded = Folded.of(problem, config)
        return Ints.of("common/row_stretch.cuh", "RunShape", problem=problem, folded=folded)

    def constants(self, problem: W, run: RunConfig) -> dict[str, int]:
        p = problem
        stored = widest_vector(p.dtype, p.output_width, run.columns)
        return {
            "vector": widest_vector(p.dtype, p.width), "stored": stored, "inside": self._is_inside(p, run)
        }  # fmt: skip

    def _is_inside(self, p: W, run: RunConfig) -> bool:
        """Return True if no window, run or pack of a thread leaves the image: the kernel needs no conditions."""
        below, along = p.reaches
        fits = below <= p.height and max(along, p.output_width * p.stride[1]) <= p.width
        whole = Folded.of(p, run).output_height % run.rows == 0 and p.output_width % run.columns == 0
        return p.padding == (0, 0) and fits and whole
