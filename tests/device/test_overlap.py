"""Programmatic dependent launches: kernels must wait before they read or write anything of the preceding launch.

Checked on the PTX of every kernel launched so, over all paths: no path may reach an access to global memory without a
`griddepcontrol.wait`, unless the access is to weights that are known to be ready.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

from escalade.device.nvrtc import cuda_headers
from escalade.device.nvrtc_library import library
from escalade.device.program import Program
from escalade.device.recipe import KernelCall, WeightsReady
from escalade.device.sources import KERNELS
from tests.support import all_rungs, supported

WAIT = "griddepcontrol.wait"
_GUARD = r"(?P<guard>@!?%p\d+\s+)?"
_ACCESS = re.compile(
    _GUARD + r"(ld\.(?!param|shared|local|const)|ldu|st\.(?!param|shared|local|async)|red\.(?!shared|async)"
    r"|atom\.(?!shared)|cp\.reduce|cp\.async\.(?!commit|wait|mbarrier|bulk\.(commit|wait|prefetch)))"
)
_BRANCH = re.compile(_GUARD + r"bra(?:\.uni)?\s+(?P<to>\S+)")
_LABEL = re.compile(r"([$\w]+):")
_READY = "int weights_ready"


@cache
def overlapping() -> dict[tuple[str, str], KernelCall]:
    """One launch of every kernel of Hopper's rungs that may start early."""
    found: dict[tuple[str, str], KernelCall] = {}
    for operation, rung in all_rungs():
        if "sm_90a" not in rung.architectures:
            continue
        for problem, *_ in supported(operation, rung, operation.small_problems):
            for step in rung.recipe(problem, rung.configs(problem)[0]).steps:
                if isinstance(step, KernelCall) and step.overlap:
                    found.setdefault((step.program.source, step.program.entry), step)
    return found


def not_ready(program: Program) -> str:
    """The source for the case that the preceding launch may have written weights."""
    return f"constexpr int weights_ready = 0;\n{program.text().replace(_READY, 'int given')}"


def ptx(text: str, name: str) -> str:
    folders = (f"-I{KERNELS}", f"-I{cuda_headers()}")
    options = ["--gpu-architecture=compute_90a", "--std=c++17", "--minimal", *folders]
    code, _ = library().compile(text, name, options, "PTX")
    return code.rstrip(b"\0").decode()


def instructions(code: str, entry: str) -> Iterator[str]:
    """Instructions of the kernel: labels with their colon, everything else without its semicolon."""
    body = code[code.index(f".entry {entry}(") :]
    body = body[body.index("\n{") :]
    depth = 0
    for at, character in enumerate(body):
        depth += (character == "{") - (character == "}")
        if character == "}" and depth == 0:
            body = body[:at]
            break
    for line in re.split(r"[\n;]", re.sub(r"//[^\n]*", "", body)):
        text = line.strip(" \t{}")
        while label := _LABEL.match(text):
            yield label[0]
            text = text[label.end() :].strip(" \t{}")
        if text and not text.startswith("."):
            yield text


def too_early(code: str, entry: str) -> list[str]:
    """Accesses of global memory that some path reaches without a wait."""
    body = list(instructions(code, entry))
    places = {text[:-1]: number for number, text in enumerate(body) if _LABEL.fullmatch(text)}
    seen: set[tuple[int, bool]] = set()
    found: dict[int, str] = {}
    ways = [(0, False)]
    while ways:
        at, waited = ways.pop()
        while at < len(body) and (at, waited) not in seen:
            seen.add((at, waited))
            text = body[at]
            assert not text.startswith(("brx", "call")), f"{entry}: {text} is a way that is not followed here"
            waited = waited or text.startswith(WAIT)
            if not waited and _ACCESS.match(text):
                found[at] = text
            branch = _BRANCH.match(text)
            if branch:
                ways.append((places[branch["to"]], waited))
            if (branch and not branch["guard"]) or text in ("ret", "exit", "trap"):
                break
            at += 1
    return list(found.values())


def test_every_kernel_waits_before_it_touches_memory() -> None:
    launches = overlapping()
    assert len(launches) > 80

    def check(kernel: tuple[str, str]) -> tuple[tuple[str, str], list[str], bool]:
        code = ptx(not_ready(launches[kernel].program), kernel[0])
        return kernel, too_early(code, kernel[1]), WAIT in code

    with ThreadPoolExecutor(2) as pool:
        for kernel, early, waits in pool.map(check, launches):
            assert waits, f"{kernel} never waits for the launch in front"
            assert not early, f"{kernel} does not wait for the launch in front before {early[:4]}"


def without_conditions(text: str) -> str:
    """Keep the branch of each `#ifdef NAME ... #else ... #endif` inside a parameter list that the program compiles."""

    def chosen(found: re.Match[str]) -> str:
        name, defined, otherwise = found.groups()
        return defined if f"#define {name}" in text else otherwise

    return re.sub(r"(?m)^#ifdef (\w+)\n([^#{]*{)\n#else\n([^#{]*{)\n#endif$", chosen, text)


def test_kernels_know_whether_weights_are_ready() -> None:
    """A kernel has the argument if and only if its source asks for it."""
    asking = 0
    for (source, entry), launch in overlapping().items():
        text = without_conditions(launch.program.text())
        parameters = re.search(rf"\b{entry}\(([^{{]*)\)\s*{{", text)
        assert parameters is not None, source
        names = parameters[1].split("PARAMETER_LIST")[0].split(",")
        told = [number for number, one in enumerate(launch.arguments) if isinstance(one, WeightsReady)]
        assert [number for number, name in enumerate(names) if _READY in name] == told, source
        asking += bool(told)
    assert asking >= 10


KERNEL = """
extern "C" __global__ void probe(const float* x, const float* w, float* y, int weights_ready) {
    const int i = threadIdx.x;
    float weight = 0.f;
    %s
    y[i] = x[i] * weight;
}
"""
FENCE = 'asm volatile("griddepcontrol.wait;" ::: "memory");'


@pytest.mark.parametrize(
    ("body", "is_right"),
    [
        (f"{FENCE} weight = w[i];", True),
        (f"weight = w[i]; {FENCE}", False),
        (f"if (!weights_ready) {FENCE} weight = w[i]; {FENCE}", True),
        (f"if (weights_ready) weight = w[i]; {FENCE} if (!weights_ready) weight = w[i];", True),
        (f"if (i % 2) {FENCE} weight = w[i];", False),
        (f"if (i % 2) {{ {FENCE} weight = w[i]; }} else {{ {FENCE} weight = w[i + 1]; }}", True),
        (f"for (int n = 0; n < i; ++n) {{ weight += 1.f; {FENCE} }}", False),
        ("weight = w[i];", False),
    ],
)
def test_the_check_sees_every_way(body: str, is_right: bool) -> None:
    code = ptx(
        f"constexpr int weights_ready = 0;\n{(KERNEL % body).replace(_READY, 'int given')}", "probe.cu"
    )
    assert (not too_early(code, "probe")) == is_right
