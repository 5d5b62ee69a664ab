"""Compilation of programs to machine code with NVRTC. Needs neither a GPU nor a driver."""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from escalade.device.cache import cache_key, default_cache
from escalade.device.nvrtc_library import installed_libraries, library, major_of, nvidia_folders, toolkits
from escalade.device.program import Program, prelude
from escalade.device.sources import KERNELS, read
from escalade.errors import CompileError, ToolError
from escalade.interruption import interruptible

# NVRTC's own cache is off: its hits come without the log, which has the register counts and spills.
_OPTIONS: dict[str, str | bool] = {"std": "c++17", "lineinfo": True, "minimal": True, "no_cache": True}
_ELF, _ELF_OF_CUDA = b"\x7fELF", (190).to_bytes(2, "little")
_bundled: dict[str, bytes] = {}
"""Machine code from engine files, by `source_key`."""
_BRACKETS = re.compile(r"^\s*#\s*include\s*<([^>]+)>", re.MULTILINE)
_ANY_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*[<"]([^">\n]+)[">]', re.MULTILINE)
_RESOURCES = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


@dataclass(frozen=True)
class Resources:
    """Resource usage of a kernel, as reported by ptxas."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True)
class Cubin:
    program: Program
    architecture: str
    code: bytes
    log: str

    @property
    def payload(self) -> bytes:
        """Cached form: length of the log, log, code."""
        log = self.log.encode()
        return len(log).to_bytes(4, "little") + log + self.code

    @staticmethod
    def is_one(payload: bytes) -> bool:
        """Return True if this looks like a payload: a log and a CUDA ELF file."""
        log_bytes = int.from_bytes(payload[:4], "little")
        head = payload[4 + log_bytes :][:20]
        try:
            payload[4 : 4 + log_bytes].decode()
        except UnicodeDecodeError:
            return False
        return head[:4] == _ELF and head[18:20] == _ELF_OF_CUDA

    @property
    def resources(self) -> Resources:
        # The log has one section for each kernel of the source.
        found = _RESOURCES.search(self.log, max(0, self.log.find(f"properties for {self.program.entry}\n")))
        if not found:
            raise CompileError(f"the compiler's log for {self.program} has no resource usage:\n{self.log}")
        return Resources(
            int(found["registers"]),
            int(found["shared"] or 0),
            int(found["stack"]),
            int(found["stores"]) + int(found["loads"]),
        )


def compile_program(program: Program, architecture: str) -> Cubin:
    """Return bundled or cached machine code for `architecture`, such as "sm_90a", or compile it."""
    bundled = _bundled.get(source_key(program, architecture)) if _bundled else None
    if bundled is not None:
        return _unpack(program, architecture, bundled)
    key = _key(program, architecture)
    payload = default_cache().get(key, lambda: _compile_without_spills(program, architecture))
    return _unpack(program, architecture, payload)


def add_bundled(codes: Mapping[str, bytes]) -> None:
    """Add payloads by `source_key`, which take precedence over cache and compiler."""
    _bundled.update(codes)


def is_bundled(program: Program, architecture: str) -> bool:
    return bool(_bundled) and source_key(program, architecture) in _bundled


def is_compiled(program: Program, architecture: str) -> bool:
    """Return True if the program is bundled, or intact in the cache."""
    return is_bundled(program, architecture) or default_cache().has(_key(program, architecture))


def unpersisted_payload(program: Program, architecture: str) -> bytes | None:
    """Return the payload if the cache holds it only for this process's lifetime, for another's `store_payload`."""
    key = _key(program, architecture)
    if default_cache().is_persistent(key):
        return None
    return default_cache().get(key, lambda: _compile_without_spills(program, architecture))


def store_payload(program: Program, architecture: str, payload: bytes) -> None:
    """Store a payload that another process compiled and could not store."""
    default_cache().get(_key(program, architecture), lambda: payload)


def warm_up() -> None:
    """Load NVRTC and hash the headers that most programs include, ahead of the first compilation."""
    compiler_version()
    header_digest(cuda_headers(), ("cuda_bf16.h", "cuda_fp16.h"))


def source_key(program: Program, architecture: str) -> str:
    """Hash everything of ours that machine code depends on, but neither compiler version nor NVIDIA's headers."""
    return cache_key(
        program.text(),
        program.entry,
        *(part for header in program.headers() for part in (header, read(header))),
        repr(sorted(_OPTIONS.items())),
        architecture,
    )


def _key(program: Program, architecture: str) -> str:
    return cache_key(
        program.text(),
        *(part for header in program.headers() for part in (header, read(header))),
        header_digest(cuda_headers(), nvidia_includes(program)),
        repr(sorted(_OPTIONS.items())),
        compiler_version(),
        architecture,
    )


def nvidia_includes(program: Program) -> tuple[str, ...]:
    """Return the `#include <...>` names of a program and its headers."""
    named = {*_BRACKETS.findall(prelude(program.constants))}
    return tuple(sorted(named.union(*map(_bracketed, (program.source, *program.headers())))))


@cache
def _bracketed(path: str) -> frozenset[str]:
    return frozenset(_BRACKETS.findall(read(path)))


def _unpack(program: Program, architecture: str, payload: bytes) -> Cubin:
    log_bytes = int.from_bytes(payload[:4], "little")
    return Cubin(program, architecture, payload[4 + log_bytes :], payload[4 : 4 + log_bytes].decode())


def _compile_without_spills(program: Program, architecture: str) -> bytes:
    """Compile, and lower the constant BLOCKS_PER_SM while the kernel spills registers.

    Register counts differ by a few between architectures, so a value that fits one may spill on another. With 0 the
    compiler limits registers by its own idea of occupancy, and may spill too: 1 lifts the limit.
    """
    payload = _compile(program, architecture)
    constants = dict(program.constants)
    blocks = constants.get("BLOCKS_PER_SM")
    while (
        isinstance(blocks, int)
        and blocks != 1
        and _unpack(program, architecture, payload).resources.spill_bytes
    ):
        blocks = max(1, blocks - 1)
        payload = _compile(
            Program.of(program.source, program.entry, constants | {"BLOCKS_PER_SM": blocks}), architecture
        )
    return payload


def _compile(program: Program, architecture: str) -> bytes:
    folders = (f"--include-path={folder}" for folder in (KERNELS, cuda_headers()))
    try:
        code, log = compile_source(
            program.text(), program.source, architecture, ["--ptxas-options=-v", *folders]
        )
    except CompileError as error:
        raise CompileError(f"NVRTC cannot compile {program} for {architecture}:\n{error}") from error
    return len(log).to_bytes(4, "little") + log + code


def compile_source(
    source: str, name: str, architecture: str, options: Sequence[str] = ()
) -> tuple[bytes, bytes]:
    """Return the machine code and the log of a source; raises CompileError with the log."""

    def work() -> tuple[bytes, bytes]:
        return library().compile(source, name, [f"-arch={architecture}", *_supported_options(), *options])

    # One call for creating, compiling and destroying: an interrupt must not destroy a program in compilation.
    return interruptible(work)


@cache
def _is_supported(option: str) -> bool:
    return library().accepts(option)


def _supported_options() -> Iterator[str]:
    """Yield our options without those that an older NVRTC lacks, such as `-no-cache`."""
    for option, value in _OPTIONS.items():
        name = f"-{option.replace('_', '-')}"
        spelled = name if value is True else f"{name}={value}"
        if value and _is_supported(spelled):
            yield spelled


@cache
def compiler_version() -> str:
    """Return NVRTC's release and build, read from the header of its PTX: `nvrtc 13.0.88 (CL-36424714)`."""
    text, _ = library().compile("", "empty.cu", [], "PTX")
    head = b"\n".join(line for line in text.splitlines() if line.startswith(b"//")).decode()
    release = re.search(r"\bV(\d+(?:\.\d+)+)", head)
    build = re.search(r"Compiler Build ID: (\S+)", head)
    # Hash the whole header if a later compiler words it differently.
    name = build[1] if build else hashlib.sha256(head.encode()).hexdigest()[:12]
    major, minor = library().version
    return f"nvrtc {release[1] if release else f'{major}.{minor}'} ({name})"


def header_digest(folder: pathlib.Path, names: Sequence[str]) -> str:
    """Hash headers and everything that they include from the same folder, directly or indirectly."""
    digest = hashlib.sha256()
    found: set[str] = set()
    waiting = sorted(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        file = f"{folder}/{name}"
        try:
            status = os.stat(file)
        except OSError:  # built into the compiler, or of another operating system
            continue
        hashed, included = _header(file, name, status.st_size, status.st_mtime_ns)
        digest.update(f"{name}\0{hashed}\0".encode())
        waiting += sorted(included - found)
    return digest.hexdigest()


@cache
def _header(file: str, name: str, size: int, changed: int) -> tuple[str, frozenset[str]]:
    """Return a header's hash and the names it includes, cached by size and modification time."""
    text = pathlib.Path(file).read_bytes()
    included = {found.decode(errors="replace") for found in _ANY_INCLUDE.findall(text)}
    beside = pathlib.PurePosixPath(name).parent
    return hashlib.sha256(text).hexdigest(), frozenset(
        {*included, *(os.path.normpath(beside / each) for each in included)}
    )


@cache
def cuda_headers(*needed: str) -> pathlib.Path:
    """Return a folder with cuda_fp16.h and the `needed` headers, preferably of NVRTC's CUDA version."""
    names = ("cuda_fp16.h", *needed)
    for folder in _header_candidates():
        if all((folder / name).is_file() for name in names):
            return folder
    raise ToolError(
        f"no folder with {' and '.join(names)} was found; install them with: "
        "pip install nvidia-cuda-runtime nvidia-cuda-crt"
    )


def _header_candidates() -> list[pathlib.Path]:
    folders: list[pathlib.Path] = []
    for root in nvidia_folders():
        folders += sorted(root.glob("cu*/include"))
    folders += [toolkit / "include" for toolkit in toolkits()]
    libraries = installed_libraries()
    # NVRTC does not compile the headers of a later CUDA.
    return sorted(folders, key=lambda folder: bool(libraries) and _major(folder) != major_of(libraries[0]))


def _major(folder: pathlib.Path) -> int | None:
    """CUDA major version of the headers in a folder."""
    try:
        text = (folder / "cuda_runtime_api.h").read_text(errors="replace")
    except OSError:
        return None
    version = re.search(r"^#define\s+CUDART_VERSION\s+(\d+)", text, re.MULTILINE)
    return int(version[1]) // 1000 if version else None
