"""Rows of channels copied as they are, from one buffer's part to another's."""

from __future__ import annotations

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe
from escalade.ops.base.dtypes import element, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config, Rung
from escalade.ops.convert.problem import ConvertProblem
from escalade.ops.convert.rungs import arguments
from escalade.ops.shared.pointwise import PacksConfig


class Rows(Rung[ConvertProblem]):
    def supports(self, problem: ConvertProblem) -> str | None:
        p = problem
        if (p.source, p.source_layout) != (p.dtype, "nhwc") or p.layout != "nhwc" or p.normalise:
            return (
                f"{self.name} copies channels of NHWC as they are; this changes their type, layout or values"
            )
        if p.padded_channels != p.channels:
            return f"{self.name} copies {p.channels} channels and writes as many, not {p.padded_channels}"
        if _packs(p) >= 2**31:
            return f"{self.name} counts packs in 32 bits; there are too many for {p.name}"
        return arguments.unsupported(self.name, p, ("y",))

    def configs(self, problem: ConvertProblem) -> tuple[Config, ...]:
        """Offers as many packs a thread as leave enough blocks to go round."""
        every = [PacksConfig(256, packs) for packs in (4, 2, 1)]
        filling = [
            config for config in every if _packs(problem) >= self.card.filling * config.threads * config.packs
        ]
        default = filling[0] if filling else every[-1]
        return (default, *(config for config in every if config != default))

    def recipe(self, problem: ConvertProblem, config: Config) -> Recipe:
        assert isinstance(config, PacksConfig)
        p = problem
        vector = _vector(p)
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
            (blocks(_packs(p), config.threads * config.packs), 1, 1),
            (config.threads, 1, 1),
            (
                Buffer("x"),
                Buffer("y"),
                p.channels // vector,
                Int64(p.stored_channels),
                Int64(p.y_pitch or p.channels),
                _packs(p),
            ),
            overlap=True,
        )
        return Recipe((call,))


def _vector(problem: ConvertProblem) -> int:
    p = problem
    return widest_vector(p.dtype, p.channels, p.stored_channels, p.y_pitch)


def _packs(problem: ConvertProblem) -> int:
    return problem.elements // _vector(problem)


ROWS = Rows(
    "rows",
    "channels that stay as they are move up to 16 bytes an access, from and to wherever their rows begin",
    below="naive",
    # 64 channels of 56 x 56, batch 32, fp16: 6.4 million threads with three 64-bit divisions, 150 instructions each (33
    # us), against 26 MB at 4.24 TB/s and a launch (8 us).
    predicted_gain=4.0,
)
