"""Gradient of softmax, or of its logarithm, for training steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from escalade.device.program import Program
from escalade.device.recipe import Argument, Buffer, Recipe
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, STORAGE, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import launch
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.rung import Rung, ThreadsConfig, ThreadsRung
from escalade.ops.layer_norm import RegistersConfig, registers_configs
from escalade.ops.shared import columns
from escalade.ops.shared.rows import LAYOUTS, check_dtypes, check_fields

# --- the problem


@dataclass(frozen=True)
class SoftmaxBackwardProblem(Named):
    """dx[row] = y[row] * (dy[row] - sum(dy[row] * y[row])) of the softmax y of rows x.

    With `log`, y is the logarithm of the softmax, and dx[row] = dy[row] - exp(y[row]) * sum(dy[row]). Buffers
    `gradient` (dy), `softmax` (y) and `y` (dx) are [batch][classes][inner]; `softmax` has the `dtype`, dy and dx the
    dtypes `gradient` and `output`.
    """

    NAME: ClassVar = NamePattern(
        "gradient of softmax",
        "{classes}_b{batch}[_inner{inner}]{log?_log}[_from{gradient:fp32|fp16|bf16}][_to{output:fp32|fp16|bf16}]",
    )

    batch: int
    classes: int
    dtype: str = "fp32"
    layout: str = "flat"
    inner: int = 1
    """Stride of a row's elements, and number of adjacent rows, as in `SoftmaxProblem`."""
    log: bool = False
    gradient: str = ""
    """Dtype of dy; empty if it is that of y."""
    output: str = ""
    """Dtype of dx; empty if it is that of y."""

    def __post_init__(self) -> None:
        check_fields("softmax_backward", self, DTYPES, {"classes": self.classes, "inner": self.inner})
        check_dtypes("softmax_backward", gradient=self.gradient, output=self.output)

    @property
    def read(self) -> str:
        """Dtype of dy."""
        return self.gradient or self.dtype

    @property
    def result(self) -> str:
        """Dtype of dx."""
        return self.output or self.dtype

    @property
    def widest(self) -> str:
        """Dtype with the largest elements, whose accesses have up to 16 bytes."""
        return max((self.dtype, self.read, self.result), key=ELEMENT_BYTES.__getitem__)

    @property
    def rows(self) -> int:
        return self.batch * self.inner

    @property
    def elements(self) -> int:
        return self.rows * self.classes

    @property
    def flops(self) -> int:
        """Per element: multiplication and addition of the sum, subtraction, multiplication."""
        return 4 * self.elements

    @property
    def bytes(self) -> int:
        return self.elements * sum(ELEMENT_BYTES[dtype] for dtype in (self.dtype, self.read, self.result))

    @property
    def rounding(self) -> float:
        """A product, a sum over the row, and with `log` an exponential."""
        return 2.0**-24 * (4 + math.sqrt(1 + self.classes / 6))


# --- rungs


def _program(source: str, problem: SoftmaxBackwardProblem, **scope: Any) -> Program:
    return Program.of(f"softmax_backward/{source}.cu", problem=problem, **scope)


def _arguments(problem: SoftmaxBackwardProblem, rows: int) -> tuple[Argument, ...]:
    return Buffer("gradient"), Buffer("softmax"), Buffer("y"), rows, problem.classes


@dataclass(frozen=True)
class Naive(ThreadsRung[SoftmaxBackwardProblem]):
    threads = (64, 32, 128)

    def recipe(self, problem: SoftmaxBackwardProblem, config: ThreadsConfig) -> Recipe:
        p = problem
        grid = ceil_div(p.rows, config.threads)
        return launch(_program("naive", p), grid, config.threads, *_arguments(p, p.batch), p.inner)


# Predictions are for 10,000 rows of 1,000 classes in fp16: 60 MB, 14 us at copy rate.
NAIVE = Naive("naive", "one thread per row, in two passes", below=None, predicted_gain=None)

_MOST_VALUES = 16
"""Most elements of dy per thread in registers, and as many of the softmax."""
_MOST_THREADS = 1024
_NARROW_THREADS = 128
"""Threads per CTA where a row takes at most a warp."""
_LINE_BYTES = 128
_FEW_PACKS = 4
_WARP = 32


@dataclass(frozen=True)
class InRegisters(Rung[SoftmaxBackwardProblem, RegistersConfig]):
    def supports(self, problem: SoftmaxBackwardProblem) -> str | None:
        if not self._offered(problem):
            width = _width(problem)
            most = _MOST_THREADS * (_MOST_VALUES // width) * width
            return f"rows of up to {most} classes fit into registers; these have {problem.classes}"
        return columns.refusal_of_dense(self.name, problem.inner)

    def configs(self, problem: SoftmaxBackwardProblem) -> tuple[RegistersConfig, ...]:
        """For many rows prefer no idle threads, accesses of whole cache lines, and one or two packs per thread.

        Of rows that are no whole packs, a thread takes four elements: 602,112 rows of 49 in fp32 take 84 us so, 96 with
        two and 141 with thirteen.
        """
        offered, width = self._offered(problem), _width(problem)
        if self._few_rows(problem):
            return offered

        def rank(config: RegistersConfig) -> tuple[int, bool, int]:
            if width == 1:
                return abs(config.packs - _FEW_PACKS), False, config.row_threads
            accessed = config.row_threads * width * ELEMENT_BYTES[problem.dtype]
            idle = config.row_threads * config.packs * width - problem.classes
            packs = config.packs if config.row_threads <= _WARP else max(2, config.packs)
            return idle, config.packs > 1 and accessed < _LINE_BYTES, packs

        return tuple(sorted(offered, key=rank))

    def _few_rows(self, problem: SoftmaxBackwardProblem) -> bool:
        return problem.batch <= self.card.busy_blocks

    def _offered(self, problem: SoftmaxBackwardProblem) -> tuple[RegistersConfig, ...]:
        width = _width(problem)
        packs, most_packs = problem.classes // width, _MOST_VALUES // width
        return registers_configs(packs, most_packs, _MOST_THREADS, _NARROW_THREADS, self._few_rows(problem))

    def recipe(self, problem: SoftmaxBackwardProblem, config: RegistersConfig) -> Recipe:
        program = _program("in_registers", problem, config=config, vector=_width(problem))
        grid = ceil_div(problem.batch, config.threads // config.row_threads)
        return launch(program, grid, config.threads, *_arguments(problem, problem.batch))


def _width(problem: SoftmaxBackwardProblem) -> int:
    """Return the elements per access of a contiguous row, 16 bytes of the widest dtype."""
    return widest_vector(problem.widest, problem.classes)


IN_REGISTERS = InRegisters(
    "in_registers",
    "16-byte loads, and rows of dy and y in the registers of part of a warp or of a CTA: one read",
    below="naive",
    # naive: 157 CTAs on 132 SMs, 2 warps each with two loads at a time, 2,000 times some 400 clocks, in two waves:
    # 0.9 ms. In registers: 16 us.
    predicted_gain=56.0,
)


@dataclass(frozen=True)
class Columns(Rung[SoftmaxBackwardProblem, columns.ColumnsConfig]):
    def supports(self, problem: SoftmaxBackwardProblem) -> str | None:
        p = problem
        return columns.refusal(self.name, p.rows, p.classes, p.inner, TENSORS)

    def configs(self, problem: SoftmaxBackwardProblem) -> tuple[columns.ColumnsConfig, ...]:
        p = problem
        return columns.configs(p.rows, p.classes, p.inner, p.widest, self.card, TENSORS)

    def recipe(self, problem: SoftmaxBackwardProblem, config: columns.ColumnsConfig) -> Recipe:
        p = problem
        steps = config.steps(p.classes)
        program = _program("columns", p, config=config, steps=steps, staged=False, blocks_per_sm=1)
        return launch(program, config.tiles(p.rows), config.threads, *_arguments(p, p.rows), p.inner)


TENSORS = 2
"""Tensors whose rows a thread of `columns` holds in registers."""
# Predicted for 64 channels of 64 x 64 pixels, batch 64, fp16: 100 MB, 24 us at copy rate; naive reads twice.
COLUMNS = Columns(
    "columns",
    "16-byte loads of adjacent rows, whose classes the warps of a CTA share and hold in registers: one read",
    below="naive",
    predicted_gain=2.0,
)


# --- the reference


def random_inputs(problem: SoftmaxBackwardProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Standard normal gradients, and the softmax of standard normal rows."""
    sizes = _sizes(problem)
    function = torch.log_softmax if problem.log else torch.softmax
    return {
        "gradient": draw.normal(*sizes).to(STORAGE[problem.read]),
        "softmax": function(draw.normal(*sizes), 1).to(STORAGE[problem.dtype]),
    }


def empty_output(problem: SoftmaxBackwardProblem, device: torch.device) -> torch.Tensor:
    return torch.empty(_sizes(problem), dtype=STORAGE[problem.result], device=device)


def gradient_of(gradient: torch.Tensor, y: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
    """Return dx of a softmax y over a dimension, in the dtype of its operands."""
    if log:
        return gradient - y.exp() * gradient.sum(dim, keepdim=True)
    return y * (gradient - (gradient * y).sum(dim, keepdim=True))


def exact(problem: SoftmaxBackwardProblem, inputs: Tensors) -> torch.Tensor:
    return gradient_of(inputs["gradient"].double(), inputs["softmax"].double(), 1, problem.log)


def peer(problem: SoftmaxBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """PyTorch's gradient; of mixed dtypes in fp32, as autocast computes it."""
    gradient, y = inputs["gradient"], inputs["softmax"]
    if gradient.dtype != y.dtype:
        gradient, y = gradient.float(), y.float()
    aten = torch.ops.aten
    function = aten._log_softmax_backward_data if problem.log else aten._softmax_backward_data
    dx: torch.Tensor = function(gradient, y, 1, y.dtype)
    return dx.to(STORAGE[problem.result])


def _sizes(problem: SoftmaxBackwardProblem) -> tuple[int, ...]:
    if problem.inner == 1:
        return problem.batch, problem.classes
    return problem.batch, problem.classes, problem.inner


# --- the operation


class SoftmaxBackwardOperation(Operation[SoftmaxBackwardProblem]):
    name = "softmax_backward"
    problem = SoftmaxBackwardProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("softmax_backward", (NAIVE, IN_REGISTERS, COLUMNS))
    problems = (
        SoftmaxBackwardProblem(10_000, 1000),
        SoftmaxBackwardProblem(602_112, 49),
        SoftmaxBackwardProblem(602_112, 49, gradient="fp16"),
        SoftmaxBackwardProblem(75_648, 197, gradient="fp16", output="fp16"),
        SoftmaxBackwardProblem(65_536, 256),
        SoftmaxBackwardProblem(64, 64, inner=4096),
    )
    """Class probabilities, attention of a Swin and of a vision transformer, also in mixed training, attention of a
    MobileViT, and softmax over an image's channels in NCHW."""
    small_problems = (
        SoftmaxBackwardProblem(5, 1000),
        SoftmaxBackwardProblem(3, 33),
        SoftmaxBackwardProblem(1, 2310),
        SoftmaxBackwardProblem(2, 16_400),
        SoftmaxBackwardProblem(600, 24),
        SoftmaxBackwardProblem(600, 49),
        SoftmaxBackwardProblem(4, 2),
        SoftmaxBackwardProblem(2, 67, inner=40),
        SoftmaxBackwardProblem(1, 5, inner=9),
        SoftmaxBackwardProblem(1, 521, inner=12),
        SoftmaxBackwardProblem(3, 258, log=True),
        SoftmaxBackwardProblem(2, 67, inner=40, log=True),
        SoftmaxBackwardProblem(70, 88, gradient="fp16", output="fp16"),
        SoftmaxBackwardProblem(5, 130, log=True, output="bf16"),
        SoftmaxBackwardProblem(3, 35, inner=24, gradient="bf16", output="fp32"),
    )
    """Small problems: rows of part of a warp, of several, and too wide for registers; widths that no vector divides;
    strided rows; logarithms; tensors of different dtypes."""
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("columns", "in_registers")


SOFTMAX_BACKWARD = SoftmaxBackwardOperation()
