"""Convolution as a matrix product: from three launches over an im2col matrix to a single fused one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from escalade.device.program import Program, Type
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.ops.base.accuracy import tf32_tolerance
from escalade.ops.base.dtypes import ELEMENT_BYTES, element
from escalade.ops.base.grid import blocks
from escalade.ops.base.launch import kernel_call
from escalade.ops.base.rung import Config, Rung
from escalade.ops.few_channels import cuda_core
from escalade.ops.few_channels.problem import FewChannelsProblem

_THREADS = 256
_TILE = 16
"""Filters per CTA of all these products, and pixels per CTA of the textbook product."""
_MMA_PIXELS, _MMA_THREADS = 64, 128
"""Pixels and threads per CTA of kernels/few_channels/matrix_tiles.cuh."""
_TF32 = Type("float")
"""Storage type of TF32 operands."""


@dataclass(frozen=True)
class ChunksConfig(Config):
    chunks: int = 1
    """Chunks of images; adjacent ones overlap in time."""


@dataclass(frozen=True)
class Unrolled(Rung[FewChannelsProblem, ChunksConfig]):
    """The three steps, for all images at once or for chunks of them in two lanes."""

    in_chunks: bool = False
    tensor_cores: bool = False

    def supports(self, problem: FewChannelsProblem) -> str | None:
        if self.tensor_cores and problem.dtype == "fp32":
            return _no_fp32(self.name)
        if _pixels(problem) >= 2**31 * _TILE:
            return f"{self.name} counts tiles of {_TILE} output pixels in 32 bits, too few for {problem.name}"
        return None

    def tolerance(self, problem: FewChannelsProblem, peer_error: float) -> float:
        products = problem.conv_elements * problem.channels * problem.taps
        return tf32_tolerance(problem.dtype, products, super().tolerance(problem, peer_error))

    def configs(self, problem: FewChannelsProblem) -> tuple[ChunksConfig, ...]:
        if not self.in_chunks:
            return (ChunksConfig(),)
        most = max(1, problem.batch)
        return tuple(dict.fromkeys(ChunksConfig(min(chunks, most)) for chunks in (32, 16, 64, 96)))

    def recipe(self, problem: FewChannelsProblem, config: ChunksConfig) -> Recipe:
        images = blocks(problem.batch, config.chunks)
        steps: list[KernelCall] = []
        workspaces: dict[str, Workspace] = {}
        for number, first in enumerate(range(0, max(1, problem.batch), images)):
            chunk = replace(problem, batch=min(images, problem.batch - first))
            lane = number % 2
            steps += self._steps(problem, chunk, first, lane)
            workspaces |= {each.name: each for each in _workspaces(replace(problem, batch=images), lane)}
        return Recipe(tuple(steps), tuple(workspaces.values()))

    def _steps(
        self, problem: FewChannelsProblem, chunk: FewChannelsProblem, first: int, lane: int
    ) -> list[KernelCall]:
        """Return the launches for a chunk of images that starts at image `first`."""
        p = chunk
        x = first * p.channels * p.pixels * ELEMENT_BYTES[p.x_type]
        y = first * p.filters * p.output_height * p.output_width * ELEMENT_BYTES[p.storage]
        columns, product, unfinished = (Buffer(f"{name}{lane}") for name in _NAMES)
        apart = cuda_core.needs_finish(problem)
        threads = (_THREADS, 1, 1)
        steps = [
            KernelCall(
                Program.of("few_channels/matrix_unroll.cu", problem=p),
                (blocks(_pixels(p) * p.channels, _THREADS), 1, 1),
                threads,
                (Buffer("x", x), columns, cuda_core.shape(p)),
                overlap=True,
                lane=lane,
            ),
            self._product(p, columns, product, lane),
            KernelCall(
                Program.of("few_channels/matrix_permute.cu", problem=p),
                (blocks(p.conv_elements, _THREADS), 1, 1),
                threads,
                (
                    product, Buffer("bias", optional=True), unfinished if apart else Buffer("y", y),
                    cuda_core.shape(p),
                ),
                overlap=True,
                lane=lane,
            ),
        ]  # fmt: skip
        return [*steps, cuda_core.finish(p, unfinished.name, y, lane)] if apart else steps

    def _product(
        self, problem: FewChannelsProblem, columns: Buffer, product: Buffer, lane: int
    ) -> KernelCall:
        p = problem
        if self.tensor_cores:
            source, width, threads = "matrix_product_mma", _MMA_PIXELS, _MMA_THREADS
        else:
            source, width, threads = "matrix_product", _TILE, _TILE * _TILE
        return kernel_call(
            Program.of(f"few_channels/{source}.cu", problem=p, product=_TF32, unroll=1),
            (blocks(_pixels(p), width), blocks(p.filters, _TILE)),
            threads,
            Buffer("weight"), columns, product, p.filters, Int64(_pixels(p)), p.channels * p.taps,
            lane=lane,
        )  # fmt: skip


@dataclass(frozen=True)
class FusedConfig(Config):
    """Config without choices."""


@dataclass(frozen=True)
class Fused(Rung[FewChannelsProblem]):
    """One launch; the im2col matrix exists in shared memory only."""

    restrict: bool = False
    unrolled: bool = False
    half: bool = False

    def supports(self, problem: FewChannelsProblem) -> str | None:
        if self.half and problem.dtype not in ("fp16", "bf16"):
            return f"{self.name} multiplies 16-bit operands, fp16 or bf16, not {problem.dtype}"
        if problem.dtype == "fp32":
            return _no_fp32(self.name)
        if _pixels(problem) >= 2**31 * _MMA_PIXELS:
            return f"{self.name} counts tiles of {_MMA_PIXELS} output pixels in 32 bits, too few for {problem.name}"
        return None

    def tolerance(self, problem: FewChannelsProblem, peer_error: float) -> float:
        products = problem.conv_elements * problem.channels * problem.taps
        return tf32_tolerance(problem.dtype, products, super().tolerance(problem, peer_error))

    def configs(self, problem: FewChannelsProblem) -> tuple[Config, ...]:
        return (FusedConfig(),)

    def recipe(self, problem: FewChannelsProblem, config: Config) -> Recipe:
        p = problem
        program = Program.of(
            "few_channels/matrix_fused.cu",
            problem=p,
            rung=self,
            product=element(p.storage) if self.half else _TF32,
            unroll=_UNROLL if self.unrolled else 1,
        )
        target = Buffer("unfinished" if cuda_core.needs_finish(p) else "y")
        call = kernel_call(
            program,
            (blocks(_pixels(p), _MMA_PIXELS), blocks(p.filters, _TILE)),
            _MMA_THREADS,
            *cuda_core.tensors(target), cuda_core.shape(p),
        )  # fmt: skip
        return cuda_core.then_finish(p, (call,))


_UNROLL = 16
_NAMES = ("columns", "product", "unfinished")


def _no_fp32(name: str) -> str:
    return f"{name} multiplies on tensor cores in tf32, fp16 or bf16, not fp32; `streams` takes fp32"


def _pixels(problem: FewChannelsProblem) -> int:
    return problem.batch * problem.conv_height * problem.conv_width


def _workspaces(problem: FewChannelsProblem, lane: int) -> tuple[Workspace, ...]:
    p = problem
    columns, product, unfinished = (f"{name}{lane}" for name in _NAMES)
    needed = (
        Workspace(columns, max(1, _pixels(p) * p.channels * p.taps * ELEMENT_BYTES[p.storage])),
        Workspace(product, max(1, p.conv_elements * 4)),
    )
    return (*needed, cuda_core.unfinished(p, unfinished)) if cuda_core.needs_finish(p) else needed


# Predictions are for 4to16_40_k7_b10000: 36 G multiply-adds, whose matrix has 2.3 G values.
RUNGS: tuple[Rung[FewChannelsProblem], ...] = (
    Unrolled("matrix_unroll", "unrolled into a matrix, a tiled product, and a permutation", None, None),
    Unrolled(
        "streams",
        "chunks of images in two streams: im2col of one overlaps the product of another",
        below="matrix_unroll",
        # 9 GB written and read (4.3 ms), and the product at 3 TFLOP/s (24 ms): the longer part hides the shorter.
        predicted_gain=1.15,
        in_chunks=True,
    ),
    Unrolled(
        "tensor_cores",
        "the product by mma.sync on operands rounded to TF32",
        below="streams",
        # The product no longer takes 24 ms, but as long as its loads: 2.3 G values at 10 instructions, 1 ms, and their
        # unhidden latency: 4 ms; writing and reading the matrix, 4.3 ms, stays.
        predicted_gain=3.5,
        in_chunks=True,
        tensor_cores=True,
    ),
    Fused(
        "fusion",
        "im2col, product and permutation in one kernel: the matrix exists in shared memory only, one tile at a time",
        below="tensor_cores",
        # 9 GB less each way, but every address takes divisions: 2.3 G times 60 instructions are 5 ms.
        predicted_gain=1.4,
    ),
    Fused(
        "restrict",
        "pointers are declared __restrict__",
        below="fusion",
        # The barriers already separate loads and stores of a tile.
        predicted_gain=1.0,
        restrict=True,
    ),
    Fused(
        "unrolling",
        "filter sizes are compile-time constants, and the loops over a tile are unrolled",
        below="restrict",
        # Divisions by constants are multiplications, 25 instructions instead of 60, and all loads of a tile are in
        # flight together.
        predicted_gain=2.0,
        restrict=True,
        unrolled=True,
    ),
    Fused(
        "half",
        "operands in 16 bits and m16n8k16: half the words, half the products",
        below="unrolling",
        # The gather, which bounds it, stays; stores and barriers are halved.
        predicted_gain=1.15,
        restrict=True,
        unrolled=True,
        half=True,
    ),
)
