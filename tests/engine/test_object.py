"""An engine as an object: among modules, copied and pickled; and its arguments and results."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from escalade.engine import Engine, compile
from escalade.engine.file import FileError
from escalade.errors import UnsupportedError


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


@dataclass(frozen=True)
class Found:
    scores: torch.Tensor
    others: dict[str, Any] = field(default_factory=dict)
    boxes: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (
            not self.scores.numel()
        ):  # an `assert` would refer to pytest, through which a capture reaches every test
            raise ValueError("no scores")


class Many(nn.Module):
    """Any structure a model may return, selected by constants among its arguments."""

    def forward(self, x: torch.Tensor, doubled: bool, times: int = 1, *, kind: str | None = None) -> Any:
        y = (x * 2 if doubled else x) * times
        if kind == "plain":
            return {"y": [y, None], "scale": 2.5, "is_doubled": doubled, "kind": kind, "size": y[0].shape}
        return [Found(y, {"pair": Pair(y + 1, times)}), None, x.shape[1], torch.float16, y[0].shape]


def equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, Found):
        return isinstance(found, Found) and equal(vars(found), vars(expected))
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(equal(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return type(found) is type(expected) and all(
            equal(*both) for both in zip(found, expected, strict=True)
        )
    return type(found) is type(expected) and bool(found == expected)


def test_arguments_are_constants_and_results_come_as_the_model_has_them() -> None:
    model, x = Many(), torch.randn(2, 3)
    engine = compile(model, (x, False, 3), {"kind": "own"})
    for batch in (2, 5):
        x = torch.randn(batch, 3)
        assert equal(engine(x, False, 3, kind="own"), model(x, False, 3, kind="own"))
    for arguments, keywords in (((x, True, 3), {"kind": "own"}), ((x, 0, 3), {"kind": "own"}), ((x,), {})):
        with pytest.raises(UnsupportedError, match=r"with x \[batch, 3\], False, 3, kind='own'"):
            engine(*arguments, **keywords)
    with pytest.raises(FileError, match="takes or returns a Found; a file supports tuples"):
        pickle.dumps(engine)
    plain = compile(model, (x, True), {"kind": "plain"})
    again = pickle.loads(pickle.dumps(plain))
    for one in (plain, again):
        assert equal(one(x, True, kind="plain"), model(x, True, kind="plain"))


@pytest.fixture(scope="module")
def engine() -> Engine:
    torch.manual_seed(3)
    return compile(nn.Linear(4, 3), torch.randn(2, 4), dtype=torch.float16, device="twin")


class Closed(nn.Module):
    """Arguments in a dataclass, and some named by Python keywords; traced or exported, depending on a size."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, input: Found, max: torch.Tensor, *, list: torch.Tensor) -> Any:
        pair = input.others["pair"]
        scores = input.scores * pair.second + pair.first - max
        if self.rows and scores.shape[0] > self.rows:
            scores = -scores
        return Found(scores, {"list": list}, input.boxes)


@pytest.mark.parametrize("rows", (0, 6), ids=("followed", "exported"))
def test_arguments_may_be_dataclasses_and_have_the_names_of_the_model(rows: int) -> None:
    model = Closed(rows)

    def given(batch: int) -> dict[str, Any]:
        found = Found(torch.randn(batch, 3), {"pair": Pair(torch.randn(batch, 3), 2)})
        return {"input": found, "max": torch.randn(3), "list": torch.randn(3)}

    first = given(2)
    engine = compile(model, (first["input"], first["max"]), {"list": first["list"]})
    for batch in (2, 5, 7):
        these = given(batch)
        for call in (engine(**these), engine(these["input"], max=these["max"], list=these["list"])):
            assert equal(call, model(**these))
    assert "input_scores 2×3" in str(engine.explain(**first)) and "max [3]" in repr(engine)
    with pytest.raises(
        UnsupportedError, match=r"call the engine with .*Found\(scores=input_scores \[batch, 3\]"
    ):
        engine(max_1=first["max"], **first)
    with pytest.raises(UnsupportedError, match=r"max is on meta"):
        engine(**{**first, "max": first["max"].to("meta")})


class Parted(nn.Module):
    """One argument, which is a structure of tensors."""

    def forward(self, parts: Any) -> torch.Tensor:
        return parts["a"] + parts["b"][0]


def test_one_argument_may_be_a_structure() -> None:
    model = Parted()
    engine = compile(model, ({"a": torch.randn(2, 3), "b": [torch.randn(2, 3)]},))
    for batch in (2, 5, 5):
        parts = {"a": torch.randn(batch, 3), "b": [torch.randn(batch, 3)]}
        assert torch.equal(engine(parts), model(parts))
        assert torch.equal(engine.submit(parts=parts).result(), model(parts))


def test_an_engine_describes_itself(engine: Engine) -> None:
    assert repr(engine) == "Engine(input [batch, 4] -> [batch, 3], fp16 on twin, ready for batches of 2)"


def test_copies_are_engines_of_their_own(engine: Engine) -> None:
    x = torch.randn(2, 4)
    for again in (copy.deepcopy(engine), copy.copy(engine), pickle.loads(pickle.dumps(engine))):
        assert (again.dtype, again.on_twin, again._plans.cached) == ("fp16", True, {})
        assert torch.equal(again(x), engine(x)) and again._lock is not engine._lock


def _twice(module: nn.Module, given: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 2


def test_copies_keep_attributes_added_by_the_caller() -> None:
    x = torch.randn(2, 4)
    first = compile(nn.Linear(4, 3), x)
    plain = first(x)
    first.tags = ["mine"]  # type: ignore[assignment]
    hook = first.register_forward_hook(_twice)
    for again in (copy.deepcopy(first), copy.copy(first), pickle.loads(pickle.dumps(first))):
        assert again.tags == ["mine"]
        torch.testing.assert_close(again(x), plain * 2)
    assert copy.copy(first).tags is not copy.deepcopy(first).tags
    hook.remove()
    assert torch.equal(first(x), plain)


def test_an_engine_among_modules(engine: Engine) -> None:
    x = torch.randn(2, 4)
    network = nn.Sequential(engine, nn.Linear(3, 2)).train().to("cpu")
    assert engine.eval() is engine and not engine.training and not engine.state_dict()
    torch.testing.assert_close(network(x), network[1](engine(x)))
    seen: list[torch.Tensor] = []
    hook = engine.register_forward_hook(lambda module, given, result: seen.append(result))
    found = engine(x)
    hook.remove()
    engine(x)
    assert seen == [found]
    with pytest.raises(UnsupportedError, match="computes in fp16 and cannot be converted"):
        network.double()
    with pytest.raises(UnsupportedError, match="device meta: engines run on"):
        network.to("meta")
    with pytest.raises(UnsupportedError, match="or contains one"):
        compile(network, x)


def test_an_engine_inside_a_compiled_model(engine: Engine) -> None:
    """Dynamo must not trace it: an engine's contents are pointers."""
    network = nn.Sequential(nn.Linear(4, 4), engine, nn.Linear(3, 2)).eval()
    torch.compiler.reset()
    compiled = torch.compile(network, backend="eager")
    engine.compile()
    with torch.no_grad():
        for batch in (2, 5, 2):
            x = torch.randn(batch, 4)
            assert torch.equal(compiled(x), network(x))
            assert torch.equal(torch.compile(engine, backend="eager")(x), engine(x))
    torch.compiler.reset()


@pytest.mark.parametrize("kind", [list, dict])
def test_tensors_in_one_container(kind: Any) -> None:
    class Summing(nn.Module):
        def forward(self, given: Any) -> torch.Tensor:
            first, second = given.values() if isinstance(given, dict) else given
            return torch.relu(first) + second

    def made(batch: int) -> Any:
        tensors = (torch.randn(batch, 3), torch.randn(batch, 3))
        return list(tensors) if kind is list else dict(zip("ab", tensors, strict=True))

    model = Summing()
    engine = compile(model, (made(2),))
    for batch in (2, 5, 2):
        given = made(batch)
        assert torch.equal(engine(given), model(given)) and torch.equal(
            engine.submit(given).result(), model(given)
        )


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * scale


def test_arguments_in_their_place_may_be_given_by_name() -> None:
    """Like a module's, however the example passed them."""
    x, scale = torch.randn(4, 3), torch.rand(3)
    engine = compile(Scaled(), (x[:2], scale), device="cpu")
    expected = engine(x, scale)
    room = torch.empty(4, 3)
    for found in (
        engine(x, scale=scale), engine(x=x, scale=scale), engine(scale=scale, x=x),
        engine.submit(x, scale=scale).result(), engine(x, scale=scale, out=room),
    ):  # fmt: skip
        assert torch.equal(found, expected)
    for given, named in (((x,), {"x": x}), ((x, scale), {"scale": scale}), ((x,), {"factor": scale})):
        with pytest.raises(UnsupportedError, match="call the engine with"):
            engine(*given, **named)
