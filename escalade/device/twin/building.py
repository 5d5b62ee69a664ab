"""Build of a kernel's source into a shared library for the CPU."""

from __future__ import annotations

import pathlib
import platform
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from escalade.device import elf
from escalade.device.cache import cache_key, default_cache
from escalade.device.nvrtc import header_digest
from escalade.device.sources import KERNELS
from escalade.device.twin import assembly, prefix, toolchain
from escalade.errors import CompileError, ToolError

SCHEMA = "twin 2"
RUNTIME_NAME = "escalade-twin.so"
_WAITS = "twin_waits"
_UNSET = "twin_unset"
_DESCRIPTORS = "twin_descriptors"
_INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)


def kernel_library(
    source: str,
    entry: str,
    name: str,
    checks: bool = False,
    sanitize: bool = False,
    zeroed: bool = False,
    counts: bool = False,
) -> pathlib.Path:
    """Build the shared library of one kernel, or find it in the cache.

    Uninitialized variables hold zeros if `zeroed`, otherwise, with checks, g++'s pattern.
    """
    options = toolchain.kernel_options(checks, sanitize, zeroed, counts)
    key = _kernel_key(source, entry, name, options)

    def make(path: pathlib.Path) -> None:
        file = name.lstrip("/")
        text = path.with_suffix(".s")
        whole = f'#line 1 "{file}"\n{source}\nTWIN_EXPORT({entry})\n'
        linking: list[str | pathlib.Path] = ["-shared", "-Wl,-Bsymbolic", text, "-o", path]
        # Build the runtime, if necessary, in parallel with the kernel.
        with ThreadPoolExecutor(1) as other:
            library = other.submit(runtime_library)
            what = f"{entry} of {name}"
            try:
                warnings = prefix.compile_to_assembly(
                    whole, file, text, options, _prefix_key(), what, not zeroed
                )
            except CompileError:
                library.result()  # an error that also hits the runtime is reported as the runtime's
                raise
            compiled = text.read_text()
            flags = _flag(_WAITS, assembly.has_barriers(compiled)) + _flag(
                _UNSET, "uninitialized]" in warnings
            )
            flags += _flag(_DESCRIPTORS, assembly.has_descriptors(compiled))
            prepared = assembly.prepare(compiled, checks)
            if checks and platform.machine() == "x86_64":
                prepared = assembly.add_fill_table(prepared)
            text.write_text((assembly.add_block_table(prepared) if counts else prepared) + flags)
            libraries = toolchain.sanitizers() if sanitize else toolchain.LIBRARIES
            toolchain.run([*linking, library.result(), *libraries], f"the assembly of {entry}")
        text.unlink()

    return default_cache().file(key, ".so", make)


def is_built(source: str, entry: str, name: str, checks: bool = False, counts: bool = False) -> bool:
    """Return True if the cache has the library of a kernel."""
    options = toolchain.kernel_options(checks, sanitize=False, zeroed=False, counts=counts)
    return default_cache().has_file(_kernel_key(source, entry, name, options), ".so")


def _kernel_key(source: str, entry: str, name: str, options: object) -> str:
    return cache_key(SCHEMA, source, entry, name, repr(options), interface_key(), *headers(source))


def _flag(name: str, value: bool) -> str:
    """Return assembly for a flag about the kernel, as an absolute symbol that the loader reads from the file."""
    return f"\t.globl\t{name}\n\t.set\t{name}, {int(value)}\n"


def needs_fibers(library: pathlib.Path) -> bool:
    symbol = elf.read(library).symbol(_WAITS)
    return symbol is None or bool(symbol.value)


def may_read_unset(library: pathlib.Path) -> bool:
    """Return True if g++ warned of a maybe-uninitialized variable, which is often a false positive."""
    symbol = elf.read(library).symbol(_UNSET)
    return symbol is not None and bool(symbol.value)


def uses_wgmma_descriptors(library: pathlib.Path) -> bool:
    symbol = elf.read(library).symbol(_DESCRIPTORS)
    return symbol is not None and bool(symbol.value)


@cache
def interface_key() -> str:
    """Hash what a kernel's build depends on besides its source: the twin's headers and the compiler."""
    return cache_key(_prefix_key(), *_texts(list((toolchain.STAND_INS / "common").rglob("*.cuh"))))


@cache
def _prefix_key() -> str:
    """Hash the same without the replacement headers in common/, which sources include themselves."""
    others = [f for f in toolchain.STAND_INS.rglob("*") if f.is_file() and f.suffix != ".cuh"]
    return cache_key(SCHEMA, *_texts([*toolchain.RUNTIME.glob("*.h"), *others]), *toolchain.identity())


def runtime_library() -> pathlib.Path:
    """Build the runtime (scheduler, shared memory, asynchronous units, checks): one library for all kernels."""
    sources = _texts(list(toolchain.RUNTIME.glob("*.cpp")))
    key = cache_key(interface_key(), *sources, repr(toolchain.runtime_options()))

    def make(path: pathlib.Path) -> None:
        # By this soname, kernel libraries find the runtime that is already loaded.
        options = [*toolchain.runtime_options(), "-shared", "-pthread", f"-Wl,-soname,{RUNTIME_NAME}"]
        try:
            toolchain.run([*options, toolchain.RUNTIME / "all.cpp", "-o", path], "the twin's runtime")
        except ToolError:
            raise
        except CompileError as error:
            raise ToolError(f"g++ does not work here: {error}") from error

    # One runtime per process, even if the cache folder changes.
    if key not in _runtimes or not _runtimes[key].is_file():
        _runtimes[key] = default_cache().file(key, ".so", make)
    return _runtimes[key]


_runtimes: dict[str, pathlib.Path] = {}


def _texts(files: list[pathlib.Path]) -> list[str]:
    return [part for file in sorted(files) for part in (file.name, file.read_text())]


def headers(source: str) -> list[str]:
    """Return names and texts of our headers that the source includes, recursively, and a hash of NVIDIA's."""
    found: dict[str, str] = {}
    others: set[str] = set()
    pending = _INCLUDE.findall(source)
    while pending:
        name = pending.pop()
        if name in found or name in others:
            continue
        for folder in (toolchain.STAND_INS, KERNELS):
            if (folder / name).is_file():
                found[name] = (folder / name).read_text()
                pending += _INCLUDE.findall(found[name])
                break
        else:
            others.add(name)
    return [
        *(part for item in sorted(found.items()) for part in item),
        header_digest(toolchain.nvidia_headers(), sorted(others)),
    ]
