"""Convolution in the frequency domain, for large filters: its cost hardly depends on the filter size.

Images are cut into square tiles that overlap by the filter size (overlap-save). In NHWC the transforms' accesses do not
coalesce: supported, not fast. A NaN or an infinity spoils every output of its tiles, not only those within the filter's
reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, TypeVar

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Ints, KernelCall, Recipe, Workspace
from escalade.ops.base.card import H200, Card
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.rung import Conv2dRung
from escalade.ops.shared import activation

TILES = (16, 24, 32, 40, 48, 64, 72, 80, 96, 128)
"""8 x 2, 3, 4, 5, 6, 8, 9, 10, 12, 16: a thread transforms the second factor in registers."""
MIB = 2**20
_COMPLEX_BYTES = 8
_LARGEST_WORKSPACE = 1024 * MIB
_LARGEST_FILTER_SPECTRA = 2048 * MIB
_L2_SHARE = 64 * MIB  # of an H200
_STEP_CHANNELS = 2
_SHARED_BYTES = 96 * 1024  # every supported architecture has it
_MOST_PLANES = 2**30  # per launch, which counts them in 32 bits

# Expected rates on an H200, used to rank tile sizes: pixels transformed, multiply-adds and bytes per second.
_PIXELS = 0.44e12
_MULTIPLY_ADDS = 17e12
_BANDWIDTH = 4e12
_SCATTERED = 1.8  # factor for NHWC, measured
_STAGE_US = 6.0  # one launch with a single wave of transforms

ProductShape = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class TransformConfig(Config):
    tile: int
    """Side of a transformed tile in pixels."""
    planes: int
    """Tiles per CTA."""
    threads: int


@dataclass(frozen=True)
class FftConfig(TransformConfig):
    thread_tiles: int
    thread_filters: int
    """Accumulators per thread of the product: tiles x filters of one frequency."""
    tile_warps: int
    filter_warps: int
    stages: int
    """Stages of the product's copy pipeline."""
    workspace_mib: int
    """Limit for the spectra of images; the batch is processed in chunks that fit."""


@dataclass(frozen=True)
class Tiling:
    """Cover of a problem's outputs by tiles of one size."""

    tile: int
    tiles: tuple[int, int]
    """Tiles per image: rows, columns."""
    step: tuple[int, int]
    """Outputs per tile: rows, columns."""

    @staticmethod
    def of(problem: Conv2dProblem, tile: int) -> Tiling:
        p = problem
        outputs = (p.output_height, p.output_width)
        step = (
            _outputs_of_tile(tile, p.height, p.filter_height, p.padding[0], outputs[0]),
            _outputs_of_tile(tile, p.width, p.filter_width, p.padding[1], outputs[1]),
        )
        return Tiling(tile, (ceil(outputs[0] / step[0]), ceil(outputs[1] / step[1])), step)

    @property
    def frequencies(self) -> int:
        return self.tile * (self.tile // 2 + 1)

    @property
    def spectrum_bytes(self) -> int:
        return self.frequencies * _COMPLEX_BYTES

    def count(self, problem: Conv2dProblem) -> int:
        return problem.batch * prod(self.tiles)

    def filter_bytes(self, problem: Conv2dProblem) -> int:
        return problem.filters * problem.group_channels * self.spectrum_bytes

    def bytes_per_tile(self, problem: Conv2dProblem) -> int:
        """Return the bytes of spectra per tile; the depthwise product feeds the inverse transform directly."""
        return self.spectrum_bytes * (problem.channels + (0 if _depthwise(problem) else problem.filters))

    def seconds(self, problem: Conv2dProblem, card: Card) -> float:
        """Estimate the time, with every spectrum transformed once and moved once for the product."""
        p = problem
        planes = self.count(p) * (p.channels + p.filters) + p.filters * p.group_channels
        products = self.count(p) * p.filters * p.group_channels * self.frequencies
        moved = 0 if _depthwise(p) else planes * self.spectrum_bytes
        computing = planes * self.tile**2 / _PIXELS + 4 * products / _MULTIPLY_ADDS
        return computing / card.speed + moved / _BANDWIDTH / card.memory_speed

    def input_planes(self, problem: Conv2dProblem, first_tile: int, tiles: int) -> Ints:
        """`FftPlanes` of kernels/conv2d/fft_planes.cuh."""
        p = problem
        size = (p.height, p.width)
        return Ints((tiles * p.channels, p.channels, *size, *p.padding, *self.tiles, *self.step, first_tile))

    def output_planes(self, problem: Conv2dProblem, first_tile: int, tiles: int) -> Ints:
        p = problem
        size = (p.output_height, p.output_width)
        return Ints((tiles * p.filters, p.filters, *size, 0, 0, *self.tiles, *self.step, first_tile))


def _outputs_of_tile(tile: int, size: int, filter_size: int, padding: int, outputs: int) -> int:
    """Return all outputs if only padding wraps around in the circular convolution, otherwise the tile minus the
    filter's reach."""
    if tile >= max(size + padding, outputs):
        return outputs
    return tile - filter_size + 1


def _depthwise(problem: Conv2dProblem) -> bool:
    return problem.groups == problem.channels == problem.filters


def _tilings(problem: Conv2dProblem, card: Card) -> list[Tiling]:
    """Return the possible tilings, most promising first."""
    reach = max(problem.filter_height, problem.filter_width)
    fitting = (Tiling.of(problem, tile) for tile in TILES if tile >= reach)
    return sorted(
        (
            tiling
            for tiling in fitting
            if tiling.filter_bytes(problem) <= _LARGEST_FILTER_SPECTRA
            and tiling.bytes_per_tile(problem) <= _LARGEST_WORKSPACE
        ),
        key=lambda tiling: tiling.seconds(problem, card),
    )


def _supports(problem: Conv2dProblem, card: Card) -> str | None:
    if problem.stride != (1, 1) or problem.dilation != (1, 1):
        return f"FFT rungs take stride 1 and dilation 1, not stride {problem.stride} and dilation {problem.dilation}"
    if problem.groups != 1 and not _depthwise(problem):
        return "FFT rungs take groups=1 or depthwise problems (groups equal to channels and filters)"
    if max(problem.filter_height, problem.filter_width) > TILES[-1]:
        return f"FFT rungs take filters of up to {TILES[-1]}x{TILES[-1]}, the largest tile"
    if not _tilings(problem, card):
        return (
            "the spectra exceed the workspace: the limits are 2 GiB for all filters and 1 GiB for one tile with all "
            "channels and filters"
        )
    return None


def _transform_shapes(tile: int) -> tuple[tuple[int, int], ...]:
    """Return (planes, threads) per CTA, with two, one or four butterflies per thread of the longest pass."""
    butterflies = (tile // 2 + 1) * max(8, tile // 8)
    planes = max(1, 256 // butterflies)
    shapes: dict[tuple[int, int], None] = {}
    for turns in (2, 1, 4):
        threads = max(64, ceil(planes * butterflies / turns / 32) * 32)
        if threads <= 512:
            shapes[planes, threads] = None
    return tuple(shapes)


def _shared_bytes(tile: int, planes: int) -> int:
    """`FftTiles::SHARED` of kernels/common/fft.cuh."""
    pitch = tile + 8 if tile % 16 == 0 else tile + 16
    return _COMPLEX_BYTES * (tile // 8 * 9 + planes * tile // 2 * pitch)


def _transform_configs(tilings: list[Tiling]) -> Iterator[TransformConfig]:
    for tiling in tilings:
        for planes, threads in _transform_shapes(tiling.tile):
            if _shared_bytes(tiling.tile, planes) <= _SHARED_BYTES:
                yield TransformConfig(tiling.tile, planes, threads)


def _transform(
    problem: Conv2dProblem, config: TransformConfig, kernel: str, planes: int,
    *arguments: Buffer | Ints, weights_only: bool = False, **scope: Any,
) -> KernelCall:  # fmt: skip
    """Return the launch of a kernel that transforms `planes` tiles."""
    finishing = {} if kernel == "fft_forward" else activation.constants_of(problem)
    return KernelCall(
        Program.of(f"conv2d/{kernel}.cu", constants=finishing, problem=problem, config=config, **scope),
        (ceil(planes / config.planes), 1, 1),
        (config.threads, 1, 1),
        arguments,
        shared_bytes=_shared_bytes(config.tile, config.planes),
        weights_only=weights_only,
    )


def _filter_transform(problem: Conv2dProblem, config: TransformConfig) -> KernelCall:
    """Return the transform of the filters, each an image of one tile, with the transforms' common factor."""
    p = problem
    planes = p.filters * p.group_channels
    filters = Ints((planes, p.group_channels, p.filter_height, p.filter_width, 0, 0, 1, 1, 0, 0, 0))
    return _transform(
        p, config, "fft_forward", planes, Buffer("weight"), Buffer("filter_spectra"), filters,
        weights_only=True, scale=0.25 / config.tile**2,
    )  # fmt: skip


T = TypeVar("T", bound=TransformConfig)


class _FftRung(Conv2dRung[T]):
    takes_groups = True

    def estimate(self, problem: Conv2dProblem, config: T) -> float:
        tiling = Tiling.of(problem, config.tile)
        launches = len(self.recipe(problem, config).after_packing.steps)
        scattered = _SCATTERED if problem.layout == "nhwc" else 1.0
        return launches * _STAGE_US + scattered * tiling.seconds(problem, self.card) * 1e6

    def tolerance(self, problem: Conv2dProblem, peer_error: float) -> float:
        """A transform spreads each pixel's rounding error over its tile: a few 1e-7 of the output's norm for any
        filter, where a direct sum of few products is nearly exact."""
        return max(super().tolerance(problem, peer_error), 1e-6)


@dataclass(frozen=True)
class Fft(_FftRung[FftConfig]):
    def limits(self, problem: Conv2dProblem) -> str | None:
        return _supports(problem, self.card)

    def configs(self, problem: Conv2dProblem) -> tuple[FftConfig, ...]:
        """Return the default, then variations of the transforms, the product and the workspace."""
        tilings = _tilings(problem, self.card)[:4]
        transforms = tuple(_transform_configs(tilings))
        products = _product_shapes(problem)
        rooms = _workspace_choices(problem, tilings[0], self.card)

        def config(transform: TransformConfig, product: ProductShape, room: int) -> FftConfig:
            return FftConfig(transform.tile, transform.planes, transform.threads, *product, room)

        return tuple(
            dict.fromkeys(
                [config(transform, products[0], rooms[0]) for transform in transforms]
                + [config(transforms[0], product, rooms[0]) for product in products]
                + [config(transforms[0], products[0], room) for room in rooms]
            )
        )

    def recipe(self, problem: Conv2dProblem, config: FftConfig) -> Recipe:
        tiling = Tiling.of(problem, config.tile)
        total = tiling.count(problem)
        chunk = _chunk(total, tiling.bytes_per_tile(problem), config.workspace_mib * MIB)
        steps = [_filter_transform(problem, config)]
        for first in range(0, total, chunk):
            steps += _steps(problem, config, tiling, first, min(chunk, total - first))
        workspaces = [
            Workspace("filter_spectra", tiling.filter_bytes(problem)),
            Workspace("input_spectra", chunk * problem.channels * tiling.spectrum_bytes),
        ]
        if not _depthwise(problem):
            workspaces.append(Workspace("output_spectra", chunk * problem.filters * tiling.spectrum_bytes))
        return Recipe(tuple(steps), tuple(workspaces))


def _product_shapes(problem: Conv2dProblem) -> list[ProductShape]:
    """Return accumulators per thread (tiles, filters), warps per CTA (tiles, filters) and stages, no wider than the
    filters."""
    if _depthwise(problem):
        return [(8, 2, 2, 2, 3)]  # unused
    if problem.filters <= 8:
        return [(8, 2, 2, 2, 3), (4, 2, 4, 4, 3)]
    return [(8, 4, 2, 4, 3), (8, 4, 4, 4, 3), (4, 4, 4, 4, 3), (4, 4, 2, 4, 4)]


def _workspace_choices(problem: Conv2dProblem, tiling: Tiling, card: Card) -> list[int]:
    """Return workspace sizes in MiB. A chunk should fit into L2, but be large enough to amortize reading all
    filters."""
    preferred = max(
        _L2_SHARE * card.l2_bytes // H200.l2_bytes,
        2 * tiling.filter_bytes(problem),
        tiling.bytes_per_tile(problem),
    )
    preferred = min(preferred, _LARGEST_WORKSPACE)
    needed = tiling.count(problem) * tiling.bytes_per_tile(problem)
    choices = (preferred, preferred // 2, _LARGEST_WORKSPACE)
    return list(dict.fromkeys(ceil(min(needed, choice) / MIB) for choice in choices))


def _chunk(total: int, bytes_per_tile: int, room: int) -> int:
    """Return the tiles per chunk: as few chunks as the workspace allows, of equal size."""
    chunks = ceil(total / max(1, room // bytes_per_tile))
    return ceil(total / chunks)


def _steps(
    problem: Conv2dProblem, config: FftConfig, tiling: Tiling, first: int, tiles: int
) -> list[KernelCall]:
    """Return forward transform, product and inverse transform of some tiles."""
    depthwise = _depthwise(problem)
    forward = _transform(
        problem, config, "fft_forward", tiles * problem.channels,
        Buffer("x"), Buffer("input_spectra"), tiling.input_planes(problem, first, tiles), scale=1.0,
    )  # fmt: skip
    inverse = _transform(
        problem, config, "fft_inverse", tiles * problem.filters,
        Buffer("input_spectra" if depthwise else "output_spectra"), Buffer("filter_spectra"),
        Buffer("bias", optional=True), Buffer("residual", optional=True), Buffer("y"),
        tiling.output_planes(problem, first, tiles), depthwise=depthwise,
    )  # fmt: skip
    if depthwise:
        return [forward, inverse]
    return [forward, _product(problem, config, tiling, tiles), inverse]


def _product(problem: Conv2dProblem, config: FftConfig, tiling: Tiling, tiles: int) -> KernelCall:
    block_tiles = config.thread_tiles * config.tile_warps
    block_filters = config.thread_filters * config.filter_warps
    blocks = ceil(tiling.frequencies / 32) * ceil(tiles / block_tiles) * ceil(problem.filters / block_filters)
    return KernelCall(
        Program.of("conv2d/fft_product.cu", config=config, tiling=tiling, step_channels=_STEP_CHANNELS),
        (blocks, 1, 1),
        (32 * config.tile_warps * config.filter_warps, 1, 1),
        (
            Buffer("input_spectra"), Buffer("filter_spectra"), Buffer("output_spectra"),
            tiles, problem.channels, problem.filters,
        ),
        shared_bytes=config.stages * _STEP_CHANNELS * (block_tiles + block_filters) * 32 * _COMPLEX_BYTES,
    )  # fmt: skip


@dataclass(frozen=True)
class FftFused(_FftRung[TransformConfig]):
    def limits(self, problem: Conv2dProblem) -> str | None:
        if not _depthwise(problem):
            return "fft_fused takes depthwise problems (groups equal to channels and filters)"
        return _supports(problem, self.card)

    def configs(self, problem: Conv2dProblem) -> tuple[TransformConfig, ...]:
        return tuple(_transform_configs(_tilings(problem, self.card)))[:24]

    def recipe(self, problem: Conv2dProblem, config: TransformConfig) -> Recipe:
        tiling = Tiling.of(problem, config.tile)
        total = tiling.count(problem)
        chunk = _MOST_PLANES // problem.channels
        steps = [_filter_transform(problem, config)]
        for first in range(0, total, chunk):
            tiles = min(chunk, total - first)
            steps.append(
                _transform(
                    problem, config, "fft_depthwise", tiles * problem.channels,
                    Buffer("x"), Buffer("filter_spectra"), Buffer("bias", optional=True),
                    Buffer("residual", optional=True), Buffer("y"),
                    tiling.input_planes(problem, first, tiles), tiling.output_planes(problem, first, tiles),
                )
            )  # fmt: skip
        return Recipe(tuple(steps), (Workspace("filter_spectra", tiling.filter_bytes(problem)),))


RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Fft(
        name="fft",
        summary="convolution in the frequency domain: tiles are transformed, multiplied per frequency and transformed "
        "back, at a cost that hardly depends on the filter size",
        below="implicit_gemm",
        # 31x31, 32 to 32 channels, 64x64, batch 32: 257 GFLOP at some 32 TFLOP/s are 8 ms. One 80x80 tile per image:
        # 3072 transforms of x, filters and y, bound by their 10,000 warp instructions, 14 ns each on the whole GPU; 0.1
        # G complex products at 60% of the multiply-add rate and 79 MB of spectra, 25 to 40 us; 90 us in all, plus
        # launches.
        predicted_gain=80,
    ),
    FftFused(
        name="fft_fused",
        summary="a depthwise tile stays in shared memory from pixels to outputs: one kernel, no spectra of images in "
        "global memory",
        below="fft",
        # 31x31, 256 channels, 56x56, batch 32, tiles of 72: both rungs are bound by the instructions of 2 x 8192
        # transforms, some 180 us; fusing saves one pass of eight, and writing and reading 175 MB of spectra.
        predicted_gain=1.3,
    ),
)
