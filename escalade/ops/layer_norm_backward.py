"""Gradients of layer normalization, for training steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from escalade.device.program import Program
from escalade.device.recipe import Argument, Buffer, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, STORAGE, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import kernel_call
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.rung import Rung, ThreadsConfig, ThreadsRung
from escalade.ops.layer_norm import EPSILON, RegistersConfig, registers_configs
from escalade.ops.shared.rows import LAYOUTS, check_dtypes, check_fields

# --- the problem


@dataclass(frozen=True)
class LayerNormBackwardProblem(Named):
    """Gradients of y[row] = (x[row] - mean) * rstd * weight + bias, where mean and rstd are those of each row of x.

    Buffers `gradient` (dy), x and the gradient of x, `y`, are [batch][features]: x of the `dtype`, dy and dx of the
    dtypes `gradient` and `output`. `weight`, which is optional, and the results `weight_gradient` and `bias_gradient`
    are fp32 vectors. With `rms` the mean counts as 0. The statistics are computed from x: that costs less than reading
    them. A `residual` of the dtype of that name, such as the gradient of x from another branch, is added to dx. With
    `rounded` dx is written a second time, in that dtype.
    """

    NAME: ClassVar = NamePattern(
        "gradients of layer normalization",
        "{features}_b{batch}{rms?_rms}{weight?_weight}[_from{gradient:fp32|fp16|bf16}][_to{output:fp32|fp16|bf16}]"
        "[_plus{residual:fp32|fp16|bf16}][_and{rounded:fp32|fp16|bf16}][_eps{epsilon}]",
    )

    batch: int
    features: int
    weight: bool = True
    rms: bool = False
    epsilon: float = EPSILON
    dtype: str = "fp32"
    layout: str = "flat"
    gradient: str = ""
    """Dtype of dy; empty if it is that of x."""
    output: str = ""
    """Dtype of dx; empty if it is that of x."""
    residual: str = ""
    """Dtype of a value that is added to dx; empty if there is none."""
    rounded: str = ""
    """Dtype of a second copy of dx; empty if there is none."""

    def __post_init__(self) -> None:
        check_fields("layer_norm_backward", self, DTYPES, {"features": self.features})
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise UnsupportedError(f"epsilon is {self.epsilon}: it must be finite and at least 0")
        types = {"gradient": self.gradient, "output": self.output}
        check_dtypes("layer_norm_backward", **types, residual=self.residual, rounded=self.rounded)

    @property
    def read(self) -> str:
        """Dtype of dy."""
        return self.gradient or self.dtype

    @property
    def result(self) -> str:
        """Dtype of dx."""
        return self.output or self.dtype

    @property
    def tensors(self) -> tuple[str, ...]:
        """Dtypes of all tensors of this shape."""
        optional = (dtype for dtype in (self.residual, self.rounded) if dtype)
        return (self.dtype, self.read, self.result, *optional)

    @property
    def elements(self) -> int:
        return self.batch * self.features

    @property
    def flops(self) -> int:
        """Two sums for the statistics and two for dx, two more over rows, and dx itself."""
        return 16 * self.elements

    @property
    def bytes(self) -> int:
        per_element = sum(ELEMENT_BYTES[dtype] for dtype in self.tensors)
        return per_element * self.elements + 4 * (2 + self.weight) * self.features

    @property
    def rounding(self) -> float:
        """Sums over a row, and running sums over the rows of a CTA."""
        return 2.0**-24 * (6 + math.sqrt(1 + max(self.features, self.batch) / 6))


# --- rungs


_RESULTS = Buffer("weight_gradient"), Buffer("bias_gradient")
ROUNDED = "rounded"
_STATISTICS, _PARTIAL = Buffer("statistics"), Buffer("partial")


def _arguments(problem: LayerNormBackwardProblem, workspace: Buffer) -> tuple[Argument, ...]:
    return (
        Buffer("gradient"), Buffer("x"), Buffer("weight", optional=True), Buffer("y"), workspace, problem.batch,
        problem.features, float(problem.epsilon), Buffer("residual", optional=True), Buffer(ROUNDED, optional=True),
    )  # fmt: skip


@dataclass(frozen=True)
class Naive(ThreadsRung[LayerNormBackwardProblem]):
    threads = (64, 32, 128)

    def recipe(self, problem: LayerNormBackwardProblem, config: ThreadsConfig) -> Recipe:
        p, threads = problem, config.threads
        rows = kernel_call(
            Program.of("layer_norm_backward/naive.cu", problem=p),
            ceil_div(p.batch, threads),
            threads,
            *_arguments(p, _STATISTICS),
        )
        sums = kernel_call(
            Program.of("layer_norm_backward/naive_sums.cu", problem=p),
            ceil_div(p.features, threads),
            threads,
            Buffer("gradient"), Buffer("x"), _STATISTICS, *_RESULTS, p.batch, p.features,
        )  # fmt: skip
        return Recipe((rows, sums), (Workspace(_STATISTICS.name, 2 * 4 * p.batch),))


# Predictions are for 100,352 rows of 96 features in fp16: 58 MB, 13.8 us at copy rate.
NAIVE = Naive("naive", "one thread per row, then one thread per feature for the sums over rows", None, None)


_MOST_REGISTERS = 16
"""Most registers per thread for x, and as many for the gradient; the sums take two for each element."""
_MOST_THREADS = 512
_WARP = 32
_NARROW_THREADS = 256
"""Threads per CTA where a row takes at most a warp."""
_MERGE_THREADS = 512


def _width(problem: LayerNormBackwardProblem) -> int:
    """Return the elements per access, 16 bytes of the widest dtype."""
    return min(widest_vector(dtype, problem.features) for dtype in problem.tensors)


@dataclass(frozen=True)
class InRegisters(Rung[LayerNormBackwardProblem, RegistersConfig]):
    def supports(self, problem: LayerNormBackwardProblem) -> str | None:
        if self._offered(problem):
            return None
        most = _MOST_THREADS * self._most_packs(problem) * _width(problem)
        return f"rows of up to {most} features fit into registers; these have {problem.features}"

    @staticmethod
    def _most_packs(problem: LayerNormBackwardProblem) -> int:
        values = _MOST_REGISTERS * 4 // max(ELEMENT_BYTES[dtype] for dtype in (problem.dtype, problem.read))
        return values // _width(problem)

    def configs(self, problem: LayerNormBackwardProblem) -> tuple[RegistersConfig, ...]:
        return self._offered(problem)

    def _offered(self, problem: LayerNormBackwardProblem) -> tuple[RegistersConfig, ...]:
        packs = problem.features // _width(problem)
        few_rows = problem.batch <= self.card.busy_blocks
        most = self._most_packs(problem)
        return registers_configs(packs, most, _MOST_THREADS, _NARROW_THREADS, few_rows)

    def _splits(self, problem: LayerNormBackwardProblem, config: RegistersConfig) -> int:
        """Return the CTAs that share the rows: as many as the SMs hold at 128 registers per thread."""
        resident = max(1, 512 // config.threads)
        rows = config.threads // config.row_threads
        return max(1, min(ceil_div(problem.batch, rows), resident * self.card.multiprocessors))

    def recipe(self, problem: LayerNormBackwardProblem, config: RegistersConfig) -> Recipe:
        p, splits = problem, self._splits(problem, config)
        first = kernel_call(
            Program.of("layer_norm_backward/in_registers.cu", problem=p, config=config, vector=_width(p)),
            splits,
            config.threads,
            *_arguments(p, _PARTIAL),
        )
        merge = kernel_call(
            Program.of("layer_norm_backward/merge.cu", threads=_MERGE_THREADS),
            (ceil_div(p.features, _WARP), 2),
            _MERGE_THREADS,
            _PARTIAL, *_RESULTS, p.features, splits,
        )  # fmt: skip
        return Recipe((first, merge), (Workspace(_PARTIAL.name, 2 * 4 * splits * p.features),))


IN_REGISTERS = InRegisters(
    "in_registers",
    "16-byte loads, rows of dy and x in registers: one read; sums over rows in registers, merged by a second launch",
    below="naive",
    # naive: 480 loads of 2 bytes per thread and row, each 32 sectors for a warp, 1.5 M sectors per SM at one per clock,
    # 0.8 ms; 96 threads then read 100,352 rows, 500 cycles per pair of loads, 27 ms. In registers: 18 us.
    predicted_gain=1500.0,
)


# --- the reference


def random_inputs(problem: LayerNormBackwardProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Standard normal gradients, and rows with a mean and a spread of their own."""
    rows, features = problem.batch, problem.features
    x = draw.normal(rows, features) * (1 + draw.normal(rows, 1).abs()) + draw.normal(rows, 1)
    gradient = draw.normal(rows, features)
    tensors = {"gradient": gradient.to(STORAGE[problem.read]), "x": x.to(STORAGE[problem.dtype])}
    if problem.weight:
        tensors["weight"] = 1 + 0.3 * draw.normal(features)
    if problem.residual:
        tensors["residual"] = draw.normal(rows, features).to(STORAGE[problem.residual])
    return tensors


def empty_output(problem: LayerNormBackwardProblem, device: torch.device) -> torch.Tensor:
    return torch.empty((problem.batch, problem.features), dtype=STORAGE[problem.result], device=device)


def gradients(
    problem: LayerNormBackwardProblem, inputs: Tensors, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, weight and bias, computed in a dtype."""
    wide = {name: tensor.to(dtype).reshape(-1, problem.features) for name, tensor in inputs.items()}
    x, gradient = wide["x"], wide["gradient"]
    centered = x if problem.rms else x - x.mean(-1, keepdim=True)
    rstd = (centered.square().mean(-1, keepdim=True) + problem.epsilon).rsqrt()
    normalized = centered * rstd
    scaled = gradient * wide["weight"] if problem.weight else gradient
    result = scaled - normalized * (scaled * normalized).mean(-1, keepdim=True)
    if not problem.rms:
        result = result - scaled.mean(-1, keepdim=True)
    result = result * rstd
    if "residual" in wide:
        result = result + wide["residual"]
    return result, (gradient * normalized).sum(0), gradient.sum(0)


def exact(problem: LayerNormBackwardProblem, inputs: Tensors) -> torch.Tensor:
    return gradients(problem, inputs)[0]


def peer(problem: LayerNormBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """PyTorch's gradients of the norm; those of RMS norm in single operators. In fp32 if the weight is."""
    if problem.rms:
        return gradients(problem, inputs, torch.float32)[0].to(STORAGE[problem.result])
    x, gradient, weight = inputs["x"].float(), inputs["gradient"].float(), inputs.get("weight")
    sizes = [problem.features]
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, sizes, weight, None, problem.epsilon)
    found: tuple[torch.Tensor, ...] = torch.ops.aten.native_layer_norm_backward(
        gradient, x, sizes, mean, rstd, weight, None, [True, problem.weight, False]
    )
    dx = found[0] if problem.residual == "" else found[0] + inputs["residual"].float()
    return dx.to(STORAGE[problem.result])


# --- the operation


class LayerNormBackwardOperation(Operation[LayerNormBackwardProblem]):
    name = "layer_norm_backward"
    problem = LayerNormBackwardProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("layer_norm_backward", (NAIVE, IN_REGISTERS))
    problems = (
        LayerNormBackwardProblem(200_704, 96),
        LayerNormBackwardProblem(50_176, 192),
        LayerNormBackwardProblem(3_136, 768),
        LayerNormBackwardProblem(12_608, 384),
        LayerNormBackwardProblem(8_192, 4_096, rms=True),
        LayerNormBackwardProblem(6_304, 768, gradient="fp16"),
        LayerNormBackwardProblem(6_304, 768, gradient="fp16", residual="fp32", rounded="fp16"),
    )
    """The norms of a ConvNeXt and of a small vision transformer at batch 64, rows of a language model's width, and a
    vision transformer's norm at batch 32 in mixed training, alone and behind a residual block."""
    small_problems = (
        LayerNormBackwardProblem(37, 96),
        LayerNormBackwardProblem(5, 33),
        LayerNormBackwardProblem(3, 2310, weight=False, epsilon=1e-6),
        LayerNormBackwardProblem(2, 16_390, rms=True),
        LayerNormBackwardProblem(300, 8),
        LayerNormBackwardProblem(70, 24, rms=True, weight=False),
        LayerNormBackwardProblem(9, 1, weight=False),  # all zeros, and with a weight rounding errors
        LayerNormBackwardProblem(70, 88, gradient="fp16"),
        LayerNormBackwardProblem(5, 1030, gradient="bf16", output="bf16"),
        LayerNormBackwardProblem(41, 40, weight=False, gradient="fp32", output="fp32"),
        LayerNormBackwardProblem(19, 24, rms=True, output="fp16"),
        LayerNormBackwardProblem(23, 200, gradient="fp16", residual="fp32", rounded="fp16"),
        LayerNormBackwardProblem(4, 1030, rms=True, residual="bf16"),
        LayerNormBackwardProblem(6, 33, weight=False, residual="fp16", rounded="fp32"),
    )
    """Small problems: rows of part of a warp, of several warps, and too wide for registers; odd widths; gradients in
    another dtype than x; residuals, and copies of dx."""
    dtypes = DTYPES
    layouts = LAYOUTS
    weights_change = True

    def preferred(self, problem: LayerNormBackwardProblem) -> tuple[str, ...]:
        return ("in_registers",)

    def extra_outputs(
        self, problem: LayerNormBackwardProblem, device: torch.device
    ) -> dict[str, torch.Tensor]:
        found = {one.name: torch.empty(problem.features, device=device) for one in _RESULTS}
        if problem.rounded:
            found[ROUNDED] = self.output(replace(problem, output=problem.rounded), device)
        return found

    def extra_references(self, problem: LayerNormBackwardProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        dx, *found = gradients(problem, inputs)
        named = {buffer.name: one for buffer, one in zip(_RESULTS, found, strict=True)}
        return {**named, ROUNDED: dx} if problem.rounded else named


LAYER_NORM_BACKWARD = LayerNormBackwardOperation()
