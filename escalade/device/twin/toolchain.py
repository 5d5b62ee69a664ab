"""The host's C++ compiler and what it is told."""

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
from escalade.device.program import KERNELS
from escalade.errors import CompileError, ToolError

FOLDER = pathlib.Path(__file__).parent
RUNTIME = FOLDER / "runtime"
STAND_INS = FOLDER / "include"
OLDEST_COMPILER = 12
_INCLUDED = ("vector_types.h", "vector_functions.h", "cuda_fp16.h", "cuda_bf16.h")
"""What the twin's headers and kernels include of NVIDIA's."""

# -ffp-contract=fast is g++'s default and nvcc's too: a*b + c may become one fused operation, from -O2 on.
_COMMON = ("-std=c++20", "-march=native", "-fPIC", "-ffp-contract=fast", "-fno-strict-aliasing")

LIBRARIES = ("-nostdlib", "-lm", "-lgcc")
"""What a kernel is linked with besides the runtime: reading all that g++ adds by itself takes longer than the rest."""


@cache
def compiler() -> str:
    """The path of g++."""
    found = subprocesses.find_program("g++")
    if not found:
        raise ToolError(
            "the twin compiles kernels with g++, which is not on the PATH; "
            "install g++ 12 or later (Debian, Ubuntu: apt install g++)"
        )
    version = subprocesses.output(found, "-dumpversion").strip()
    number = version.split(".")[0]
    if not number.isdecimal():
        raise ToolError(f"{found} does not say which version of g++ it is; the twin needs one that works")
    if int(number) < OLDEST_COMPILER:
        raise ToolError(f"{found} is version {version}; the twin needs g++ {OLDEST_COMPILER} or later")
    return found


@cache
def identity() -> tuple[str, ...]:
    """What a library depends on besides its sources: compiler, processor, NVIDIA's headers."""
    version = subprocesses.output(compiler(), "--version")
    # The names of the instruction sets that -march=native stands for here.
    target = subprocesses.output(compiler(), *_COMMON, "-Q", "--help=target")
    march = " ".join(re.findall(r"^\s+-m(?:arch|cpu|tune)=\s+(\S+)", target, re.MULTILINE))
    return (version, platform.machine(), march, header_digest(nvidia_headers(), _INCLUDED))


def runtime_options() -> tuple[str, ...]:
    return (*_COMMON, "-O2", "-g1", "-fno-omit-frame-pointer", *_includes())


# g++ puts a call in front of every load and store (runtime/hooks.cpp).
_FOLLOWED = (
    # Without scalar replacement a float4 moves as one access, as on the card.
    *("-fsanitize=thread", "-fno-tree-sra", "-fno-tree-vectorize"),
    *("--param", "tsan-instrument-func-entry-exit=0", "--param", "tsan-distinguish-volatile=1"),
    # g++ does not tell of what a call stores in place of its result, nor of an argument that it takes from memory.
    # So a structure goes through a temporary, whose copy it tells of, and a pointer stays one.
    *("-fno-elide-constructors", "-fno-ipa-sra"),
    # The place of a last call.
    "-fno-optimize-sibling-calls",
    # No copy of an access or a barrier on both sides of a branch in front of it: lanes would seem to be at two places.
    *("--param", "max-jump-thread-duplication-stmts=0"),
)
_COUNTED = (
    "-DTWIN_COUNTS",
    "-fsanitize-coverage=trace-pc",  # and one in front of each block of code
    "-fno-reorder-blocks",  # in the source's order: runtime/counting.h builds on it
    "-fexpensive-optimizations",  # without these a*b + c stays two operations
    # So would a sum in a loop on processors that g++ knows to add faster than they multiply and add.
    *("--param", "avoid-fma-max-bits=0"),
)


def kernel_options(
    checks: bool = False, sanitize: bool = False, zeroed: bool = False, counts: bool = False
) -> tuple[str, ...]:
    """Options for a kernel's source; shared memory depends on the thread-local ones (see runtime/language.h).

    With checks, variables that are not set hold a pattern, or zeros if `zeroed`.
    """
    options = [
        *_COMMON,
        "-O1",  # a quarter less of g++'s time than with -O2, and kernels run no longer: the runtime is most of it
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
        options += _FOLLOWED
    if counts:
        options += _COUNTED
    if checks:
        # An index outside a thread's own array, whose stores it does not tell of.
        options += ["-DTWIN_CHECKS", "-fsanitize=bounds"]
        options += ["-fno-omit-frame-pointer"]  # how a barrier was reached (runtime/barriers.cpp)
        # g++ would write out a call of memset, or one that checks its bounds, and not tell of it; the runtime's does.
        options += ["-fno-builtin-memset", "-U_FORTIFY_SOURCE"]
        if platform.machine() == "x86_64":  # the same of copies whose length is not known
            options += ["-mmemcpy-strategy=libcall:-1:noalign"]
        # What a kernel leaves unset is known by its bits (runtime/registers.cpp, launch.py).
        options += [f"-ftrivial-auto-var-init={'zero' if zeroed else 'pattern'}"]
        options += ["-Wuninitialized", "-Wmaybe-uninitialized"]
    # Every page of a large frame is touched in order: an overflow of the stack finds the guard below it.
    options += ["-fstack-clash-protection", "--param", "stack-clash-protection-guard-size=12"]
    if sanitize:
        options += sanitizers()
    else:  # a division by zero gives zero on aarch64, and nothing in particular on the card
        options += ["-fsanitize=integer-divide-by-zero"]
    return tuple(options)


def sanitizers() -> tuple[str, ...]:
    return ("-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-omit-frame-pointer")


def _includes() -> tuple[str, ...]:
    # NVIDIA's folder as a system one, for its warnings; the stand-ins before our own kernels.
    return ("-I", str(STAND_INS), "-I", str(RUNTIME), "-I", str(KERNELS), "-isystem", str(nvidia_headers()))


def run(
    arguments: Sequence[str | pathlib.Path],
    what: str,
    sources: Mapping[str, str] | None = None,
    links: Mapping[str, pathlib.Path] | None = None,
) -> str:
    """One run of g++ in a folder that holds `sources`, and `links` to other files, and nothing else; its warnings.

    So quoted includes are looked up on the include path only, as NVRTC does.
    """
    with _workshop() as folder:
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
        raise CompileError(f"g++ refused {what}:\n{done.stderr.strip()}")
    return done.stderr


def _workshop() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="twin-")
    except OSError as error:
        raise ToolError(
            f"g++ needs a folder for temporary files, and none can be made ({error.strerror or error}); TMPDIR names "
            "one"
        ) from error


def nvidia_headers() -> pathlib.Path:
    """The folder of CUDA headers that g++ can use: NVRTC brings crt/ itself, g++ does not."""
    return cuda_headers("crt/host_defines.h")
