"""Rungs and their sources: one stem for a family and what it launches, and sources that say whom they serve."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest

from escalade.device.program import KERNELS
from escalade.device.recipe import KernelCall
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS
from escalade.ops.base.operation import Operation
from escalade.ops.base.rung import Rung

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
BY_OTHERS = {("linear", "pool_first")}
"""Rungs that are launches of other families of their folder, one after the other."""
MOST_PROBLEMS = 40
"""Problems for which a rung is asked for its launches."""
SOURCES = sorted(path.relative_to(KERNELS).as_posix() for path in KERNELS.rglob("*.cu"))


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
    """By source, who launches it for a small problem, by its first config."""
    found = defaultdict(set)
    for operation in OPERATIONS.values():
        for rung in operation.ladder:
            supported = (problem for problem in problems(operation) if rung.supports(problem) is None)
            for problem in itertools.islice(supported, MOST_PROBLEMS):
                for call in rung.recipe(problem, rung.configs(problem)[0]).steps:
                    if isinstance(call, KernelCall):
                        found[call.program.source].add(launcher(operation, rung))
                        assert call.program.entry == call.program.source.removesuffix(".cu").replace("/", "_")
    return found


def problems(operation: Operation[Any]) -> list[Any]:
    """The small problems, in every dtype and layout that they can be posed in."""
    found = []
    for dtype, layout, problem in itertools.product(
        operation.dtypes, operation.layouts, operation.small_problems
    ):
        try:
            found.append(replace(problem, dtype=dtype, layout=layout))
        except UnsupportedError:
            continue
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_has_the_name_of_who_launches_it(source: str) -> None:
    own = {one for one in launched()[source] if one.folder == source.partition("/")[0]}
    if source in SHARED:
        assert len({one.family for one in own}) > 1, f"{source} is not shared: one family launches it"
        assert not any(one.owns(source) for one in own), (
            f"{source} has the name of a family: it is listed in vain"
        )
    else:
        strange = {one for one in own if not one.owns(source) and (one.operation, one.rung) not in BY_OTHERS}
        assert own, f"no rung launches {source}"
        assert not strange, f"{source} is neither shared nor named as {strange}"


def test_what_is_listed_is_there() -> None:
    assert set(SHARED) <= set(SOURCES)
    assert all(OPERATIONS[operation].ladder.rung(rung) for operation, rung in BY_OTHERS)
