"""Kernel arguments as the driver and the twin expect them: an array of the addresses of the values.

The values are allocated once. When a tensor moves, only its pointers and tensor maps are rewritten.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from escalade.device.recipe import (
    Addresses,
    Argument,
    Buffer,
    Im2colMap,
    Int64,
    Ints,
    ReleaseDependents,
    TensorMap,
    TiledMap,
    WeightsReady,
)
from escalade.errors import UnsupportedError

TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGNMENT = 64
_MOST_ADDRESSES = 256  # addresses of one buffer for which encoded tensor maps are cached

Encode = Callable[[TensorMap, int], bytes]
"""Encodes a tensor map for the tensor at an address."""


class ArgumentList:
    """Arguments of one launch; `addresses` is the array that the launch function takes."""

    def __init__(self, arguments: tuple[Argument, ...], encode: Encode) -> None:
        self._encode = encode
        self.values = [_value(argument) for argument in arguments]
        self.addresses = (ctypes.c_void_p * len(self.values))(*map(ctypes.addressof, self.values))
        pairs = list(zip(arguments, self.values, strict=True))
        self._flags = [
            (argument, value)
            for argument, value in pairs
            if isinstance(argument, WeightsReady | ReleaseDependents)
        ]
        self._pointers = [pointer for pair in pairs for pointer in _pointers(*pair)]
        self._maps = [
            (argument, value) for argument, value in pairs if isinstance(argument, TiledMap | Im2colMap)
        ]

    def point(self, buffers: Mapping[str, int]) -> None:
        """Set every pointer and tensor map from the addresses of the named buffers."""
        for buffer, pointer in self._pointers:
            pointer.value = _address(buffer, buffers)
        for tensor_map, value in self._maps:
            address = _address(tensor_map.buffer, buffers)
            assert address is not None, "the buffer of a tensor map is never optional"
            value.raw = self._encode(tensor_map, address)

    def set(self, weights_ready: bool, release_dependents: bool) -> None:
        """Set the programmatic-dependent-launch flags, which are False by default."""
        for flag, value in self._flags:
            value.value = weights_ready if isinstance(flag, WeightsReady) else release_dependents

    @property
    def weights_ready(self) -> tuple[str, ...]:
        """Names of the weights that the launch may read without waiting for the previous launch."""
        return tuple(
            name
            for flag, value in self._flags
            if isinstance(flag, WeightsReady) and value.value
            for name in flag.weights
        )


class BufferPointers:
    """All pointers into one buffer in the arguments of several launches, for buffers that move between calls."""

    def __init__(self) -> None:
        self.launches: list[ArgumentList] = []
        """Argument lists that point into the buffer, without duplicates."""
        self._values: list[tuple[Any, int]] = []
        self._maps: list[tuple[ArgumentList, TensorMap, Any, int]] = []
        self._address: int | None = None
        self._encoded: dict[int, list[bytes]] = {}

    def add(self, arguments: ArgumentList, name: str, offset: int = 0) -> None:
        """Register the arguments' buffer `name`, which starts `offset` bytes into this buffer."""
        values = [(value, buffer) for buffer, value in arguments._pointers if buffer.name == name]
        maps = [(one, value) for one, value in arguments._maps if one.buffer.name == name]
        self._values += [(value, offset + buffer.offset) for value, buffer in values]
        self._maps += [(arguments, one, value, offset + one.buffer.offset) for one, value in maps]
        if (values or maps) and not any(known is arguments for known in self.launches):
            self.launches.append(arguments)
        self._encoded = {}
        self.forget()

    @property
    def single(self) -> Any:
        """The ctypes pointer, if it is the only thing to set; else None."""
        (value, offset), *others = self._values or [(None, 0)]
        return None if others or offset or self._maps else value

    def forget(self) -> None:
        """Set everything again at the next `point`: other code has changed the arguments."""
        self._address = None

    def point(self, address: int) -> bool:
        """Point everything at `address`. Returns False, without any work, if it already does."""
        if address == self._address:
            return False
        self._address = None  # until all are set
        for value, offset in self._values:
            value.value = address + offset
        if self._maps:
            for (_, _, value, _), encoded in zip(self._maps, self._encoded_for(address), strict=True):
                value.raw = encoded
        self._address = address
        return True

    def _encoded_for(self, address: int) -> list[bytes]:
        """Return the encoded tensor maps for this address, cached: allocators reuse addresses."""
        found = self._encoded.get(address)
        if found is None:
            found = [one._encode(tensor_map, address + offset) for one, tensor_map, _, offset in self._maps]
            if len(self._encoded) >= _MOST_ADDRESSES:
                self._encoded.pop(next(iter(self._encoded)), None)
            self._encoded[address] = found
        return found


def _pointers(argument: Argument, value: Any) -> list[tuple[Buffer, Any]]:
    """Return the pointers in an argument's value, each with its buffer."""
    if isinstance(argument, Buffer):
        return [(argument, value)]
    if isinstance(argument, Addresses):
        step = ctypes.sizeof(ctypes.c_void_p)
        return [
            (buffer, ctypes.c_void_p.from_buffer(value, index * step))
            for index, buffer in enumerate(argument.buffers)
        ]
    return []


def _address(buffer: Buffer, buffers: Mapping[str, int]) -> int | None:
    address = buffers.get(buffer.name)
    if address is not None:
        return address + buffer.offset
    if not buffer.optional:
        raise UnsupportedError(
            f"the recipe needs a tensor {buffer.name!r}; the tensors are {sorted(buffers)}"
        )
    return None


def _aligned(size: int, alignment: int) -> Any:
    """Allocate `size` bytes at a multiple of `alignment`."""
    memory = (ctypes.c_char * (size + alignment))()
    return (ctypes.c_char * size).from_buffer(memory, -ctypes.addressof(memory) % alignment)


def _value(argument: Argument) -> Any:
    match argument:
        case Buffer():
            return ctypes.c_void_p()
        case Addresses(buffers):
            return (ctypes.c_void_p * len(buffers))()
        case TiledMap() | Im2colMap():
            return _aligned(TENSOR_MAP_BYTES, _TENSOR_MAP_ALIGNMENT)
        case Int64(value):
            return ctypes.c_longlong(value)
        case WeightsReady() | ReleaseDependents():
            return ctypes.c_int(0)
        case Ints(values):
            return (ctypes.c_int * len(values))(*values)
        case float():
            return ctypes.c_float(argument)
        case _:
            return ctypes.c_int(argument)
