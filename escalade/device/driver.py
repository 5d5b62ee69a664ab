"""Calls of the CUDA driver: their errors as exceptions."""

from __future__ import annotations

from typing import Any

from escalade.errors import LaunchError


def check(result: tuple[Any, ...], what: str) -> Any:
    """The value or values of a driver call's result, or a LaunchError that says what was being done."""
    from cuda.bindings import driver

    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(status)
        _, text = driver.cuGetErrorString(status)
        raise LaunchError(f"{what}: {name.decode()}: {text.decode()}")
    return values[0] if len(values) == 1 else values
