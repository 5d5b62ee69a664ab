"""CUDA driver calls with errors as exceptions, and raw driver functions for hot paths."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from escalade.errors import LaunchError

_API_VERSION = 12000  # CUDA 12.0: later versions changed the signatures of some functions


def check(result: tuple[Any, ...], what: str) -> Any:
    """Return the value or values of a driver call; raises LaunchError, starting with `what`, if it failed."""
    from cuda.bindings import driver

    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(status)
        _, text = driver.cuGetErrorString(status)
        raise LaunchError(f"{what}: {name.decode()}: {text.decode()}")
    return values[0] if len(values) == 1 else values


def check_status(status: int, what: str) -> None:
    """Raise LaunchError unless a raw driver function returned success."""
    from cuda.bindings import driver

    check((driver.CUresult(status),), what)


@cache
def launch_function() -> Callable[..., int]:
    """Return `cuLaunchKernelEx`, taking config, kernel, arguments and `extra` (null) as c_void_p.

    Through cuda-bindings a launch spends several times as long in Python as in the driver.
    """
    return driver_function("cuLaunchKernelEx")


@cache
def driver_function(name: str) -> Callable[..., int]:
    """Return a raw driver function that takes c_void_p and releases the GIL, for calls that may block."""
    return function_at(_address(name))


@cache
def gil_holding_function(name: str) -> Callable[..., int]:
    """Return a raw driver function that takes c_void_p and keeps the GIL, for calls that never block.

    With other threads waiting for the GIL, reacquiring it takes longer than the call.
    """
    return ctypes.PYFUNCTYPE(ctypes.c_int)(_address(name))


def _address(name: str) -> int:
    from cuda.bindings import driver

    address, _ = check(driver.cuGetProcAddress(name.encode(), _API_VERSION, 0), f"finding {name}")
    return int(address)


def make_context_current(device_index: int) -> None:
    """Make the device's primary context, which PyTorch uses, current in this thread. Allowed during graph capture."""
    from cuda.bindings import driver

    check(driver.cuCtxSetCurrent(_primary_context(device_index)), "making the context current")


@cache
def _primary_context(device_index: int) -> Any:
    from cuda.bindings import driver

    device = check(driver.cuDeviceGet(device_index), "finding the device")
    return check(driver.cuDevicePrimaryCtxRetain(device), "finding the device's context")


def function_at(address: int) -> Callable[..., int]:
    """Return a C function that returns int. Declaring no argument types skips ctypes' conversions."""
    return ctypes.CFUNCTYPE(ctypes.c_int)(address)
