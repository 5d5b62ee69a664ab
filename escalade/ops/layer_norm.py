"""Layer normalization of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from escalade.device.program import Program
from escalade.device.recipe import Argument, Buffer, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, NAMES, STORAGE, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import launch
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors, in_float64
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.shared import activation, columns, rows
from escalade.ops.shared.rows import LAYOUTS, check_dtypes, check_fields

# --- the problem


EPSILON = 1e-5


@dataclass(frozen=True)
class LayerNormProblem(Named):
    """y[row] = activated((x[row] - mean) / sqrt(variance + epsilon) * weight + bias), the last three optional.

    x and y are [batch][features][inner], weight and bias [features], all in one dtype; sums are fp32. With `rms` the
    mean counts as 0: each row is divided by its root mean square. With `wide` weight and bias are fp32, and y has the
    dtype `output`, as in mixed training.
    """

    NAME: ClassVar = NamePattern(
        "layer normalization",
        "{features}_b{batch}[_inner{inner}]{rms?_rms}{weight?_weight}{bias?_bias}{wide?_wide}[_to{output:fp32|fp16|bf16}]"
        "[_eps{epsilon}]{relu?_relu}" + activation.IN_NAME,
    )

    batch: int
    features: int
    weight: bool = True
    bias: bool = True
    rms: bool = False
    epsilon: float = EPSILON
    relu: bool = False
    activation: str = ""
    dtype: str = "fp32"
    layout: str = "flat"
    inner: int = 1
    """Stride of a row's elements, and number of adjacent rows: the pixels of an image for its channels in NCHW."""
    wide: bool = False
    output: str = ""
    """Dtype of y; empty if it is that of x."""

    def __post_init__(self) -> None:
        check_fields("layer_norm", self, DTYPES, {"features": self.features, "inner": self.inner})
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise UnsupportedError(f"epsilon is {self.epsilon}: it must be finite and at least 0")
        activation.normalize(self)
        check_dtypes("layer_norm", output=self.output)
        if self.result != self.dtype and self.inner > 1:
            raise UnsupportedError(
                f"output {self.output} of {self.dtype} rows with stride {self.inner}: layer_norm writes strided rows "
                "in the dtype of x; pass rows without a stride, or cast the result"
            )

    @property
    def result(self) -> str:
        """Dtype of y."""
        return self.output or self.dtype

    @property
    def parameters(self) -> str:
        """Dtype of weight and bias."""
        return "fp32" if self.wide else self.dtype

    @property
    def rows(self) -> int:
        return self.batch * self.inner

    @property
    def elements(self) -> int:
        return self.rows * self.features

    @property
    def flops(self) -> int:
        """Per element: sum, difference, square and its sum, product; one more each for weight and bias."""
        return (5 + self.weight + self.bias) * self.elements

    @property
    def bytes(self) -> int:
        constants = (self.weight + self.bias) * self.features * ELEMENT_BYTES[self.parameters]
        return self.elements * (ELEMENT_BYTES[self.dtype] + ELEMENT_BYTES[self.result]) + constants

    @property
    def rounding(self) -> float:
        """Two sums over a row, a square root and a division."""
        return 2.0**-24 * (4 + math.sqrt(1 + self.features / 6))


# --- rungs


def _program(source: str, problem: LayerNormProblem, **scope: Any) -> Program:
    constants = activation.constants(problem.relu, problem.activation, problem.result)
    return Program.of(f"layer_norm/{source}.cu", constants=constants, problem=problem, **scope)


def arguments(problem: LayerNormProblem) -> tuple[Argument, ...]:
    return (
        Buffer("x"), Buffer("weight", optional=True), Buffer("bias", optional=True), Buffer("y"), problem.rows,
        problem.features, float(problem.epsilon),
    )  # fmt: skip


@dataclass(frozen=True)
class PerRow(Rung[LayerNormProblem, ThreadsConfig]):
    row_threads: int
    threads: tuple[int, ...]

    def supports(self, problem: LayerNormProblem) -> str | None:
        return columns.refusal_of_dense(self.name, problem.inner)

    def configs(self, problem: LayerNormProblem) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in self.threads)

    def recipe(self, problem: LayerNormProblem, config: ThreadsConfig) -> Recipe:
        grid = ceil_div(problem.batch * self.row_threads, config.threads)
        return launch(_program(self.name, problem), grid, config.threads, *arguments(problem))


# Predictions are for 100,352 rows of 96 features in fp16: 19 MB in, 19 MB out, 9.2 us at copy rate.
NAIVE = PerRow(
    "naive", "one thread per row, in three passes", None, None, row_threads=1, threads=(64, 32, 128)
)

WARP_PER_ROW = PerRow(
    "warp_per_row",
    "one warp per row, summed by shuffles, in three passes of which two hit a cache",
    below="naive",
    # naive: 288 loads of 2 bytes per thread, each 32 sectors for a warp, 900 k sectors per SM at one per clock: 0.5 ms.
    # One warp per row: 9 loads, 10 shuffles and 3 stores, 760 warps per SM: 30 us.
    predicted_gain=17.0,
    row_threads=32,
    threads=(256, 128, 512),
)


@dataclass(frozen=True)
class Columns(Rung[LayerNormProblem, columns.ColumnsConfig]):
    def supports(self, problem: LayerNormProblem) -> str | None:
        if problem.result != problem.dtype:
            return f"{self.name} writes y in the dtype of x, {problem.dtype}, not in {problem.output}"
        return columns.refusal(self.name, problem.rows, problem.features, problem.inner)

    def configs(self, problem: LayerNormProblem) -> tuple[columns.ColumnsConfig, ...]:
        p = problem
        return columns.configs(p.rows, p.features, p.inner, p.dtype, self.card)

    def recipe(self, problem: LayerNormProblem, config: columns.ColumnsConfig) -> Recipe:
        p = problem
        program = partial(_program, "columns", p)
        return columns.column_launch(
            config, p.rows, p.features, p.dtype, self.card, program, *arguments(p), p.inner,
            more_bytes=columns.FP32_BYTES * p.features * (p.weight + p.bias), functions=bool(p.activation),
        )  # fmt: skip


# Predicted for 64 channels of 64 x 64 pixels, batch 64, fp16: 34 MB in, 34 MB out, 16 us at copy rate.
COLUMNS = Columns(
    "columns",
    "adjacent rows per lane, whose features the warps of a CTA share and hold in registers; the next are prefetched",
    below=None,
    predicted_gain=None,
)


# --- rung in_registers: a row in the registers of as few threads as hold it


MOST_VALUES = 32
"""Most values per thread: each of 1,024 threads has 64 registers."""
MOST_THREADS = 1024


@dataclass(frozen=True)
class RegistersConfig(Config):
    row_threads: int
    """Threads per row: part of a warp, or whole warps."""
    packs: int
    """Accesses per thread."""
    threads: int


def registers_configs(
    row_packs: int, most_packs: int, most_threads: int, narrow_threads: int, few_rows: bool
) -> tuple[RegistersConfig, ...]:
    """Return ways to hold a row of `row_packs` accesses in registers.

    Many rows: first those without idle threads, then the fewest threads. Few rows: as many threads as have work. The
    warps of a row synchronize by the CTA's barrier; CTAs of narrower rows have `narrow_threads`.
    """
    offered: list[tuple[int, RegistersConfig]] = []
    row_threads = 1
    while row_threads <= most_threads:
        packs = ceil_div(row_packs, row_threads)
        if packs <= most_packs:
            threads = narrow_threads if row_threads <= 32 else row_threads
            offered.append((row_threads * packs - row_packs, RegistersConfig(row_threads, packs, threads)))
        if packs == 1:
            break
        row_threads *= 2
    if few_rows:
        return tuple(config for _, config in reversed(offered))
    return tuple(config for _, config in sorted(offered, key=lambda one: one[0]))


@dataclass(frozen=True)
class RowsConfig(RegistersConfig):
    rows: int
    """Rows per thread, loaded together."""


_ROWS = (2, 1, 4)
_LINE_BYTES = 128
_WARP = 32


def _width(problem: LayerNormProblem) -> int:
    """Return the elements per access, 16 bytes of the wider dtype."""
    return min(widest_vector(dtype, problem.features) for dtype in (problem.dtype, problem.result))


@dataclass(frozen=True)
class InRegisters(Rung[LayerNormProblem, RowsConfig]):
    def supports(self, problem: LayerNormProblem) -> str | None:
        if self._offered(problem):
            return columns.refusal_of_dense(self.name, problem.inner)
        width = _width(problem)
        most = MOST_THREADS * (MOST_VALUES // width) * width
        return f"rows of up to {most} features fit into registers; these have {problem.features}"

    def configs(self, problem: LayerNormProblem) -> tuple[RowsConfig, ...]:
        """For many rows prefer no idle threads, accesses of whole cache lines, and one or two packs per thread.

        A copy is fastest by many small CTAs whose threads have one access each. Two short rows per thread share the
        loads of weights: 65,536 rows of 64 in fp16 take 3.4 us instead of 3.9.
        """
        p, few_rows = problem, self._few_rows(problem)
        width = _width(p)

        def rank(config: RowsConfig) -> tuple[int, bool, int, int]:
            if few_rows:
                return 0, False, 0, config.rows
            accessed = config.row_threads * width * ELEMENT_BYTES[p.dtype]
            is_partial = config.packs > 1 and accessed < _LINE_BYTES
            packs = config.packs if config.row_threads <= _WARP else max(2, config.packs)
            idle_threads = config.row_threads * config.packs * width - p.features
            return idle_threads, is_partial, packs, _ROWS.index(config.rows)

        offered = [
            RowsConfig(**config.as_dict(), rows=rows)
            for config in self._offered(p)
            for rows in _ROWS
            if rows == 1 or (config.row_threads <= _WARP and rows * config.packs * width <= MOST_VALUES)
        ]
        return tuple(sorted(offered, key=rank))

    def _few_rows(self, problem: LayerNormProblem) -> bool:
        return problem.batch <= self.card.busy_blocks

    def _offered(self, problem: LayerNormProblem) -> tuple[RegistersConfig, ...]:
        width = _width(problem)
        return registers_configs(
            problem.features // width, MOST_VALUES // width, MOST_THREADS, 128, self._few_rows(problem)
        )

    def recipe(self, problem: LayerNormProblem, config: RowsConfig) -> Recipe:
        vector = _width(problem)
        full = config.row_threads * config.packs * vector == problem.features
        program = _program("in_registers", problem, config=config, vector=vector, full=full)
        grid = ceil_div(problem.batch, config.threads // config.row_threads * config.rows)
        return launch(program, grid, config.threads, *arguments(problem))


IN_REGISTERS = InRegisters(
    "in_registers",
    "16-byte loads, and the row in the registers of as few threads as hold it: one read",
    below="warp_per_row",
    # 10.5 us, near the copy, against 30.
    predicted_gain=2.9,
)


# --- the reference


def random_inputs(problem: LayerNormProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Standard normal rows, each with its own mean and spread."""
    rows, features = problem.rows, problem.features
    x = draw.normal(rows, features) * (1 + draw.normal(rows, 1).abs()) + draw.normal(rows, 1)
    tensors = {"x": x if problem.inner == 1 else x.view(-1, problem.inner, features).mT.contiguous()}
    if problem.weight:
        tensors["weight"] = 1 + 0.3 * draw.normal(features)
    if problem.bias:
        tensors["bias"] = 0.3 * draw.normal(features)
    return {
        name: tensor.to(STORAGE[problem.dtype if name == "x" else problem.parameters])
        for name, tensor in tensors.items()
    }


def empty_output(problem: LayerNormProblem, device: torch.device) -> torch.Tensor:
    sizes: tuple[int, ...] = (problem.batch, problem.features)
    if problem.inner > 1:
        sizes = (problem.batch, problem.features, problem.inner)
    return torch.empty(sizes, dtype=STORAGE[problem.result], device=device)


def peer(problem: LayerNormProblem, inputs: Tensors) -> torch.Tensor:
    if problem.inner > 1:
        return peer(replace(problem, inner=1), {**inputs, "x": inputs["x"].mT}).mT
    x, weight, bias = inputs["x"], inputs.get("weight"), inputs.get("bias")
    if problem.output and x.dtype is not torch.float64:
        wide = {name: tensor.float() for name, tensor in inputs.items()}
        return peer(replace(problem, dtype="fp32", output=""), wide).to(STORAGE[problem.output])
    if problem.wide and x.dtype in (torch.float16, torch.bfloat16):  # PyTorch mixes dtypes on CPUs only
        return peer(problem, {**inputs, "x": x.float()}).to(x.dtype)
    if problem.rms:
        y = F.rms_norm(x, x.shape[-1:], weight, problem.epsilon)
        y = y if bias is None else y + bias
    else:
        y = F.layer_norm(x, x.shape[-1:], weight, bias, problem.epsilon)
    return activation.apply(problem, y)


# --- the operation


class LayerNormOperation(Operation[LayerNormProblem]):
    name = "layer_norm"
    problem = LayerNormProblem
    in_pytorch = Reference(random_inputs, empty_output, in_float64(peer), peer)
    ladder = Ladder("layer_norm", (NAIVE, WARP_PER_ROW, IN_REGISTERS, COLUMNS))
    problems = (
        LayerNormProblem(100_352, 96),
        LayerNormProblem(25_088, 192),
        LayerNormProblem(1_568, 768),
        LayerNormProblem(49, 768),
        LayerNormProblem(16_384, 8_192),
        LayerNormProblem(64, 64, inner=4096),
        LayerNormProblem(6_304, 768, output="fp16"),
    )
    """The norms of a ConvNeXt at batch 32 and 1, rows of a language model's width, an image's channels in NCHW, and a
    vision transformer's norm at batch 32 in mixed training."""
    small_problems = (
        LayerNormProblem(37, 96),
        LayerNormProblem(5, 33, bias=False),
        LayerNormProblem(3, 2310, weight=False, bias=False, epsilon=1e-6),
        LayerNormProblem(2, 33_002, rms=True, bias=False),
        LayerNormProblem(70, 8),
        LayerNormProblem(3, 1),
        LayerNormProblem(2, 67, inner=40),
        LayerNormProblem(1, 5, rms=True, inner=9),
        LayerNormProblem(6, 72, wide=True),
        LayerNormProblem(2, 12, wide=True, inner=20),
        LayerNormProblem(7, 88, output="fp16"),
        LayerNormProblem(5, 1030, rms=True, output="bf16", activation="silu(x)"),
        LayerNormProblem(6, 40, wide=True, output="fp32", relu=True),
    )
    """Small problems: rows of part of a warp, of several warps, and too wide for registers; widths that no vector
    divides; strided rows; parameters in fp32; results in another dtype."""
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("columns", "in_registers", "warp_per_row")


LAYER_NORM = LayerNormOperation()


# --- the PyTorch operator


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    epsilon: float = EPSILON,
    *,
    rung: str | None = None,
) -> torch.Tensor:
    """Normalize rows of the last dimension to mean 0 and variance 1, times weight, plus bias. `rung` names a rung."""
    return OPERATOR(x, weight, bias, epsilon, rung)


def _plan(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
    rung: str | None = None,
) -> CallPlan:
    given = (weight is not None, bias is not None)
    return CallPlan(
        LAYER_NORM,
        lambda: rows.empty_like(x),
        lambda: LayerNormProblem(*rows.sizes(x), *given, epsilon=epsilon, dtype=NAMES[x.dtype]),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, ctx.epsilon, _ = inputs
    ctx.save_for_backward(x, weight, bias)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Recompute the statistics, which is cheaper than saving them, and leave the rest to PyTorch."""
    x, weight, bias = ctx.saved_tensors
    sizes = list(x.shape[-1:])
    _, mean, scale = torch.ops.aten.native_layer_norm(x, sizes, weight, bias, ctx.epsilon)
    wanted = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[1],
              bias is not None and ctx.needs_input_grad[2]]  # fmt: skip
    found = torch.ops.aten.native_layer_norm_backward(
        gradient.contiguous(), x, sizes, mean, scale, weight, bias, wanted
    )
    return (*(part if asked else None for part, asked in zip(found, wanted, strict=True)), None, None)


OPERATOR = define_planned(
    "layer_norm", _plan, "x: ... C, weight: C, bias: C", setup=_setup, backward=_backward
)
