"""`escalade doctor`: check this machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from escalade import subprocesses
from escalade.commands.progress import waiting
from escalade.device.architecture import HOPPER
from escalade.errors import ToolError
from escalade.narrow_tables import Table
from escalade.terminal_text import format_bytes, printable

VARIABLES = {
    "ESCALADE_CACHE_DIR": ("~/.cache/escalade", "folder of the kernel cache"),
    "ESCALADE_CACHE_LIMIT": (
        "1GiB",
        "size of the kernel cache, such as 500MB or 1.5GiB; the least recently used entries are evicted first",
    ),
    "ESCALADE_COMMIT": ("HEAD", "commit named in records; by default git's"),
    "ESCALADE_DATA": (
        "data",
        "folder of LeNet's weights and Fashion-MNIST for `escalade bench lenet`, and of photographs for `escalade "
        "measure`",
    ),
    "ESCALADE_SYNC": (
        "0",
        "1: synchronize after every launch, so that an error names the kernel that caused it",
    ),
    "ESCALADE_TWIN_LIMIT": ("120", "CPU seconds that a kernel on the twin may take; 0: no limit"),
}
"""Default and meaning of every environment variable that Escalade reads."""

_PROBE = 'extern "C" __global__ void probe(float* y) { y[threadIdx.x] = 2.f * threadIdx.x; }\n'


@dataclass(frozen=True)
class Finding:
    """Result of one check. `good` is None for mere information."""

    topic: str
    value: str
    good: bool | None = None
    advice: str = ""


@dataclass(frozen=True)
class Report:
    findings: tuple[Finding, ...]
    abilities: tuple[Finding, ...]


def command() -> None:
    """Check this machine: GPU, driver, compilers, versions and caches. Report what does not work and how to fix it."""
    with waiting("checking; the first time, test kernels are compiled"):
        report = examine()
    if not show(report):
        raise typer.Exit(1)


def examine() -> Report:
    """Run all checks. A failed check is a finding, not an exception."""
    gpu = _check("GPU", _gpu, "Kernels run on the CPU twin instead. With an NVIDIA GPU: install its driver, and a "
                 "PyTorch built for CUDA (https://pytorch.org/get-started)")  # fmt: skip
    torch_found = _check("PyTorch", _torch, "pip install torch")
    driver = _check("driver", _driver, "Compiling needs no driver. To run kernels on a GPU, install its driver, of "
                    "the same CUDA major version as NVRTC or a later one (CUDA 13: driver 580 or newer)")  # fmt: skip
    compiler = _compiler()
    headers = _check("CUDA headers", _headers, "pip install nvidia-cuda-runtime nvidia-cuda-crt")
    host = _check("g++", _host_compiler, "Install g++ 12 or later (Debian, Ubuntu: apt install g++)")
    twin = _check("twin", _twin, "The twin needs g++ and the CUDA headers; see those lines")
    findings = (
        Finding("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        torch_found, gpu, driver, compiler, headers, host, twin, _profiler(),
        _check("cache", _cache, "Set ESCALADE_CACHE_DIR to a writable folder"),
    )  # fmt: skip
    on_gpu = bool(gpu.good and compiler.good and headers.good)
    abilities = (
        Finding("compile kernels for a GPU", "yes" if compiler.good and headers.good else "no",
                bool(compiler.good and headers.good), "escalade cache precompile conv2d"),
        Finding("run kernels on the GPU, and time them", "yes" if on_gpu else "no", on_gpu, "escalade ladder conv2d"),
        Finding("run kernels on the CPU twin", "yes" if twin.good else "no", bool(twin.good),
                "escalade verify conv2d --device twin"),
    )  # fmt: skip
    return Report(findings, abilities)


def show(report: Report, console: Console | None = None) -> bool:
    """Print the report. Return True if kernels can run on the GPU or on the twin."""
    console = console or Console()
    table = Table(title="This machine", title_justify="left", show_header=False)
    for finding in report.findings:
        table.add_row(_mark(finding.good), finding.topic, Text(printable(finding.value, keep="\n")))
    console.print(table)
    variables = Table("variable", "value", "default", "meaning", title="Environment", title_justify="left")
    for name, (default, meaning) in VARIABLES.items():
        variables.add_row(name, Text(printable(os.environ.get(name, ""))), default, meaning)
    console.print(variables)
    abilities = Table("", "task", "works", "try", title="What works", title_justify="left")
    for ability in report.abilities:
        abilities.add_row(
            _mark(ability.good), ability.topic, ability.value, ability.advice if ability.good else ""
        )
    console.print(abilities)
    for finding in report.findings:
        if finding.good is False and finding.advice:
            console.print(f"[yellow]{finding.topic}:[/] {escape(finding.advice)}.")
    return any(bool(ability.good) for ability in report.abilities[1:])


def _mark(good: bool | None) -> str:
    return {True: "[green]ok[/]", False: "[red]no[/]", None: ""}[good]


def _check(topic: str, check: Callable[[], str], advice: str) -> Finding:
    try:
        return Finding(topic, check(), True)
    except Exception as error:  # any failure is a finding
        return Finding(topic, str(error).strip() or type(error).__name__, False, advice)


def _torch() -> str:
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return f"{torch.__version__} ({cuda})"


def _gpu() -> str:
    import torch

    from escalade.device.gpu import properties_of

    if not torch.cuda.is_available():
        raise RuntimeError("none usable by PyTorch")
    found = []
    for index in range(torch.cuda.device_count()):
        card = properties_of(torch.device("cuda", index))
        found.append(
            f"{card.name}, {card.architecture}, {card.multiprocessors} SMs, "
            f"{card.memory_bytes / 2**30:.0f} GiB, {card.l2_bytes / 2**20:.0f} MiB L2"
        )
    return "; ".join(found)


def _driver() -> str:
    from escalade.device.nvrtc_library import driver_cuda_version, library
    from escalade_bench.measure.records import driver_version

    version, cuda = driver_version(), driver_cuda_version()
    if version == "unknown":
        raise RuntimeError("none found")
    if cuda is None:
        return version
    shown_cuda = ".".join(map(str, cuda))
    try:
        compiler = library().version
    except ToolError:  # reported by the NVRTC check
        return f"{version} (CUDA {shown_cuda})"
    if compiler[0] > cuda[0]:
        raise RuntimeError(
            f"{version} (CUDA {shown_cuda}) cannot load machine code from NVRTC {compiler[0]}.{compiler[1]}"
        )
    return f"{version} (CUDA {shown_cuda})"


def _compiler() -> Finding:
    """Check NVRTC. A broken installation needs different advice from a missing one."""
    from escalade.device.nvrtc_library import library

    try:
        path = library().path
    except ToolError as error:
        return Finding("NVRTC", str(error), False, "pip install nvidia-cuda-nvrtc")
    return _check(
        "NVRTC",
        lambda: f"{_nvrtc()}; {path}",
        f"{path} is installed but does not compile a kernel for sm_90a. Escalade needs NVRTC 12.0 or newer: "
        "pip install --upgrade --force-reinstall nvidia-cuda-nvrtc",
    )


def _nvrtc() -> str:
    from escalade.device.nvrtc import compile_source, compiler_version

    code, _ = compile_source(_PROBE, "probe.cu", HOPPER.name)
    version = compiler_version().removeprefix("nvrtc ").removesuffix(" (UNKNOWN)")
    return f"{version}, compiles a kernel ({len(code)} bytes)"


def _headers() -> str:
    from escalade.device.nvrtc import cuda_headers

    return str(cuda_headers())


def _host_compiler() -> str:
    from escalade.device.twin import toolchain

    found = toolchain.compiler()
    return f"{found}: {subprocesses.output(found, '--version').splitlines()[0]}"


def _twin() -> str:
    import ctypes

    import torch

    from escalade.device import twin

    kernel = twin.build(_PROBE, "probe", name="probe.cu")
    y = torch.zeros(32)
    kernel.launch((1, 1, 1), (32, 1, 1), [ctypes.c_void_p(y.data_ptr())], buffers=((y.data_ptr(), 128),))
    if not torch.equal(y, 2 * torch.arange(32.0)):
        raise RuntimeError(f"a test kernel returned {y.tolist()}")
    return "builds and runs a kernel"


def _profiler() -> Finding:
    """Check Nsight Compute, which only `profile` uses."""
    try:
        from escalade_bench.profile import ncu

        found = ncu.find()
    except Exception as error:
        return Finding("Nsight Compute", str(error))
    return Finding(
        "Nsight Compute",
        found or "not found: escalade profile reports times, but no counters",
        True if found else None,
    )


def _cache() -> str:
    from escalade.device.cache import default_cache

    cache = default_cache()
    if problem := cache.problem():
        raise RuntimeError(problem)
    entries, size = cache.size()
    return f"{cache.directory}: {entries} entries, {format_bytes(size)} of {format_bytes(cache.limit_bytes)}"
