"""Loading and launching of kernels on the twin."""

from __future__ import annotations

import ctypes
import os
import pathlib
import re
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from escalade import subprocesses
from escalade.device import elf
from escalade.device.twin import assembly, counting, toolchain
from escalade.device.twin.building import (
    kernel_library,
    may_read_unset,
    needs_fibers,
    runtime_library,
    uses_wgmma_descriptors,
)
from escalade.device.twin.counting import Counts
from escalade.errors import CompileError, LaunchError, TwinError, UnsupportedError

Size3 = tuple[int, int, int]


@dataclass(frozen=True)
class Order:
    """Execution order of threads, CTAs and asynchronous operations; every choice is legal in CUDA."""

    seed: int = 0
    """0 for sequential order; otherwise threads, warps and CTAs are shuffled by this seed."""
    late: bool = False
    """True to run asynchronous operations (cp.async, TMA, wgmma) as late as allowed instead of immediately."""


SEQUENTIAL = Order()


_UNSET_BITS = b"\xfe\xfe"  # g++'s -ftrivial-auto-var-init=pattern; as a float -1.7e38
_USUAL_BYTES = bytes(byte for byte in range(256) if byte & 0x70 != 0x70)  # top bytes of floats below 1e29
LIMIT_VARIABLE = "ESCALADE_TWIN_LIMIT"
_LIMIT_S = 120.0
_LONGEST_LIMIT_S = 4e6


def limit_seconds() -> float:
    """Return the CPU seconds after which a kernel with no returning thread counts as hung; 0 for no limit.

    CPU time, so that a busy machine makes no difference.
    """
    value = os.environ.get(LIMIT_VARIABLE, "")
    try:
        seconds = float(value) if value else _LIMIT_S
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST_LIMIT_S:
        raise LaunchError(
            f"{LIMIT_VARIABLE} is {value!r}; set a number of seconds, at most {_LONGEST_LIMIT_S:.0f}, "
            "or 0 for no limit"
        )
    return seconds


def _interruptible() -> bool:
    """Return True if Ctrl-C should end a launch: where Python would raise KeyboardInterrupt after it."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


class _Range(ctypes.Structure):
    _fields_ = [("start", ctypes.c_size_t), ("bytes", ctypes.c_uint64), ("index", ctypes.c_uint32)]


class _Unwritten(ctypes.Structure):
    _fields_ = [("start", ctypes.c_size_t), ("bytes", ctypes.c_uint64), ("written", ctypes.c_void_p)]


class Unwritten:
    """Memory that kernels must write before reading: outputs and workspaces, by address and size.

    Pass the same object to several launches to track writes across them.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._written = [(start, size, ctypes.create_string_buffer(size)) for start, size in ranges if size]

    def __len__(self) -> int:
        return len(self._written)

    @property
    def fields(self) -> ctypes.Array[_Unwritten]:
        """Array of structs for the runtime."""
        rows = (_Unwritten(start, size, ctypes.addressof(flags)) for start, size, flags in self._written)
        return (_Unwritten * max(1, len(self)))(*rows)


class _Variable(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("offset", ctypes.c_uint32), ("bytes", ctypes.c_uint32)]


_COUNTS = (
    *(
        "shared_bytes",
        "seed",
        "late",
        "checks",
        "counts",
        "fibers",
        "workers",
        "limit_ms",
        "interruptible",
        "descriptors",
        "paths",
        "overlap",
    ),
    *("variable_count", "static_bytes", "buffer_count", "parameter_count"),
    *("unwritten_count", "weights_ready_count", "fill_count"),
)


class _Request(ctypes.Structure):
    """`twin::Request` of runtime/state.h."""

    _fields_ = [
        *((name, ctypes.c_uint32 * 3) for name in ("grid", "block", "cluster")),
        *((name, ctypes.c_uint32) for name in _COUNTS),
        *((name, ctypes.c_void_p) for name in ("entry", "parameters")),
        ("parameter_bytes", ctypes.POINTER(ctypes.c_uint32)),
        ("variables", ctypes.POINTER(_Variable)),
        ("buffers", ctypes.POINTER(_Range)),
        ("unwritten", ctypes.POINTER(_Unwritten)),
        ("weights_ready", ctypes.POINTER(_Range)),
        ("fills", ctypes.c_void_p),
        ("library", _Range),
        ("code", _Range),
    ]


class TwinKernel:
    """Kernel on the CPU, created by `build`."""

    def __init__(
        self,
        path: pathlib.Path,
        entry: str,
        checks: bool,
        zeroed: Callable[[], TwinKernel] | None = None,
        counted: bool = False,
    ) -> None:
        self._zeroed = zeroed  # the same kernel with uninitialized variables set to zero
        self._may_read_unset = may_read_unset(path)
        self._filled: set[str] = set()  # constants requested by the host
        self.path = path
        self.entry = entry
        self.checks = checks
        self.counted = counted
        self._counts: Counts | None = None
        self._runtime = _runtime()
        self._library = ctypes.CDLL(str(path))
        self._elf = elf.read(path)
        self._waits = needs_fibers(path)
        self._has_descriptors = uses_wgmma_descriptors(path)
        self._fills = self._elf.symbol(assembly.FILLS)
        start = ctypes.cast(self._library.twin_entry, ctypes.c_void_p).value
        symbol = self._elf.symbol("twin_entry")
        assert start is not None and symbol is not None
        self._entry_address = start
        self._base = start - symbol.value
        variables = self._elf.shared_variables
        self._variables = (_Variable * len(variables))(
            *(_Variable(plain_name(v.name).encode(), v.value, v.size) for v in variables)
        )

    def launch(
        self,
        grid: Size3,
        block: Size3,
        arguments: Sequence[Any],
        *,
        shared_bytes: int = 0,
        cluster: Size3 = (1, 1, 1),
        order: Order = SEQUENTIAL,
        buffers: Sequence[tuple[int, int]] = (),
        unwritten: Unwritten | None = None,
        overlap: bool = False,
        weights_ready: Sequence[tuple[int, int]] = (),
        limit_s: float | None = None,
    ) -> None:
        """Run the kernel to completion; raises TwinError with a report if it has a bug.

        Arguments are ctypes values. `buffers` lists address and size of all memory that the kernel may access. With
        checks, accesses outside them and reads of `unwritten` memory are errors; the kernel runs on copies placed far
        apart, and a failing launch leaves the buffers unchanged. `overlap` means that it may start before the previous
        launch has finished: with checks, it must wait before any access except reads of `weights_ready`. After
        `limit_s` CPU seconds without a returning thread the kernel counts as hung; None means `limit_seconds()`, 0 no
        limit.
        """
        if not all(grid):
            raise LaunchError(
                f"{self.entry} was launched with an empty grid, {grid}; a grid needs at least one block"
            )
        unwritten = unwritten or Unwritten(())
        addresses = (ctypes.c_void_p * max(1, len(arguments)))(*map(ctypes.addressof, arguments))
        ranges = sorted((start, size, index) for index, (start, size) in enumerate(buffers) if size)
        request = _Request(
            _triple(grid),
            _triple(block),
            _triple(cluster),
            shared_bytes,
            order.seed,
            order.late,
            self.checks,
            self.counted,
            self._waits,
            os.cpu_count() or 1,
            round(1000 * (limit_seconds() if limit_s is None else limit_s)),
            _interruptible(),
            self._has_descriptors,
            True,
            overlap,
            len(self._variables),
            self._elf.thread_local_bytes,
            len(ranges),
            len(arguments),
            len(unwritten),
            len(weights_ready),
            self._fills.size // 16 if self._fills else 0,
            self._entry_address,
            ctypes.addressof(addresses),
            (ctypes.c_uint32 * max(1, len(arguments)))(*map(ctypes.sizeof, arguments)),
            self._variables,
            (_Range * max(1, len(ranges)))(*(_Range(*each) for each in ranges)),
            unwritten.fields,
            (_Range * max(1, len(weights_ready)))(*(_Range(*each, 0) for each in weights_ready)),
            self._base + self._fills.value if self._fills else None,
            _Range(self._base, self._elf.loaded_bytes),
            _Range(self._base + self._elf.code.start, len(self._elf.code)),
        )
        for index, (start, size) in enumerate(buffers if self.checks else ()):
            if size and not self._runtime.twin_mapped(start, size):
                raise LaunchError(
                    f"{self.entry}: buffer {index}, {size} bytes at {start:#x}, is not all memory of this process"
                )
        before = contents(buffers) if self._zeroed else []
        report = self._take(self._runtime.twin_launch(ctypes.byref(request)))
        ways = _WAYS.search(report)
        if ways and self._same_lines(ways[1], ways[2]):
            request.paths = False
            report = self._take(self._runtime.twin_launch(ctypes.byref(request)))
        if report:
            raise TwinError(f"{self.entry}: {self.source_places(_WAYS.sub('', report))}")
        if self.counted:
            text = self._take(self._runtime.twin_counts())
            self._counts = counting.parse(self.source_places(text), self._blocks())
        if self._zeroed and self._suspects(before, contents(buffers)):
            zeroed = self._zeroed()
            for name in self._filled:
                ctypes.memmove(zeroed.constant(name)[0], *self.constant(name))
            again = partial(
                zeroed.launch,
                grid,
                block,
                arguments,
                shared_bytes=shared_bytes,
                cluster=cluster,
                order=order,
                buffers=buffers,
                limit_s=limit_s,
            )
            self._compare_unset(again, buffers, before)

    def _suspects(self, before: Sequence[bytes], after: Sequence[bytes]) -> bool:
        """Return True if results may depend on uninitialized variables: g++ warned, or they contain its pattern."""
        return self._may_read_unset or any(
            new != old and _strangeness(new) > _strangeness(old)
            for old, new in zip(before, after, strict=True)
        )

    def _compare_unset(
        self, again: Callable[[], None], buffers: Sequence[tuple[int, int]], before: Sequence[bytes]
    ) -> None:
        """Launch again with zeroed variables; raises TwinError if the results differ."""
        first = contents(buffers)
        _put(buffers, before)
        try:
            again()
        except TwinError as error:
            raise TwinError(
                f"{self.entry} reads a variable that was never set; if that holds zeros: {error}"
            ) from error
        second = contents(buffers)
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            if one != other:
                at = next(at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
                place = self._place_of_writer(buffers[index][0] + at)
                _put(buffers, before)
                raise TwinError(
                    f"{self.entry}: {place}: writes byte {at} of buffer {index}, "
                    "which depends on a variable or local array that was never set"
                )
        _put(buffers, first)

    def _same_lines(self, one: str, other: str) -> bool:
        """Return True if two call paths have the same source lines: then g++ has duplicated the code."""
        addresses = [re.findall(r"0x[0-9a-f]+", calls) for calls in (one, other)]
        lines = call_lines(self.path, sorted({each for calls in addresses for each in calls}))
        first, second = ([lines[each] for each in calls] for calls in addresses)
        return first == second

    def _place_of_writer(self, address: int) -> str:
        """Return the source line of the last store to an address in this thread's last checked launch."""
        kernel = self._zeroed() if self._zeroed else self
        return kernel.source_places(kernel._take(self._runtime.twin_writer(address)))

    def constant(self, name: str) -> tuple[int, int]:
        """Return the address and size of a `__constant__` variable, for the host to fill."""
        found = [s for s in self._elf.symbols if s.is_object and plain_name(s.name) == name]
        if not found:
            raise LaunchError(f"{self.entry} has no __constant__ variable named {name}")
        self._filled.add(name)
        return self._base + found[0].value, found[0].size

    def counts(self) -> Counts:
        """Return the counts of the last launch. Needs a build with `counts=True`."""
        if not self.counted:
            raise LaunchError(f"{self.entry} was built without counts; build it with counts=True")
        if self._counts is None:
            raise LaunchError(f"{self.entry} has not been launched yet, so there are no counts")
        return self._counts

    def _blocks(self) -> dict[int, tuple[int, ...]]:
        """Return the operations of each basic block, by its offset in the library (`assembly.add_block_table`)."""
        symbol = self._elf.symbol(assembly.BLOCKS)
        assert symbol is not None
        columns = 1 + len(counting.OPERATIONS)
        words = (ctypes.c_uint64 * (symbol.size // 8)).from_address(self._base + symbol.value)
        rows = (words[at : at + columns] for at in range(0, len(words), columns))
        return {address - self._base: tuple(operations) for address, *operations in rows}

    def unwritten(self, address: int, size: int, element_bytes: int = 1) -> list[int]:
        """Return the elements of a buffer that this thread's last checked launch did not fully write."""
        self._need_checks("unwritten")
        missing = []
        at = 0
        while (at := self._runtime.twin_unwritten(address, size, at)) < size:
            missing.append(at // element_bytes)
            at = (at // element_bytes + 1) * element_bytes
        return missing

    def _need_checks(self, what: str) -> None:
        if not self.checks:
            raise LaunchError(f"{what} needs access hooks; build {self.entry} with checks=True")

    def _take(self, text: int | None) -> str:
        """Copy a string allocated by the runtime, and free it."""
        if not text:
            return ""
        value = ctypes.string_at(text).decode(errors="replace")
        self._runtime.twin_free(text)
        return value

    def source_places(self, text: str) -> str:
        """Replace library offsets, written as [+0x...], by source file and line."""
        offsets = sorted(set(re.findall(r"\[\+(0x[0-9a-f]+)\]", text)))
        places = source_lines(self.path, offsets)
        return re.sub(r"\[\+(0x[0-9a-f]+)\]", lambda match: places[match[1]], text)


_WAYS = re.compile(r" \{([^|{]*)\|([^}]*)\}")
"""In a report: the call paths by which two lanes reached the same line."""
_COPIES = re.compile(r"(?:C\d|aS)E(?:RK|O)S\d*_$")
"""Mangled copy constructors and assignments: g++ attributes implicit ones to the line of the struct's definition."""


def source_lines(path: pathlib.Path, offsets: Sequence[str]) -> dict[str, str]:
    """Return the source line of each offset: the innermost that is not in the twin, NVIDIA's headers or a copy."""
    return {offset: _short(lines[0]) for offset, lines in call_lines(path, offsets).items()}


def call_lines(path: pathlib.Path, offsets: Sequence[str]) -> dict[str, list[str]]:
    """Return the source lines of each offset, innermost first, followed by those of inlined calls.

    g++ distinguishes two calls on one line by a discriminator; duplicates of a call have the same one.
    """
    if not offsets:
        return {}
    output = subprocesses.output("addr2line", "-a", "-i", "-f", "-e", path, *offsets)
    if not output:
        return {offset: [f"{path.name}+{offset}"] for offset in offsets}
    others = tuple(map(str, (toolchain.RUNTIME, toolchain.STAND_INS, toolchain.nvidia_headers())))
    places: dict[int, list[str]] = {}
    for part in re.split(r"^(?=0x)", output, flags=re.MULTILINE)[1:]:
        address, *rest = part.splitlines()
        functions, lines = rest[::2], rest[1::2]
        own = [
            line
            for function, line in zip(functions, lines, strict=True)
            if not line.startswith(others) and not _COPIES.search(function)
        ]
        places[int(address, 16)] = own or lines[-1:]
    return {offset: places.get(int(offset, 16), [offset]) for offset in offsets}


def contents(buffers: Sequence[tuple[int, int]]) -> list[bytes]:
    return [ctypes.string_at(address, size) for address, size in buffers]


def _strangeness(data: bytes) -> int:
    """Count occurrences of the uninitialized pattern, and of floats as large as results computed from it."""
    return data.count(_UNSET_BITS) + len(data[3::4].translate(None, _USUAL_BYTES))


def _put(buffers: Sequence[tuple[int, int]], values: Sequence[bytes]) -> None:
    # Skip unchanged buffers: those that a kernel only reads may be read-only memory.
    for (address, size), value in zip(buffers, values, strict=True):
        if ctypes.string_at(address, size) != value:
            ctypes.memmove(address, value, size)


def _short(place: str) -> str:
    """Shorten a location: without the compiler's working folder, headers relative to the kernels folder."""
    place = re.sub(r" \(discriminator \d+\)", "", place)
    return re.sub(r"^.*/twin-[^/]*/", "", place).removeprefix(f"{toolchain.KERNELS}/")


def _triple(size: Size3) -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * 3)(*size)


@cache
def plain_name(mangled: str) -> str:
    """Return the last part of a C++ name: `tile` of `_ZZ6kernelILi3EEvPfE4tile`."""
    if not mangled.startswith("_Z"):
        return mangled
    plain = subprocesses.output("c++filt", mangled).strip() or mangled
    return plain.rsplit("::", 1)[-1]


@cache
def _runtime() -> ctypes.CDLL:
    """Load the runtime once: a second copy would have its own scheduler state, unknown to the kernels."""
    library = ctypes.CDLL(str(runtime_library()))
    for function in (library.twin_launch, library.twin_counts, library.twin_writer):
        function.restype = ctypes.c_void_p
    library.twin_writer.argtypes = [ctypes.c_size_t]
    library.twin_mapped.restype = ctypes.c_bool
    library.twin_mapped.argtypes = [ctypes.c_size_t, ctypes.c_uint64]
    library.twin_unwritten.restype = ctypes.c_uint64
    library.twin_unwritten.argtypes = [ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64]
    library.twin_free.argtypes = [ctypes.c_void_p]
    return library


_kernels: dict[pathlib.Path, TwinKernel] = {}


def build(
    source: str, entry: str, *, name: str = "kernel.cu", checks: bool = False, counts: bool = False
) -> TwinKernel:
    """Compile the kernel `entry` of a CUDA source for the CPU.

    `source` is the whole text. Its includes ("common/x.cuh") resolve to the twin's own versions first, then to
    `escalade/kernels`. `checks` verifies every load and store, `counts` counts them; see `docs/twin.md`.
    """
    if checks and counts:
        raise UnsupportedError(f"{entry}: checks and counts exclude each other; build the kernel twice")
    if not re.search(rf"\b{re.escape(entry)}\s*\(", source):
        raise CompileError(f"{name} does not define {entry}")
    path = kernel_library(source, entry, name, checks, counts=counts)
    if path not in _kernels:
        zeroed = partial(_zeroed, source, entry, name) if checks else None
        _kernels[path] = TwinKernel(path, entry, checks, zeroed, counts)
    return _kernels[path]


def _zeroed(source: str, entry: str, name: str) -> TwinKernel:
    path = kernel_library(source, entry, name, checks=True, zeroed=True)
    if path not in _kernels:
        _kernels[path] = TwinKernel(path, entry, checks=True)
    return _kernels[path]
