"""NVRTC, loaded by path and called through ctypes.

A process may hold several NVRTCs: PyTorch built for CUDA 12 brings libnvrtc.so.12, and cuda-bindings uses whichever is
already loaded. Loading by path makes the choice ours. Symbols are versioned, so the libraries do not interfere.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from functools import cache

from escalade import subprocesses
from escalade.errors import CompileError, ToolError

_SONAME = re.compile(r"libnvrtc\.so\.(\d+)")
_MAJORS = (13, 12)
"""CUDA major versions that the kernels are compiled with, newest first."""
_INVALID_OPTION = 5  # NVRTC_ERROR_INVALID_OPTION


class NvrtcLibrary:
    """One loaded libnvrtc."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self.path = path
        """The file that was loaded, or a soname that the dynamic linker resolved."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = major.value, minor.value
        # The 13.0 wheels do not search their own folder for the builtins.
        builtins = pathlib.Path(path).with_name(f"libnvrtc-builtins.so.{major.value}.{minor.value}")
        if builtins.is_file():
            ctypes.CDLL(str(builtins))

    def compile(
        self, source: str, name: str, options: Sequence[str], output: str = "CUBIN"
    ) -> tuple[bytes, bytes]:
        """Return the `output` ("CUBIN" or "PTX") of a source, and the log. A refusal is a CompileError with the log."""
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), name.encode(), 0, None, None
            )
        )
        try:
            status = self._compile(program, options)
            log = self._text("ProgramLog", program).rstrip(b"\0")
            if status:
                raise CompileError(f"{log.decode(errors='replace')}{self._error(status)}")
            return self._text(output, program), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def accepts(self, option: str) -> bool:
        """False for an option that this version does not have: NVRTC refuses it for any source."""
        program = ctypes.c_void_p()
        self._check(self._library.nvrtcCreateProgram(ctypes.byref(program), b"", b"empty.cu", 0, None, None))
        try:
            return self._compile(program, [option]) != _INVALID_OPTION
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _compile(self, program: ctypes.c_void_p, options: Sequence[str]) -> int:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        return int(self._library.nvrtcCompileProgram(program, len(options), given))

    def _text(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._check(self._library[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self._check(self._library[f"nvrtcGet{what}"](program, text))
        return text.raw

    def _check(self, status: int) -> None:
        if status:
            raise CompileError(f"{self.path}: {self._error(status)}")

    def _error(self, status: int) -> str:
        return str(self._library.nvrtcGetErrorString(status).decode())


@cache
def library() -> NvrtcLibrary:
    """Load NVRTC: the newest of the installed ones whose machine code the driver accepts."""
    refusals = []
    sonames = [f"libnvrtc.so.{major}" for major in _preferred(_MAJORS)]
    for path in (*map(str, installed_libraries()), *sonames):
        try:
            return NvrtcLibrary(path)
        except (OSError, AttributeError, CompileError) as error:
            refusals.append((str(error).splitlines() or [type(error).__name__])[0])
    raise ToolError(
        f"NVRTC, which compiles kernels for GPUs, cannot be loaded ({refusals[0]}); "
        "install it with: pip install nvidia-cuda-nvrtc"
    )


def installed_libraries() -> list[pathlib.Path]:
    """List NVRTC libraries in the order of preference: newest first, but those newer than the driver last."""
    folders = [folder for root in nvidia_folders() for folder in sorted(root.glob("*/lib"))]
    folders += [folder for root in toolkits() for folder in (root / "lib64", *root.glob("targets/*/lib"))]
    found = {path: int(name[1]) for path, name in _libraries(folders)}
    order = _preferred([*found.values()])
    return sorted(found, key=lambda path: order.index(found[path]))


def _libraries(folders: Sequence[pathlib.Path]) -> Iterator[tuple[pathlib.Path, re.Match[str]]]:
    for folder in folders:
        for path in sorted(folder.glob("libnvrtc.so.*")):
            name = _SONAME.fullmatch(path.name)
            if name and int(name[1]) >= min(_MAJORS):
                yield path, name


def major_of(path: pathlib.Path) -> int:
    """CUDA major version of a library that `installed` lists."""
    return int(path.name.rpartition(".")[2])


def _preferred(majors: Sequence[int]) -> list[int]:
    driver = driver_cuda_version()
    # A driver does not load machine code of a later major version.
    return sorted({*majors}, key=lambda major: (driver is not None and major > driver[0], -major))


@cache
def driver_cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the installed driver supports; None without a driver."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return (version.value // 1000, version.value % 1000 // 10) if version.value else None


def nvidia_folders() -> list[pathlib.Path]:
    """Folders of the NVIDIA packages on sys.path."""
    spec = importlib.util.find_spec("nvidia")
    return [pathlib.Path(root) for root in (spec.submodule_search_locations or [])] if spec else []


def toolkits() -> list[pathlib.Path]:
    """Roots of installed CUDA toolkits. Relative ones would depend on the current folder."""
    named = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    nvcc = subprocesses.find_program("nvcc")
    if nvcc:
        named.append(str(pathlib.Path(nvcc).resolve().parent.parent))
    return [pathlib.Path(toolkit) for toolkit in named if os.path.isabs(toolkit)]
