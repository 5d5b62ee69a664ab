"""What an operation does with x on the way in: an expression of x and of operands by channel and image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from escalade.device.program import Constant, Macro
from escalade.device.recipe import Argument, Buffer
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import ELEMENT_BYTES, STORAGE
from escalade.ops.expressions import Expression, fast_functions

OPERANDS = ("gain", "shift", "gate")
"""What a prologue may read besides x, in the order of a kernel's arguments: `gain` and `shift` are fp32 vectors of one
number a channel, `gate` has one of the dtype for every channel of every image, [N][C]."""
IN_NAME = r"[\[pre:{prologue:text}\]]"
"""The prologue in the name pattern of a problem."""


class Prepared(Protocol):
    """A problem on images that may have a prologue; `settle` belongs into its `__post_init__`."""

    @property
    def prologue(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def channels(self) -> int: ...


def settle(problem: Prepared) -> None:
    """Checks the prologue, and says it in its canonical form."""
    if not problem.prologue:
        return
    expression = Expression.parse(problem.prologue)
    known = {"x", *OPERANDS} >= set(expression.inputs)
    if "x" not in expression.inputs or not known or len(expression.results) != 1:
        raise UnsupportedError(
            f"a prologue of {problem.prologue!r}: it is one result computed from x, such as relu(gain * x + shift), "
            "and from gain and shift, of a number a channel, and gate, of one for each channel of each image"
        )
    object.__setattr__(problem, "prologue", "" if expression.is_identity else expression.text)


def operands(problem: Prepared) -> tuple[str, ...]:
    """The inputs that the prologue reads besides x, in the order of `OPERANDS`."""
    return _operands(problem.prologue)


def _operands(text: str) -> tuple[str, ...]:
    read = Expression.parse(text).inputs if text else ()
    return tuple(name for name in OPERANDS if name in read)


def operand_bytes(problem: Prepared) -> int:
    """Bytes of all that the prologue reads besides x."""
    gate = problem.batch * ELEMENT_BYTES[problem.dtype]
    return problem.channels * sum(gate if name == "gate" else 4 for name in operands(problem))


def constants(problem: Prepared) -> dict[str, Constant]:
    """What `kernels/common/prologue.cuh` leaves open; nothing if there is no prologue."""
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
    """gain, shift, gate: arguments of kernels with kernels/common/prologue.cuh, null where a problem has none."""
    return tuple(Buffer(name, optional=True) for name in OPERANDS)


def random_operands(problem: Prepared, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Normal deviates for what the prologue reads besides x."""
    drawn = {}
    for name in operands(problem):
        size = (problem.batch, problem.channels) if name == "gate" else (problem.channels,)
        values = torch.randn(size, generator=generator, device=generator.device)
        drawn[name] = values.to(STORAGE[problem.dtype]) if name == "gate" else values
    return drawn


def apply(text: str, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The inputs with x as the products have it, by PyTorch: computed in fp32 or more, and stored in x's type."""
    if not text:
        return inputs
    x = inputs["x"]
    wide = torch.promote_types(x.dtype, torch.float32)
    values = {"x": x.to(wide)}
    for name in _operands(text):
        values[name] = inputs[name].to(wide).reshape(-1, x.shape[1], 1, 1)
    (prepared,) = Expression.parse(text).evaluate(values)
    return {**inputs, "x": prepared.to(x.dtype)}
