"""A tensor from one layout and element type to another in one pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from escalade.device.program import Constant, Program
from escalade.device.recipe import Argument, Buffer, Int64, Ints, KernelCall, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require, require_at_least
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, STORAGE, VECTOR_BYTES, element, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference
from escalade.ops.base.pitch import check_pitches, unsupported_pitch
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.shared.images import LAYOUTS, Images, check_problem, empty_images, require_32_bits
from escalade.ops.shared.pointwise import PacksConfig

# --- the problem


SOURCES = ("uint8", *DTYPES)


@dataclass(frozen=True)
class ConvertProblem(Images, Named):
    """y[n, c] = x[n, c], or x[n, c] * scale[c] + shift[c], in another layout and element type.

    `source` and `source_layout` are x's, `dtype` and `layout` y's. x stores `stored_channels`, of which the
    first `channels` are taken; y has `padded_channels`, zeros from `channels` on. Both are `channels` unless
    given. scale and shift are fp32. A part of an x in NHWC begins at its own address, and the whole's channels are
    stored. With `ways` above 1 channels are dealt out in turns: y's channel c is x's c / ways + c % ways * step.
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
    """Elements from pixel to pixel of a y in NHWC that is a part of a larger buffer; 0: it is dense."""
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
        """The product and the sum are rounded to fp32; without them the only rounding is the target's own."""
        return 2.0**-24 if self.normalise else 0.0


def reach(channels: int, ways: int, step: int) -> int:
    """Channels up to the last that so many are dealt out of."""
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
        raise UnsupportedError(f"a step of {p.step} between channels of one way: it takes at least 2 ways")
    require_at_least(p.channels, {"padded channels": p.padded_channels})
    require_at_least(reach(p.channels, p.ways, p.step), {"stored channels": p.stored_channels})
    check_pitches(p, y=p.padded_channels)
    require_32_bits("convert", max(p.stored_channels, p.padded_channels, p.y_pitch) * p.pixels)


# --- rungs, arguments: how convert reaches a kernel: the constants, arguments and refusals that its rungs share


TENSORS: tuple[Argument, ...] = (
    Buffer("x"),
    Buffer("scale", optional=True),
    Buffer("shift", optional=True),
    Buffer("y"),
)


def kernel_constants(problem: ConvertProblem) -> dict[str, Constant]:
    return {
        "Source": element(problem.source),
        "Target": element(problem.dtype),
        "SOURCE_NHWC": problem.source_layout == "nhwc",
        "TARGET_NHWC": problem.layout == "nhwc",
        "NORMALISE": problem.normalise,
    }


def unsupported(
    rung: str, problem: ConvertProblem, takes: Collection[str] = (), takes_ways: bool = False
) -> str | None:
    """What no rung does, and buffers apart other than those that it takes so."""
    if problem.layout == "nchw" and problem.padded_channels != problem.channels:
        return (
            f"an nchw target is not padded, but {problem.padded_channels} channels are asked for of "
            f"{problem.channels}; what an nhwc source stores is stored_channels"
        )
    if problem.ways > 1 and not takes_ways:
        return f"{rung} leaves channels in their order; here they are dealt out of {problem.ways} ways"
    return unsupported_pitch(rung, problem, takes)


# --- rungs, dealt: rows of channels dealt out in turns, from one buffer's part to another's


class Dealt(Rung[ConvertProblem, PacksConfig]):
    def supports(self, problem: ConvertProblem) -> str | None:
        p = problem
        if p.ways == 1:
            return f"{self.name} deals channels out of several ways; these stay in their order"
        if (p.source, p.source_layout) != (p.dtype, "nhwc") or p.layout != "nhwc" or p.normalise:
            return f"{self.name} moves channels of NHWC; this changes their type, layout or values"
        if p.padded_channels != p.channels:
            return f"{self.name} takes {p.channels} channels and writes as many, not {p.padded_channels}"
        if _packs(p) >= 2**31:
            return f"{self.name} counts packs in 32 bits; there are too many for {p.name}"
        return unsupported(self.name, p, ("y",), takes_ways=True)

    def configs(self, problem: ConvertProblem) -> tuple[PacksConfig, ...]:
        """Offers as many packs a thread as leave enough blocks to go round."""
        every = [PacksConfig(256, packs) for packs in (2, 1)]
        filling = [
            config
            for config in every
            if _packs(problem) >= self.card.busy_blocks * config.threads * config.packs
        ]
        default = filling[0] if filling else every[-1]
        return (default, *(config for config in every if config != default))

    def recipe(self, problem: ConvertProblem, config: PacksConfig) -> Recipe:
        p = problem
        vector = _vector(p)
        constants: dict[str, Constant] = {
            "Element": element(p.dtype),
            "VECTOR": vector,
            "RUN": _run(p, vector),
            "WAYS": p.ways,
            "PACKS": config.packs,
            "THREADS": config.threads,
        }
        call = KernelCall(
            Program.of("convert/dealt.cu", "convert_dealt", constants),
            (blocks(_packs(p), config.threads * config.packs), 1, 1),
            (config.threads, 1, 1),
            (
                Buffer("x"),
                Buffer("y"),
                p.channels // vector,
                p.step,
                Int64(p.stored_channels),
                Int64(p.y_pitch or p.channels),
                _packs(p),
            ),
            overlap=True,
        )
        return Recipe((call,))


def _vector(problem: ConvertProblem) -> int:
    return widest_vector(problem.dtype, problem.channels, problem.y_pitch)


def _run(problem: ConvertProblem, vector: int) -> int:
    """Neighbours of a way in a pack, if they can be one access; 1: they are loaded one by one."""
    run, rest = divmod(vector, problem.ways)
    fits = not rest and not any(length % run for length in (problem.step, problem.stored_channels))
    return run if fits else 1


def _packs(problem: ConvertProblem) -> int:
    return problem.elements // _vector(problem)


DEALT = Dealt(
    "dealt",
    "channels are dealt out of several ways: up to 16 bytes a store, and what a pack has of a way in one load",
    below="naive",
    # 64 of 128 channels of 56 x 56, batch 32, fp16: 6.4 million threads with four 64-bit divisions, 170 instructions
    # each (37 us), against 26 MB at 4.24 TB/s and a launch (8 us).
    predicted_gain=4.0,
)


# --- rungs, few_channels: a thread takes several neighbouring pixels with all their channels


MOST_CHANNELS = 8


@dataclass(frozen=True)
class RunConfig(Config):
    pixels: int
    """Pixels that a thread takes at once."""
    rounds: int = 1
    threads: int = 128


class FewChannels(Rung[ConvertProblem, RunConfig]):
    def supports(self, problem: ConvertProblem) -> str | None:
        p = problem
        most = max(p.padded_channels, p.stored_channels if p.source_layout == "nhwc" else 0)
        if most > MOST_CHANNELS:
            return (
                f"{self.name} takes up to {MOST_CHANNELS} channels, not {most}: a thread holds all of a pixel"
            )
        if p.batch * p.pixels >= 2**31:
            return f"{self.name} counts the pixels of the whole batch in 32 bits; here there are {p.batch * p.pixels}"
        return unsupported(self.name, problem)

    def configs(self, problem: ConvertProblem) -> tuple[RunConfig, ...]:
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

    def recipe(self, problem: ConvertProblem, config: RunConfig) -> Recipe:
        p = problem

        def vector(dtype: str, layout: str, channels: int) -> int:
            each = channels if layout == "nhwc" else 1
            return widest_vector(dtype, each * config.pixels, each * p.pixels)

        constants = kernel_constants(p) | {
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
            (*TENSORS, p.batch, p.pixels),
            overlap=True,
        )
        return Recipe((call,))


FEW_CHANNELS = FewChannels(
    "few_channels",
    "a thread takes several neighbouring pixels with all their channels, up to 16 bytes an access on both sides",
    below="naive",
    # 3 channels of 224 x 224 into 4, batch 256, fp32 to fp16: 51 million threads with three 64-bit divisions,
    # 150 instructions each (260 us), against 257 MB at 4.24 TB/s (61 us).
    predicted_gain=4.0,
)


# --- rungs, naive: one thread per element of the target


class Naive(Rung[ConvertProblem, ThreadsConfig]):
    def supports(self, problem: ConvertProblem) -> str | None:
        return unsupported(self.name, problem, ("y",), takes_ways=True)

    def configs(self, problem: ConvertProblem) -> tuple[ThreadsConfig, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: ConvertProblem, config: ThreadsConfig) -> Recipe:
        p = problem
        constants = kernel_constants(p) | {"PITCHED": p.y_pitch > 0, "WAYS": p.ways}
        call = KernelCall(
            Program.of("convert/naive.cu", "convert_naive", constants),
            (blocks(p.output_elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            (
                *TENSORS,
                Ints(
                    (p.batch, p.channels, p.stored_channels, p.padded_channels, p.pixels, p.y_pitch, p.step)
                ),
            ),
            overlap=True,
        )
        return Recipe((call,))


NAIVE = Naive("naive", "one thread an element of the target, in the target's order", None, None)


# --- rungs, rows: rows of channels copied as they are, from one buffer's part to another's


class Rows(Rung[ConvertProblem, PacksConfig]):
    def supports(self, problem: ConvertProblem) -> str | None:
        p = problem
        if (p.source, p.source_layout) != (p.dtype, "nhwc") or p.layout != "nhwc" or p.normalise:
            return (
                f"{self.name} copies channels of NHWC as they are; this changes their type, layout or values"
            )
        if p.padded_channels != p.channels:
            return f"{self.name} copies {p.channels} channels and writes as many, not {p.padded_channels}"
        if _packs_rows(p) >= 2**31:
            return f"{self.name} counts packs in 32 bits; there are too many for {p.name}"
        return unsupported(self.name, p, ("y",))

    def configs(self, problem: ConvertProblem) -> tuple[PacksConfig, ...]:
        """Offers as many packs a thread as leave enough blocks to go round."""
        every = [PacksConfig(256, packs) for packs in (4, 2, 1)]
        filling = [
            config
            for config in every
            if _packs_rows(problem) >= self.card.busy_blocks * config.threads * config.packs
        ]
        default = filling[0] if filling else every[-1]
        return (default, *(config for config in every if config != default))

    def recipe(self, problem: ConvertProblem, config: PacksConfig) -> Recipe:
        p = problem
        vector = _vector_rows(p)
        call = KernelCall(
            Program.of(
                "convert/rows.cu",
                "convert_rows",
                {
                    "Element": element(p.dtype),
                    "VECTOR": vector,
                    "PACKS": config.packs,
                    "THREADS": config.threads,
                },
            ),
            (blocks(_packs_rows(p), config.threads * config.packs), 1, 1),
            (config.threads, 1, 1),
            (
                Buffer("x"),
                Buffer("y"),
                p.channels // vector,
                Int64(p.stored_channels),
                Int64(p.y_pitch or p.channels),
                _packs_rows(p),
            ),
            overlap=True,
        )
        return Recipe((call,))


def _vector_rows(problem: ConvertProblem) -> int:
    p = problem
    return widest_vector(p.dtype, p.channels, p.stored_channels, p.y_pitch)


def _packs_rows(problem: ConvertProblem) -> int:
    return problem.elements // _vector_rows(problem)


ROWS = Rows(
    "rows",
    "channels that stay as they are move up to 16 bytes an access, from and to wherever their rows begin",
    below="naive",
    # 64 channels of 56 x 56, batch 32, fp16: 6.4 million threads with three 64-bit divisions, 150 instructions each (33
    # us), against 26 MB at 4.24 TB/s and a launch (8 us).
    predicted_gain=4.0,
)


# --- rungs, tiled: a tile of channels and pixels is turned in shared memory


TILE = 64

_TILE_THREADS = 256


class Tiled(Rung[ConvertProblem]):
    def supports(self, problem: ConvertProblem) -> str | None:
        if problem.source_layout == problem.layout:
            return f"{self.name} exchanges nchw and nhwc; source and target both are {problem.layout}"
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
        constants = kernel_constants(p) | {
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
            (*TENSORS, shape),
            overlap=True,
        )
        return Recipe((call,))


TILED = Tiled(
    "tiled",
    "a tile of channels and pixels is turned in shared memory, so that both sides move whole lines 16 bytes a lane",
    below="naive",
    # 64 channels of 56 x 56, batch 32, fp16, nhwc to nchw: the foot fetches a sector for every element, 205 MB
    # out of L2 at 5.5 TB/s (37 us); 26 MB once at 4.24 TB/s and a launch are 7 us.
    predicted_gain=5.0,
)


# --- problems to measure and to test


PROBLEMS = (
    ConvertProblem(1, 3, 224, 224, padded_channels=4),
    ConvertProblem(32, 3, 224, 224, padded_channels=4),
    ConvertProblem(256, 3, 224, 224, padded_channels=4),
    ConvertProblem(256, 3, 224, 224, "uint8", padded_channels=4, normalise=True),
    ConvertProblem(32, 64, 56, 56, "fp16", "nhwc"),
    ConvertProblem(32, 64, 56, 56, "fp16", "nhwc", "fp16", stored_channels=128, ways=2, step=64),
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
    ConvertProblem(2, 24, 5, 3, "fp16", "nhwc", "fp16", stored_channels=40, y_pitch=56),
    ConvertProblem(3, 10, 3, 3, "bf16", "nhwc", "bf16", stored_channels=16, y_pitch=16),
    ConvertProblem(2, 24, 5, 3, "fp16", "nhwc", "fp16", stored_channels=48, ways=2, step=24, y_pitch=56),
    ConvertProblem(2, 30, 3, 5, "fp32", "nhwc", "fp32", ways=3, step=10),
    ConvertProblem(1, 7, 3, 3, "bf16", "nhwc", "bf16", stored_channels=11, ways=4, step=3),
)
"""Small problems that between them have every source and pair of layouts, channels left out and added, odd sizes on
both sides, channels dealt out of several ways, and parts of larger buffers."""


# --- the reference


def random_inputs(problem: ConvertProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """x has three dimensions, in the order in which it lies in memory: its layout is the problem's alone."""
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)
    rest = (p.stored_channels, p.pixels) if p.source_layout == "nchw" else (p.pixels, p.stored_channels)
    if p.source == "uint8":
        x = torch.randint(0, 256, (p.batch, *rest), generator=generator, device=device, dtype=torch.uint8)
    else:
        x = torch.randn((p.batch, *rest), generator=generator, device=device).to(STORAGE[p.source])
    if not p.normalise:
        return {"x": x}
    scale, shift = torch.randn((2, p.channels), generator=generator, device=device)
    return {"x": x, "scale": scale.contiguous(), "shift": shift.clone()}


def empty_output(problem: ConvertProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.batch, p.padded_channels, p.height, p.width), device)


def logical(problem: ConvertProblem, x: torch.Tensor) -> torch.Tensor:
    """The channels that are taken, as [N, C, H, W]; of an x that is in this order already, whatever its strides."""
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


def _normalised(
    problem: ConvertProblem, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    x = logical(problem, inputs["x"])
    if not problem.normalise:
        return x
    scale, shift = (inputs[name].to(dtype)[:, None, None] for name in ("scale", "shift"))
    return x.to(dtype) * scale + shift


def exact(problem: ConvertProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The converted tensor in float64."""
    p = problem
    y = torch.zeros(
        (p.batch, p.padded_channels, p.height, p.width), dtype=torch.float64, device=inputs["x"].device
    )
    y[:, : p.channels] = _normalised(p, inputs, torch.float64)
    return y


def peer(problem: ConvertProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One copy that changes type and layout at once, into zeros where channels are added."""
    y = empty_output(problem, inputs["x"].device)
    if problem.padded_channels > problem.channels:
        y.zero_()
    y[:, : problem.channels].copy_(_normalised(problem, inputs, torch.float32))
    return y


# --- the operation


class Convert(Operation[ConvertProblem]):
    name = "convert"
    problem = ConvertProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("convert", (NAIVE, TILED, FEW_CHANNELS, ROWS, DEALT))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: ConvertProblem) -> tuple[str, ...]:
        return ("dealt", "rows", "few_channels", "tiled", "naive")


CONVERT = Convert()
