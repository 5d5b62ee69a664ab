"""What operations on the rows of a matrix share: element types, sizes, and their registration with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from escalade.device.program import Type
from escalade.errors import UnsupportedError
from escalade.ops.call import aligned, ready
from escalade.ops.ladder import Problem

STORAGE = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
LAYOUTS = ("flat",)
SMS = 132
"""The defaults are chosen for an H200; other cards have the tuner."""

_ELEMENTS = {"fp32": "float", "tf32": "float", "fp16": "__half", "bf16": "__nv_bfloat16"}
_LIBRARY = torch.library.Library("escalade", "FRAGMENT")


def element(dtype: str) -> Type:
    """As kernels name it."""
    return Type(_ELEMENTS[dtype])


def ceil_div(size: int, tile: int) -> int:
    return -(-size // tile)


def vector(dtype: str, length: int) -> int:
    """Elements in the widest access, of 16 bytes at most, that every row of this length can be cut into."""
    width = 16 // ELEMENT_BYTES[dtype]
    while length % width:
        width //= 2
    return width


def check_fields(operation: str, problem: Any, dtypes: tuple[str, ...], sizes: Mapping[str, int]) -> None:
    """Of a problem: its dtype, layout and batch, and that every size is at least 1 and counts in 30 bits."""
    if problem.dtype not in dtypes:
        raise UnsupportedError(f"dtype {problem.dtype!r}: {operation} takes {', '.join(dtypes)}")
    if problem.layout not in LAYOUTS:
        raise UnsupportedError(f"layout {problem.layout!r}: {operation} takes {', '.join(LAYOUTS)}")
    if problem.batch < 0:
        raise UnsupportedError(f"{problem.batch} rows: there cannot be fewer than none")
    for what, value in sizes.items():
        if value < 1:
            raise UnsupportedError(f"{what} of {value}: it must be at least 1")
    for what, value in {"rows": problem.batch, **sizes}.items():
        if value >= 2**30:
            raise UnsupportedError(f"{value} {what}: {operation} takes fewer than 2^30; split them")


# --- as operators of PyTorch


def check_matrix(operation: str, x: torch.Tensor) -> None:
    if x.dim() < 1:
        raise UnsupportedError(f"x has no dimensions; {operation} works along the last of at least one")
    if x.dtype not in DTYPES:
        raise UnsupportedError(f"x is {x.dtype}; {operation} takes float32, float16 and bfloat16")


def rows_of(x: torch.Tensor) -> int:
    """How many rows there are, whatever dimensions they are arranged in."""
    return x.shape[:-1].numel()


def run(
    operation: str,
    problem: Problem,
    rung: str | None,
    inputs: Mapping[str, torch.Tensor | None],
    y: torch.Tensor,
) -> torch.Tensor:
    """`y`, filled. Inputs are made contiguous, so that leading dimensions are rows of one matrix."""
    if rung is not None:
        # A name that no rung has is wrong even where there is nothing to do.
        from escalade.ops import operation as registered

        registered(operation).ladder.rung(rung)
    if problem.batch:
        dense = {name: None if t is None else aligned(t.contiguous()) for name, t in inputs.items()}
        ready(operation, problem, y.device, rung).run({**dense, "y": y})
    return y


def register(
    schema: str,
    run: Callable[..., torch.Tensor],
    fake: Callable[..., torch.Tensor],
    setup: Callable[..., None],
    backward: Callable[..., Any],
) -> None:
    """`torch.ops.escalade.<name>`: on CPU tensors the twin, on CUDA tensors the card, with gradients."""

    def on_cuda(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        with torch.cuda.device(x.device):
            return run(x, *rest)

    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CPU")
    _LIBRARY.impl(name, on_cuda, "CUDA")
    torch.library.register_fake(f"escalade::{name}", fake, lib=_LIBRARY)
    torch.library.register_autograd(f"escalade::{name}", backward, setup_context=setup, lib=_LIBRARY)


def register_autocast(name: str, call: Callable[..., torch.Tensor]) -> None:
    """Under autocast, `call` is given the dtype to cast to in front of the operator's own arguments."""

    def under(device_type: str) -> Callable[..., torch.Tensor]:
        def cast_and_run(*arguments: Any) -> torch.Tensor:
            dtype = torch.get_autocast_dtype(device_type)
            with torch.autocast(device_type, enabled=False):
                return call(dtype, *arguments)

        return cast_and_run

    _LIBRARY.impl(name, under("cuda"), "AutocastCUDA")
    _LIBRARY.impl(name, under("cpu"), "AutocastCPU")
