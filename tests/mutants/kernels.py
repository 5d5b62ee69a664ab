"""Mutants of CUDA sources, run by the twin."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LADDERS = "tests/ops/test_ladders.py"


def _of(file: str, name: str, old: str, new: str, operation: str = "") -> Mutant:
    """A mutant of a kernel, run by the tests of its operation and by those of every rung."""
    operation = operation or file.split("/")[0]
    return Mutant(
        f"kernels/{name}", f"escalade/kernels/{file}", old, new, (f"tests/ops/{operation}", LADDERS),
        f"(test_ladders and {operation} and right) or test_{operation}",
    )  # fmt: skip


def _direct(name: str, old: str, new: str) -> Mutant:
    tests = ("tests/ops/conv2d/rungs/test_direct.py", LADDERS)
    chosen = "test_direct or (right and conv2d-direct)"
    return Mutant(f"kernels/{name}", "escalade/kernels/conv2d/direct.cu", old, new, tests, chosen)


MUTANTS: tuple[Mutant, ...] = (
    _of(
        "softmax/block_per_row.cu",
        "softmax-mask-one-too-many",
        "values[i][e] = i * THREADS + thread < packs ?",
        "values[i][e] = i * THREADS + thread <= packs ?",
    ),
    _of(
        "softmax/block_per_row.cu",
        "softmax-rows-beyond-the-last",
        "if (row >= rows) return;",
        "if (row > rows) return;",
    ),
    _of(
        "softmax/columns.cu",
        "softmax-columns-forget-their-stride",
        "(at < classes ? at : 0) * inner);",
        "(at < classes ? at : 0));",
    ),
    _of(
        "reduce/columns.cu",
        "reduce-without-the-last-barrier",
        "        __syncthreads();\n    }\n    if (!works",
        "    }\n    if (!works",
    ),
    _of(
        "pad2d/runs.cu",
        "padding-with-the-wrong-edge",
        "source(first + j - left, shape.width)",
        "source(first + j - top, shape.width)",
    ),
    _of("convert/rows.cu", "rows-of-the-wrong-pitch", "y + row * y_pitch", "y + row * x_pitch"),
)
