"""The comparison of `tests.golden`: each kind of change is reported, and equivalent programs are not."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from tests.golden.kernels import compare_programs, spread
from tests.golden.sources import flattened
from tests.golden.store import Line, compare, read_lines, write_lines

STEPS: list[Line] = [
    {
        "key": "lenet/b1/conv",
        "task": "lenet",
        "after": "",
        "rung": "pooled",
        "config": {"rows": 8, "warps": 4},
    },
    {"key": "lenet/b1/fc", "task": "lenet", "after": "conv", "rung": "split_k", "offset": 512},
]


def test_a_changed_field_is_named_with_both_values() -> None:
    assert compare(STEPS, STEPS).differences == []
    for name, value, said in (
        ("offset", 768, "lenet/b1/fc: offset: 512 -> 768"),
        ("rung", "tiled", "lenet/b1/fc: rung: split_k -> tiled"),
        ("after", "", "lenet/b1/fc: after: conv -> "),
        ("task", "moved", None),
    ):
        found = compare(STEPS, [STEPS[0], {**STEPS[1], name: value}])
        assert found.differences == ([said] if said else [])
    other = {**STEPS[0], "config": {"rows": 8, "warps": 8}}
    assert compare(STEPS, [other, STEPS[1]]).differences == ["lenet/b1/conv: config: warps 4 -> 8"]
    assert compare(STEPS, [other, STEPS[1]], ignored={"config"}).differences == []


def test_lines_that_are_gone_or_new_are_reported() -> None:
    assert compare(STEPS, STEPS[:1]).differences == ["lenet/b1/fc: gone"]
    assert compare(STEPS[:1], STEPS).notes == ["lenet/b1/fc: new"]
    assert compare(STEPS[:1], STEPS, additions_differ=True).differences == ["lenet/b1/fc: new"]


def test_a_set_is_read_back_with_intended_renamings(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plans.jsonl.gz"
    write_lines(path, STEPS)
    written = path.read_bytes()
    write_lines(path, STEPS)
    assert path.read_bytes() == written
    assert read_lines(path) == STEPS
    assert read_lines(path, {"split_k": "splits"})[1]["rung"] == "splits"
    assert read_lines(path, {"split": "x"}) == STEPS  # whole words only
    assert read_lines(path, {r"(lenet)/b1": r"\1/b2"})[0]["key"] == "lenet/b2/conv"


KERNEL = """
// Adds one.
#include "common/a.cuh"
#if FAST
#include "common/b.cuh"
#endif
#include "common/b.cuh"
#define TWO \\
    2
__global__ void kernel(int* y) {
    y[0] = A + B;  /* a "comment" */
    asm volatile("add  // no comment");
}
"""
HEADERS = {
    "common/a.cuh": '#pragma once\n#include "common/b.cuh"\nconstexpr int A = 1;\n',
    "common/b.cuh": "#pragma once\nconstexpr int B = 2;\n",
}


def test_comments_and_layout_are_no_part_of_a_source() -> None:
    def flat(kernel: str, **headers: str) -> str:
        return flattened("k.cu", {"k.cu": kernel or KERNEL, **HEADERS, **headers}.__getitem__)

    plain = flat("")
    assert "comment */" not in plain and "Adds" not in plain and '"add  // no comment"' in plain
    assert plain.count("constexpr int B") == 1
    assert "#include" not in plain and "#define TWO 2" in plain
    assert flat(KERNEL.replace("// Adds one.", "// Adds 1.\n\n")) == plain
    assert flat(KERNEL.replace("kernel(int* y) {\n    y", "kernel(\n    int* y) { y")) == plain
    assert flat(KERNEL.replace("A + B", "A - B")) != plain
    assert flat(KERNEL.replace("add  //", "add //")) != plain
    assert flat("", **{"common/b.cuh": "#pragma once\nconstexpr int B = 3;\n"}) != plain


def test_a_header_behind_a_condition_is_there_again_behind_it() -> None:
    files = {
        **HEADERS,
        "k.cu": '#if FAST\n#include "common/b.cuh"\n#endif\n#include "common/b.cuh"\nint x = B;\n',
    }
    assert flattened("k.cu", files.__getitem__).count("constexpr int B") == 2


def _program(source: str, **constants: Any) -> dict[str, Any]:
    listed = [[name, type(value).__name__, value] for name, value in constants.items()]
    return {"source": source, "text": source, "entry": "kernel", "constants": listed}


def test_only_other_machine_code_is_a_difference() -> None:
    then = {"a": _program("a.cu"), "b": _program("b.cu"), "c": _program("c.cu")}
    today = {"a": _program("a.cu"), "b2": _program("b.cu"), "c2": _program("c.cu")}
    old: list[Line] = [{"key": key, "programs": [key]} for key in then]
    new: list[Line] = [{"key": key, "programs": [found]} for key, found in zip("abc", today, strict=True)]
    asked: list[tuple[str, str]] = []

    def compiled(pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
        asked.extend(pairs)
        return iter(["machine code differs" if pair[0] == "c" else "" for pair in pairs])

    report = compare_programs(old, new, then, today, None, compiled)
    assert asked == [("b", "b2"), ("c", "c2")]  # equal texts need no compiler
    assert report.differences == ["c: machine code differs"]
    longer: list[Line] = [*new[:2], {"key": "c", "programs": ["c2", "a"]}]
    assert compare_programs(old, longer, then, today, None, compiled).differences == ["c: 1 launches -> 2"]


def test_few_programs_of_a_source_have_every_switch() -> None:
    programs = {
        str(n): _program("a.cu", ROWS=64 + n, SPLIT=n == 7, CLUSTER=2 if n == 9 else 1) for n in range(20)
    }
    pairs = [(name, name) for name in programs]
    chosen = {one for one, _ in spread(pairs, programs, 3)}
    assert len(chosen) == 3 and {"7", "9"} <= chosen
    assert spread(pairs, programs, None) == pairs
