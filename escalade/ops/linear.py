"""Fully connected layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from escalade.device.program import Program
from escalade.device.recipe import Argument, Buffer, Int64, KernelCall, Recipe, WeightsReady, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.adaptive_avg_pool2d import SCALE, AdaptiveAvgPool2dOperation, AdaptiveAvgPool2dProblem
from escalade.ops.base.card import TWIN, Card
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import (
    ELEMENT_BYTES,
    MULTIPLIED,
    NAMES,
    QUANTIZED,
    STORAGE,
    full_vector,
    multiplied_as,
    widest_vector,
)
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import kernel_call, launch
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.rung import Config, Rung, ThreadsConfig, ThreadsRung
from escalade.ops.base.switches import precision, round_to_tf32
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from escalade.ops.shared import activation, rows
from escalade.ops.shared.quantized_input import (
    check_quantized,
    dequantized,
    quantized_input,
    refuses_bytes,
)
from escalade.ops.shared.rows import LAYOUTS, check_fields

# --- the problem


@dataclass(frozen=True)
class LinearProblem(Named):
    """y = relu(x @ weight.T + bias); bias and relu are optional.

    x is [batch][in_features], weight [out_features][in_features], y [batch][out_features]. `dtype` is their storage
    type; `tf32` means fp32 storage with TF32 products. Accumulators are always fp32.

    With `pixels`, x is [batch][pixels][in_features], an NHWC image, and the layer's input is the mean over its pixels,
    rounded to `dtype`. With `x_dtype`, this image is quantized, and the means are multiplied by its `scale`.
    """

    NAME: ClassVar = NamePattern(
        "fully connected layer",
        "{in_features}to{out_features}[_mean{pixels}][_x{x_dtype:fp8|int8}]_b{batch}<_|+|{bias?bias}|{relu?relu}>"
        + activation.IN_NAME,
    )

    batch: int
    in_features: int
    out_features: int
    bias: bool = False
    relu: bool = False
    dtype: str = "fp32"
    layout: str = "flat"
    pixels: int = 1
    activation: str = ""
    """Expression in `x` that replaces ReLU, such as `x * sigmoid(x)`."""
    x_dtype: str = ""
    """fp8 or int8; empty if x is in `dtype`."""

    def __post_init__(self) -> None:
        sizes = {"in_features": self.in_features, "out_features": self.out_features, "pixels": self.pixels}
        check_fields("linear", self, MULTIPLIED, sizes)
        activation.normalize(self)
        check_quantized("linear", self.x_dtype)
        if self.x_dtype and self.pixels == 1:
            raise UnsupportedError(
                f"rows in {self.x_dtype}: linear reads them only to take means over pixels"
            )
        if self.output_elements >= 2**38:
            raise UnsupportedError(
                f"{self.output_elements} outputs: linear takes fewer than 2^38; split the rows"
            )

    @property
    def input_elements(self) -> int:
        return self.batch * self.pixels * self.in_features

    @property
    def output_elements(self) -> int:
        return self.batch * self.out_features

    @property
    def flops(self) -> int:
        additions = self.input_elements if self.pixels > 1 else 0
        return 2 * self.output_elements * self.in_features + additions

    @property
    def bytes(self) -> int:
        parameters = self.out_features * (self.in_features + (1 if self.bias else 0))
        return self.input_elements * ELEMENT_BYTES[self.stored] + ELEMENT_BYTES[self.dtype] * (
            parameters + self.output_elements
        )

    @property
    def stored(self) -> str:
        """Dtype of x."""
        return self.x_dtype or self.dtype

    @property
    def rounding(self) -> float:
        """Error of a running fp32 sum, as in `Conv2dProblem.rounding`."""
        return 2.0**-24 * math.sqrt(1 + (self.in_features + self.pixels - 1) / 6)


# --- the reference


def random_inputs(problem: LinearProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Return normal deviates, weights scaled to keep outputs of order one."""
    p = problem

    size = (p.batch, p.pixels, p.in_features) if p.pixels > 1 else (p.batch, p.in_features)
    inputs = {
        "x": draw.stored(p, *size),
        "weight": draw.stored(p, p.out_features, p.in_features, scale=p.in_features**-0.5),
    }
    if p.bias:
        inputs["bias"] = draw.stored(p, p.out_features)
    return quantized_input(inputs, p.x_dtype)


def empty_output(problem: LinearProblem, device: torch.device) -> torch.Tensor:
    return torch.empty((problem.batch, problem.out_features), dtype=STORAGE[problem.dtype], device=device)


def compute(problem: LinearProblem, inputs: Tensors) -> torch.Tensor:
    """Return the layer in the dtype of the inputs; x is [batch][in_features]."""
    y = F.linear(inputs["x"], inputs["weight"], inputs.get("bias"))
    return activation.apply(problem, y)


def exact(problem: LinearProblem, inputs: Tensors) -> torch.Tensor:
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    return compute(problem, dict(wide, x=_rows(problem, dequantized(wide))))


def _rows(problem: LinearProblem, x: torch.Tensor) -> torch.Tensor:
    """Return the means over pixels, if there are several."""
    return x.mean(1) if problem.pixels > 1 else x


def peer(problem: LinearProblem, inputs: Tensors) -> torch.Tensor:
    """Return PyTorch's result in the problem's dtype, with fp32 accumulation as in cuBLAS.

    The CPU has no TF32, so operands are rounded here, and some CPUs accumulate 16-bit products in 16 bits.
    """
    x, stored = dequantized(inputs), STORAGE[problem.dtype]
    if x.is_cuda:
        with precision(problem.dtype):
            return compute(problem, dict(inputs, x=_rows(problem, x).to(stored)))
    rows = _rows(problem, x.float()).to(stored)
    if problem.dtype == "tf32":
        rounded = dict(inputs, x=round_to_tf32(rows), weight=round_to_tf32(inputs["weight"]))
        return compute(problem, rounded)
    wide = {name: tensor.float() for name, tensor in dict(inputs, x=rows).items()}
    return compute(problem, wide).to(STORAGE[problem.dtype])


# --- rungs


def refuses_pixels(rung: str, problem: LinearProblem) -> str | None:
    """Return why a rung without pooling does not support the problem."""
    if problem.pixels == 1:
        return None
    return f"{rung} does not support means over pixels; pool_first does"


def launch_arguments(problem: LinearProblem, output: str = "y") -> tuple[Argument, ...]:
    return (
        Buffer("x"),
        Buffer("weight"),
        Buffer("bias", optional=True),
        Buffer(output),
        problem.batch,
        problem.in_features,
        problem.out_features,
    )


# --- rungs on CUDA cores


@dataclass(frozen=True)
class Naive(ThreadsRung[LinearProblem]):
    threads = (256, 128, 64)

    def supports(self, problem: LinearProblem) -> str | None:
        if problem.x_dtype:
            return (
                f"{self.name} supports x in {', '.join(MULTIPLIED)}, not {problem.x_dtype}; pool_first does"
            )
        return None

    def recipe(self, problem: LinearProblem, config: ThreadsConfig) -> Recipe:
        return launch(
            Program.of("linear/naive.cu", constants=activation.constants_of(problem), problem=problem),
            ceil_div(problem.output_elements, config.threads),
            config.threads,
            *launch_arguments(problem),
        )


@dataclass(frozen=True)
class TiledConfig(Config):
    rows: int
    """Rows of x per CTA."""
    outputs: int
    """Output features per CTA."""
    thread_rows: int
    thread_outputs: int
    splits: int = 1
    """CTAs that share one sum (split-K)."""

    @property
    def threads(self) -> int:
        return self.rows // self.thread_rows * (self.outputs // self.thread_outputs)

    def tiles(self, problem: LinearProblem) -> int:
        return ceil_div(problem.batch, self.rows) * ceil_div(problem.out_features, self.outputs)

    def cost(self, problem: LinearProblem, multiprocessors: int) -> float:
        """Estimate the clocks of the busiest SM; only the order matters.

        128 multiply-adds per clock, of which larger thread tiles reach more, and a single CTA of 256 threads half.
        Filling the pipeline costs as much as 64 of k, adding up splits as much as a launch and their traffic.
        """
        per_thread = self.thread_rows * self.thread_outputs
        efficiency = {16: 0.5, 32: 0.65, 64: 0.8}[per_thread]
        rounds = ceil_div(self.tiles(problem) * self.splits, multiprocessors)
        busy = min(1.0, 0.25 + min(rounds, 4) * self.threads / 1024)
        depth = ceil_div(problem.in_features, self.splits) + 64
        traffic = self.splits * problem.output_elements * 8 / 2500
        return rounds * depth * self.rows * self.outputs / (128 * efficiency * busy) + (
            3000 + traffic if self.splits > 1 else 0
        )


TILE_DEPTH = 16
TILES = (
    TiledConfig(128, 128, 8, 8),
    TiledConfig(128, 64, 8, 4),
    TiledConfig(128, 32, 8, 4),
    TiledConfig(64, 64, 4, 4),
    TiledConfig(64, 32, 4, 4),
    TiledConfig(32, 64, 4, 4),
    TiledConfig(32, 32, 4, 4),
)


@dataclass(frozen=True)
class Tiled(Rung[LinearProblem, TiledConfig]):
    def supports(self, problem: LinearProblem) -> str | None:
        return refuses_pixels(self.name, problem)

    def configs(self, problem: LinearProblem) -> tuple[TiledConfig, ...]:
        offered, multiprocessors = list(TILES), self.card.multiprocessors
        for config in TILES:
            most = min(
                4 * multiprocessors // config.tiles(problem), problem.in_features // (4 * TILE_DEPTH), 32
            )
            offered += [replace(config, splits=splits) for splits in {most, most // 2} if splits > 1]
        return tuple(sorted(offered, key=lambda config: config.cost(problem, multiprocessors))[:12])

    def recipe(self, problem: LinearProblem, config: TiledConfig) -> Recipe:
        p, whole = problem, config.splits == 1
        finished = p if whole else replace(p, bias=False, relu=False, activation="")
        program = Program.of(
            "linear/tiled.cu",
            constants=activation.constants_of(finished),
            problem=finished,
            config=config,
            vector=widest_vector(p.dtype, p.in_features),
            tile_depth=TILE_DEPTH,
        )
        product = kernel_call(
            program,
            (config.tiles(p), config.splits),
            config.threads,
            *launch_arguments(p, "y" if whole else "parts"),
        )
        if whole:
            return Recipe((product,))
        parts = Workspace("parts", config.splits * p.output_elements * 4)
        return Recipe((product, _sum_parts(p, config.splits)), (parts,))


def _sum_parts(problem: LinearProblem, splits: int) -> KernelCall:
    p = problem
    width = widest_vector("fp32", p.out_features)
    return kernel_call(
        Program.of(
            "linear/tiled_sum_parts.cu", constants=activation.constants_of(p), problem=p, width=width,
            splits=splits,
        ),
        ceil_div(p.output_elements // width, 128),
        128,
        Buffer("parts"), Buffer("bias", optional=True), Buffer("y"), p.out_features, Int64(p.output_elements),
    )  # fmt: skip


@dataclass(frozen=True)
class WarpConfig(Config):
    rows: int
    """Rows of x per warp."""
    outputs: int
    """Output features per warp."""
    stages: int
    """Stages of the ring, in packs of a row of weights."""
    output_warps: int
    """Warps per CTA along the outputs."""
    depth_warps: int
    """Warps per CTA along k."""

    def warps(self, problem: LinearProblem) -> int:
        groups = ceil_div(problem.batch, self.rows) * ceil_div(problem.out_features, self.outputs)
        return groups * self.depth_warps


MOST_ROWS = 64
"""Largest number of rows; every eight of them read the weights again."""
ENOUGH_WARPS = 24
"""Warps per SM that keep memory busy."""
_OUTPUTS = {1: (1, 2), 2: (2, 1), 4: (4, 2), 8: (4, 2)}
"""Outputs per warp, by its rows: more rows should share loads of x among more outputs."""
_STAGES = {1: 8, 2: 6, 4: 4}
"""Stages, by outputs per warp: the rings of 8 warps take 32 to 64 KiB, so that several CTAs share an SM."""


@dataclass(frozen=True)
class WarpPerOutput(Rung[LinearProblem, WarpConfig]):
    def supports(self, problem: LinearProblem) -> str | None:
        if problem.batch > MOST_ROWS:
            return f"{self.name} takes up to {MOST_ROWS} rows, not {problem.batch}: every eight read the weights again"
        return refuses_pixels(self.name, problem)

    def configs(self, problem: LinearProblem) -> tuple[WarpConfig, ...]:
        rows = next((count for count in (1, 2, 4) if problem.batch <= count), 8)
        offered = []
        for outputs in _OUTPUTS[rows]:
            for stages in (_STAGES[outputs], _STAGES[outputs] // 2 + 1):
                fitted = _fitted(problem, WarpConfig(rows, outputs, stages, 8, 1), self.card)
                offered += [fitted, *_variations(fitted)]
        return tuple(dict.fromkeys(offered))

    def recipe(self, problem: LinearProblem, config: WarpConfig) -> Recipe:
        width = widest_vector(problem.dtype, problem.in_features)
        warps = config.output_warps * config.depth_warps
        return launch(
            Program.of(
                "linear/warp_per_output.cu", constants=activation.constants_of(problem), problem=problem,
                width=width, config=config, warps=warps,
            ),
            (
                ceil_div(problem.out_features, config.outputs * config.output_warps),
                ceil_div(problem.batch, config.rows),
            ),
            warps * 32,
            *launch_arguments(problem), WeightsReady(("weight", "bias")),
            shared_bytes=warps * config.stages * config.outputs * 32 * width * ELEMENT_BYTES[problem.dtype],
        )  # fmt: skip


def _fitted(problem: LinearProblem, config: WarpConfig, card: Card) -> WarpConfig:
    """Split k among enough warps to fill the card, as long as each fills its ring."""
    packs = problem.in_features // widest_vector(problem.dtype, problem.in_features)
    while (
        config.depth_warps < 8
        and config.warps(problem) < ENOUGH_WARPS * card.multiprocessors
        and packs > 32 * config.stages * config.depth_warps
    ):
        config = replace(config, output_warps=config.output_warps // 2, depth_warps=2 * config.depth_warps)
    each = ceil_div(packs, 32 * config.depth_warps)
    return replace(config, stages=max(2, min(config.stages, each + 1)))


def _variations(config: WarpConfig) -> list[WarpConfig]:
    """Return configs with half the warps per CTA, and other splits between outputs and k."""
    half = replace(config, output_warps=max(1, config.output_warps // 2))
    deeper = replace(half, depth_warps=2 * config.depth_warps)
    return [other for other in (half, deeper) if other.output_warps * other.depth_warps <= 8]


# Predictions are for 25088to4096 in fp16 (206 MB of weights): batch 32 for `tiled`, batch 1 for `warp_per_output`.
NAIVE = Naive("naive", "one thread per output, everything read from global memory", None, None)
TILED = Tiled(
    "tiled",
    "tiles of x and of the weights in shared memory, up to 64 outputs in a thread's registers; split-K where tiles are "
    "few",
    below="naive",
    # naive: 3.3 G multiply-adds with a 32-sector load each, 0.5 M warp requests per microsecond at best: about 6 ms;
    # tiled: 6.6 GFLOP at 25 TFLOP/s, 0.26 ms.
    predicted_gain=20.0,
)
WARP_PER_OUTPUT = WarpPerOutput(
    "warp_per_output",
    "for a few rows: each warp streams rows of weights through a ring of asynchronous copies, 16 bytes per lane, and "
    "reduces by shuffles",
    below="tiled",
    # 206 MB at 3.6 TB/s, 57 us; tiled multiplies 32 rows of which 31 are padding, at 25 TFLOP/s: 260 us.
    predicted_gain=4.5,
)


# --- rungs on tensor cores


@dataclass(frozen=True)
class StreamConfig(Config):
    output_tiles: int
    """16 outputs each, per CTA."""
    units: int
    """Pieces of k per warp that are loaded together."""
    warps: int
    """Warps per CTA, along k."""
    evict_first: bool
    """True if weights are the first to leave L2."""


MOST_STREAMED_ROWS = 32
"""Largest number of rows; every CTA reads all of them."""
LEAST_STREAMED = 1 << 22
"""Fewest weights for which streaming them takes longer than a launch and one round trip."""
_STREAMED_OUTPUTS = 2048
"""Fewest outputs that give every SM a CTA."""
_SM_WARPS = 16
"""Warps per SM at 128 registers per thread."""


class Streamed(Rung[LinearProblem, StreamConfig]):
    def supports(self, problem: LinearProblem) -> str | None:
        if problem.dtype not in ("fp16", "bf16"):
            return f"{self.name} supports fp16 and bf16, not {problem.dtype}"
        if problem.batch > MOST_STREAMED_ROWS:
            return (
                f"{self.name} takes up to {MOST_STREAMED_ROWS} rows, not {problem.batch}: every CTA reads all"
            )
        if problem.in_features % full_vector(problem.dtype):
            return (
                f"{self.name} loads 16 bytes, and needs a multiple of 8 features, not {problem.in_features}"
            )
        return refuses_pixels(self.name, problem)

    def configs(self, problem: LinearProblem) -> tuple[StreamConfig, ...]:
        """Default to 32 outputs per CTA if several tiles of rows are read less often so and all SMs have work."""
        weight_bytes = problem.in_features * problem.out_features * ELEMENT_BYTES[problem.dtype]
        is_kept = (
            weight_bytes <= self.card.l2_bytes // 2
        )  # the other half of L2 has copies for the other partition
        wide = (
            _row_tiles(problem) > 1 and ceil_div(problem.out_features, 32) >= 0.9 * self.card.multiprocessors
        )
        tiles = (2, 1) if wide else (1, 2)
        units = (2, 1) if _row_tiles(problem) <= 2 else (1, 2)
        return tuple(
            StreamConfig(some, together, 8, evict_first)
            for evict_first in (not is_kept, is_kept)
            for some in tiles
            for together in units
        )

    def recipe(self, problem: LinearProblem, config: StreamConfig) -> Recipe:
        return launch(
            Program.of(
                "linear/streamed.cu", constants=activation.constants_of(problem), problem=problem, config=config,
                row_tiles=_row_tiles(problem), blocks_per_sm=_SM_WARPS // config.warps,
            ),
            ceil_div(problem.out_features, 16 * config.output_tiles),
            config.warps * 32,
            *launch_arguments(problem), WeightsReady(("weight", "bias")),
        )  # fmt: skip


def _row_tiles(problem: LinearProblem) -> int:
    """Return the columns of products, eight rows of x each."""
    return ceil_div(problem.batch, 8)


def as_convolution(problem: LinearProblem) -> Conv2dProblem:
    """Return the layer as a convolution of one-pixel images, over the same buffers."""
    return Conv2dProblem(
        problem.batch, problem.in_features, 1, 1, problem.out_features, 1, 1,
        dtype=problem.dtype, layout="nhwc", bias=problem.bias, relu=problem.relu, activation=problem.activation,
    )  # fmt: skip


@dataclass(frozen=True)
class AsPointwiseConvolution(Rung[LinearProblem]):
    convolution: str
    """Name of the rung of conv2d."""

    @property
    def _rung(self) -> Rung[Conv2dProblem]:
        return Conv2dOperation.ladder.rung(self.convolution).on(self.card)

    @property
    def architectures(self) -> tuple[str, ...]:
        return self._rung.architectures

    def supports(self, problem: LinearProblem) -> str | None:
        if problem.pixels > 1:
            return refuses_pixels(self.name, problem)
        try:
            refusal = self._rung.supports(as_convolution(problem))
        except UnsupportedError as error:
            refusal = str(error)
        return refusal and f"as a 1x1 convolution, {refusal}"

    def configs(self, problem: LinearProblem) -> tuple[Config, ...]:
        return self._rung.configs(as_convolution(problem))

    def recipe(self, problem: LinearProblem, config: Config) -> Recipe:
        return self._rung.recipe(as_convolution(problem), config)

    def tolerance(self, problem: LinearProblem, peer_error: float) -> float:
        return self._rung.tolerance(as_convolution(problem), peer_error)


STREAMED = Streamed(
    "streamed",
    "for a few rows: mma.sync with weights and rows straight from global memory to registers, k split among warps",
    below="warp_per_output",
    # 4096to4096 at batch 16 in fp16: 34 MB at 4.2 TB/s, 8 us. warp_per_output reads them twice, and takes 24
    # instructions for 16 bytes of weights and a row of x.
    predicted_gain=2.0,
)

# Predictions are for 25088to4096 at batch 32, 6.6 GFLOP and 206 MB of fp16 weights.
TENSOR_CORE = AsPointwiseConvolution(
    "tensor_core",
    "products by mma.sync in fp16, bf16 or TF32, as a 1x1 convolution over the rows: conv2d's fused_epilogue",
    below="tiled",
    # The weights at 2.8 TB/s, 75 us, plus the split-K reduction, 10 us, against 260 us.
    predicted_gain=3.0,
    convolution="fused_epilogue",
)
TENSOR_CORE_SPLIT = AsPointwiseConvolution(
    "tensor_core_split",
    "fp32 accuracy on tensor cores, as a 1x1 convolution over the rows: conv2d's tensor_core_split",
    below="tiled",
    # 411 MB of fp32 weights at 2.8 TB/s, 147 us, against 280 us.
    predicted_gain=1.9,
    convolution="tensor_core_split",
)


# --- rungs with the mean over an image in front


FEW_ROWS = {"fp32": 16, "tf32": 8, "fp16": 8, "bf16": 8}
"""Up to this many rows, reading the weights takes longer than the products of one warp per output."""
_MEAN = AdaptiveAvgPool2dOperation.ladder.rung("vectorised")


def plain_rungs(problem: LinearProblem) -> tuple[Rung[LinearProblem], ...]:
    """Return the rungs without pooling, fastest expected first. Split products are omitted: they turn an infinity into
    NaN."""
    few = (WARP_PER_OUTPUT,) if problem.batch <= FEW_ROWS[problem.dtype] else ()
    is_stream = problem.out_features >= _STREAMED_OUTPUTS
    is_stream &= problem.in_features * problem.out_features >= LEAST_STREAMED
    return (*((STREAMED,) if is_stream else ()), *few, TENSOR_CORE, TILED)


def _pooling(problem: LinearProblem) -> AdaptiveAvgPool2dProblem:
    """Return the mean of images of `pixels` rows and one column: the same memory as x."""
    p, stored = problem, NAMES[STORAGE[problem.dtype]]
    return AdaptiveAvgPool2dProblem(
        p.batch, p.in_features, p.pixels, 1, dtype=stored, layout="nhwc", x_dtype=p.x_dtype
    )


@dataclass(frozen=True)
class PoolFirst(Rung[LinearProblem]):
    def supports(self, problem: LinearProblem) -> str | None:
        if problem.pixels == 1:
            return f"{self.name} needs several pixels; this problem has one"
        try:
            return _MEAN.on(self.card).refusal(_pooling(problem))
        except UnsupportedError as error:
            return f"as a pooling: {error}"

    def configs(self, problem: LinearProblem) -> tuple[Config, ...]:
        """Return the configs of the layer; the mean uses its default."""
        rung, plain = self._layer(problem)
        return rung.configs(plain)

    def recipe(self, problem: LinearProblem, config: Config) -> Recipe:
        rung, plain = self._layer(problem)
        pooling = _MEAN.on(self.card)
        mean = pooling.recipe(_pooling(problem), pooling.configs(_pooling(problem))[0]).remap(
            {"y": Buffer("means")}
        )
        layer = rung.recipe(plain, config).remap({"x": Buffer("means")})
        bytes = plain.input_elements * ELEMENT_BYTES[plain.dtype]
        return Recipe((*mean.steps, *layer.steps), (Workspace("means", bytes), *layer.workspaces))

    def tolerance(self, problem: LinearProblem, peer_error: float) -> float:
        rung, _ = self._layer(problem)
        return rung.tolerance(problem, peer_error)

    def _layer(self, problem: LinearProblem) -> tuple[Rung[LinearProblem], LinearProblem]:
        plain = replace(problem, pixels=1, x_dtype="")
        rungs = (rung.on(self.card) for rung in plain_rungs(plain))
        return next(rung for rung in rungs if rung.supports(plain) is None), plain


@dataclass(frozen=True)
class PooledConfig(Config):
    threads: int
    outputs: int
    """Output features per warp."""

    def blocks(self, problem: LinearProblem) -> int:
        return ceil_div(problem.out_features, self.threads // 32 * self.outputs)


MOST_POOLED_ROWS = 4
MOST_PACKS = 16
"""Largest number of weight packs per lane in registers, 64 registers at 16 bytes each; half with two outputs."""
MOST_GROUPS = 16
"""Largest number of threads per feature, whose sums are added up serially."""
AHEAD_OF_BLOCK = 4096
"""Loads in flight per CTA, up to 16 bytes each: a quarter of the register file."""
SM_BYTES = 64
"""Bytes per clock and SM."""
LANES = 128
"""Thread instructions issued per clock and SM."""
POOLED_CONFIGS = (PooledConfig(512, 1), PooledConfig(256, 1), PooledConfig(512, 2), PooledConfig(256, 2))
"""16 warps first: 1000 outputs are then 63 CTAs, which read x half as often as 125 and are few enough to launch
early."""


class Pooled(Rung[LinearProblem, PooledConfig]):
    def supports(self, problem: LinearProblem) -> str | None:
        if problem.pixels == 1:
            return f"{self.name} needs several pixels; this problem has one"
        if problem.batch > MOST_POOLED_ROWS:
            return f"{self.name} takes up to {MOST_POOLED_ROWS} rows, not {problem.batch}: every CTA reads all of x"
        if _packs(problem) > MOST_PACKS:
            return (
                f"{self.name} keeps a row of weights in a warp's registers; {problem.in_features} features in vectors "
                f"of {_vector(problem)} do not fit"
            )
        return refuses_bytes(self, problem.x_dtype, problem.in_features)

    def configs(self, problem: LinearProblem) -> tuple[PooledConfig, ...]:
        return tuple(config for config in POOLED_CONFIGS if config.outputs**2 * _packs(problem) <= MOST_PACKS)

    def recipe(self, problem: LinearProblem, config: PooledConfig) -> Recipe:
        p, vector = problem, _vector(problem)
        groups = max(1, min(config.threads * vector // p.in_features, p.pixels, MOST_GROUPS))
        return launch(
            Program.of(
                "linear/pooled.cu", constants=activation.constants_of(p), problem=p, config=config, vector=vector,
                groups=groups, ahead=min(p.pixels // groups, AHEAD_OF_BLOCK // config.threads),
            ),
            config.blocks(p),
            config.threads,
            Buffer("x"), Buffer("weight"), Buffer("bias", optional=True), Buffer("y"), p.out_features,
            WeightsReady(("weight", "bias")), SCALE,
            shared_bytes=p.batch * p.in_features * (groups * 4 + ELEMENT_BYTES[p.dtype]),
        )  # fmt: skip


def _vector(problem: LinearProblem) -> int:
    return widest_vector(problem.dtype, problem.in_features)


def _packs(problem: LinearProblem) -> int:
    """Return the packs per lane of a row of weights."""
    return ceil_div(problem.in_features, 32 * _vector(problem))


def one_launch_pays(problem: LinearProblem, card: Card = TWIN) -> bool:
    """Return True if reading all of x in every CTA takes less time than the launch that is saved.

    Graphs are built before their card is known, with an H200's rates. ResNet-18's 512 channels of 7x7 in fp16 are 50
    KB: 63 CTAs read 3.2 MB in 0.45 us from L2, and one SM takes as long for its 50 KB; converting and adding 25,088
    values takes 390 clocks, 0.22 us. That is less than a launch's 1.5 us for up to two images. ResNet-50's 2048
    channels take 2.7 us for one.
    """
    if POOLED.supports(problem) is not None:
        return False
    rates = card.rates
    x = problem.input_elements * ELEMENT_BYTES[problem.stored]
    reading = max(x / (SM_BYTES * rates.clock), POOLED_CONFIGS[0].blocks(problem) * x / rates.l2)
    instructions = problem.input_elements * (1 if ELEMENT_BYTES[problem.dtype] == 4 else 2)
    return reading + instructions / (LANES * rates.clock) < rates.launch_us


# Predictions are for 512to1000_mean49 at batch 1 in fp16: 50 KB of x, 1 MB of weights.
POOL_FIRST = PoolFirst(
    "pool_first",
    "the mean over pixels by adaptive_avg_pool2d's vectorised, and the layer's own rung behind it: two launches",
    below="naive",
    # naive: 25088 serial loads of x per thread, some 10 clocks each, 150 us; here 2.0 and 1.9 us.
    predicted_gain=40.0,
)
POOLED = Pooled(
    "pooled",
    "for a few rows, mean and layer in one launch: every CTA computes the means of all features, with its weights "
    "already in registers",
    below="pool_first",
    # A launch with one round trip, 1.6 us, x to 63 CTAs, 0.45 us, and its sums, 0.22 us, against 3.9 us.
    predicted_gain=1.7,
)


# --- the operation


class LinearOperation(Operation[LinearProblem]):
    name = "linear"
    problem = LinearProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder(
        "linear",
        (
            NAIVE,
            TILED,
            WARP_PER_OUTPUT,
            STREAMED,
            TENSOR_CORE,
            TENSOR_CORE_SPLIT,
            POOL_FIRST,
            POOLED,
        ),
    )
    problems = (
        *(LinearProblem(batch, 512, 1000, bias=True) for batch in (1, 8, 32, 256)),
        *(LinearProblem(batch, 25088, 4096, bias=True, relu=True) for batch in (1, 32)),
        LinearProblem(10_000, 1296, 32, bias=True, relu=True),
        *(LinearProblem(batch, 512, 1000, bias=True, pixels=49) for batch in (1, 2, 4)),
        LinearProblem(1, 2048, 1000, bias=True, pixels=49),
    )
    """The heads of ResNet and VGG, the first layer of a small autoencoder, and ResNet's heads with the mean."""
    small_problems = (
        LinearProblem(1, 64, 40, bias=True),
        LinearProblem(3, 520, 33, bias=True, relu=True),
        LinearProblem(8, 36, 20),
        LinearProblem(13, 130, 9, relu=True),
        LinearProblem(2, 2056, 5, bias=True),
        LinearProblem(19, 1096, 37, bias=True, relu=True),
        LinearProblem(37, 48, 68, bias=True),
        LinearProblem(70, 31, 130, relu=True),
        LinearProblem(1, 1, 1),
        LinearProblem(1, 64, 40, bias=True, pixels=49),
        LinearProblem(3, 200, 33, bias=True, relu=True, pixels=35),
        LinearProblem(4, 31, 17, relu=True, pixels=2),
        LinearProblem(1, 1040, 3, bias=True, pixels=29),
        LinearProblem(18, 40, 9, bias=True, pixels=4),
        *(LinearProblem(2, 208, 19, bias=True, pixels=35, x_dtype=x_dtype) for x_dtype in QUANTIZED),
    )
    """Tested on the twin: a single row and several CTAs, odd feature counts, k in one piece and split; means over two
    pixels and over more than are loaded at once, of more features than a CTA has threads and of more rows than one
    launch takes."""
    dtypes = MULTIPLIED
    layouts = LAYOUTS

    def preferred(self, problem: LinearProblem) -> tuple[str, ...]:
        if problem.pixels > 1:
            both = ("pool_first", "naive")
            return ("pooled", *both) if one_launch_pays(problem) else both
        return tuple(rung.name for rung in plain_rungs(problem))


LINEAR = LinearOperation()


# --- the PyTorch operator


def _plan(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    relu: bool = False,
    tf32: bool = False,
    rung: str | None = None,
) -> CallPlan:
    features = weight.shape[0]
    return CallPlan(
        LINEAR,
        lambda: rows.empty_like(x, features),
        lambda: LinearProblem(*rows.sizes(x), features, bias is not None, relu, multiplied_as(x, tf32)),
    )


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    relu: bool = False,
    tf32: bool = False,
    rung: str | None = None,
) -> torch.Tensor:
    """Return relu(x @ weight.T + bias); bias and relu are optional, x has any leading dimensions.

    `tf32` allows TF32 products for fp32 tensors; `rung` selects a rung of the ladder by name.
    """
    return OPERATOR(x, weight, bias, relu, tf32, rung)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, relu = inputs[:4]
    ctx.save_for_backward(x, weight, output if relu else None)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Differentiate with PyTorch's own products; there are only forward kernels."""
    x, weight, output = ctx.saved_tensors
    if output is not None:
        gradient = torch.ops.aten.threshold_backward(gradient, output, 0)
    # Trailing arguments left at their defaults are omitted here too.
    need_x, need_weight, need_bias = (*ctx.needs_input_grad, False)[:3]
    flat = gradient.reshape(-1, gradient.shape[-1])
    return (
        gradient @ weight if need_x else None,
        flat.mT @ x.reshape(-1, x.shape[-1]) if need_weight else None,
        flat.sum(0) if ctx.has_bias and need_bias else None,
        None,
        None,
        None,
    )


OPERATOR = define_planned(
    "linear", _plan, "x: ... I, weight: O I, bias: O", setup=_setup, backward=_backward, autocast=True
)
