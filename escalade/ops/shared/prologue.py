"""The prologue: an expression applied to x as it is loaded, with per-channel and per-image operands."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

import torch

from escalade.device.program import Constant, Macro
from escalade.device.recipe import Argument, Buffer
from escalade.errors import UnsupportedError
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import ELEMENT_BYTES, STORAGE
from escalade.ops.expressions import Expression, fast_functions

OPERANDS = ("gain", "shift", "gate")
"""Operands of a prologue, in the order of a kernel's arguments: `gain` and `shift` are fp32 vectors of one number per
channel, `gate` has one per channel and image, [N][C], in the problem's dtype."""
IN_NAME = r"[\[pre:{prologue:text}\]]"
"""The prologue in a problem's name pattern."""


class HasPrologue(Protocol):
    """An image problem that may have a prologue; its `__post_init__` calls `normalize`."""

    @property
    def prologue(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def channels(self) -> int: ...


def normalize(problem: HasPrologue) -> None:
    """Check the prologue and store its canonical text."""
    if not problem.prologue:
        return
    expression = Expression.parse(problem.prologue)
    known = {"x", *OPERANDS} >= set(expression.inputs)
    if "x" not in expression.inputs or not known or len(expression.results) != 1:
        raise UnsupportedError(
            f"prologue {problem.prologue!r}: it must be one expression in x, such as relu(gain * x + shift), that may "
            "use gain and shift (one number per channel) and gate (one per channel and image)"
        )
    object.__setattr__(problem, "prologue", "" if expression.is_identity else expression.text)


def operands(problem: HasPrologue) -> tuple[str, ...]:
    """Return the operands that the prologue reads, in the order of `OPERANDS`."""
    return _operands(problem.prologue)


@lru_cache(1024)
def _operands(text: str) -> tuple[str, ...]:
    read = Expression.parse(text).inputs if text else ()
    return tuple(name for name in OPERANDS if name in read)


def operand_bytes(problem: HasPrologue) -> int:
    """Return the bytes of the operands that the prologue reads."""
    gate = problem.batch * ELEMENT_BYTES[problem.dtype]
    return problem.channels * sum(gate if name == "gate" else 4 for name in operands(problem))


def constants(problem: HasPrologue) -> dict[str, Constant]:
    """Return the parameters of kernels/common/prologue.cuh; empty without a prologue."""
    if not problem.prologue:
        return {}
    lines, (result,) = Expression.parse(problem.prologue).statements(
        {name: name for name in ("x", *OPERANDS)}
    )
    read = operands(problem)
    return {
        "PROLOGUE": Macro(" ".join((*lines, f"return {result};"))),
        **{f"PROLOGUE_{name.upper()}": name in read for name in OPERANDS},
        "FAST_FUNCTIONS": fast_functions(problem.dtype),
    }


def tensors() -> tuple[Argument, ...]:
    """Return the arguments gain, shift and gate, null where a problem has none."""
    return tuple(Buffer(name, optional=True) for name in OPERANDS)


def random_operands(problem: HasPrologue, draw: Draw) -> dict[str, torch.Tensor]:
    """Return normal deviates for the prologue's operands."""
    drawn = {}
    for name in operands(problem):
        size = (problem.batch, problem.channels) if name == "gate" else (problem.channels,)
        values = draw.normal(*size)
        drawn[name] = values.to(STORAGE[problem.dtype]) if name == "gate" else values
    return drawn


def apply(text: str, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Apply a prologue with PyTorch: replace x by its result, computed in at least fp32 and stored in x's dtype."""
    if not text:
        return inputs
    x = inputs["x"]
    wide = torch.promote_types(x.dtype, torch.float32)
    values = {"x": x.to(wide)}
    for name in _operands(text):
        values[name] = inputs[name].to(wide).reshape(-1, x.shape[1], 1, 1)
    (prepared,) = Expression.parse(text).evaluate(values)
    return {**inputs, "x": prepared.to(x.dtype)}
