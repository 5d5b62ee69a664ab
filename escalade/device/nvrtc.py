"""Programs to machine code, with NVRTC. Needs neither a GPU nor a driver."""

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
from escalade.device.program import KERNELS, Program, prelude, read
from escalade.errors import CompileError, ToolError
from escalade.interruption import interruptible

# No cache of NVRTC's own: what comes from it comes without the log that names registers and spills.
_OPTIONS: dict[str, str | bool] = {"std": "c++17", "lineinfo": True, "minimal": True, "no_cache": True}
_ELF, _ELF_OF_CUDA = b"\x7fELF", (190).to_bytes(2, "little")
_offered: dict[str, bytes] = {}
"""Machine code that was brought along, by `source_key`."""
_BRACKETS = re.compile(r"^\s*#\s*include\s*<([^>]+)>", re.MULTILINE)
_ANY_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*[<"]([^">\n]+)[">]', re.MULTILINE)
_RESOURCES = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


@dataclass(frozen=True)
class Resources:
    """What the assembler says a kernel takes."""

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
        """The log's length, the log, the code: what is kept."""
        log = self.log.encode()
        return len(log).to_bytes(4, "little") + log + self.code

    @staticmethod
    def is_one(payload: bytes) -> bool:
        """Whether this is machine code of a GPU with its log, as far as its frame tells."""
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
            raise CompileError(f"the compiler's log for {self.program} names no resources:\n{self.log}")
        return Resources(
            int(found["registers"]),
            int(found["shared"] or 0),
            int(found["stack"]),
            int(found["stores"]) + int(found["loads"]),
        )


def compile_program(program: Program, architecture: str) -> Cubin:
    """Compiled for `architecture` (such as "sm_90a"), from the cache if it was before; or what was brought along."""
    offered = _offered.get(source_key(program, architecture)) if _offered else None
    if offered is not None:
        return _unpack(program, architecture, offered)
    key = _key(program, architecture)
    payload = default_cache().get(key, lambda: _compile_unspilled(program, architecture))
    return _unpack(program, architecture, payload)


def add_bundled(codes: Mapping[str, bytes]) -> None:
    """Machine code by `source_key` that is taken from now on, without asking the cache or the compiler."""
    _offered.update(codes)


def is_bundled(program: Program, architecture: str) -> bool:
    """Whether its machine code was brought along."""
    return bool(_offered) and source_key(program, architecture) in _offered


def is_compiled(program: Program, architecture: str) -> bool:
    """Whether it was brought along, or the cache has it already, whole."""
    return is_bundled(program, architecture) or default_cache().has(_key(program, architecture))


def unpersisted_payload(program: Program, architecture: str) -> bytes | None:
    """What was compiled, if the cache has it only for as long as this process lives; for `keep` in another."""
    key = _key(program, architecture)
    if default_cache().is_persistent(key):
        return None
    return default_cache().get(key, lambda: _compile_unspilled(program, architecture))


def store_payload(program: Program, architecture: str, payload: bytes) -> None:
    """What another process compiled and could not keep."""
    default_cache().get(_key(program, architecture), lambda: payload)


def warm_up() -> None:
    """Loads the compiler, and reads the headers that most programs include, ahead of the first of them."""
    compiler_version()
    header_digest(cuda_headers(), ("cuda_bf16.h", "cuda_fp16.h"))


def source_key(program: Program, architecture: str) -> str:
    """A hash of all of ours that machine code depends on, and of nothing that a compiler brings."""
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
    """The names in angle brackets that a program and its headers include."""
    named = {*_BRACKETS.findall(prelude(program.constants))}
    return tuple(sorted(named.union(*map(_bracketed, (program.source, *program.headers())))))


@cache
def _bracketed(path: str) -> frozenset[str]:
    return frozenset(_BRACKETS.findall(read(path)))


def _unpack(program: Program, architecture: str, payload: bytes) -> Cubin:
    log_bytes = int.from_bytes(payload[:4], "little")
    return Cubin(program, architecture, payload[4 + log_bytes :], payload[4 : 4 + log_bytes].decode())


def _compile_unspilled(program: Program, architecture: str) -> bytes:
    """A program's constant BLOCKS_PER_SM is a wish: it is lowered for as long as it can only be had by spilling.

    How many registers a kernel needs differs by a few from one architecture to the next.
    """
    payload = _compile(program, architecture)
    constants = dict(program.constants)
    blocks = constants.get("BLOCKS_PER_SM")
    while (
        isinstance(blocks, int)
        and blocks > 1
        and _unpack(program, architecture, payload).resources.spill_bytes
    ):
        blocks -= 1
        payload = _compile(
            Program.of(program.source, program.entry, constants | {"BLOCKS_PER_SM": blocks}), architecture
        )
    return payload


def _compile(program: Program, architecture: str) -> bytes:
    """The log's length, the log, the code."""
    folders = (f"--include-path={folder}" for folder in (KERNELS, cuda_headers()))
    try:
        code, log = compile_source(
            program.text(), program.source, architecture, ["--ptxas-options=-v", *folders]
        )
    except CompileError as error:
        raise CompileError(f"NVRTC refused {program} for {architecture}:\n{error}") from error
    return len(log).to_bytes(4, "little") + log + code


def compile_source(
    source: str, name: str, architecture: str, options: Sequence[str] = ()
) -> tuple[bytes, bytes]:
    """The machine code of a source, and what the compiler says of it; a CompileError with that if it refuses."""
    # As a whole: who is interrupted must not destroy what is still being compiled.
    return interruptible(lambda: _translated(source, name, architecture, options))


def _translated(source: str, name: str, architecture: str, options: Sequence[str]) -> tuple[bytes, bytes]:
    return library().compile(source, name, [f"-arch={architecture}", *_own_options(), *options])


@cache
def _known(option: str) -> bool:
    return library().accepts(option)


def _own_options() -> Iterator[str]:
    """Our options, without those that an older NVRTC does not have: `-no-cache` came with the cache."""
    for option, value in _OPTIONS.items():
        name = f"-{option.replace('_', '-')}"
        spelled = name if value is True else f"{name}={value}"
        if value and _known(spelled):
            yield spelled


@cache
def compiler_version() -> str:
    """Release, number and build, as what it compiles says: `nvrtc 13.0.88 (CL-36424714)`."""
    text, _ = library().compile("", "empty.cu", [], "PTX")
    head = b"\n".join(line for line in text.splitlines() if line.startswith(b"//")).decode()
    release = re.search(r"\bV(\d+(?:\.\d+)+)", head)
    build = re.search(r"Compiler Build ID: (\S+)", head)
    # The head as a whole stands in for what a later compiler calls otherwise.
    name = build[1] if build else hashlib.sha256(head.encode()).hexdigest()[:12]
    major, minor = library().version
    return f"nvrtc {release[1] if release else f'{major}.{minor}'} ({name})"


def header_digest(folder: pathlib.Path, names: Sequence[str]) -> str:
    """A hash of headers and of all that they include from the same folder, directly or not."""
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
        except OSError:  # the compiler's own, or another system's
            continue
        hashed, included = _header(file, name, status.st_size, status.st_mtime_ns)
        digest.update(f"{name}\0{hashed}\0".encode())
        waiting += sorted(included - found)
    return digest.hexdigest()


@cache
def _header(file: str, name: str, size: int, changed: int) -> tuple[str, frozenset[str]]:
    """The hash of a header and the names that its includes may have; read again when its size or date changes."""
    text = pathlib.Path(file).read_bytes()
    included = {found.decode(errors="replace") for found in _ANY_INCLUDE.findall(text)}
    beside = pathlib.PurePosixPath(name).parent
    return hashlib.sha256(text).hexdigest(), frozenset(
        {*included, *(os.path.normpath(beside / each) for each in included)}
    )


@cache
def cuda_headers(*needed: str) -> pathlib.Path:
    """Return a folder with cuda_fp16.h and the `needed` headers, of the same CUDA version as NVRTC if there is one."""
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
