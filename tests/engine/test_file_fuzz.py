"""Hundreds of nearly valid engine files: each is refused with a message, or works like any other engine."""

from __future__ import annotations

import pathlib
import random
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from escalade.engine import Engine, compile, load
from escalade.engine.graph.graph import fixed_shape
from escalade.engine.nodes.evaluate import compute
from escalade.errors import EscaladeError
from tests.engine import confusion
from tests.engine.files import Contents, every_kind, replaced
from tests.engine.mutations import mutated_bytes, mutated_contents

BYTES, GRAPHS, PIECES = 300, 600, 3
"""Files with changed bytes, files with changed graphs, and the tests that use them."""
MOST_ELEMENTS = 10_000
"""Sizes of inputs for calls of a changed engine."""
CALLS_ON_TWIN = 5


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Contents, bytes, Engine]:
    path = tmp_path_factory.mktemp("fuzz") / "original.engine"
    contents = every_kind(path)
    return contents, path.read_bytes(), load(path, device="cpu")


def test_confused_types_and_boundary_numbers_end_no_process(
    original: tuple[Contents, bytes, Engine], tmp_path: pathlib.Path
) -> None:
    """In a child process, which prints the current case in case a signal ends it."""
    (tmp_path / "kinds.engine").write_bytes(original[1])
    confusion.saved(tmp_path)
    tried, loaded = map(int, re.findall(r"\d+", confusion.run(tmp_path, seed=7, count=60)))
    assert 0 < loaded < tried / 2


def loaded(path: pathlib.Path, device: str = "cpu") -> Engine | None:
    """Return the engine of a file, or None if it is refused."""
    try:
        return load(path, device=device)
    except EscaladeError as error:
        assert str(error)
        return None


def given(engine: Engine) -> tuple[list[torch.Tensor], int]:
    """Inputs like those that an engine declares."""
    least, _ = engine.graph.batches
    made = []
    for entry in engine.graph.inputs:
        shape, dtype = fixed_shape(entry.shape, least), getattr(torch, entry.dtype)
        made.append((torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 9).to(dtype))
    return made, least


def called(engine: Engine) -> Any:
    """Return its results, or None if it raised; they have the sizes and dtypes of its graph."""
    sizes = [fixed_shape(entry.shape, engine.graph.batches[0]) for entry in engine.graph.inputs]
    if any(torch.Size(size).numel() > MOST_ELEMENTS for size in sizes):
        return None
    tensors, batch = given(engine)
    positional, named = pytree.tree_unflatten(tensors, engine.graph.arguments)
    try:
        result = engine(*positional, **named)
    except EscaladeError as error:
        assert str(error)
        return None
    leaves = pytree.tree_leaves(result)
    assert [tuple(leaf.shape) for leaf in leaves] == [
        fixed_shape(engine.graph.shape_of(name), batch) for name in engine.graph.outputs
    ]
    assert [str(leaf.dtype) for leaf in leaves] == [f"torch.{name}" for name in engine.graph.output_types]
    return result


def node_by_node(engine: Engine) -> list[torch.Tensor]:
    """Evaluate the graph node by node, without any pass."""
    tensors, batch = given(engine)
    graph = engine.graph.at(batch)
    values = dict(graph.constants) | {
        entry.name: tensor for entry, tensor in zip(graph.inputs, tensors, strict=True)
    }
    with torch.no_grad():
        for node in graph:
            inputs = {role: _wide(values[name]) for role, name in node.inputs.items()}
            values[node.name] = compute(node, inputs, torch.device("cpu"))
    return [values[name] for name in graph.outputs]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def test_changed_bytes_are_noticed(original: tuple[Contents, bytes, Engine], tmp_path: pathlib.Path) -> None:
    _, whole, engine = original
    draw, path = random.Random(1), tmp_path / "changed.engine"
    refused = 0
    for _ in range(BYTES):
        replaced(path, mutated_bytes(whole, draw))
        again = loaded(path)
        refused += again is None
        if again is not None:  # such as spaces at the end of the header
            torch.testing.assert_close(called(again), called(engine), rtol=0, atol=0, equal_nan=True)
    assert refused > BYTES * 0.95


@pytest.mark.share(7)
@pytest.mark.parametrize("piece", range(PIECES))
def test_changed_graphs_are_sentences_or_engines(
    original: tuple[Contents, bytes, Engine], tmp_path: pathlib.Path, piece: int
) -> None:
    contents, _, engine = original
    draw, path = random.Random(1000 + piece), tmp_path / "changed.engine"
    accepted = returned = 0
    for _ in range(GRAPHS // PIECES):
        changed = mutated_contents(contents, draw)
        replaced(path, changed.written())
        again = loaded(path)
        if again is None:
            continue
        accepted += 1
        result = called(again)
        returned += result is not None
        if result is not None and again.dtype == "fp32":
            for found, expected in zip(pytree.tree_leaves(result), node_by_node(again), strict=True):
                if found.is_floating_point():  # the larger of two close numbers is not determined
                    torch.testing.assert_close(
                        found.float(), expected.to(found.dtype).float(), rtol=1e-2, atol=1e-2, equal_nan=True
                    )
        if (
            changed.graph == contents.graph
            and changed.metadata == contents.metadata
            and _same(changed, contents)
        ):
            torch.testing.assert_close(result, called(engine), rtol=0, atol=0, equal_nan=True)
    assert accepted < GRAPHS // PIECES / 2 and returned, "most changes are noticed, and some change nothing"


def _same(one: Contents, other: Contents) -> bool:
    return one.tensors.keys() == other.tensors.keys() and all(
        torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items()
    )


def test_changed_graphs_do_not_overrun_kernels(tmp_path: pathlib.Path) -> None:
    """On the twin, which checks buffer bounds: accepted files compute the CPU's results."""

    class Rows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(F.relu6(x) + x, -1)

    path = tmp_path / "rows.engine"
    compile(Rows(), torch.randn(2, 4)).save(path)
    contents, draw = Contents.of(path), random.Random(5)
    returned = 0
    for _ in range(150):
        replaced(path, mutated_contents(contents, draw).written())
        engine = loaded(path, "twin")
        if engine is None or engine.dtype != "fp32" or returned == CALLS_ON_TWIN:
            continue
        result, expected = called(engine), called(load(path, device="cpu"))
        torch.testing.assert_close(result, expected)
        returned += result is not None
    assert returned == CALLS_ON_TWIN
