"""Compilation without a GPU: cache keys, errors, and every rung for every architecture it supports."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from escalade.device import nvrtc
from escalade.device.architecture import ALL_ARCHITECTURES
from escalade.device.cache import default_cache
from escalade.device.nvrtc import compile_program, compiler_version, cuda_headers, header_digest
from escalade.device.program import Program, Type
from escalade.errors import CompileError
from escalade.ops import OPERATIONS, Operation, Rung
from escalade.ops.attention import AttentionProblem, MmaConfig
from escalade.ops.base.cards import typical_card
from tests.device.conftest import Write
from tests.support import all_rungs, supported

COPY = Program.of("copy.cu", "copy", {"Element": Type("float"), "COUNT": 4})
COPY_SOURCE = """// y = x
#include "common/index.cuh"
extern "C" __global__ void copy(const Element* x, Element* y) {
    for (int i = 0; i < COUNT; ++i) y[index(i)] = x[index(i)];
}
"""
HOPPER, FAMILY_SHARE = "sm_90a", 5
"""One in this many rungs of each family is compiled for it: their kernels differ mostly by constants."""
SHARES = {"sm_80": 24, "sm_86": 48, "sm_89": 48, "sm_100": 36, "sm_120": 36}
"""One in this many rungs is compiled for each other architecture: more for the oldest, which differs most."""
INDEX = "#pragma once\n__device__ int index(int i) { return i * %d; }\n"


@pytest.fixture
def copy_kernel(write_kernel: Write) -> Write:
    write_kernel("copy.cu", COPY_SOURCE)
    write_kernel("common/index.cuh", INDEX % 1)
    return write_kernel


def misses_of(program: Program, architecture: str = "sm_90a") -> int:
    before = default_cache().misses
    compile_program(program, architecture)
    return default_cache().misses - before


def test_a_program_is_compiled_once(copy_kernel: Write, empty_cache: pathlib.Path) -> None:
    assert [misses_of(COPY), misses_of(COPY)] == [1, 0]
    assert compile_program(COPY, "sm_90a").code[:4] == b"\x7fELF"


FIRST_IN_THREADS = """
import sys, threading
from escalade.device.nvrtc import compile_program
from escalade.device.program import Program

def work(number):
    together.wait()
    try:
        compile_program(Program.of(sys.argv[1], "store", {"NUMBER": number}), "sm_90a")
    except Exception as error:
        wrong.append(error)

sys.setswitchinterval(1e-6)
together, wrong = threading.Barrier(8), []
threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong, wrong
"""


def test_several_threads_may_be_the_first_to_compile(tmp_path: pathlib.Path) -> None:
    """In a process that has not imported NVIDIA's packages yet."""
    source = tmp_path / "store.cu"
    source.write_text('extern "C" __global__ void store(int* y) { *y = NUMBER; }\n')
    ran = subprocess.run(
        [sys.executable, "-c", FIRST_IN_THREADS, str(source)],
        env={**os.environ, "ESCALADE_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


def test_the_key_has_everything_that_the_code_depends_on(
    copy_kernel: Write, empty_cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    misses_of(COPY)
    copy_kernel("common/index.cuh", INDEX % 2)
    assert misses_of(COPY) == 1, "a header changed"
    copy_kernel("copy.cu", COPY_SOURCE.replace("++i", "i++"))
    assert misses_of(COPY) == 1, "the source changed"
    assert misses_of(Program.of("copy.cu", "copy", {"Element": Type("float"), "COUNT": 8})) == 1, (
        "a constant changed"
    )
    assert misses_of(COPY, "sm_80") == 1, "the architecture changed"
    with monkeypatch.context() as changed:
        changed.setattr(nvrtc, "compiler_version", lambda: "nvrtc 99.9")
        assert misses_of(COPY) == 1, "the compiler changed"
    with monkeypatch.context() as changed:
        changed.setitem(nvrtc._OPTIONS, "lineinfo", False)
        assert misses_of(COPY) == 1, "an option changed"
    assert misses_of(COPY) == 0, "nothing changed"


def test_a_header_of_nvidias_is_part_of_the_key(
    copy_kernel: Write, empty_cache: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a header included by another header."""
    folder = tmp_path / "include"
    folder.mkdir()
    for path in cuda_headers().iterdir():
        (folder / path.name).symlink_to(path)
    monkeypatch.setattr(nvrtc, "cuda_headers", lambda *needed: folder)
    halves = Program.of("copy.cu", "copy", {"Element": Type("__half"), "COUNT": 4})
    assert [misses_of(COPY), misses_of(halves), misses_of(halves)] == [1, 1, 0]
    deeper = folder / "cuda_fp16.hpp"
    text = deeper.read_text()
    deeper.unlink()
    deeper.write_text(text + "\n// as another release has it\n")
    assert misses_of(halves) == 1, "a header changed"
    assert misses_of(COPY) == 0, "it includes none"


def test_headers_are_found_in_any_folder(tmp_path: pathlib.Path) -> None:
    files = {
        "a.h": '#include "sub/b.h"\n  #  include <missing.h>\n',
        "sub/b.h": '#include "c.h"\n#include "../d.h"\n',
        "sub/c.h": '#include "../a.h"\n',
        "d.h": "",
        "other.h": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = header_digest(tmp_path, ["a.h"])
    assert before == header_digest(tmp_path, ["a.h"]) != header_digest(tmp_path, ["d.h"])
    for name in files:
        (tmp_path / name).write_text(files[name] + "// changed\n")
        after = header_digest(tmp_path, ["a.h"])
        assert (after != before) == (name != "other.h"), name
        before = after


def test_a_changed_header_changes_the_code(copy_kernel: Write, empty_cache: pathlib.Path) -> None:
    before = compile_program(COPY, "sm_90a").code
    copy_kernel("common/index.cuh", INDEX % 2)
    assert compile_program(COPY, "sm_90a").code != before


def test_a_damaged_cubin_is_compiled_again(copy_kernel: Write, empty_cache: pathlib.Path) -> None:
    code = compile_program(COPY, "sm_90a").code
    (entry,) = empty_cache.rglob("*.bin")
    entry.write_bytes(entry.read_bytes()[:100])
    with pytest.warns(UserWarning, match="was damaged"):
        assert compile_program(COPY, "sm_90a").code == code


def test_an_error_names_kernel_choices_architecture_file_and_line(
    copy_kernel: Write, empty_cache: pathlib.Path
) -> None:
    copy_kernel("copy.cu", COPY_SOURCE.replace("x[index", "z[index"))
    with pytest.raises(CompileError) as caught:
        compile_program(COPY, "sm_90a")
    message = str(caught.value)
    for part in ("copy of copy.cu", "COUNT=4", "Element=float", "sm_90a", "copy.cu(4)", '"z" is undefined'):
        assert part in message
    assert list(empty_cache.rglob("*.bin")) == []


def test_an_error_in_a_header_names_the_header(copy_kernel: Write, empty_cache: pathlib.Path) -> None:
    copy_kernel("common/index.cuh", "#pragma once\n__device__ int index(int i) { return j; }\n")
    with pytest.raises(CompileError, match=r"common/index\.cuh\(2\)"):
        compile_program(COPY, "sm_90a")


def test_an_unknown_architecture_is_a_compile_error(copy_kernel: Write, empty_cache: pathlib.Path) -> None:
    with pytest.raises(CompileError, match="sm_12345"):
        compile_program(COPY, "sm_12345")


def test_resources_are_read_from_the_log(write_kernel: Write, empty_cache: pathlib.Path) -> None:
    write_kernel(
        "tile.cu",
        'extern "C" __global__ void tile(float* y) {\n'
        "    __shared__ float values[1024];\n"
        "    values[threadIdx.x] = y[threadIdx.x];\n    __syncthreads();\n"
        "    y[threadIdx.x] = values[1023 - threadIdx.x];\n}\n",
    )
    resources = compile_program(Program.of("tile.cu", "tile"), "sm_80").resources
    assert resources.shared_bytes == 4096
    assert 0 < resources.registers < 64
    assert resources.spill_bytes == 0


def test_spills_are_seen(write_kernel: Write, empty_cache: pathlib.Path) -> None:
    write_kernel(
        "spill.cu",
        'extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* y) {\n'
        "    float v[128];\n"
        "    for (int i = 0; i < 128; ++i) v[i] = y[i * 1024 + threadIdx.x];\n"
        "    __syncthreads();\n"
        "    for (int i = 0; i < 128; ++i) y[i * 1024 + threadIdx.x] = v[127 - i] * v[i];\n}\n",
    )
    assert compile_program(Program.of("spill.cu", "spill"), "sm_80").resources.spill_bytes > 0


def test_a_cta_of_one_warp_gets_the_registers_it_needs(empty_cache: pathlib.Path) -> None:
    """The compiler's own limit assumes that many such CTAs share an SM; attention of a single image has one."""
    attention = OPERATIONS["attention"]
    rung = attention.ladder.on(typical_card("sm_90a")).rung("mma")
    problem = AttentionProblem.packed(1, 197, 12, 64, dtype="fp16")
    (program,) = rung.recipe(problem, MmaConfig(1, 1, 112)).programs
    assert dict(program.constants)["BLOCKS_PER_SM"] == 0
    assert compile_program(program, "sm_90a").resources.spill_bytes == 0


def test_the_compiler_and_its_headers_are_found() -> None:
    assert re.fullmatch(r"nvrtc \d+\.\d+\.\d+ \(\S+\)", compiler_version()), (
        "number and build, not the release only"
    )
    assert (cuda_headers() / "cuda_fp16.h").is_file()


def test_headers_are_not_looked_for_in_the_current_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"bin:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_HOME", "toolkit")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "nvcc").chmod(0o755)
    found = nvrtc._header_candidates()
    assert found and all(folder.is_absolute() and tmp_path not in folder.parents for folder in found)


def _representatives(operation: Operation[Any], rung: Rung[Any]) -> list[Any]:
    """One problem per dtype that the rung supports: from the measured ones, else from the small ones."""
    chosen: dict[str, Any] = {}
    for variants in supported(operation, rung, (*operation.problems[3:], *operation.problems[:3])):
        for problem in variants:
            chosen.setdefault(problem.dtype, problem)
    for variants in supported(operation, rung, operation.small_problems):
        for problem in variants:
            chosen.setdefault(problem.dtype, problem)
    return list(chosen.values())


Case = tuple[Operation[Any], Rung[Any], str, int]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The rungs with their architectures: all with --thorough, else others every day."""
    if "architecture" not in metafunc.fixturenames:
        return
    cases: list[Case] = []
    for number, architecture in enumerate(ALL_ARCHITECTURES):
        families: dict[str, list[Case]] = {}
        for turn, (operation, rung) in enumerate(all_rungs(), number):
            family = type(rung).__module__ if architecture == HOPPER else ""
            if architecture in rung.architectures:
                families.setdefault(family, []).append((operation, rung, architecture, turn))
        for offered in families.values():
            share = min(SHARES.get(architecture, FAMILY_SHARE), len(offered))
            share = 1 if metafunc.config.option.thorough else share
            cases += offered[metafunc.config.option.sample.toordinal() % share :: share]
    assert {architecture for *_, architecture, _ in cases} == {*ALL_ARCHITECTURES}
    names = [f"{operation.name}-{rung.name}-{architecture}" for operation, rung, architecture, _ in cases]
    metafunc.parametrize(("operation", "rung", "architecture", "turn"), cases, ids=names)


@pytest.mark.share(7)
def test_every_rung_compiles_and_keeps_its_registers(
    operation: Operation[Any],
    rung: Rung[Any],
    architecture: str,
    turn: int,
    request: pytest.FixtureRequest,
) -> None:
    """One dtype each, in turns: the card that tests run on compiles all. test_overlap.py also shows that every kernel
    compiles."""
    problems = _representatives(operation, rung)
    assert problems, f"rung {rung.name} supports none of its operation's problems"
    intended = rung.intended_spill
    if not request.config.option.thorough:
        problems = [problems[turn % len(problems)]]
    here = rung.on(typical_card(architecture))
    for problem in problems:
        if here.refusal(problem):
            continue
        programs = here.recipe(problem, here.configs(problem)[0]).programs
        if not request.config.option.thorough:  # the last of a network's layers
            programs = tuple({(program.source, program.entry): program for program in programs}.values())
        for program in programs:
            cubin = compile_program(program, architecture)
            spilled = cubin.resources.spill_bytes
            assert intended or spilled == 0, (
                f"{program} for {architecture} spills {spilled} bytes\n{cubin.log}"
            )
