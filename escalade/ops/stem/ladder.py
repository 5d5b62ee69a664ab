"""The ladder of the stem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, ReleaseDependents, Workspace
from escalade.ops.base.dtypes import element
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.stem import arguments, reference
from escalade.ops.stem.problem import StemProblem
from escalade.ops.stem.tiles import (
    MOST_WIDTH,
    POOLS,
    STREAMS,
    StreamedConfig,
    WarpConfig,
    WarpgroupConfig,
    dense_steps,
    filter_steps,
    streamed_configs,
    warp_blocks,
    warp_configs,
    warpgroup_configs,
)

_PACK_THREADS = 256


class Separate(Rung[StemProblem]):
    def supports(self, problem: StemProblem) -> str | None:
        return None

    def configs(self, problem: StemProblem) -> tuple[Config, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128, 512))

    def recipe(self, problem: StemProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        target = Buffer("unpooled" if problem.pool else "y")
        convolution = KernelCall(
            Program.of("stem/direct.cu", "stem_direct", arguments.image_constants(problem)),
            (blocks(problem.conv_elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            (*arguments.tensors(Buffer("weight"), target), arguments.shape(problem)),
            overlap=True,
        )
        return _then_pool(problem, (convolution,), ())


def _then_pool(
    problem: StemProblem, steps: tuple[KernelCall, ...], workspaces: tuple[Workspace, ...]
) -> Recipe:
    """Pooling by a launch of its own, if there is any."""
    if problem.pool is None:
        return Recipe(steps, workspaces)
    return Recipe((*steps, arguments.pool(problem)), (*workspaces, arguments.unpooled(problem)))


def _unsupported(name: str, problem: StemProblem) -> str | None:
    p = problem
    if p.dtype not in ("fp16", "bf16"):
        return (
            f"{name} multiplies on tensor cores in fp16 or bf16, not {p.dtype}; `separate` takes every dtype"
        )
    if p.filters % 16 or p.filters > 128:
        return f"{name} takes multiples of 16 filters up to 128, not {p.filters}; `separate` takes any number"
    if p.filter_width > MOST_WIDTH:
        return f"{name} takes filters up to {MOST_WIDTH} wide, not {p.filter_width}; `separate` takes any"
    if filter_steps(p) > 32:
        return f"{name} keeps the weights in registers, which {p.filter_height} filter rows exceed"
    return None


def _pack(problem: StemProblem, warp_blocks: int, pixel_a_lane: bool) -> tuple[KernelCall, Workspace]:
    """The weights in the order of the fragments' registers."""
    p = problem
    elements = filter_steps(p) * 16 * p.filters
    call = KernelCall(
        Program.of(
            "stem/pack.cu",
            "stem_pack",
            {
                "Element": element(p.storage),
                "CHANNELS": p.channels,
                "FILTER_HEIGHT": p.filter_height,
                "FILTER_WIDTH": p.filter_width,
                "WARP_BLOCKS": warp_blocks,
                "PIXEL_A_LANE": pixel_a_lane,
            },
        ),
        (blocks(elements, _PACK_THREADS), 1, 1),
        (_PACK_THREADS, 1, 1),
        (Buffer("weight"), Buffer("packed"), elements, p.filters // 16),
        overlap=True,
        weights_only=True,
    )
    return call, Workspace("packed", elements * 2)


@dataclass(frozen=True)
class TensorCore(Rung[StemProblem]):
    pools: bool = False
    """Whether it pools in registers, instead of by a launch of its own."""

    def supports(self, problem: StemProblem) -> str | None:
        refusal = _unsupported(self.name, problem)
        if refusal:
            return refusal
        if self.pools and problem.pool is None:
            return (
                f"{self.name} pools, and there is nothing to pool here; `tensor_core` does the rest the same"
            )
        if self.pools and problem.pool not in POOLS:
            return f"{self.name} pools 3x3 with stride 2 and padding 1, or 2x2 with stride 2; `tensor_core` pools any"
        if not warp_configs(self._part(problem), self.card):
            return f"the pixels of the smallest tile do not fit in shared memory at stride {problem.stride}"
        return None

    def configs(self, problem: StemProblem) -> tuple[Config, ...]:
        return warp_configs(self._part(problem), self.card)

    def recipe(self, problem: StemProblem, config: Config) -> Recipe:
        assert isinstance(config, WarpConfig)
        part = self._part(problem)
        tiling = config.tiling(part)
        pack, packed = _pack(problem, warp_blocks(part), pixel_a_lane=True)
        constants = tiling.constants() | {
            "BANDS": config.bands,
            "BAND_ROWS": config.band_rows,
            "COLUMN_BLOCKS": config.column_blocks,
            "FILTER_WARPS": config.warps(part) // config.bands,
            "WARP_BLOCKS": warp_blocks(part),
            "BLOCKS_PER_SM": config.blocks_per_sm,
        }
        target = Buffer("y" if part == problem else "unpooled")
        convolution = KernelCall(
            Program.of("stem/tensor_core.cu", "stem_tensor_core", constants),
            (tiling.tiles, 1, 1),
            (config.warps(part) * 32, 1, 1),
            (
                *arguments.tensors(Buffer("packed"), target),
                arguments.shape(part, tiling.row_tiles, tiling.column_tiles),
                ReleaseDependents(),
            ),
            shared_bytes=config.shared_bytes(part),
            overlap=True,
        )
        if part == problem:
            return Recipe((pack, convolution), (packed,))
        return _then_pool(problem, (pack, convolution), (packed,))

    def _part(self, problem: StemProblem) -> StemProblem:
        """What the convolution's kernel does."""
        return problem if self.pools else replace(problem, pool=None)


class Warpgroup(Rung[StemProblem]):
    @property
    def architectures(self) -> tuple[str, ...]:
        return ("sm_90a",)

    def supports(self, problem: StemProblem) -> str | None:
        refusal = _unsupported(self.name, problem)
        if refusal:
            return refusal
        if problem.filters % 64:
            return (
                f"{self.name} takes 64 or 128 filters, not {problem.filters}; `pooled` takes multiples of 16"
            )
        if problem.stride[1] != 2:
            return f"{self.name} takes a stride of 2 along rows, where windows begin 16 bytes apart; `pooled` takes any"
        if filter_steps(problem) > 16:
            return f"{self.name} keeps the weights in registers, which {problem.filter_height} filter rows exceed"
        if problem.pool not in POOLS:
            return f"{self.name} pools 3x3 with stride 2 and padding 1, or 2x2 with stride 2; `tensor_core` pools any"
        if not warpgroup_configs(problem, self.card):
            return f"the pixels of the smallest tile do not fit in shared memory at stride {problem.stride}"
        return None

    def configs(self, problem: StemProblem) -> tuple[Config, ...]:
        return warpgroup_configs(problem, self.card)

    def recipe(self, problem: StemProblem, config: Config) -> Recipe:
        assert isinstance(config, WarpgroupConfig)
        tiling = config.tiling(problem)
        pack, packed = _pack(problem, 1, pixel_a_lane=False)
        constants = tiling.constants() | {"BLOCKS_PER_SM": config.blocks_per_sm}
        call = KernelCall(
            Program.of("stem/warpgroup.cu", "stem_warpgroup", constants),
            (tiling.tiles, problem.filters // 64, 1),
            (128, 1, 1),
            (
                *arguments.tensors(Buffer("packed"), Buffer("y")),
                arguments.shape(problem, tiling.row_tiles, tiling.column_tiles),
            ),
            shared_bytes=config.shared_bytes(problem),
            overlap=True,
        )
        return Recipe((pack, call), (packed,))


class Streamed(Rung[StemProblem]):
    @property
    def architectures(self) -> tuple[str, ...]:
        return ("sm_90a",)

    def supports(self, problem: StemProblem) -> str | None:
        refusal = _unsupported(self.name, problem)
        if refusal:
            return refusal
        p = problem
        if p.channels != 3:
            return f"{self.name} packs pixels of 3 channels, not {p.channels}; `warpgroup` takes 1 to 4"
        if p.filters % 64:
            return f"{self.name} takes 64 or 128 filters, not {p.filters}; `pooled` takes multiples of 16"
        if p.stride != (2, 2):
            return f"{self.name} takes a stride of 2 in both directions, not {p.stride}; `pooled` takes any"
        if p.filter_width % 2 == 0 or p.filter_width < 3 or p.filter_height > 7:
            return (
                f"{self.name} takes filters 3, 5 or 7 wide and up to 7 high, not {p.filter_height}x{p.filter_width}; "
                "`warpgroup` takes other widths up to 8"
            )
        if p.pool not in POOLS:
            return f"{self.name} pools 3x3 with stride 2 and padding 1, or 2x2 with stride 2; `tensor_core` pools any"
        if p.batch * p.output_height * p.output_width >= 2**31:
            return f"{self.name} counts rows in 32 bits and takes less than 2^31 pixels of y; `warpgroup` takes more"
        return None

    def configs(self, problem: StemProblem) -> tuple[Config, ...]:
        return streamed_configs(problem, self.card)

    def recipe(self, problem: StemProblem, config: Config) -> Recipe:
        assert isinstance(config, StreamedConfig)
        return self.over(problem, config)

    def over(
        self, problem: StemProblem, config: StreamedConfig, *, weights_nhwc: bool = False, bias: bool = True
    ) -> Recipe:
        """The launches for weights in either layout, with or without a bias."""
        p = problem
        elements = dense_steps(p) * 16 * p.filters
        pack = KernelCall(
            Program.of(
                "stem/pack_dense.cu",
                "stem_pack_dense",
                {
                    "Element": element(p.storage),
                    "FILTER_HEIGHT": p.filter_height,
                    "FILTER_WIDTH": p.filter_width,
                    "WEIGHTS_NHWC": weights_nhwc,
                    "HAS_BIAS": bias,
                },
            ),
            (blocks(elements, _PACK_THREADS), 1, 1),
            (_PACK_THREADS, 1, 1),
            (Buffer("weight"), Buffer("bias", optional=True), Buffer("packed"), elements, p.filters // 16),
            overlap=True,
            weights_only=True,
        )
        tiling = config.tiling(p)
        constants = tiling.column_constants() | {
            "STAGES": config.stages,
            "PAIR_LOADS": p.width % 2 == 0 and p.padding[1] % 2 == 1,
        }
        call = KernelCall(
            Program.of("stem/streamed.cu", "stem_streamed", constants),
            (config.blocks(p, self.card), p.filters // 64, 1),
            (256 * STREAMS, 1, 1),
            (
                *arguments.tensors(Buffer("packed"), Buffer("y"), bias_optional=True),
                arguments.shape(p, tiling.row_tiles, tiling.column_tiles),
                ReleaseDependents(),
            ),
            shared_bytes=config.shared_bytes(p),
            overlap=True,
        )
        return Recipe((pack, call), (Workspace("packed", elements * 2),))


# Predictions for 3to64_224_k7s2 at batch 256 with 3x3 pooling, fp16 from fp32 images: 60 GFLOP, 92 with the padding to
# 4 channels and 8 taps; the image is 154 MB, the convolution's result 411 MB, y 103 MB.
RUNGS: tuple[Rung[StemProblem], ...] = (
    Separate("separate", "one thread an output, converting as it reads; then pooling", None, None),
    TensorCore(
        "tensor_core",
        "filters x pixels by mma.sync: weights in registers, the image staged once in shared memory as pixels of four "
        "16-bit channels; bias and ReLU on the way out, then pooling",
        below="separate",
        # 0.23 ms of products (92 GFLOP at 400 TFLOP/s) and 0.12 ms of pooling (514 MB) against 30 G multiply-adds with
        # two loads each, about 4 ms.
        predicted_gain=11.0,
    ),
    TensorCore(
        "pooled",
        "pooled in registers: a lane has two columns of each window and its neighbour the third, rows are walked down",
        below="tensor_core",
        # The pooling and its 0.12 ms are gone, 7% of the rows are computed twice: 0.25 against 0.35 ms.
        predicted_gain=1.4,
        pools=True,
    ),
    Warpgroup(
        "warpgroup",
        "by wgmma, whose operand of pixels is the staged row itself: windows that begin 16 bytes apart and overlap",
        below=("tensor_core", "pooled"),
        # 98 GFLOP at 700 TFLOP/s, 0.14 ms, against 0.25.
        predicted_gain=1.75,
    ),
    Streamed(
        "streamed",
        "k without the padding of channels and taps, by blocks that stay: warpgroups convert two rows at a time for "
        "others that multiply and pool in ping-pong",
        below="warpgroup",
        # K is 176 instead of 224 and 2% of the rows are computed twice, not 6%: 74 GFLOP at 700 TFLOP/s, 0.106 ms, over
        # which 257 MB (0.061 ms) pass unnoticed; against 0.183 ms, of which 0.140 are products.
        predicted_gain=1.65,
    ),
)


def _resnet(batch: int, source: str, normalise: bool, pool: bool = True) -> StemProblem:
    return StemProblem(
        batch, 3, 224, 224, 64, 7, 7, (2, 2), (3, 3), source, "nchw", normalise,
        pool=(3, 2, 1) if pool else None,
    )  # fmt: skip


PROBLEMS = (
    *(_resnet(batch, "fp32", False) for batch in (1, 8, 32, 256)),
    *(_resnet(batch, "uint8", True) for batch in (1, 8, 32, 256)),
    _resnet(256, "fp32", False, pool=False),
)

SMALL_PROBLEMS = (
    StemProblem(2, 3, 23, 37, 64, 7, 7, (2, 2), (3, 3), pool=(3, 2, 1)),
    StemProblem(1, 3, 20, 70, 64, 7, 7, (2, 2), (3, 3), "uint8", "nhwc", True, pool=(3, 2, 1)),
    StemProblem(1, 3, 18, 21, 128, 7, 7, (2, 2), (3, 3), "fp16", pool=(2, 2, 0), relu=False),
    StemProblem(1, 4, 17, 15, 64, 3, 3, (2, 2), (1, 1), "bf16", "nhwc", pool=None),
    StemProblem(2, 1, 14, 13, 16, 3, 3, (1, 1), (1, 1), "uint8", pool=(2, 2, 0)),
    StemProblem(1, 3, 11, 19, 32, 3, 3, (1, 1), (1, 1), "fp16", "nhwc", True, False, (3, 2, 1)),
    StemProblem(1, 4, 12, 9, 48, 5, 5, (1, 1), (2, 2), "fp32", "nhwc", pool=(3, 2, 1)),
    StemProblem(1, 3, 16, 17, 80, 5, 3, (3, 1), (0, 2), "bf16", "nchw", True, relu=False),
    StemProblem(1, 1, 15, 18, 32, 8, 8, (2, 2), (0, 0), "fp32", pool=(3, 3, 1)),
    StemProblem(1, 3, 13, 14, 10, 9, 11, (2, 1), (4, 5), "uint8", normalise=True, pool=(3, 1, 0)),
)
"""Small problems that between them have every source, layout, pooling, odd sizes, filters that are not square and of
every width of step."""


class Stem(Operation[StemProblem]):
    name = "stem"
    ladder = Ladder("stem", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = ("fp32", "tf32", "fp16", "bf16")
    layouts = ("nhwc",)

    def preferred(self, problem: StemProblem) -> tuple[str, ...]:
        return ("streamed", "warpgroup", "pooled", "tensor_core", "separate")

    def parse(self, name: str) -> StemProblem:
        return StemProblem.parse(name)

    def inputs(self, problem: StemProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
        return reference.random_inputs(problem, device, seed)

    def output(self, problem: StemProblem, device: torch.device) -> torch.Tensor:
        return reference.empty_output(problem, device)

    def reference(self, problem: StemProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return reference.reference(problem, inputs)

    def peer(self, problem: StemProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return reference.peer(problem, inputs)


STEM = Stem()
