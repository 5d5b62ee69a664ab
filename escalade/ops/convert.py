"""Conversion of layout and element type in one pass."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from escalade.device.program import Program
from escalade.device.recipe import Argument, Buffer, Int64, Ints, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require, require_at_least
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, STORAGE, VECTOR_BYTES, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import launch
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.pitch import check_pitches, unsupported_pitch
from escalade.ops.base.rung import Config, Rung, ThreadsConfig, ThreadsRung, first_that
from escalade.ops.shared.images import LAYOUTS, Images, check_problem, empty_images, require_32_bits
from escalade.ops.shared.pointwise import PacksConfig

# --- the problem


SOURCES = ("uint8", *DTYPES)


@dataclass(frozen=True)
class ConvertProblem(Images, Named):
    """y[n, c] = x[n, c], or x[n, c] * scale[c] + shift[c], in another layout and element type.

    `source` and `source_layout` are x's, `dtype` and `layout` y's. x stores `stored_channels`, of which the first
    `channels` are read; y has `padded_channels`, zeros from `channels` on. Both default to `channels`. scale and shift
    are fp32. If x is a slice of an NHWC buffer, its pointer includes the offset and `stored_channels` is the buffer's
    pitch. With `ways` above 1 channels are interleaved: y's channel c is x's c / ways + c % ways * step.
    """

    NAME: ClassVar = NamePattern(
        "conversion",
        "{channels}[of{stored_channels}][to{padded_channels}]_{height,width}_{source:uint8|fp32|fp16|bf16}"
        "_{source_layout:nchw|nhwc}_b{batch}{normalise?_norm}[_dealt{ways}x{step}]",
        dict.fromkeys(("stored_channels", "padded_channels"), lambda p: p.channels),
    )

    source: str = "fp32"
    source_layout: str = "nchw"
    dtype: str = "fp32"
    layout: str = "nhwc"
    padded_channels: int = 0
    normalise: bool = False
    stored_channels: int = 0
    y_pitch: int = 0
    """Elements from pixel to pixel of a y in NHWC that is a slice of a larger buffer; 0 if dense."""
    ways: int = 1
    step: int = 0
    """Channels of x from one way to the next."""

    def __post_init__(self) -> None:
        for field in ("padded_channels", "stored_channels"):
            if getattr(self, field) == 0:
                object.__setattr__(self, field, self.channels)
        _check(self)

    @property
    def output_elements(self) -> int:
        return self.batch * self.padded_channels * self.pixels

    @property
    def flops(self) -> int:
        return 2 * self.elements if self.normalise else 0

    @property
    def bytes(self) -> int:
        read = self.elements * ELEMENT_BYTES[self.source]
        written = self.output_elements * ELEMENT_BYTES[self.dtype]
        return read + written + (8 * self.channels if self.normalise else 0)

    @property
    def rounding(self) -> float:
        """Product and sum are rounded to fp32; otherwise only the target type rounds."""
        return 2.0**-24 if self.normalise else 0.0


def reach(channels: int, ways: int, step: int) -> int:
    """Return the end of the channels that `channels` interleaved ones are read from."""
    each, more = divmod(channels, ways)
    longer = (more - 1) * step + each + 1 if more else 0
    return max(longer, (ways - 1) * step + each if each else 0)


def _check(p: ConvertProblem) -> None:
    require("convert", "source", p.source, SOURCES)
    require("convert", "source layout", p.source_layout, LAYOUTS)
    check_problem("convert", p)
    require_at_least(1, {"ways": p.ways})
    require_at_least(0, {"step": p.step})
    if p.ways == 1 and p.step:
        raise UnsupportedError(f"step is {p.step} with one way: a step needs at least 2 ways")
    require_at_least(p.channels, {"padded channels": p.padded_channels})
    require_at_least(reach(p.channels, p.ways, p.step), {"stored channels": p.stored_channels})
    check_pitches(p, y=p.padded_channels)
    require_32_bits("convert", max(p.stored_channels, p.padded_channels, p.y_pitch) * p.pixels)


# --- rungs


TENSORS: tuple[Argument, ...] = (
    Buffer("x"), Buffer("scale", optional=True), Buffer("shift", optional=True), Buffer("y"),
)  # fmt: skip


def unsupported(
    rung: str, problem: ConvertProblem, pitched: Collection[str] = (), takes_ways: bool = False
) -> str | None:
    """Return why no rung supports a problem, or this one does not: ways, or a pitch on a buffer not in `pitched`."""
    if problem.layout == "nchw" and problem.padded_channels != problem.channels:
        return (
            f"an nchw target cannot be padded from {problem.channels} to {problem.padded_channels} channels; the "
            "channels that an nhwc source stores are stored_channels"
        )
    if problem.ways > 1 and not takes_ways:
        return f"{rung} keeps the order of channels; these are interleaved from {problem.ways} ways"
    return unsupported_pitch(rung, problem, pitched)


# --- rungs rows and dealt: move channels of NHWC, from one slice of a buffer to another


@dataclass(frozen=True)
class Moved(Rung[ConvertProblem, PacksConfig]):
    verb: str
    dealt: bool
    """True to interleave channels of several ways, False to keep their order."""
    offered: tuple[int, ...]
    """Packs per thread."""

    def supports(self, problem: ConvertProblem) -> str | None:
        p = problem
        if self.dealt and p.ways == 1:
            return f"{self.name} interleaves channels; these keep their order"
        if (p.source, p.source_layout) != (p.dtype, "nhwc") or p.layout != "nhwc" or p.normalise:
            return f"{self.name} {self.verb} channels of NHWC; this changes their type, layout or values"
        if p.padded_channels != p.channels:
            return f"{self.name} writes as many channels as it reads, {p.channels}, not {p.padded_channels}"
        if self._packs(p) >= 2**31:
            return f"{self.name} counts packs in 32 bits; {p.name} needs more"
        return unsupported(self.name, p, ("y",), takes_ways=self.dealt)

    def configs(self, problem: ConvertProblem) -> tuple[PacksConfig, ...]:
        """Default to the first packs per thread that leave enough CTAs."""
        every = [PacksConfig(256, packs) for packs in self.offered]
        packs = self._packs(problem)
        return first_that(lambda one: packs >= self.card.busy_blocks * one.threads * one.packs, every)

    def recipe(self, problem: ConvertProblem, config: PacksConfig) -> Recipe:
        p, vector, packs = problem, self._vector(problem), self._packs(problem)
        run: dict[str, Any] = {"run": _run(p, vector)} if self.dealt else {}
        return launch(
            Program.of(f"convert/{self.name}.cu", problem=p, config=config, vector=vector, **run),
            blocks(packs, config.threads * config.packs),
            config.threads,
            Buffer("x"), Buffer("y"), p.channels // vector, *((p.step,) if self.dealt else ()),
            Int64(p.stored_channels), Int64(p.y_pitch or p.channels), packs,
        )  # fmt: skip

    def _vector(self, problem: ConvertProblem) -> int:
        p = problem
        return widest_vector(p.dtype, p.channels, p.y_pitch, 0 if self.dealt else p.stored_channels)

    def _packs(self, problem: ConvertProblem) -> int:
        return problem.elements // self._vector(problem)


def _run(problem: ConvertProblem, vector: int) -> int:
    """Return the channels of one way in a pack if one access can load them; else 1."""
    run, rest = divmod(vector, problem.ways)
    fits = not rest and not any(length % run for length in (problem.step, problem.stored_channels))
    return run if fits else 1


ROWS = Moved(
    "rows",
    "copies channels with up to 16 bytes per access, between rows of any pitch",
    below="naive",
    # 64 channels of 56 x 56, batch 32, fp16: 6.4 million threads with three 64-bit divisions, 150 instructions each (33
    # us), against 26 MB at 4.24 TB/s and a launch (8 us).
    predicted_gain=4.0,
    verb="copies",
    dealt=False,
    offered=(1, 2, 4),  # 1 GB in fp32: 503, 520 and 520 us
)

DEALT = Moved(
    "dealt",
    "interleaves channels of several ways: up to 16 bytes per store, and one load per way of a pack",
    below="naive",
    # 64 of 128 channels of 56 x 56, batch 32, fp16: 6.4 million threads with four 64-bit divisions, 170 instructions
    # each (37 us), against 26 MB at 4.24 TB/s and a launch (8 us).
    predicted_gain=4.0,
    verb="moves",
    dealt=True,
    offered=(2, 1),
)


# --- rung few_channels: a thread takes several neighboring pixels with all their channels


MOST_CHANNELS = 8


@dataclass(frozen=True)
class RunConfig(Config):
    pixels: int
    """Pixels per thread and round."""
    rounds: int = 1
    threads: int = 128


class FewChannels(Rung[ConvertProblem, RunConfig]):
    def supports(self, problem: ConvertProblem) -> str | None:
        p = problem
        most = max(p.padded_channels, p.stored_channels if p.source_layout == "nhwc" else 0)
        if most > MOST_CHANNELS:
            return f"{self.name} supports up to {MOST_CHANNELS} channels, not {most}: a thread holds whole pixels"
        if p.batch * p.pixels >= 2**31:
            return f"{self.name} counts the pixels of the batch in 32 bits; there are {p.batch * p.pixels}"
        return unsupported(self.name, problem)

    def configs(self, problem: ConvertProblem) -> tuple[RunConfig, ...]:
        """Default to the shortest run that fills an access: 16 bytes of an NHWC tensor, 4 of a plane of an NCHW one.

        Adjacent lanes then fill whole sectors; longer runs leave gaps between lanes.
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

    def recipe(self, problem: ConvertProblem, config: RunConfig) -> Recipe:
        p = problem

        def vector(dtype: str, layout: str, channels: int) -> int:
            each = channels if layout == "nhwc" else 1
            return widest_vector(dtype, each * config.pixels, each * p.pixels)

        program = Program.of(
            "convert/few_channels.cu",
            problem=p, config=config, source_vector=vector(p.source, p.source_layout, p.stored_channels),
            target_vector=vector(p.dtype, p.layout, p.padded_channels),
        )  # fmt: skip
        runs = p.batch * blocks(p.pixels, config.pixels)
        grid = blocks(runs, config.threads * config.rounds)
        return launch(program, grid, config.threads, *TENSORS, p.batch, p.pixels)


FEW_CHANNELS = FewChannels(
    "few_channels",
    "several neighboring pixels with all their channels per thread, up to 16 bytes per access on both sides",
    below="naive",
    # 3 channels of 224 x 224 into 4, batch 256, fp32 to fp16: 51 million threads with three 64-bit divisions,
    # 150 instructions each (260 us), against 257 MB at 4.24 TB/s (61 us).
    predicted_gain=4.0,
)


class Naive(ThreadsRung[ConvertProblem]):
    def supports(self, problem: ConvertProblem) -> str | None:
        return unsupported(self.name, problem, ("y",), takes_ways=True)

    def recipe(self, problem: ConvertProblem, config: ThreadsConfig) -> Recipe:
        p = problem
        return launch(
            Program.of("convert/naive.cu", problem=p),
            blocks(p.output_elements, config.threads),
            config.threads,
            *TENSORS, Ints.of("convert/naive.cu", "Shape", problem=p),
        )  # fmt: skip


NAIVE = Naive("naive", "one thread per element of the target, in the target's order", None, None)


# --- rung tiled: transpose a tile of channels and pixels in shared memory


TILE = 64
_TILE_THREADS = 256


class Tiled(Rung[ConvertProblem]):
    def supports(self, problem: ConvertProblem) -> str | None:
        if problem.source_layout == problem.layout:
            return f"{self.name} exchanges nchw and nhwc; source and target are both {problem.layout}"
        return unsupported(self.name, problem)

    def configs(self, problem: ConvertProblem) -> tuple[Config, ...]:
        return (Config(),)

    def recipe(self, problem: ConvertProblem, config: Config) -> Recipe:
        p = problem
        if p.source_layout == "nchw":
            rows, columns, padded_rows, source_pitch = p.channels, p.pixels, p.padded_channels, p.pixels
        else:
            rows, columns, padded_rows, source_pitch = p.pixels, p.channels, p.pixels, p.stored_channels
        row_tiles, column_tiles = blocks(padded_rows, TILE), blocks(columns, TILE)
        program = Program.of(
            "convert/tiled.cu",
            problem=p, source_vector=min(TILE // 8, widest_vector(p.source, source_pitch)),
            target_vector=widest_vector(p.dtype, padded_rows),
        )  # fmt: skip
        shape = Ints.of(
            "convert/tiled.cu", "Shape", problem=p, rows=rows, columns=columns, padded_rows=padded_rows,
            source_pitch=source_pitch, row_tiles=row_tiles, column_tiles=column_tiles,
        )  # fmt: skip
        return launch(program, max(1, p.batch * row_tiles * column_tiles), _TILE_THREADS, *TENSORS, shape)


TILED = Tiled(
    "tiled",
    "a tile of channels and pixels is transposed in shared memory, so that both sides are coalesced, 16 bytes per lane",
    below="naive",
    # 64 channels of 56 x 56, batch 32, fp16, nhwc to nchw: naive fetches a sector for every element, 205 MB out of L2
    # at 5.5 TB/s (37 us); 26 MB once at 4.24 TB/s and a launch are 7 us.
    predicted_gain=5.0,
)


# --- the reference


def random_inputs(problem: ConvertProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """x has three dimensions in memory order, so that only the problem defines its layout."""
    p = problem
    rest = (p.stored_channels, p.pixels) if p.source_layout == "nchw" else (p.pixels, p.stored_channels)
    if p.source == "uint8":
        x = draw.integers(256, p.batch, *rest, dtype=torch.uint8)
    else:
        x = draw.normal(p.batch, *rest).to(STORAGE[p.source])
    if not p.normalise:
        return {"x": x}
    scale, shift = draw.normal(2, p.channels)
    return {"x": x, "scale": scale.contiguous(), "shift": shift.clone()}


def empty_output(problem: ConvertProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.batch, p.padded_channels, p.height, p.width), device)


def logical(problem: ConvertProblem, x: torch.Tensor) -> torch.Tensor:
    """Return the selected channels as [N, C, H, W]; a 4-D x is in this order already, with any strides."""
    p = problem
    if x.dim() != 4:
        if p.source_layout == "nchw":
            x = x.view(p.batch, p.stored_channels, p.height, p.width)
        else:
            x = x.view(p.batch, p.height, p.width, p.stored_channels).permute(0, 3, 1, 2)
    if p.ways > 1:
        channel = torch.arange(p.channels, device=x.device)
        return x.index_select(1, channel // p.ways + channel % p.ways * p.step)
    return x[:, : p.channels]


def _normalized(problem: ConvertProblem, inputs: Tensors, dtype: torch.dtype) -> torch.Tensor:
    x = logical(problem, inputs["x"])
    if not problem.normalise:
        return x
    scale, shift = (inputs[name].to(dtype)[:, None, None] for name in ("scale", "shift"))
    return x.to(dtype) * scale + shift


def exact(problem: ConvertProblem, inputs: Tensors) -> torch.Tensor:
    p = problem
    y = torch.zeros(
        (p.batch, p.padded_channels, p.height, p.width), dtype=torch.float64, device=inputs["x"].device
    )
    y[:, : p.channels] = _normalized(p, inputs, torch.float64)
    return y


def peer(problem: ConvertProblem, inputs: Tensors) -> torch.Tensor:
    """One copy that changes type and layout at once, into zeros if channels are added."""
    y = empty_output(problem, inputs["x"].device)
    if problem.padded_channels > problem.channels:
        y.zero_()
    y[:, : problem.channels].copy_(_normalized(problem, inputs, torch.float32))
    return y


# --- the operation


class ConvertOperation(Operation[ConvertProblem]):
    name = "convert"
    problem = ConvertProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("convert", (NAIVE, TILED, FEW_CHANNELS, ROWS, DEALT))
    problems = (
        ConvertProblem(1, 3, 224, 224, padded_channels=4),
        ConvertProblem(32, 3, 224, 224, padded_channels=4),
        ConvertProblem(256, 3, 224, 224, padded_channels=4),
        ConvertProblem(256, 3, 224, 224, "uint8", padded_channels=4, normalise=True),
        ConvertProblem(32, 64, 56, 56, "fp16", "nhwc"),
        ConvertProblem(32, 64, 56, 56, "fp16", "nhwc", "fp16", stored_channels=128, ways=2, step=64),
    )
    """Problems of `escalade ladder`."""
    small_problems = (
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
        ConvertProblem(2, 24, 5, 3, "fp16", "nhwc", "fp16", stored_channels=40, y_pitch=56),
        ConvertProblem(3, 10, 3, 3, "bf16", "nhwc", "bf16", stored_channels=16, y_pitch=16),
        ConvertProblem(2, 24, 5, 3, "fp16", "nhwc", "fp16", stored_channels=48, ways=2, step=24, y_pitch=56),
        ConvertProblem(2, 30, 3, 5, "fp32", "nhwc", "fp32", ways=3, step=10),
        ConvertProblem(1, 7, 3, 3, "bf16", "nhwc", "bf16", stored_channels=11, ways=4, step=3),
    )
    """Small problems: every source and pair of layouts, channels dropped and added, odd sizes on both sides,
    interleaved channels, and pitches."""
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("dealt", "rows", "few_channels", "tiled", "naive")


CONVERT = ConvertOperation()
