"""Stem by persistent CTAs: warpgroups convert rows for others that multiply and pool."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from escalade.device.architecture import WITH_WGMMA
from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, ReleaseDependents, Workspace
from escalade.ops.base.card import Card
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.shared import activation
from escalade.ops.stem.problem import StemProblem
from escalade.ops.stem.rungs import arguments
from escalade.ops.stem.rungs.packed import PACK_THREADS, unsupported
from escalade.ops.stem.rungs.tiles import POOLS, Tiling


def dense_steps(problem: StemProblem) -> int:
    """Return the MMA steps in the order of sm90_streamed_dense.cuh: one slot per two taps except the first."""
    return problem.filter_height * (problem.filter_width // 2) // 2 + 1


STREAMS = 2
"""Streams per CTA, each with a producer and a consumer warpgroup."""
STREAM_START_CLOCKS = 4000
"""Clocks until the first row of a CTA can be multiplied, and after its last (estimate)."""


@dataclass(frozen=True)
class StreamedConfig(Config):
    """Config of persistent CTAs with wgmma that walk down the rows."""

    columns: int
    """Convolution columns per tile: N of a wgmma."""
    stages: int
    """Stages per stream, in pairs of image rows; a window spans half of the filter's height."""

    def tiling(self, problem: StemProblem) -> Tiling:
        """Return tiles as high as the image."""
        return Tiling(problem, max(1, problem.output_height), self.columns)

    def blocks(self, problem: StemProblem, card: Card) -> int:
        """Return the CTAs: one per SM, each with at least one row of y."""
        return max(1, min(self._rows(problem), card.multiprocessors // (problem.filters // 64)))

    def shared_bytes(self, problem: StemProblem) -> int:
        """Bytes of the stages, each with two rows of 16-byte slots and the window corners, and their barriers."""
        slots = self.columns + problem.filter_width // 2 - 1
        stage = 1024 * blocks((2 * slots + self.columns) * 16, 1024)
        return STREAMS * self.stages * (stage + 16)

    def cost(self, problem: StemProblem, card: Card) -> float:
        """Estimate the clocks: columns / 2 per step, at least 24; a row is pooled while the other stream multiplies."""
        tiling = self.tiling(problem)
        rows = ceil_div(self._rows(problem), self.blocks(problem, card))
        streams = min(STREAMS, rows)
        row = dense_steps(problem) * max(self.columns / 2, 24.0) + 30
        return streams * tiling.conv_rows(blocks(rows, STREAMS)) * row + STREAM_START_CLOCKS

    def _rows(self, problem: StemProblem) -> int:
        """Return the rows of y over all column tiles and images."""
        return problem.batch * self.tiling(problem).column_tiles * problem.output_height


def streamed_configs(problem: StemProblem, card: Card) -> tuple[StreamedConfig, ...]:
    found = [StreamedConfig(columns, stages) for columns, stages in product((112, 64, 32), (12, 16, 8))]
    valid = [config for config in found if config.shared_bytes(problem) <= card.shared_bytes]
    return tuple(sorted(valid, key=lambda config: config.cost(problem, card)))


class Streamed(Rung[StemProblem, StreamedConfig]):
    @property
    def architectures(self) -> tuple[str, ...]:
        return WITH_WGMMA

    def supports(self, problem: StemProblem) -> str | None:
        refusal = unsupported(self.name, problem)
        if refusal:
            return refusal
        p = problem
        if p.channels != 3:
            return f"{self.name} takes 3 channels, not {p.channels}; `warpgroup` takes 1 to 4"
        if p.filters % 64:
            return f"{self.name} takes 64 or 128 filters, not {p.filters}; `pooled` takes multiples of 16"
        if p.stride != (2, 2):
            return f"{self.name} takes stride 2, not {p.stride}; `pooled` takes any"
        if p.filter_width % 2 == 0 or p.filter_width < 3 or p.filter_height > 7:
            return (
                f"{self.name} takes filters 3, 5 or 7 wide and up to 7 high, not {p.filter_height}x{p.filter_width}; "
                "`warpgroup` takes other widths up to 8"
            )
        if p.pool not in POOLS:
            return f"{self.name} pools 3x3 with stride 2 and padding 1, or 2x2 with stride 2; `tensor_core` pools any"
        if p.batch * p.output_height * p.output_width >= 2**31:
            return f"{self.name} takes fewer than 2^31 pixels of y; `warpgroup` takes more"
        return None

    def configs(self, problem: StemProblem) -> tuple[StreamedConfig, ...]:
        return streamed_configs(problem, self.card)

    def recipe(self, problem: StemProblem, config: StreamedConfig) -> Recipe:
        return self.over(problem, config)

    def over(
        self, problem: StemProblem, config: StreamedConfig, *, weights_nhwc: bool = False, bias: bool = True
    ) -> Recipe:
        """Return the launches for weights in either layout, with or without a bias."""
        p = problem
        elements = dense_steps(p) * 16 * p.filters
        pack = KernelCall(
            Program.of("stem/sm90_streamed_pack.cu", problem=p, weights_nhwc=weights_nhwc, bias=bias),
            (blocks(elements, PACK_THREADS), 1, 1),
            (PACK_THREADS, 1, 1),
            (Buffer("weight"), Buffer("bias", optional=True), Buffer("packed"), elements, p.filters // 16),
            overlap=True,
            weights_only=True,
        )
        tiling = config.tiling(p)
        call = KernelCall(
            Program.of(
                "stem/sm90_streamed.cu",
                constants=activation.constants_of(p),
                problem=p,
                tiling=tiling,
                config=config,
            ),
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
    Streamed(
        "streamed",
        "k without padding of channels and taps, by persistent CTAs: warpgroups convert two rows at a time for others "
        "that multiply and pool in ping-pong",
        below="warpgroup",
        # K is 176 instead of 224 and 2% of the rows are computed twice, not 6%: 74 GFLOP at 700 TFLOP/s, 0.106 ms,
        # which hides 257 MB (0.061 ms); against 0.183 ms, of which 0.140 are products.
        predicted_gain=1.65,
    ),
)
