"""Winograd's minimal filtering for 3x3 filters: 2.25 (2x2 tiles) or 4 times (4x4) fewer multiplications.

Every rung transforms patches of x (V) and the filters (U), multiplies them pointwise, and transforms the products (M)
into tiles of y. A NaN or Inf in x spoils every tile whose patch contains it; a direct convolution would confine it to
the outputs whose filter covers it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Ints, KernelCall, Recipe
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import C
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.rung import Conv2dRung
from escalade.ops.conv2d.rungs.winograd_config import (
    INPUTS,
    PRODUCTS,
    WEIGHTS,
    Chunk,
    FusedConfig,
    StagedConfig,
    Tiles,
    TransformStages,
    gemm,
)
from escalade.ops.shared import activation

ROUNDING = {2: 1.0, 4: 2.5}
"""Factor on the fp32 rounding of a direct sum, by tile: the transforms add and subtract values larger than the result.
With 4x4 outputs errors are 1.3 to 2.1 times a direct sum's rounding from 64 channels on, and up to 2.8 times for a few,
whose sums round little."""

PRODUCT_RATE = 45e6
"""FLOPs per microsecond of the matrix products, measured on an H200."""
SPLIT_RATE = 60e6
"""FLOPs per microsecond of the matrix products by three TF32 products each, measured on an H200."""
STAGE_US = 4.0
"""Microseconds to start and end a stage: a third of the time of one image."""


@dataclass(frozen=True)
class Winograd(Conv2dRung[C]):
    """Base class: supported problems, and the filter transform."""

    dtypes: tuple[str, ...] = field(default=("fp32", "fp16", "bf16"), kw_only=True)  # with fp32 accuracy
    tile: int

    def limits(self, problem: Conv2dProblem) -> str | None:
        p = problem
        if ((p.filter_height, p.filter_width), p.stride, p.dilation) != ((3, 3), (1, 1), (1, 1)):
            return f"{self.name} takes 3x3 filters with stride 1 and dilation 1, not {p.name}"
        return None

    def tolerance(self, problem: Conv2dProblem, peer_error: float) -> float:
        return max(super().tolerance(problem, peer_error), 2 * ROUNDING[self.tile] * problem.rounding)

    def _filter_transform(self, problem: Conv2dProblem, channels_inside: bool) -> KernelCall:
        tiles = Tiles.of(problem, self.tile)
        return KernelCall(
            Program.of(
                "conv2d/winograd_filter.cu", problem=problem, tile=self.tile, channels_inside=channels_inside
            ),
            (ceil_div(tiles.channels * tiles.filters, 128), 1, 1),
            (128, 1, 1),
            (Buffer("weight"), Buffer(WEIGHTS), arguments.shape(problem)),
            weights_only=True,
            overlap=True,
        )


@dataclass(frozen=True)
class Staged(Winograd[StagedConfig]):
    """Three launches per chunk of tiles: transform the inputs, multiply, transform the products."""

    split: bool = False
    chunk_megabytes: tuple[int, ...] = (1024,)
    stage_threads = 128

    def configs(self, problem: Conv2dProblem) -> tuple[StagedConfig, ...]:
        block_filters: tuple[int, ...] = (64,)
        if problem.filters > 64:  # a split product has registers for three CTAs of 64, but one of 128
            block_filters = (64, 128) if self.split else (128, 64)
        return tuple(
            StagedConfig(
                split=self.split, block_filters=f, vector=vector, chunk_megabytes=megabytes, stages=stages
            )
            for vector in (2, 4)
            for stages in (3, 4)
            for f in block_filters
            for megabytes in self.chunk_megabytes
        )

    def estimate(self, problem: Conv2dProblem, config: StagedConfig) -> float:
        """Sum of the three stages: x read and V written, V read and M written, M read and y written."""
        tiles = Tiles.of(problem, self.tile)
        inputs = 4 * tiles.points * tiles.count * tiles.channels
        products = 4 * tiles.points * tiles.count * tiles.filters
        x = problem.input_elements * problem.element_bytes
        rate = (SPLIT_RATE if config.split else PRODUCT_RATE) * self.card.speed
        whole_tiles = ceil_div(tiles.count, config.block_tiles) * config.block_tiles
        whole_filters = ceil_div(tiles.filters, config.block_filters) * config.block_filters
        multiplied = 2 * tiles.points * whole_tiles * tiles.channels * whole_filters / rate
        stages = (
            self.card.transfer_us(x + inputs)
            + max(self.card.transfer_us(inputs + products), multiplied)
            + self.card.transfer_us(problem.traffic - x + products)
        )
        return STAGE_US * len(self.recipe(problem, config).after_packing.steps) + stages

    def recipe(self, problem: Conv2dProblem, config: StagedConfig) -> Recipe:
        tiles = Tiles.of(problem, self.tile)
        chunks = tiles.chunks(config)
        steps = [self._filter_transform(problem, channels_inside=config.split)]
        for chunk in chunks:
            steps += self._chunk(problem, config, tiles, chunk)
        return Recipe(tuple(steps), tiles.workspaces(chunks[0].room, 1))

    def _chunk(
        self, problem: Conv2dProblem, config: StagedConfig, tiles: Tiles, chunk: Chunk
    ) -> tuple[KernelCall, KernelCall, KernelCall]:
        stage = TransformStages(problem, config, tiles, self.stage_threads)
        geometry = (arguments.shape(problem), tiles.grid(chunk))
        input_blocks, channel_blocks = stage.blocks(stage.input_lanes, tiles.channels, chunk.room)
        output_blocks, filter_blocks = stage.blocks(stage.output_lanes, tiles.filters, chunk.count)
        gemm_blocks, gemm_shape = gemm(config, tiles, chunk)
        return (
            KernelCall(
                stage.program("conv2d/winograd_input.cu"),
                (input_blocks, 1, 1),
                (self.stage_threads, 1, 1),
                (Buffer("x"), Buffer(INPUTS), channel_blocks, *geometry),
                overlap=True,
            ),
            KernelCall(
                Program.of("conv2d/winograd_gemm.cu", config=config),
                (gemm_blocks, 1, 1),
                (config.gemm_threads, 1, 1),
                (Buffer(INPUTS), Buffer(WEIGHTS), Buffer(PRODUCTS), gemm_shape),
                shared_bytes=config.shared_bytes,
                overlap=True,
            ),
            KernelCall(
                stage.program("conv2d/winograd_output.cu"),
                (output_blocks, 1, 1),
                (self.stage_threads, 1, 1),
                (Buffer(PRODUCTS), *arguments.tensors()[2:], filter_blocks, *geometry),
                overlap=True,
            ),
        )


@dataclass(frozen=True)
class Pipelined(Staged):
    """One launch per chunk: its input transform, the products of the previous one, the outputs of the one before."""

    def recipe(self, problem: Conv2dProblem, config: StagedConfig) -> Recipe:
        tiles = Tiles.of(problem, self.tile)
        # V and M are double-buffered, so a chunk may take half.
        chunks = tiles.chunks(replace(config, chunk_megabytes=config.chunk_megabytes // 2))
        steps = [self._filter_transform(problem, channels_inside=config.split)]
        steps += [self._launch(problem, config, tiles, chunks, turn) for turn in range(len(chunks) + 2)]
        return Recipe(tuple(steps), tiles.workspaces(chunks[0].room, 2))

    def _launch(
        self,
        problem: Conv2dProblem,
        config: StagedConfig,
        tiles: Tiles,
        chunks: tuple[Chunk, ...],
        turn: int,
    ) -> KernelCall:
        def chunk(number: int) -> Chunk:
            return chunks[number] if 0 <= number < len(chunks) else Chunk()

        def half(name: str, number: int, width: int) -> Buffer:
            return Buffer(name, number % 2 * 4 * tiles.points * chunks[0].room * width)

        stage = TransformStages(problem, config, tiles, config.gemm_threads)
        next_chunk, chunk_now, last_chunk = chunk(turn), chunk(turn - 1), chunk(turn - 2)
        input_blocks, channel_blocks = stage.blocks(stage.input_lanes, tiles.channels, next_chunk.room)
        output_blocks, filter_blocks = stage.blocks(stage.output_lanes, tiles.filters, last_chunk.count)
        gemm_blocks, gemm_shape = gemm(config, tiles, chunk_now)
        return KernelCall(
            stage.program("conv2d/winograd_pipelined.cu"),
            (input_blocks + gemm_blocks + output_blocks, 1, 1),
            (config.gemm_threads, 1, 1),
            (
                Buffer("x"),
                *arguments.tensors()[2:],
                half(INPUTS, turn, tiles.channels),
                half(INPUTS, turn - 1, tiles.channels),
                Buffer(WEIGHTS),
                half(PRODUCTS, turn - 1, tiles.filters),
                half(PRODUCTS, turn - 2, tiles.filters),
                arguments.shape(problem),
                tiles.grid(next_chunk),
                tiles.grid(last_chunk),
                gemm_shape,
                Ints((input_blocks, gemm_blocks, output_blocks, channel_blocks, filter_blocks)),
            ),
            shared_bytes=config.shared_bytes,
            overlap=True,
        )


@dataclass(frozen=True)
class Fused(Winograd[FusedConfig]):
    """One launch: 32 tiles and some filters per CTA, all points in registers."""

    shapes: tuple[FusedConfig, ...] = ()

    def configs(self, problem: Conv2dProblem) -> tuple[FusedConfig, ...]:
        return self.shapes

    def recipe(self, problem: Conv2dProblem, config: FusedConfig) -> Recipe:
        tiles = Tiles.of(problem, self.tile)
        filter_blocks = ceil_div(problem.filters, config.block_filters)
        x, _, *rest = arguments.tensors()
        call = KernelCall(
            Program.of(
                "conv2d/winograd_fused.cu",
                constants=activation.constants_of(problem),
                problem=problem,
                config=config,
                tile=self.tile,
            ),
            (ceil_div(tiles.count, 32) * filter_blocks, 1, 1),
            (config.threads(tiles.points), 1, 1),
            (
                x,
                Buffer(WEIGHTS),
                *rest,
                filter_blocks,
                arguments.shape(problem),
                tiles.grid(Chunk(0, tiles.count)),
            ),
            shared_bytes=config.shared_bytes(tiles.points),
            overlap=True,
        )
        return Recipe(
            (self._filter_transform(problem, channels_inside=False), call), tiles.workspaces(0, 0)[:1]
        )


# Predictions for 128 -> 128 filters on 28x28 images, batch 256, on an H200: fp32 products at 42 TFLOP/s, memory
# at 4.2 TB/s, the L2 cache at 5.5.
RUNGS = (
    # Products: 26.3 GFLOP = 626 us; x, V, M and y: 1.85 GB = 440 us; against 59.2 GFLOP at 40 = 1480 us.
    Staged(
        "winograd_f2",
        "F(2x2,3x3): transform x and the filters, 16 matrix products, transform back; 2.25 times fewer products",
        "implicit_gemm", 1.4, tile=2,
    ),
    # The products at 33 TFLOP/s, since two filter blocks transform each patch: 800 us.
    Fused(
        "winograd_f2_fused",
        "one launch: patches are transformed into shared memory, the sums of all points stay in registers",
        "winograd_f2", 1.3, tile=2, shapes=(FusedConfig(2, 64),),
    ),
    # Products: 14.8 GFLOP = 350 us; traffic: 1.13 GB = 270 us.
    Staged(
        "winograd_f4",
        "F(4x4,3x3): 36 products for 16 outputs, 4 times fewer; V and M grow by 2.25 instead of 4",
        "winograd_f2", 1.7, tile=4,
    ),
    # Predicted for a first version, in which every warp both transformed and multiplied.
    Fused(
        "winograd_f4_fused",
        "F(4x4,3x3) in one launch: the 36 sums of 32 tiles and 32 filters in registers",
        "winograd_f4", 1.0, tile=4, shapes=(FusedConfig(3, 32),),
    ),
    # V and M at L2 instead of DRAM bandwidth saves 60 us; 45 launches cost most of that again.
    Staged(
        "winograd_f4_blocked",
        "works on chunks of tiles whose V and M stay in the L2 cache",
        "winograd_f4", 1.05, tile=4, chunk_megabytes=(64, 34, 24),
    ),
    # Three TF32 products at 65 TFLOP/s: 230 us instead of 350.
    Staged(
        "winograd_f4_split",
        "the products on tensor cores: each operand split into two TF32 parts, three products, fp32 accuracy",
        "winograd_f4", 1.25, tile=4, split=True, chunk_megabytes=(1024, 34, 96),
    ),
    # Arithmetic and memory overlapped: max(230, 270) and the ends of the pipeline.
    Pipelined(
        "winograd_f4_pipelined",
        "one launch transforms one chunk of inputs, multiplies the previous one and finishes the one before",
        "winograd_f4_split", 1.5, tile=4, split=True, chunk_megabytes=(256, 96, 48),
    ),
)  # fmt: skip
