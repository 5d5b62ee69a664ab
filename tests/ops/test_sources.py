"""Rungs and their sources: one stem for a family and what it launches, and sources that say whom they serve."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from escalade.device.recipe import KernelCall
from escalade.device.sources import KERNELS
from escalade.ops import OPERATIONS
from escalade.ops.base.operation import Operation
from escalade.ops.base.rung import Rung
from tests.support import all_rungs, supported

SHARED = {
    "conv2d/convert.cu": "operands in another type, or with more channels",
    "conv2d_input_gradient/flip.cu": "the filter turned around, for every class of pixels",
    "conv2d_input_gradient/place.cu": "a class's pixels put where they belong",
    "conv2d_weight_gradient/sum_parts.cu": "the sums of parts of the pixels added up",
    "few_channels/pool.cu": "ReLU and pooling of what a rung leaves unfinished",
    "mlp_backward/sum_parts.cu": "the sums of parts of the batch added up",
    "stem/pack.cu": "weights in the order of the registers of tensor cores",
    "stem/pool.cu": "pooling of what a rung leaves unpooled",
}
"""Sources that several families of their folder launch: they have names of their own."""
BY_ANY = {("conv2d_input_gradient", "subpixel")}
"""Rungs that take whichever rung of another operation should be the fastest: its sources need not name them."""
BY_OTHERS = {
    ("linear", "pool_first"),
    ("conv2d_weight_gradient", "wgmma_split"),
    ("conv2d_weight_gradient", "window_split"),
}
"""Rungs that are launches of other families of their folder, one after the other."""
BESIDE_LADDERS = {"classify/resize.cu": "escalade_apps/classify/resizing.py"}
"""Sources that are no operation's, and who launches them."""
SOURCES = sorted(path.relative_to(KERNELS).as_posix() for path in KERNELS.rglob("*.cu"))
FOLDERS = {
    folder: list(sources)
    for folder, sources in itertools.groupby(SOURCES, lambda source: source.partition("/")[0])
}
each_folder = pytest.mark.parametrize("folder", FOLDERS)


class Launcher(NamedTuple):
    operation: str
    folder: str
    """The folder in kernels/ that the rung's class belongs to: its operation's, or that of what operations share."""
    family: str
    rung: str

    def owns(self, source: str) -> bool:
        folder, _, stem = source.removesuffix(".cu").partition("/")
        return folder == self.folder and any(
            re.match(rf"{name}(_|$)", stem) for name in (self.family, self.rung)
        )


def launcher(operation: Operation[Any], rung: Rung[Any]) -> Launcher:
    *_, folder, family = type(rung).__module__.removesuffix(".rungs").replace(".rungs.", ".").split(".")
    return Launcher(operation.name, family if folder == "shared" else folder, family, rung.name)


@cache
def launched() -> dict[str, set[Launcher]]:
    """By source, who launches it for a small problem in one of its dtypes and layouts, by its first config."""
    found = defaultdict(set)
    for operation, rung in all_rungs():
        for number, variants in enumerate(supported(operation, rung, operation.small_problems)):
            problem = variants[number % len(variants)]
            for call in rung.recipe(problem, rung.configs(problem)[0]).steps:
                if isinstance(call, KernelCall):
                    found[call.program.source].add(launcher(operation, rung))
                    assert call.program.entry == call.program.source.removesuffix(".cu").replace("/", "_")
    return found


@each_folder
def test_a_source_has_the_name_of_who_launches_it(folder: str) -> None:
    for source in sorted({*FOLDERS[folder]} - {*BESIDE_LADDERS}):
        own = {one for one in launched()[source] if one.folder == folder}
        if source in SHARED:
            assert len({one.family for one in own}) > 1, f"{source} is not shared: one family launches it"
            assert not any(one.owns(source) for one in own), (
                f"{source} has the name of a family: it is listed in vain"
            )
        else:
            others = {one for one in own if not one.owns(source)}
            strange = {one for one in others if (one.operation, one.rung) not in BY_OTHERS}
            assert own, f"no rung launches {source}"
            assert not strange, f"{source} is neither shared nor named as {strange}"


@pytest.mark.parametrize(("source", "launcher"), BESIDE_LADDERS.items())
def test_a_source_beside_the_ladders_says_who_launches_it(source: str, launcher: str) -> None:
    assert source in SOURCES and source not in launched()
    assert launcher in opening(source)
    assert f'"{source}"' in (KERNELS.parent.parent / launcher).read_text()


def test_what_is_listed_is_there() -> None:
    assert set(SHARED) <= set(SOURCES)
    assert all(OPERATIONS[operation].ladder.rung(rung) for operation, rung in BY_OTHERS)


def opening(source: str) -> str:
    """The comment that a source begins with."""
    lines = (KERNELS / source).read_text().splitlines()
    return "\n".join(itertools.takewhile(lambda line: line.startswith("//"), lines))


@each_folder
def test_a_source_opens_with_whom_it_serves(folder: str) -> None:
    for source in FOLDERS[folder]:
        for one in launched()[source]:
            if one.folder != folder and (one.operation, one.rung) in BY_ANY:
                continue
            named = one.rung if one.folder == folder else one.operation
            assert re.search(rf"\b{named}\b", opening(source)), f"the opening of {source} lacks {named}"


@each_folder
def test_the_switches_of_a_source_are_its_own(folder: str) -> None:
    """What the table in its opening says is set is asked for in the code, or in a header of its folder."""
    headers = "\n".join(map(code, (*(KERNELS / folder).glob("*.cuh"), *(KERNELS / "common").glob("*.cuh"))))
    for source in FOLDERS[folder]:
        _, _, table = opening(source).rpartition("//\n")
        own = code(KERNELS / source)
        for switch in re.findall(r"\b[A-Z][A-Z_]{3,}\b", table):
            assert re.search(rf"\b{switch}\b", own) or re.search(rf"\b{switch}\b", headers), (
                f"the opening of {source} has {switch}, which its code has not"
            )


def code(path: Path) -> str:
    """A source or header without its comments."""
    return re.sub(r"//.*", "", path.read_text())


@pytest.mark.parametrize("folder", sorted({path.parent.name for path in KERNELS.rglob("*.cu*")}))
def test_comments_name_files_that_are_there(folder: str) -> None:
    for path in sorted((KERNELS / folder).glob("*.cu*")):
        for line in path.read_text().splitlines():
            for name in re.findall(r"[\w/]*\w+\.cuh?\b", line.partition("//")[2]):
                places = (path.parent / name, KERNELS / name, KERNELS / "common" / name)
                assert any(place.is_file() for place in places), f"{path} names {name}, which is not there"


@each_folder
def test_a_source_names_the_headers_of_its_folder(folder: str) -> None:
    """Where to read on; shapes that the host fills, of one struct each, go without saying."""
    for source in FOLDERS[folder]:
        for header in re.findall(rf'#include "{folder}/(\w+\.cuh)"', (KERNELS / source).read_text()):
            assert header in opening(source), f"the opening of {source} does not say when to read {header}"
