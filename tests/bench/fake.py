"""A small operation for tests, y = 2x, with correct and incorrect rungs."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, Workspace
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.base.rung import Config, Rung

SOURCE = str(pathlib.Path(__file__).parent / "scale.cu")
FAULTS = {"none": 0, "unwritten": 1, "mutates": 2, "wrong_element": 3, "uses_workspace": 4}


@dataclass(frozen=True)
class ScaleProblem:
    size: int
    dtype: str = "fp32"
    layout: str = "nchw"

    @staticmethod
    def parse(name: str) -> ScaleProblem:
        return ScaleProblem(int(name.removeprefix("scale_")))

    @property
    def name(self) -> str:
        return f"scale_{self.size}"

    @property
    def batch(self) -> int:
        return 1

    @property
    def flops(self) -> int:
        return self.size

    @property
    def bytes(self) -> int:
        return 8 * self.size

    @property
    def rounding(self) -> float:
        return 2.0**-24


@dataclass(frozen=True)
class Threads(Config):
    threads: int = 64


@dataclass(frozen=True)
class ScaleRung(Rung[ScaleProblem]):
    fault: str = "none"
    slip: float = 1.0

    def supports(self, problem: ScaleProblem) -> str | None:
        if problem.layout != "nchw":
            return f"{self.name} takes nchw, not {problem.layout}"
        return None

    def configs(self, problem: ScaleProblem) -> tuple[Config, ...]:
        return (Threads(64), Threads(32), Threads(128))

    def recipe(self, problem: ScaleProblem, config: Config) -> Recipe:
        assert isinstance(config, Threads)
        if self.fault == "raises":
            raise ZeroDivisionError("no tile divides this")
        program = Program.of(SOURCE, "scale", {"FAULT": FAULTS[self.fault], "SLIP": self.slip})
        call = KernelCall(
            program,
            (-(-problem.size // config.threads), 1, 1),
            (config.threads, 1, 1),
            (Buffer("x"), Buffer("y"), Buffer("scratch"), problem.size),
        )
        return Recipe((call,), (Workspace("scratch", 4 * problem.size),))


def rung(name: str, fault: str = "none", below: str | None = None, slip: float = 1.0) -> ScaleRung:
    return ScaleRung(name, f"a rung that is {name}", below, 1.5 if below else None, fault, slip)


class Scale(Operation[ScaleProblem]):
    name = "scale"
    problem = ScaleProblem
    problems = (ScaleProblem(1000),)
    small_problems = (ScaleProblem(100),)
    dtypes = ("fp32",)
    layouts = ("nchw", "nhwc")

    def __init__(self, *rungs: ScaleRung) -> None:
        self.ladder = Ladder("scale", rungs)
        self.inputs_made = 0

    def preferred(self, problem: ScaleProblem) -> tuple[str, ...]:
        return tuple(rung.name for rung in self.ladder)

    def inputs(self, problem: ScaleProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
        self.inputs_made += 1
        generator = torch.Generator(device=device).manual_seed(seed)
        return {"x": torch.randn(problem.size, generator=generator, device=device)}

    def output(self, problem: ScaleProblem, device: torch.device) -> torch.Tensor:
        return torch.empty(problem.size, device=device)

    def reference(self, problem: ScaleProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return 2 * inputs["x"].double()

    def peer(self, problem: ScaleProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return 2 * inputs["x"]
