"""From constants to C++, and what a source includes."""

from __future__ import annotations

import dataclasses
import re

import pytest

from escalade.device.program import KERNELS, Macro, Program, Type, included, prelude, read
from escalade.ops import OPERATIONS
from tests.device.conftest import Write

SOURCES = sorted(str(path.relative_to(KERNELS)) for path in KERNELS.rglob("*.cu"))


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (True, "constexpr bool NAME = true;"),
        (False, "constexpr bool NAME = false;"),
        (7, "constexpr int NAME = 7;"),
        (-7, "constexpr int NAME = -7;"),
        (2**31 - 1, "constexpr int NAME = 2147483647;"),
        (2**31, "constexpr long long NAME = 2147483648;"),
        (0.5, "constexpr float NAME = 0.5f;"),
        (1e-30, "constexpr float NAME = 1e-30f;"),
        (Type("float"), "using NAME = float;"),
        (Macro("__restrict__"), "#define NAME __restrict__"),
        (Macro(""), "#define NAME"),
    ],
)
def test_constants_become_definitions(value: bool | int | float | Type | Macro, line: str) -> None:
    assert prelude((("NAME", value),)) == f"{line}\n"


@pytest.mark.parametrize(
    ("element", "header"),
    [("__half", "cuda_fp16.h"), ("__half2", "cuda_fp16.h"), ("__nv_bfloat16", "cuda_bf16.h")],
)
def test_types_bring_their_header_first(element: str, header: str) -> None:
    assert prelude((("Element", Type(element)),)).startswith(f"#include <{header}>\n")


def test_float_needs_no_header() -> None:
    assert "#include" not in prelude((("Element", Type("float")),))


def test_line_numbers_are_those_of_the_source() -> None:
    program = Program.of("conv2d/direct.cu", "conv2d_direct", {"NHWC": True, "Element": Type("float")})
    before, _, after = program.text().partition('#line 1 "conv2d/direct.cu"\n')
    assert before == prelude(program.constants)
    assert after == read("conv2d/direct.cu")


def test_the_order_of_constants_does_not_matter() -> None:
    assert Program.of("a.cu", "a", {"X": 1, "Y": 2}) == Program.of("a.cu", "a", {"Y": 2, "X": 1})


def test_a_program_is_a_value() -> None:
    program = Program.of("a.cu", "a", {"X": 1})
    assert hash(program) == hash(Program.of("a.cu", "a", {"X": 1}))
    with pytest.raises(dataclasses.FrozenInstanceError):
        program.entry = "b"  # type: ignore[misc]


def test_a_program_names_itself_and_its_choices() -> None:
    program = Program.of("a.cu", "go", {"TILE": 8, "FAST": True, "E": Type("float"), "R": Macro("")})
    assert str(program) == "go of a.cu (E=float, FAST=true, R=(nothing), TILE=8)"


def test_headers_are_found_through_headers(write_kernel: Write) -> None:
    write_kernel("a.cu", '#include <cuda_fp16.h>\n#include "common/b.cuh"\n  # include "common/c.cuh"\n')
    write_kernel("common/b.cuh", '#pragma once\n#include "common/d.cuh"\n')
    write_kernel("common/c.cuh", '#pragma once\n#include "common/d.cuh"\n')
    write_kernel("common/d.cuh", "#pragma once\n")
    write_kernel("common/unused.cuh", "#pragma once\n")
    assert Program.of("a.cu", "a").headers() == ("common/b.cuh", "common/c.cuh", "common/d.cuh")


def test_every_header_of_a_kernel_is_there() -> None:
    for source in SOURCES:
        for header in included(source):
            assert (KERNELS / header).is_file(), f"{source} includes {header}"


def test_a_kernel_is_device_code_only() -> None:
    for source in SOURCES:
        text = read(source)
        assert text.startswith("//"), (
            f"{source} opens with what it computes, what it changes and what bounds it"
        )
        host = re.search(r"<<<|cudaMalloc|#\s*include\s*<(torch|ATen|cuda_runtime)", text)
        assert not host, f"{source} has {host}"


def test_a_source_holds_one_kernel() -> None:
    """What the compiler says of registers and spills is then said of this one."""
    for source in SOURCES:
        code = re.sub(r"//.*", "", "".join(read(name) for name in (source, *included(source))))
        assert len(re.findall(r"__global__\s", code)) == 1, source


def test_every_program_of_a_ladder_names_an_entry_of_its_source() -> None:
    for operation in OPERATIONS.values():
        for rung in operation.ladder:
            for problem in operation.small_problems:
                if rung.supports(problem) is not None:
                    continue
                for program in rung.recipe(problem, rung.configs(problem)[0]).programs:
                    pattern = rf"__global__[^;{{]*\b{re.escape(program.entry)}\s*\("
                    found = any(
                        re.search(pattern, read(name)) for name in (program.source, *program.headers())
                    )
                    assert found, f"rung {rung.name}: {program.source} has no kernel {program.entry}"
