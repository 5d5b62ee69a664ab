"""Programs to machine code, with NVRTC. Needs neither a GPU nor a driver."""

from __future__ import annotations

import importlib.util
import io
import os
import pathlib
import re
import shutil
import threading
from dataclasses import dataclass
from functools import cache

from escalade.device.cache import cache_key, default_cache
from escalade.device.program import KERNELS, Program, read
from escalade.errors import CompileError

# No cache of NVRTC's own: what comes from it comes without the log that names registers and spills.
_OPTIONS = {"std": "c++17", "lineinfo": True, "no_cache": True}
_importing = threading.Lock()
"""cuda.core puts another module in its own place while it is imported: a second thread would find it half made."""
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
    """Compiled for `architecture` (such as "sm_90a"), from the cache if it was before."""
    key = _key(program, architecture)
    payload = default_cache().get(key, lambda: _compile_unspilled(program, architecture))
    return _unpack(program, architecture, payload)


def is_compiled(program: Program, architecture: str) -> bool:
    """Whether the cache has it already."""
    return default_cache().has(_key(program, architecture))


def _key(program: Program, architecture: str) -> str:
    return cache_key(
        program.text(),
        *(part for header in program.headers() for part in (header, read(header))),
        repr(sorted(_OPTIONS.items())),
        compiler_version(),
        architecture,
    )


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
    with _importing:
        from cuda.core import Program as NvrtcProgram
        from cuda.core import ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(
        name=program.source,
        arch=architecture,
        include_path=[str(KERNELS), str(cuda_headers())],
        ptxas_options=["-v"],
        **_OPTIONS,
    )
    try:
        code = NvrtcProgram(program.text(), "c++", options).compile("cubin", logs=log).code
    except Exception as error:
        raise CompileError(f"NVRTC refused {program} for {architecture}:\n{log.getvalue()}{error}") from error
    text = log.getvalue().encode()
    return len(text).to_bytes(4, "little") + text + code


@cache
def compiler_version() -> str:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor}"


@cache
def cuda_headers(*needed: str) -> pathlib.Path:
    """A folder with cuda_fp16.h and what else is needed: of the NVIDIA packages, or of an installed toolkit."""
    names = ("cuda_fp16.h", *needed)
    for folder in _header_candidates():
        if all((folder / name).is_file() for name in names):
            return folder
    raise CompileError(
        f"no folder with {' and '.join(names)} was found; install them with: "
        "pip install nvidia-cuda-runtime nvidia-cuda-crt"
    )


def _header_candidates() -> list[pathlib.Path]:
    folders: list[pathlib.Path] = []
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        folders += sorted(pathlib.Path(root).glob("cu*/include"))
        folders.append(pathlib.Path(root) / "cuda_runtime" / "include")
    toolkits = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    nvcc = shutil.which("nvcc")
    if nvcc:
        toolkits.append(str(pathlib.Path(nvcc).resolve().parent.parent))
    return folders + [pathlib.Path(toolkit) / "include" for toolkit in toolkits if toolkit]
