"""From constants to C++, and what a source includes."""

from __future__ import annotations

import dataclasses
import re

import pytest

from escalade.device.program import Macro, Program, Type, prelude
from escalade.device.recipe import Ints
from escalade.device.sources import KERNELS, included, read
from escalade.errors import CompileError
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
    assert before == "#define ESCALADE_PARAMETERS\n" + prelude(program.constants)
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
    """The compiler's registers and spills are then reported for this program."""
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


@dataclasses.dataclass(frozen=True)
class Sized:
    dtype: str = "bf16"
    layout: str = "nhwc"
    stride: tuple[int, int] = (1, 2)
    batch: int = 3


DECLARING = """\
#include "open.cuh"
#ifndef ESCALADE_PARAMETERS  // the host defines these
using Element = float;       // problem.dtype
constexpr bool NHWC = true;  // problem.layout == "nhwc": channels innermost
constexpr int STRIDE_W = 1;  // problem.stride[1]
#define QUALIFIER            // "__restrict__" if problem.batch > 2 else ""
#endif
"""


def test_declared_parameters_are_evaluated(write_kernel: Write) -> None:
    write_kernel(
        "open.cuh", "#ifndef ESCALADE_PARAMETERS\nconstexpr float SHARE = 0;  // scale / 4: of it\n#endif\n"
    )
    write_kernel("open/declaring.cu", DECLARING)
    program = Program.of("open/declaring.cu", problem=Sized(), scale=2, constants={"NHWC": False, "OTHER": 7})
    assert program.entry == "open_declaring"
    assert dict(program.constants) == {
        "Element": Type("__nv_bfloat16"), "NHWC": False, "STRIDE_W": 2, "QUALIFIER": Macro("__restrict__"),
        "SHARE": 0.5, "OTHER": 7,
    }  # fmt: skip
    # Host definitions replace those that exist for editors.
    assert program.text().startswith("#define ESCALADE_PARAMETERS\n")


def test_a_parameter_without_a_value_names_its_file(write_kernel: Write) -> None:
    write_kernel(
        "declaring.cu", "#ifndef ESCALADE_PARAMETERS\nconstexpr int TILE = 1;  // config.tile\n#endif\n"
    )
    with pytest.raises(CompileError, match=r"declaring\.cu .*'config'"):
        Program.of("declaring.cu", problem=Sized())
    write_kernel("declaring.cu", "#ifndef ESCALADE_PARAMETERS\nconstexpr int TILE = 1;\n#endif\n")
    with pytest.raises(CompileError, match=r"declaring\.cu: 'constexpr int TILE = 1;'"):
        Program.of("declaring.cu", problem=Sized())


def test_a_struct_is_filled_as_it_declares_its_fields(write_kernel: Write) -> None:
    write_kernel(
        "shape.cuh",
        "struct Shape {\n    int batch;\n    int down, along;  // problem.stride: of windows\n"
        "    int rows;  // rows\n    __device__ int both() const { return down * along; }\n};\n",
    )
    assert Ints.of("shape.cuh", "Shape", problem=Sized(), rows=9) == Ints((3, 1, 2, 9))
    with pytest.raises(CompileError, match="no struct Sizes"):
        Ints.of("shape.cuh", "Sizes", problem=Sized())
