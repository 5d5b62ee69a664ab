"""Kernels to run under a sanitizer: every source and every rung once, on problems of a few tiles, and the
resizing of photographs, which is not an operation.

`python -m tests.gpu.sanitize` reads jobs from standard input, one per line, runs them on the GPU (with `--twin`, on the
twin), and prints for each when it starts and whether its results are right. With `--raw`, outputs and workspaces are
left uninitialized instead of poisoned. Inputs and references are computed on the CPU, so that the sanitizer sees few
kernels but the project's own, and every tensor has a separate allocation, whose bounds it knows.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import torch

from escalade.device.recipe import Im2colMap, KernelCall, Recipe, TiledMap
from escalade.device.run import bind
from escalade.device.sources import KERNELS
from escalade.ops import OPERATIONS, Operation, Rung
from escalade.ops.base.cards import typical_card
from escalade.ops.base.pitch import pitches
from escalade.tune.verification import VerificationCase, compare, in_layout, poisoned_workspaces
from escalade_apps.classify import resizing
from escalade_apps.classify.images import Crop
from tests.classify.squares import difference
from tests.random_models import views
from tests.random_models.runs import Run, today
from tests.support import supported

ARCHITECTURE = "sm_90a"
RAW = "--raw"
_FLOPS = 2.0**21
"""Work per job: several CTAs and tiles, but little enough for a tool that slows it down a hundredfold."""
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Job:
    """One rung with its default config on one problem; as text, the words of its line."""

    operation: str
    rung: str
    problem: str
    dtype: str
    layout: str

    def __str__(self) -> str:
        return f"{self.operation} {self.rung} {self.problem} {self.dtype} {self.layout}"

    @staticmethod
    def parse(line: str) -> Job:
        return Job(*line.split())

    @property
    def parts(self) -> tuple[Operation[Any], Rung[Any], Any]:
        operation = OPERATIONS[self.operation]
        problem = replace(operation.parse(self.problem), dtype=self.dtype, layout=self.layout)
        return operation, operation.ladder.rung(self.rung), problem

    @property
    def sources(self) -> set[str]:
        _, rung, problem = self.parts
        return {program.source for program in rung.recipe(problem, rung.configs(problem)[0]).programs}


@dataclass(frozen=True)
class Resizing:
    """Photographs of all these sizes resized at once; as text, their resized and cropped sizes, and the original
    sizes."""

    crop: Crop
    sizes: tuple[tuple[int, int], ...]
    sources: ClassVar[set[str]] = {resizing.PROGRAM.source}

    def __str__(self) -> str:
        sizes = " ".join(f"{width}x{height}" for width, height in self.sizes)
        return f"resizing {self.crop.resize} {self.crop.side} {sizes}"

    @staticmethod
    def parse(line: str) -> Resizing:
        _, resize, side, *sizes = line.split()
        pairs = (map(int, size.split("x")) for size in sizes)
        return Resizing(Crop(int(resize), int(side)), tuple((width, height) for width, height in pairs))


@dataclass(frozen=True)
class Views:
    """A network in which kernels read views of PyTorch's results, by its number."""

    number: int
    dtype: str
    sources: ClassVar[set[str]] = set()
    """None: the plan chooses which kernels run."""

    def __str__(self) -> str:
        return f"views {self.number} {self.dtype}"

    @staticmethod
    def parse(line: str) -> Views:
        _, number, dtype = line.split()
        return Views(int(number), dtype)

    def failure(self, device: torch.device) -> str:
        place = "cuda" if device.type == "cuda" else "twin"
        return Run("views", self.number, self.dtype, place, no_graph=True).failure()


AnyJob = Job | Resizing | Views
RESIZING = Resizing(Crop(72, 65), ((50, 60), (33, 400), (400, 33), (72, 90), (1, 1), (300, 257)))


def parse(line: str) -> AnyJob:
    if line.startswith("views "):
        return Views.parse(line)
    return Resizing.parse(line) if line.startswith("resizing ") else Job.parse(line)


def views_of_the_day() -> list[Views]:
    """Every second pair of a source and a view, the others tomorrow, with the consumers of the day."""
    first = today() * len(views.PAIRS)
    return [
        Views((first + number) % views.COUNT, ("fp16", "fp32")[number // 2 % 2])
        for number in range(today() % 2, len(views.PAIRS), 2)
    ]


def sources() -> set[str]:
    return {path.relative_to(KERNELS).as_posix() for path in KERNELS.rglob("*.cu")}


def covering() -> list[Job | Resizing]:
    """One job per rung, and one for each source that those do not cover."""
    chosen: list[Job | Resizing] = [RESIZING]
    left = sources() - RESIZING.sources
    candidates = [
        _candidates(operation, rung) for operation in OPERATIONS.values() for rung in operation.ladder
    ]
    for each in candidates:
        chosen += each[:1]
        left -= each[0].sources if each else set()
    folders = {source.partition("/")[0] for source in left}
    for job in sorted(chain(*candidates), key=lambda job: job.operation not in folders):
        if not left:
            break
        if job.sources & left:
            chosen.append(job)
            left -= job.sources
    return chosen


def _candidates(operation: Operation[Any], rung: Rung[Any]) -> list[Job]:
    """Problems of suitable size first, and slices of larger buffers last."""
    here = rung.on(typical_card(ARCHITECTURE))
    problems = [
        problem
        for variants in supported(operation, rung, operation.small_problems)
        for problem in variants
        if problem.batch and here.refusal(problem) is None
    ]
    problems.sort(key=lambda p: (bool(pitches(p)), abs(math.log2(max(1, p.flops) / _FLOPS))))
    return [Job(operation.name, rung.name, p.name, p.dtype, p.layout) for p in problems]


def run(job: AnyJob, device: torch.device, seed: int = 0, raw: bool = False) -> str:
    """Return errors in the results, or an empty string. `raw` memory is uninitialized instead of poisoned."""
    if isinstance(job, Views):
        return job.failure(device)
    if isinstance(job, Resizing):
        return difference(job.sizes, job.crop, device, seed)
    operation, rung, problem = job.parts
    case = VerificationCase(operation, problem, _CPU, seed)
    recipe = rung.recipe(problem, rung.configs(problem)[0])
    tensors = {name: in_layout(tensor, problem.layout).to(device) for name, tensor in case.inputs.items()}
    outputs = {"y": operation.output(problem, device), **operation.extra_outputs(problem, device)}
    unfilled = (
        set[str]() if not raw else {*outputs, *(one.name for one in recipe.workspaces)} - _mapped(recipe)
    )
    workspaces = {
        name: one for name, one in poisoned_workspaces(recipe, device).items() if name not in unfilled
    }
    for name, output in outputs.items():
        if name not in unfilled:
            output.fill_(float("nan") if output.is_floating_point() else torch.iinfo(output.dtype).max)
    bind(recipe, {**tensors, **workspaces, **outputs}, str(job))()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    tolerance = rung.tolerance(problem, case.peer_error)
    for name, expected in {"y": case.expected, **case.further}.items():
        failure, _ = compare(outputs[name].cpu(), expected, tolerance)
        if failure:
            return f"of {name}: {failure}"
    return ""


def _mapped(recipe: Recipe) -> set[str]:
    """Return the buffers with tensor maps: initcheck does not see TMA stores."""
    calls = (step for step in recipe.steps if isinstance(step, KernelCall))
    arguments = (argument for call in calls for argument in call.arguments)
    return {argument.buffer.name for argument in arguments if isinstance(argument, TiledMap | Im2colMap)}


def main(lines: Iterable[str], device: torch.device, raw: bool = False) -> int:
    wrong = 0
    for line in filter(None, map(str.strip, lines)):
        print(f"begins {line}", flush=True)
        try:
            failure = run(parse(line), device, raw=raw)
        except Exception as error:  # later jobs continue, if the GPU still works
            failure = f"{type(error).__name__}: {error}"
        print(f"wrong {line}: {failure}" if failure else f"right {line}", flush=True)
        wrong += bool(failure)
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    torch.set_num_threads(1)  # other processes use the GPU too
    where = _CPU if "--twin" in sys.argv else torch.device("cuda", 0)
    sys.exit(main(sys.stdin, where, raw=RAW in sys.argv))
