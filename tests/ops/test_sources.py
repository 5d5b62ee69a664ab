"""Kernel sources: each is launched, named like its entry, and has no unused declarations or names."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache

import pytest

from escalade.device.recipe import KernelCall
from escalade.device.sources import BLOCK, KERNELS, declared_names, included
from tests.support import all_rungs, supported

BESIDE_LADDERS = {"classify/resize.cu": "escalade_apps/classify/resizing.py"}
"""Sources that no rung launches, and the modules that launch them."""
FILES = sorted(path.relative_to(KERNELS).as_posix() for path in KERNELS.rglob("*.cu*"))
FOLDERS = sorted({file.partition("/")[0] for file in FILES})


@cache
def launched() -> dict[str, set[str]]:
    """Return the entries that rungs launch, by source: for a small problem in one of its dtypes and layouts."""
    found = defaultdict(set)
    for operation, rung in all_rungs():
        for number, variants in enumerate(supported(operation, rung, operation.small_problems)):
            problem = variants[number % len(variants)]
            for call in rung.recipe(problem, rung.configs(problem)[0]).steps:
                if isinstance(call, KernelCall):
                    found[call.program.source].add(call.program.entry)
    return found


def test_every_source_is_launched_and_named_as_its_entry() -> None:
    sources = {file for file in FILES if file.endswith(".cu")}
    assert sources == {*launched(), *BESIDE_LADDERS}
    for source, entries in launched().items():
        assert entries == {source.removesuffix(".cu").replace("/", "_")}
    for source, module in BESIDE_LADDERS.items():
        assert f'"{source}"' in (KERNELS.parent.parent / module).read_text()


@pytest.mark.parametrize("folder", FOLDERS)
def test_declared_parameters_are_read(folder: str) -> None:
    for file in (file for file in FILES if file.startswith(f"{folder}/")):
        text = (KERNELS / file).read_text()
        headers = re.findall(r'#include "([^"]+)"', text)
        users = [one for one in FILES if file in included(one)] if file.endswith(".cuh") else []
        code = "\n".join(BLOCK.sub("", (KERNELS / one).read_text()) for one in (file, *headers, *users))
        for name in declared_names(file):
            assert re.search(rf"\b{name}\b", code), (
                f"{file} declares {name}, which neither it nor its headers read"
            )


@pytest.mark.parametrize("folder", FOLDERS)
def test_comments_name_files_that_exist(folder: str) -> None:
    for path in sorted((KERNELS / folder).glob("*.cu*")):
        for line in path.read_text().splitlines():
            for name in re.findall(r"[\w/]*\w+\.cuh?\b", line.partition("//")[2]):
                places = (path.parent / name, KERNELS / name, KERNELS / "common" / name)
                assert any(place.is_file() for place in places), f"{path} names {name}, which does not exist"
