"""`pointwise` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors the same kernel on the twin."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import torch

from escalade.device.strides import aligned
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.executables import ready
from escalade.ops.calling.library import define, require_rung, require_same_device
from escalade.ops.expressions import Expression
from escalade.ops.pointwise.operation import POINTWISE
from escalade.ops.pointwise.problem import PointwiseProblem, View
from escalade.ops.shared.pointwise import result_names

_BYTES = (torch.uint8, torch.bool)


def pointwise(
    expression: str, *, rung: str | None = None, **tensors: torch.Tensor
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """What an expression such as `x * sigmoid(gate)` computes of the tensors that it names, broadcast as PyTorch does.

    They are float32, float16 or bfloat16, all of one type, or uint8 or bool; several results are a tuple.
    """
    names = Expression.parse(expression).inputs
    if set(names) != set(tensors) or not names:
        raise UnsupportedError(
            f"{expression!r} is of {', '.join(names) or 'nothing'}, and {', '.join(tensors) or 'nothing'} is given; "
            "pointwise takes the tensors that an expression names, at least one"
        )
    first, *others = (tensors[name] for name in names)
    results = OPERATOR(first, others, expression, rung)
    return results[0] if len(results) == 1 else tuple(results)


def _given(x: torch.Tensor, others: list[torch.Tensor], expression: str) -> dict[str, torch.Tensor]:
    return dict(zip(Expression.parse(expression).inputs, (x, *others), strict=True))


def _dtype(tensors: dict[str, torch.Tensor]) -> str:
    """The one floating type of the tensors."""
    x = next(iter(tensors.values()))
    floating = {name: tensor for name, tensor in tensors.items() if tensor.dtype not in _BYTES}
    types = {tensor.dtype for tensor in floating.values()}
    if len(types) != 1:
        given = ", ".join(f"{name} is {tensor.dtype}" for name, tensor in tensors.items())
        raise UnsupportedError(f"{given}; pointwise takes floating-point tensors of one type, at least one")
    for name, tensor in tensors.items():
        require_same_device(x, name, tensor)
    return dtype_of("pointwise", next(iter(floating.values())))


def _room(tensors: dict[str, torch.Tensor], count: int) -> list[torch.Tensor]:
    """Results in the order of the first tensor that has all their elements."""
    try:
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors.values()))
    except RuntimeError as error:
        sizes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise UnsupportedError(f"sizes of {sizes} cannot be broadcast against each other") from error
    like = next(iter(tensor for tensor in tensors.values() if tensor.dtype not in _BYTES))
    pattern = next((tensor for tensor in tensors.values() if tensor.shape == shape), None)
    made = like.new_empty(shape) if pattern is None else torch.empty_like(pattern, dtype=like.dtype)
    return [made, *(torch.empty_like(made) for _ in range(count - 1))]


def _run(
    x: torch.Tensor, others: list[torch.Tensor], expression: str, rung: str | None
) -> list[torch.Tensor]:
    tensors, program = _given(x, others, expression), Expression.parse(expression)
    dtype = _dtype(tensors)
    results = _room(tensors, len(program.results))
    made = dict(zip(result_names(program), results, strict=True))
    apart = _apart_from(made, tensors)
    program, tensors = program.rename(apart), {apart[name]: tensor for name, tensor in tensors.items()}
    y = results[0]
    if y.numel() == 0:
        require_rung(POINTWISE, rung)
        return results
    order = sorted(range(y.dim()), key=lambda axis: (-y.stride()[axis], axis))
    seen = {name: aligned(_kept(tensor)).expand(y.shape).permute(order) for name, tensor in tensors.items()}
    views = {
        name: View(tuple(tensor.shape), _steps(tensor), "uint8" if tensor.dtype in _BYTES else dtype)
        for name, tensor in seen.items()
    }
    problem = PointwiseProblem.of(program.text, [y.shape[axis] for axis in order], views, dtype)
    ready(POINTWISE, problem, y.device, rung).run({**seen, **made})
    return results


def _apart_from(made: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """A name per input that no result has: the kernel's buffers, y among them, are found by name."""
    taken, found = {*made, *names}, {}
    for name in names:
        found[name] = name
        while found[name] in made:
            found[name] = next(new for n in itertools.count() if (new := f"{name}_{n}") not in taken)
        taken.add(found[name])
    return found


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; a copy where it reaches so far that strides would not fit."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor if max(math.prod(tensor.shape), reach) < 2**31 else tensor.contiguous()


def _steps(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(
        0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _fake(
    x: torch.Tensor, others: list[torch.Tensor], expression: str, rung: str | None
) -> list[torch.Tensor]:
    tensors = _given(x, others, expression)
    _dtype(tensors)
    return _room(tensors, len(Expression.parse(expression).results))


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, others, ctx.expression, _ = inputs
    ctx.save_for_backward(x, *others)


def _backward(ctx, gradients):  # type: ignore[no-untyped-def]
    """PyTorch's own gradient of the expression, function by function."""
    wanted = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in ctx.saved_tensors]
    floating = [tensor for tensor in wanted if tensor.requires_grad]
    with torch.enable_grad():
        given = _given(wanted[0], [tensor.to(floating[0].dtype) for tensor in wanted[1:]], ctx.expression)
        results = Expression.parse(ctx.expression).evaluate(given)
        pairs = [
            (result, gradient.expand(result.shape))
            for result, gradient in zip(results, gradients, strict=True)
            if result.requires_grad
        ]
        found = torch.autograd.grad(
            [result for result, _ in pairs], floating, [gradient for _, gradient in pairs], allow_unused=True
        )
    by_tensor = dict(zip(map(id, floating), found, strict=True))
    first, *rest = (by_tensor.get(id(tensor)) for tensor in wanted)
    return first, rest, None, None


OPERATOR = define(
    "pointwise(Tensor x, Tensor[] others, str expression, str? rung) -> Tensor[]",
    _run, _fake, setup=_setup, backward=_backward,
)  # fmt: skip
