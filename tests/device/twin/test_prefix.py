"""Precompiled headers: which source uses which, that they are used, and that results do not depend on them."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from escalade.device.program import Program, Type
from escalade.device.twin import build, prefix, toolchain
from escalade.device.twin.building import kernel_library, runtime_library
from escalade.errors import CompileError
from tests.device.twin.support import launch

HALVE = r"""#include <cuda_fp16.h>
extern "C" __global__ void halve(const __half* x, __half* y) {
    y[threadIdx.x] = __float2half(0.5f * __half2float(x[threadIdx.x]));
}
"""


@pytest.fixture
def fresh(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty cache, and a process without headers; the runtime is copied."""
    runtime_library()
    monkeypatch.setenv("ESCALADE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(prefix, "_made", {})
    return tmp_path


def runs(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Names of the files in the folder of each later run of g++."""
    seen: list[Sequence[str]] = []
    real = toolchain.run

    def run(
        arguments: Sequence[str | pathlib.Path],
        what: str,
        sources: Mapping[str, str] | None = None,
        links: Mapping[str, pathlib.Path] | None = None,
    ) -> str:
        # g++ explains why it rejects a header.
        seen.append([*(sources or {}), *(links or {})])
        return real(["-Winvalid-pch", "-Werror=invalid-pch", *arguments], what, sources, links)

    monkeypatch.setattr(toolchain, "run", run)
    return seen


def halves() -> None:
    x, y = torch.randn(32, dtype=torch.float16), torch.zeros(32, dtype=torch.float16)
    launch(build(HALVE, "halve"), 1, 32, (x, y))
    assert torch.equal(y, x / 2)


@pytest.mark.parametrize(
    ("source", "moved"),
    [
        ("int x;\n#include <cuda_fp16.h>\n", []),
        ("#include <cuda_fp16.h>\n", ["<cuda_fp16.h>"]),
        (
            '#line 1 "a.cu"\n// why\n\n#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n',
            ["<cuda_bf16.h>", "<cuda_fp16.h>"],
        ),
        ("#define A 1\n#include <cuda_fp16.h>\n", []),
        ('#include "common/ptx.cuh"\n#include <cuda_fp16.h>\n', []),
        ("/* why */\n#include <cuda_fp16.h>\n", []),
    ],
)
def test_only_includes_that_stand_first_are_moved(source: str, moved: list[str]) -> None:
    assert prefix.text(source).splitlines() == [
        '#include "device.h"',
        *(f"#include {name}" for name in moved),
    ]


@pytest.mark.parametrize("element", ["__half", "__nv_bfloat16"])
def test_the_header_of_a_programs_elements_is_moved(element: str) -> None:
    text = Program.of("copy/vectorised.cu", constants={"Element": Type(element)}).text()
    (header,) = re.findall("#include <.*>", text)
    assert header in prefix.text(text).splitlines()


@pytest.mark.parametrize("variant", [{}, {"checks": True}, {"sanitize": True}], ids=str)
def test_gxx_uses_its_precompiled_headers_and_builds_them_once(
    fresh: pathlib.Path, monkeypatch: pytest.MonkeyPatch, variant: dict[str, bool]
) -> None:
    seen = runs(monkeypatch)
    kernel_library(HALVE, "halve", "kernel.cu", **variant)
    kernel_library(HALVE.replace("0.5f", "0.25f"), "halve", "kernel.cu", **variant)
    header, compiled = prefix.FILE, f"{prefix.FILE}.gch"
    assert seen == [[header], ["kernel.cu", header, compiled], [], ["kernel.cu", header, compiled], []]
    assert len(list(fresh.rglob("*.gch"))) == 1


def test_assembly_is_the_same_with_and_without(fresh: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = toolchain.kernel_options(checks=True)
    results = []
    for name in ("with", "without"):
        path = fresh / name
        prefix.compile_to_assembly(HALVE, "kernel.cu", path, options, "key", "halve")
        results.append(re.sub(r"/twin-\w+", "", path.read_text()))
        monkeypatch.setattr(prefix, "_compiled", lambda *_: None)
    assert results[0] == results[1]


def test_a_kernel_is_built_where_gxx_refuses_to_make_headers(
    fresh: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = toolchain.run

    def run(arguments: Sequence[str | pathlib.Path], what: str, *files: Any) -> str:
        if "c++-header" in arguments:
            raise CompileError("no precompiled headers here")
        return real(arguments, what, *files)

    monkeypatch.setattr(toolchain, "run", run)
    halves()
    assert not list(fresh.rglob("*.gch"))


@pytest.mark.parametrize("contents", [b"", b"no precompiled header"])
def test_a_kernel_is_built_where_gxx_refuses_to_use_headers(
    fresh: pathlib.Path, monkeypatch: pytest.MonkeyPatch, contents: bytes
) -> None:
    """A header of an older compiler version."""
    foreign = fresh / "foreign.gch"
    foreign.write_bytes(contents)
    monkeypatch.setattr(prefix, "_compiled", lambda *_: foreign)
    halves()


def test_a_failure_that_only_the_compiled_headers_have_is_not_repeated(
    fresh: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tries = toolchain.run, []

    def run(
        arguments: Sequence[str | pathlib.Path],
        what: str,
        sources: Mapping[str, str] | None = None,
        links: Mapping[str, pathlib.Path] | None = None,
    ) -> str:
        if links:
            tries.append(what)
            raise CompileError("had to relocate PCH")
        return real(arguments, what, sources)

    monkeypatch.setattr(toolchain, "run", run)
    halves()
    kernel_library(HALVE.replace("0.5f", "0.25f"), "halve", "kernel.cu")
    assert tries == ["halve of kernel.cu"]


def test_an_error_in_the_source_does_not_give_up_the_headers(fresh: pathlib.Path) -> None:
    with pytest.raises(CompileError, match=r"kernel\.cu:3:.*nonsense"):
        build(HALVE.replace("0.5f", "nonsense"), "halve")
    assert all(prefix._made.values())


def test_headers_that_were_evicted_are_made_again(
    fresh: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves()
    (made,) = fresh.rglob("*.gch")
    made.unlink()
    kernel_library(HALVE.replace("0.5f", "0.25f"), "halve", "kernel.cu")
    assert made.is_file()


def test_processes_that_start_together_make_the_headers_once(fresh: pathlib.Path) -> None:
    program = f"""
import pathlib, sys
from escalade.device.twin import prefix, toolchain
real = toolchain.run
def run(arguments, what, *files):
    print(what, flush=True)
    real(arguments, what, *files)
toolchain.run = run
prefix.compile_to_assembly(
    {HALVE!r}, "kernel.cu", pathlib.Path(sys.argv[1]), toolchain.kernel_options(), "key", "halve"
)
"""
    environment = {**os.environ, "ESCALADE_CACHE_DIR": str(fresh)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(fresh / name)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "other")
    ]
    output = [worker.communicate()[0].splitlines() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert sorted(output, key=len) == [["halve"], ["the twin's headers", "halve"]]
