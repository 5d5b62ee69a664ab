"""Type confusion and boundary numbers in engine files, tested in a separate process.

`python -m tests.engine.confusion FOLDER SEED COUNT` loads and calls changed copies of the engines in a folder on the
CPU: the most dangerous changes and COUNT others, or all (0). It prints each change before testing it: if a signal ends
process, the last line is the culprit. `test_file_fuzz` runs a sample; run all after changing what is checked.
"""

from __future__ import annotations

import json
import math
import pathlib
import random
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from escalade.engine import Engine, compile, load
from escalade.engine.graph.graph import fixed_shape
from escalade.errors import EscaladeError
from tests.engine.files import Contents

SHARP = re.compile(r"(dtype|layout|memory_format)'\) = '-?[0-9]+'$|^integers: \w+ = \(-\d+")
"""Changes that are always tested: integers for PyTorch's enumerations, the smallest numbers in constants."""
MOST_ELEMENTS = 10_000
"""Input size limit, in elements, for calls of a changed engine."""
CONFUSED: tuple[Any, ...] = (
    None, True, 0, -1, 6, 77, 10**6, 2**31, 2**63 - 1, -(2**63) + 1, -(2**63), 2**64, 0.5, math.nan, math.inf, -1.5,
    "", "float32", "a\0b", "x" * 2000, [], [6], [None], [[1]], ["x"], [True], [2**63 - 1] * 3, {}, {"$batch": 1},
    {"$batch": 2**62}, {"$value": "in0"}, {"$value": "in9"}, {"$device": "cpu"}, {"$device": "cuda:9"},
    {"$torch": "float64"}, {"$torch": "int32"}, {"$torch": "quint8"}, {"$torch": "float8_e4m3fn"},
    {"$torch": "sparse_coo"}, {"$torch": "strided"}, {"$torch": "channels_last"}, {"$torch": "preserve_format"},
)  # fmt: skip
"""Replacements for every number, dtype, layout and list of a graph."""


class Integers(nn.Module):
    """Integer operators whose CPU kernels divide, shift, index and count by their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Buffer(torch.tensor([5, -7, 3, 2]))
        self.narrow = nn.Buffer(torch.tensor([2, 3, -2, 1], dtype=torch.int32))
        self.at = nn.Buffer(torch.tensor([3, 0, 1, 2]))
        self.table = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for left, right in ((self.wide, self.at + 1), (self.narrow, self.narrow), (n, self.wide)):
            found += [torch.div(left, right, rounding_mode=mode) for mode in ("trunc", "floor")]
            found += [left // right, left % right, torch.fmod(left, right), torch.lcm(left, right)]
            found += [torch.gcd(left, right), left << right.abs(), left >> right.abs(), left**2]
        found += [left[self.at] for left in (self.wide, self.table)]
        found += [torch.gather(self.wide, 0, self.at), torch.index_select(self.table, 1, self.at)]
        found += [nn.functional.embedding(self.at, self.table), torch.take(self.table, self.at)]
        found += [self.wide.scatter(0, self.at, self.wide), self.wide.index_add(0, self.at, self.wide)]
        found += [torch.bucketize(self.wide, self.at), nn.functional.one_hot(self.at, 4)]
        found += [
            x.to(torch.float64).sum(1, dtype=torch.float32),
            torch.arange(0, 9, 2, device=x.device) + n[:, :1],
        ]
        found += [torch.full((4,), 3, dtype=torch.int32) + n, x.roll(1, 1), x.repeat(1, 2), x.unfold(1, 2, 1)]
        found += [torch.nn.functional.pad(x, (1, 1)), x.cumsum(1, dtype=torch.float32), x.topk(2).values]
        found += [
            torch.zeros_like(x, memory_format=torch.preserve_format),
            x.new_zeros((2, 2), dtype=torch.int8),
        ]
        return found


def saved(folder: pathlib.Path) -> None:
    """Write the engines to be changed; `every_kind` builds another."""
    torch.manual_seed(3)
    examples = torch.randn(2, 4), torch.randint(1, 9, (2, 4))
    compile(Integers(), examples).save(folder / "integers.engine")


Change = tuple[str, Callable[[], Contents]]
"""A description of the change, and a function that makes the changed file."""


def changes(contents: Contents) -> Iterator[Change]:
    """Every leaf and list of a graph replaced by each confused value; every constant by boundary numbers."""

    def confused(path: tuple[Any, ...], value: Any) -> Contents:
        graph = replaced_at(json.loads(contents.metadata["graph"]), path, value)
        return Contents(contents.metadata, graph, contents.tensors)

    for path in paths(contents.graph):
        if path[0] == "nodes" and len(path) <= 3:
            continue  # whole rows are not arguments
        for value in CONFUSED:
            yield f"{path} = {str(value)[:60]!r}", partial(confused, path, value)
    for name, tensor in contents.tensors.items():
        for other, filled in _boundaries(tensor):
            changed = Contents(contents.metadata, contents.graph, {**contents.tensors, name: filled})
            yield f"{name} = {other}", partial(lambda changed: changed, changed)


def replaced_at(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return the tree with another value at a path."""
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return tree


def paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the key paths to every value inside nested lists and objects."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        yield (*path, key)
        yield from paths(value, (*path, key))


def _boundaries(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if tensor.is_floating_point():
        yield from ((str(value), torch.full_like(tensor, value)) for value in (math.nan, math.inf))
        return
    info = torch.iinfo(tensor.dtype)
    for values in (
        (info.min,),
        (-1,),
        (0,),
        (info.max,),
        (info.min, -1),
        (-1, info.min, 0),
        (63, 64, 1 << 20),
    ):
        row = torch.tensor(values, dtype=tensor.dtype).repeat(tensor.numel())[: tensor.numel()]
        yield str(values), row.reshape(tensor.shape)


def called(engine: Engine) -> None:
    """Call an engine with boundary numbers, if that takes little memory."""
    least, _ = engine.graph.batches
    shapes = [fixed_shape(entry.shape, least) for entry in engine.graph.inputs]
    if sum(map(math.prod, shapes)) > MOST_ELEMENTS:
        return
    for number in (-1, 1):
        tensors = []
        for shape, entry in zip(shapes, engine.graph.inputs, strict=True):
            dtype = getattr(torch, entry.dtype)
            tensor = torch.full(shape, number if dtype.is_signed else 1, dtype=dtype)
            if dtype.is_signed and not dtype.is_floating_point:
                tensor.view(-1)[::2] = torch.iinfo(dtype).min
            tensors.append(tensor)
        positional, named = pytree.tree_unflatten(tensors, engine.graph.arguments)
        engine(*positional, **named)


def main(folder: pathlib.Path, seed: int, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    cases = [
        (f"{path.stem}: {what}", make)
        for path in sorted(folder.glob("*.engine"))
        for what, make in changes(Contents.of(path))
    ]
    if count:
        sharp = [case for case in cases if SHARP.search(case[0])]
        cases = sharp + random.Random(seed).sample(cases, count)
    loaded = 0
    for what, make in cases:
        print(what, flush=True)
        (folder / "changed").write_bytes(make().written())
        try:
            engine = load(folder / "changed", device="cpu")
            loaded += 1
            called(engine)
        except EscaladeError as refusal:
            assert str(refusal)
    print(f"{len(cases)} files, {loaded} loaded")


def run(folder: pathlib.Path, seed: int, count: int) -> str:
    """Test changed files in a child process; return its last line, or raise with the change that ended it."""
    command = [sys.executable, "-m", "tests.engine.confusion", str(folder), str(seed), str(count)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    last = (ended.stdout.strip().splitlines() or [""])[-1]
    assert ended.returncode == 0, f"exit {ended.returncode} by {last}\n{ended.stderr[-2000:]}"
    return last


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
