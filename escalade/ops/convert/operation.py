"""The ladder of convert."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Argument, Buffer, Ints, KernelCall, Recipe
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, VECTOR_BYTES, element, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.convert import reference
from escalade.ops.convert.problem import ConvertProblem
from escalade.ops.shared.images import LAYOUTS

_TENSORS: tuple[Argument, ...] = (
    Buffer("x"),
    Buffer("scale", optional=True),
    Buffer("shift", optional=True),
    Buffer("y"),
)


def _constants(problem: ConvertProblem) -> dict[str, Constant]:
    return {
        "Source": element(problem.source),
        "Target": element(problem.dtype),
        "SOURCE_NHWC": problem.source_layout == "nhwc",
        "TARGET_NHWC": problem.layout == "nhwc",
        "NORMALISE": problem.normalise,
    }


def _unsupported_padding(problem: ConvertProblem) -> str | None:
    if problem.layout == "nchw" and problem.padded_channels != problem.channels:
        return (
            f"an nchw target is not padded, but {problem.padded_channels} channels are asked for of "
            f"{problem.channels}; what an nhwc source stores is stored_channels"
        )
    return None


class Naive(Rung[ConvertProblem]):
    def supports(self, problem: ConvertProblem) -> str | None:
        return _unsupported_padding(problem)

    def configs(self, problem: ConvertProblem) -> tuple[Config, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: ConvertProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        p = problem
        call = KernelCall(
            Program.of("convert/naive.cu", "convert_naive", _constants(p)),
            (blocks(p.output_elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            (*_TENSORS, Ints((p.batch, p.channels, p.stored_channels, p.padded_channels, p.pixels))),
            overlap=True,
        )
        return Recipe((call,))


TILE = 64
_TILE_THREADS = 256


class Tiled(Rung[ConvertProblem]):
    def supports(self, problem: ConvertProblem) -> str | None:
        if problem.source_layout == problem.layout:
            return f"{self.name} exchanges nchw and nhwc; source and target both are {problem.layout}"
        return _unsupported_padding(problem)

    def configs(self, problem: ConvertProblem) -> tuple[Config, ...]:
        return (Config(),)

    def recipe(self, problem: ConvertProblem, config: Config) -> Recipe:
        p = problem
        if p.source_layout == "nchw":
            rows, columns, padded_rows, source_pitch = p.channels, p.pixels, p.padded_channels, p.pixels
        else:
            rows, columns, padded_rows, source_pitch = p.pixels, p.channels, p.pixels, p.stored_channels
        row_tiles, column_tiles = blocks(padded_rows, TILE), blocks(columns, TILE)
        constants = _constants(p) | {
            "SOURCE_VECTOR": min(TILE // 8, widest_vector(p.source, source_pitch)),
            "TARGET_VECTOR": widest_vector(p.dtype, padded_rows),
        }
        shape = Ints(
            (
                p.batch, rows, columns, padded_rows, source_pitch, p.stored_channels * p.pixels,
                p.padded_channels * p.pixels, row_tiles, column_tiles,
            )
        )  # fmt: skip
        call = KernelCall(
            Program.of("convert/tiled.cu", "convert_tiled", constants),
            (max(1, p.batch * row_tiles * column_tiles), 1, 1),
            (_TILE_THREADS, 1, 1),
            (*_TENSORS, shape),
            overlap=True,
        )
        return Recipe((call,))


MOST_CHANNELS = 8


@dataclass(frozen=True)
class RunConfig(Config):
    pixels: int
    """Pixels that a thread takes at once."""
    rounds: int = 1
    threads: int = 128


class FewChannels(Rung[ConvertProblem]):
    def supports(self, problem: ConvertProblem) -> str | None:
        p = problem
        most = max(p.padded_channels, p.stored_channels if p.source_layout == "nhwc" else 0)
        if most > MOST_CHANNELS:
            return (
                f"{self.name} takes up to {MOST_CHANNELS} channels, not {most}: a thread holds all of a pixel"
            )
        if p.batch * p.pixels >= 2**31:
            return f"{self.name} counts the pixels of the whole batch in 32 bits; here there are {p.batch * p.pixels}"
        return _unsupported_padding(problem)

    def configs(self, problem: ConvertProblem) -> tuple[Config, ...]:
        """The shortest run first that fills an access: 16 bytes of an NHWC tensor, 4 of a plane of an NCHW one.

        Lanes side by side then fill whole sectors; longer runs leave gaps between lanes.
        """
        p = problem

        def enough(run: int) -> bool:
            sides = (
                (p.source, p.source_layout, p.stored_channels),
                (p.dtype, p.layout, p.padded_channels),
            )
            return all(
                run * ELEMENT_BYTES[dtype] * (channels if layout == "nhwc" else 1)
                >= (VECTOR_BYTES if layout == "nhwc" else 4)
                for dtype, layout, channels in sides
            )

        runs = (1, 2, 4, 8, 16)
        best = next((run for run in runs if enough(run)), runs[-1])
        every = [RunConfig(run, rounds) for run in runs for rounds in (1, 2, 4) if run * rounds <= 16]
        default = RunConfig(best)
        return (default, *(config for config in every if config != default))

    def recipe(self, problem: ConvertProblem, config: Config) -> Recipe:
        assert isinstance(config, RunConfig)
        p = problem

        def vector(dtype: str, layout: str, channels: int) -> int:
            each = channels if layout == "nhwc" else 1
            return widest_vector(dtype, each * config.pixels, each * p.pixels)

        constants = _constants(p) | {
            "CHANNELS": p.channels,
            "STORED_CHANNELS": p.stored_channels,
            "PADDED_CHANNELS": p.padded_channels,
            "PIXELS": config.pixels,
            "ROUNDS": config.rounds,
            "SOURCE_VECTOR": vector(p.source, p.source_layout, p.stored_channels),
            "TARGET_VECTOR": vector(p.dtype, p.layout, p.padded_channels),
        }
        runs = p.batch * blocks(p.pixels, config.pixels)
        call = KernelCall(
            Program.of("convert/few_channels.cu", "convert_few_channels", constants),
            (blocks(runs, config.threads * config.rounds), 1, 1),
            (config.threads, 1, 1),
            (*_TENSORS, p.batch, p.pixels),
            overlap=True,
        )
        return Recipe((call,))


RUNGS: tuple[Rung[ConvertProblem], ...] = (
    Naive("naive", "one thread an element of the target, in the target's order", None, None),
    Tiled(
        "tiled",
        "a tile of channels and pixels is turned in shared memory, so that both sides move whole lines 16 bytes a lane",
        below="naive",
        # 64 channels of 56 x 56, batch 32, fp16, nhwc to nchw: the foot fetches a sector for every element, 205 MB
        # out of L2 at 5.5 TB/s (37 us); 26 MB once at 4.24 TB/s and a launch are 7 us.
        predicted_gain=5.0,
    ),
    FewChannels(
        "few_channels",
        "a thread takes several neighbouring pixels with all their channels, up to 16 bytes an access on both sides",
        below="naive",
        # 3 channels of 224 x 224 into 4, batch 256, fp32 to fp16: 51 million threads with three 64-bit divisions,
        # 150 instructions each (260 us), against 257 MB at 4.24 TB/s (61 us).
        predicted_gain=4.0,
    ),
)

PROBLEMS = (
    ConvertProblem(1, 3, 224, 224, padded_channels=4),
    ConvertProblem(32, 3, 224, 224, padded_channels=4),
    ConvertProblem(256, 3, 224, 224, padded_channels=4),
    ConvertProblem(256, 3, 224, 224, "uint8", padded_channels=4, normalise=True),
    ConvertProblem(32, 64, 56, 56, "fp16", "nhwc"),
)
"""What `escalade ladder convert` measures, in every dtype and layout that a rung supports."""

SMALL_PROBLEMS = (
    ConvertProblem(2, 3, 8, 6, padded_channels=4),
    ConvertProblem(2, 3, 5, 7, "uint8", padded_channels=8, normalise=True),
    ConvertProblem(1, 1, 9, 16, "fp16", padded_channels=4, normalise=True),
    ConvertProblem(3, 4, 4, 12, "bf16"),
    ConvertProblem(2, 3, 5, 8, "fp32", "nhwc", padded_channels=4),
    ConvertProblem(2, 3, 6, 7, "fp16", "nhwc", stored_channels=8),
    ConvertProblem(2, 3, 7, 7, "uint8", "nhwc", normalise=True),
    ConvertProblem(2, 70, 5, 13, "fp16", "nhwc", stored_channels=72, normalise=True),
    ConvertProblem(1, 40, 8, 16, "fp32", "nhwc"),
    ConvertProblem(1, 24, 7, 12, "bf16", padded_channels=32),
    ConvertProblem(2, 67, 9, 8, "uint8", normalise=True),
)
"""Small problems that between them have every source and pair of layouts, channels left out and added, odd sizes on
both sides."""


class Convert(Operation[ConvertProblem]):
    name = "convert"
    problem = ConvertProblem
    in_pytorch = reference
    ladder = Ladder("convert", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: ConvertProblem) -> tuple[str, ...]:
        return ("few_channels", "tiled", "naive")


CONVERT = Convert()
