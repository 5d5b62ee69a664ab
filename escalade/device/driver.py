"""Calls of the CUDA driver: their errors as exceptions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from escalade.errors import LaunchError

_FUNCTIONS_OF = 12000
"""The version of CUDA whose functions are taken, where later ones have changed them."""


def check(result: tuple[Any, ...], what: str) -> Any:
    """The value or values of a driver call's result, or a LaunchError that says what was being done."""
    from cuda.bindings import driver

    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(status)
        _, text = driver.cuGetErrorString(status)
        raise LaunchError(f"{what}: {name.decode()}: {text.decode()}")
    return values[0] if len(values) == 1 else values


def check_status(status: int, what: str) -> None:
    """Raises a LaunchError unless that, which a function of the driver has returned, is success."""
    from cuda.bindings import driver

    check((driver.CUresult(status),), what)


@cache
def launch_function() -> Callable[..., int]:
    """`cuLaunchKernelEx` itself, over four addresses (config, kernel, arguments, and none of what is extra), each a
    c_void_p: on its way through cuda-bindings a launch takes several times as long in Python as in the driver."""
    return driver_function("cuLaunchKernelEx")


@cache
def driver_function(name: str) -> Callable[..., int]:
    """A function of the driver's that may have to wait, over addresses, each a c_void_p: other threads go on
    meanwhile."""
    return function_at(_address(name))


@cache
def gil_holding_function(name: str) -> Callable[..., int]:
    """A function of the driver's that waits for nothing, over addresses, each a c_void_p. It keeps the interpreter's
    lock: where other threads wait for that, to get it back takes longer than all else that is done."""
    return ctypes.PYFUNCTYPE(ctypes.c_int)(_address(name))


def _address(name: str) -> int:
    from cuda.bindings import driver

    address, _ = check(driver.cuGetProcAddress(name.encode(), _FUNCTIONS_OF, 0), f"finding {name}")
    return int(address)


def make_context_current(device_index: int) -> None:
    """PyTorch's context of the device, for the calling thread; recording a CUDA graph may be under way."""
    from cuda.bindings import driver

    check(driver.cuCtxSetCurrent(_primary_context(device_index)), "making the context current")


@cache
def _primary_context(device_index: int) -> Any:
    from cuda.bindings import driver

    device = check(driver.cuDeviceGet(device_index), "finding the device")
    return check(driver.cuDevicePrimaryCtxRetain(device), "finding the device's context")


def function_at(address: int) -> Callable[..., int]:
    """A function of C's that returns an int and takes what is given as c_void_p: ctypes knows no types that it would
    convert arguments to, which takes it as long as the call."""
    return ctypes.CFUNCTYPE(ctypes.c_int)(address)
