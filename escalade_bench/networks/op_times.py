"""Both convolutions of a LeNet by every rung of their ladder, and by cuDNN.

The records are those of `escalade ladder few_channels`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from escalade import ops
from escalade.device.cuda import architecture
from escalade.device.precompilation import precompile
from escalade.ops.base.operation import Operation
from escalade.tune import verification
from escalade_bench.ladder import climb
from escalade_bench.measure.records import Record
from escalade_bench.networks.workload import Say, Setting

OPERATION = "few_channels"
FORMS = {
    "": ("1to4_86_k7_b{batch}", "4to16_40_k7_b{batch}"),
    "with ReLU and pooling": ("1to4_86_k7_b{batch}_relu_pool2", "4to16_40_k7_b{batch}_relu_pool4c"),
}
"""The first and the second convolution, alone and fused with the following layers."""
_DTYPES = ("fp32", "fp16")
_SECONDS = 0.1
"""Most seconds per subject: slow ones take a tenth of a second for their five rounds anyway."""


def measure(setting: Setting, say: Say) -> Iterator[list[Record]]:
    """Measure all rungs for the convolutions alone; with ReLU and pooling, those of a network.

    Rungs without fp32 run on fp32 tensors with TF32 products. On the CPU, the twin runs one rung on one image.
    """
    operation = ops.operation(OPERATION)
    asked = {problem: _asked(operation, problem, setting) for problem in _problems(operation, setting)}
    layouts = operation.layouts if setting.on_gpu else operation.layouts[:1]
    if setting.on_gpu:
        say(f"{operation.name}: compiling")
        _compile(operation, asked, setting)
    for problem, by_dtype in asked.items():
        for dtype, rungs in by_dtype.items():
            short = min(setting.session.seconds, _SECONDS)
            settings = setting.session.settings(say, dtype, layouts=layouts, rungs=rungs, seconds_each=short)
            yield climb(operation, problem, settings)


def _problems(operation: Operation[Any], setting: Setting) -> list[Any]:
    forms = FORMS.values() if setting.on_gpu else (FORMS[""],)
    batch = max(setting.batches) if setting.on_gpu else 1
    return [operation.parse(name.format(batch=batch)) for names in forms for name in names]


def _compile(
    operation: Operation[Any], asked: Mapping[Any, Mapping[str, tuple[str, ...]]], setting: Setting
) -> None:
    """Compile on all cores before the climbs, which report failures."""
    here = architecture(setting.device.index or 0)
    planned = [
        job
        for problem, by_dtype in asked.items()
        for dtype, rungs in by_dtype.items()
        for job in verification.jobs(
            operation, setting.device, problems=[problem], rungs=rungs, dtypes=[dtype]
        )
    ]
    precompile(verification.programs(planned), here)


def _asked(operation: Operation[Any], problem: Any, setting: Setting) -> dict[str, tuple[str, ...]]:
    """Return the rungs to measure by dtype; the climb leaves out those that refuse."""
    preferred = operation.preferred(problem)
    if not setting.on_gpu:
        return {
            "fp32": next((name,) for name in preferred if not operation.ladder.rung(name).supports(problem))
        }
    plain = problem.pool == 1
    wanted = [rung for rung in operation.ladder if plain or rung.name in preferred]
    found = {dtype: tuple(rung.name for rung in wanted) for dtype in setting.dtypes if dtype in _DTYPES}
    if "fp32" in found:
        exact, rounded = (replace(problem, dtype=dtype) for dtype in ("fp32", "tf32"))
        found["tf32"] = tuple(r.name for r in wanted if r.supports(exact) and not r.supports(rounded))
    return {dtype: rungs for dtype, rungs in found.items() if rungs}
