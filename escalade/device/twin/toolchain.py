"""The host's C++ compiler and its options."""

from __future__ import annotations

import errno
import os
import pathlib
import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache

from escalade import subprocesses
from escalade.device.nvrtc import cuda_headers, header_digest
from escalade.device.sources import KERNELS
from escalade.errors import CompileError, ToolError

FOLDER = pathlib.Path(__file__).parent
RUNTIME = FOLDER / "runtime"
STAND_INS = FOLDER / "include"
OLDEST_COMPILER = 12
_INCLUDED = ("vector_types.h", "vector_functions.h", "cuda_fp16.h", "cuda_bf16.h")
"""NVIDIA's headers that the twin's headers and kernels include."""

# -ffp-contract=fast is g++'s default and nvcc's too: a*b + c may become one fused operation, from -O2 on.
_COMMON = ("-std=c++20", "-march=native", "-fPIC", "-ffp-contract=fast", "-fno-strict-aliasing")

LIBRARIES = ("-nostdlib", "-lm", "-lgcc")
"""Libraries of a kernel besides the runtime. Linking g++'s default libraries would take longer than everything else."""


@cache
def compiler() -> str:
    """Return the path of g++; raises ToolError if it is missing or too old."""
    found = subprocesses.find_program("g++")
    if not found:
        raise ToolError(
            "the twin compiles kernels with g++, which is not on the PATH; "
            "install g++ 12 or later (Debian, Ubuntu: apt install g++)"
        )
    version = subprocesses.output(found, "-dumpversion").strip()
    number = version.split(".")[0]
    if not number.isdecimal():
        raise ToolError(f"{found} does not report its version; the twin needs g++ {OLDEST_COMPILER} or later")
    if int(number) < OLDEST_COMPILER:
        raise ToolError(f"{found} is version {version}; the twin needs g++ {OLDEST_COMPILER} or later")
    return found


@cache
def identity() -> tuple[str, ...]:
    """Return what a library depends on besides its sources: compiler, processor, NVIDIA's headers."""
    version = subprocesses.output(compiler(), "--version")
    # The instruction sets that -march=native resolves to.
    target = subprocesses.output(compiler(), *_COMMON, "-Q", "--help=target")
    march = " ".join(re.findall(r"^\s+-m(?:arch|cpu|tune)=\s+(\S+)", target, re.MULTILINE))
    return (version, platform.machine(), march, header_digest(nvidia_headers(), _INCLUDED))


def runtime_options() -> tuple[str, ...]:
    return (*_COMMON, "-O2", "-g1", "-fno-omit-frame-pointer", *_includes())


# g++ inserts a call before every load and store (runtime/hooks.cpp).
_INSTRUMENTED = (
    # Without scalar replacement a float4 moves as one access, as on the GPU.
    *("-fsanitize=thread", "-fno-tree-sra", "-fno-tree-vectorize"),
    *("--param", "tsan-instrument-func-entry-exit=0", "--param", "tsan-distinguish-volatile=1"),
    # g++ does not instrument a call's store of its returned struct, nor the load of an argument passed by reference
    # after IPA-SRA. So structs go through an instrumented temporary, and pointers stay pointers.
    *("-fno-elide-constructors", "-fno-ipa-sra"),
    # Keeps the frame of a tail call, for its source line.
    "-fno-optimize-sibling-calls",
    # No duplicates of an access or barrier on both sides of a branch: lanes would appear to be at two locations.
    *("--param", "max-jump-thread-duplication-stmts=0"),
)
_COUNTED = (
    "-DTWIN_COUNTS",
    "-fsanitize-coverage=trace-pc",  # also a call before each basic block
    "-fno-reorder-blocks",  # runtime/counting.h relies on source order
    "-fexpensive-optimizations",  # otherwise a*b + c stays two operations
    # g++ avoids FMA in accumulation loops on processors where an addition has a lower latency.
    *("--param", "avoid-fma-max-bits=0"),
)


def kernel_options(
    checks: bool = False, sanitize: bool = False, zeroed: bool = False, counts: bool = False
) -> tuple[str, ...]:
    """Return g++'s options for a kernel. Shared memory depends on the TLS options (see runtime/language.h).

    With checks, uninitialized variables hold a pattern, or zeros if `zeroed`.
    """
    options = [
        *_COMMON,
        "-O1",  # compiles 25% faster than -O2, and kernels run as fast: most time is spent in the runtime
        "-g1",
        "-Wno-unknown-pragmas",
        "-Wno-attributes",
        *_includes(),
    ]
    options += ["-ftls-model=global-dynamic", "-fno-extern-tls-init", "-fno-gnu-unique"]
    if platform.machine() == "aarch64":
        options += ["-mtls-dialect=trad", "-fno-section-anchors"]
    else:
        options += ["-mtls-dialect=gnu"]
    if checks or counts:
        options += _INSTRUMENTED
    if counts:
        options += _COUNTED
    if checks:
        # Indices outside local arrays, whose stores are not instrumented.
        options += ["-DTWIN_CHECKS", "-fsanitize=bounds"]
        options += ["-fno-omit-frame-pointer"]  # call paths to barriers (runtime/barriers.cpp)
        # Calls the runtime's memset: g++'s inline and fortified versions are not instrumented.
        options += ["-fno-builtin-memset", "-U_FORTIFY_SOURCE"]
        if platform.machine() == "x86_64":  # the same for copies of unknown length
            options += ["-mmemcpy-strategy=libcall:-1:noalign"]
        # Uninitialized variables are recognized by their bits (runtime/registers.cpp, launch.py).
        options += [f"-ftrivial-auto-var-init={'zero' if zeroed else 'pattern'}"]
        options += ["-Wuninitialized", "-Wmaybe-uninitialized"]
    # Touch every page of a large frame in order, so that a stack overflow hits the guard page.
    options += ["-fstack-clash-protection", "--param", "stack-clash-protection-guard-size=12"]
    if sanitize:
        options += sanitizers()
    else:  # division by zero returns zero on aarch64 and is undefined on the GPU
        options += ["-fsanitize=integer-divide-by-zero"]
    return tuple(options)


def sanitizers() -> tuple[str, ...]:
    return ("-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-omit-frame-pointer")


def _includes() -> tuple[str, ...]:
    # -isystem silences warnings in NVIDIA's headers. The twin's versions shadow headers in our kernels folder.
    return ("-I", str(STAND_INS), "-I", str(RUNTIME), "-I", str(KERNELS), "-isystem", str(nvidia_headers()))


def run(
    arguments: Sequence[str | pathlib.Path],
    what: str,
    sources: Mapping[str, str] | None = None,
    links: Mapping[str, pathlib.Path] | None = None,
) -> str:
    """Run g++ in a scratch folder with only `sources` and symlinks `links`; returns its warnings.

    So quoted includes are searched on the include path only, as by NVRTC.
    """
    with _scratch_folder() as folder:
        for name, text in (sources or {}).items():
            path = pathlib.Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for name, target in (links or {}).items():
            pathlib.Path(folder, name).symlink_to(target.absolute())
        done = subprocesses.run([compiler(), *arguments], folder=folder)
    if done.returncode:
        full = next((code for code in (errno.ENOSPC, errno.EDQUOT) if os.strerror(code) in done.stderr), 0)
        if full:
            raise OSError(full, os.strerror(full))
        raise CompileError(f"g++ cannot compile {what}:\n{done.stderr.strip()}")
    return done.stderr


def _scratch_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="twin-")
    except OSError as error:
        raise ToolError(
            f"g++ needs a folder for temporary files, and none can be created ({error.strerror or error}); set TMPDIR "
            "to a writable folder"
        ) from error


def nvidia_headers() -> pathlib.Path:
    """Return the folder of CUDA headers for g++, which, unlike NVRTC, needs crt/ there."""
    return cuda_headers("crt/host_defines.h")
