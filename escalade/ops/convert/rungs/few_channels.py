"""A thread takes several neighbouring pixels with all their channels."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import KernelCall, Recipe
from escalade.ops.base.dtypes import ELEMENT_BYTES, VECTOR_BYTES, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config, Rung
from escalade.ops.convert.problem import ConvertProblem
from escalade.ops.convert.rungs import arguments

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
        return arguments.unsupported(self.name, problem)

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

        constants = arguments.constants(p) | {
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
            (*arguments.TENSORS, p.batch, p.pixels),
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
