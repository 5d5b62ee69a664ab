"""Further checks: g++'s sanitizers in a separate process, and unwritten outputs."""

from __future__ import annotations

import ctypes
import pathlib
import re
import struct
import tempfile
from collections.abc import Sequence
from typing import Any

from escalade import subprocesses
from escalade.device import elf
from escalade.device.cache import cache_key, default_cache
from escalade.device.twin import toolchain
from escalade.device.twin.building import interface_key, kernel_library, needs_fibers, runtime_library
from escalade.device.twin.launch import SEQUENTIAL, Order, Size3, TwinKernel, limit_seconds, plain_name
from escalade.errors import TwinError

Buffers = Sequence[tuple[int, int]]
_SOURCE = toolchain.FOLDER / "sanitizer" / "runner.cpp"
_REPORT_LINES = 40


def require_written(
    kernel: TwinKernel, address: int, size: int, element_bytes: int, name: str = "output"
) -> None:
    """Raise TwinError if the last launch of `kernel`, built with checks, left elements of a buffer unwritten.

    A computed NaN counts as written.
    """
    missing = kernel.unwritten(address, size, element_bytes)
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        total = size // element_bytes
        raise TwinError(
            f"{kernel.entry} left {len(missing)} of {total} elements of {name} unwritten: {shown}"
        )


def sanitize(
    source: str,
    entry: str,
    grid: Size3,
    block: Size3,
    arguments: Sequence[Any],
    *,
    buffers: Buffers,
    name: str = "kernel.cu",
    shared_bytes: int = 0,
    cluster: Size3 = (1, 1, 1),
    order: Order = SEQUENTIAL,
) -> None:
    """Run one launch under AddressSanitizer and UndefinedBehaviorSanitizer in a separate process.

    Every buffer is copied to an allocation of exactly its size, and its contents are copied back. Argument words that
    point into a buffer are treated as pointers. Raises TwinError with the report.
    """
    library = kernel_library(source, entry, name, sanitize=True)
    runner = _runner()
    with tempfile.TemporaryDirectory(prefix="twin-run-") as folder:
        given, result = pathlib.Path(folder, "input"), pathlib.Path(folder, "output")
        head = _head(library, grid, block, cluster, shared_bytes, order, len(buffers))
        given.write_bytes(head + _contents(buffers) + _arguments(arguments, buffers))
        options = {
            # Fibers abandoned by a report are not leaks; __tls_get_addr is the runtime's.
            "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0:color=never",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1:color=never",
        }
        done = subprocesses.run([runner, runtime_library(), library, given, result], variables=options)
        if done.returncode:
            raise TwinError(f"{entry}: {_readable(done.stderr)}")
        data = result.read_bytes()
    at = 0
    for address, size in buffers:
        ctypes.memmove(address, data[at : at + size], size)
        at += size


def _runner() -> pathlib.Path:
    key = cache_key(interface_key(), _SOURCE.read_text())

    def make(path: pathlib.Path) -> None:
        # Compile without instrumentation, but link with the sanitizers to get their runtime.
        compiled = path.with_suffix(".o")
        toolchain.run([*toolchain.runtime_options(), "-c", _SOURCE, "-o", compiled], "the sanitizers' runner")
        toolchain.run([*toolchain.sanitizers(), compiled, "-ldl", "-o", path], "the sanitizers' runner")
        compiled.unlink()

    return default_cache().file(key, ".run", make)


def _head(
    library: pathlib.Path,
    grid: Size3,
    block: Size3,
    cluster: Size3,
    shared_bytes: int,
    order: Order,
    buffer_count: int,
) -> bytes:
    contents = elf.read(library)
    variables = contents.shared_variables
    numbers = (*grid, *block, *cluster, shared_bytes, order.seed, order.late, 0, 0, needs_fibers(library), 1)
    head = struct.pack(
        "=28IQQQ",
        *numbers,
        round(1000 * limit_seconds()),
        *(False, False, False, False),
        len(variables),
        contents.thread_local_bytes,
        buffer_count,
        *(0, 0, 0, 0),
        contents.loaded_bytes,
        contents.code.start,
        len(contents.code),
    )
    for variable in variables:
        text = plain_name(variable.name).encode() + b"\0"
        head += struct.pack("=Q", len(text)) + text + struct.pack("=II", variable.value, variable.size)
    return head


def _contents(buffers: Buffers) -> bytes:
    return b"".join(struct.pack("=Q", size) + ctypes.string_at(address, size) for address, size in buffers)


def _arguments(arguments: Sequence[Any], buffers: Buffers) -> bytes:
    result = struct.pack("=I", len(arguments))
    for argument in arguments:
        data = ctypes.string_at(ctypes.addressof(argument), ctypes.sizeof(argument))
        pointers = []
        for at in range(0, len(data) - 7, 8):
            word = int.from_bytes(data[at : at + 8], "little")
            # One past the end counts as inside: an empty slice starts there.
            inside = [i for i, (start, size) in enumerate(buffers) if start <= word <= start + size]
            if inside and word:
                exact = [i for i in inside if word < buffers[i][0] + buffers[i][1]] or inside
                pointers.append((at, exact[0], word - buffers[exact[0]][0]))
        result += struct.pack("=Q", len(data)) + data + struct.pack("=I", len(pointers))
        result += b"".join(struct.pack("=IIQ", *pointer) for pointer in pointers)
    return result


def _readable(report: str) -> str:
    """Reduce a sanitizer's report to what happened and where in the kernel."""
    lines = []
    for line in report.splitlines():
        if line.startswith(("Shadow bytes", "SUMMARY", "allocated by")):
            break
        is_own = f"{toolchain.FOLDER}/" in line or "__libc_start" in line
        if line.strip("= ") and not is_own:
            lines.append(re.sub(r"/\S*/twin-[^/]*/", "", line))
    return "\n".join(lines[:_REPORT_LINES])
