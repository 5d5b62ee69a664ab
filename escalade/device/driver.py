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


def retry(call: Callable[[], int], status: int, device_index: int, what: str) -> None:
    """Handle the error `status` of a raw driver call: repeat the call with the device's context, or raise LaunchError.

    A thread that has not used CUDA before has no current context.
    """
    from cuda.bindings import driver

    if status == int(driver.CUresult.CUDA_ERROR_INVALID_CONTEXT):
        make_context_current(device_index)
        status = call()
    if status:
        check((driver.CUresult(status),), what)


@cache
def driver_function(name: str) -> Callable[..., int]:
    """Return a raw driver function that takes c_void_p and releases the GIL, for calls that may block.

    Through cuda-bindings a launch spends several times as long in Python as in the driver.
    """
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
