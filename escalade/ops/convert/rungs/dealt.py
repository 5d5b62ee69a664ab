"""Rows of channels dealt out in turns, from one buffer's part to another's."""

from __future__ import annotations

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe
from escalade.ops.base.dtypes import element, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config, Rung
from escalade.ops.convert.problem import ConvertProblem
from escalade.ops.convert.rungs import arguments
from escalade.ops.shared.pointwise import PacksConfig


class Dealt(Rung[ConvertProblem]):
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
        return arguments.unsupported(self.name, p, ("y",), takes_ways=True)

    def configs(self, problem: ConvertProblem) -> tuple[Config, ...]:
        """Offers as many packs a thread as leave enough blocks to go round."""
        every = [PacksConfig(256, packs) for packs in (2, 1)]
        filling = [
            config for config in every if _packs(problem) >= self.card.filling * config.threads * config.packs
        ]
        default = filling[0] if filling else every[-1]
        return (default, *(config for config in every if config != default))

    def recipe(self, problem: ConvertProblem, config: Config) -> Recipe:
        assert isinstance(config, PacksConfig)
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
