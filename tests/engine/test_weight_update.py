"""New weights in place of old ones: `refresh` and `load_state_dict` of an engine."""

from __future__ import annotations

import copy
import pathlib
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from escalade.engine import Engine, compile, load
from escalade.engine.plan.kernels import PlanKernels
from escalade.errors import UnsupportedError


class Everything(nn.Module):
    """Layers whose weights are folded, packed, reordered or derived at capture."""

    shift: torch.Tensor
    own: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.deep = nn.Conv2d(16, 16, 3, padding=1)
        self.turned = nn.ConvTranspose2d(16, 8, 3, padding=1)
        self.slope = nn.PReLU(8)
        self.fc = nn.Linear(8 * 4 * 4, 12)
        self.matrix = nn.Parameter(torch.randn(12, 12))
        self.register_buffer("shift", torch.randn(12))
        self.register_buffer("own", torch.randn(12), persistent=False)
        self.tied = nn.Linear(12, 12)
        self.unread = nn.Linear(2, 2)
        self.tied.weight = self.matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.deep(torch.relu(self.norm(self.stem(x)))))
        y = self.fc(self.slope(self.turned(y)).flatten(1))
        return self.tied(y @ self.matrix + self.shift) * self.own


def made(seed: int) -> Everything:
    torch.manual_seed(seed)
    model = Everything()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) * 0.2 + 0.01)
    return model.eval()


def forbid_planning(patch: pytest.MonkeyPatch) -> None:
    """Fail if anything is planned, compiled or prepared again."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("planned again")

    patch.setattr("escalade.engine.plan_cache.make_plan", refuse)
    patch.setattr("escalade.engine.plan_cache.compile_plans", refuse)
    patch.setattr(PlanKernels, "__init__", refuse)


X = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", "fp32"), ("cpu", "fp16"), ("twin", "fp32"), ("twin", "fp16")]
)
def test_new_weights_match_a_fresh_compile(
    device: str, dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    model, other = made(1), made(2)
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    engine = compile(model, X, **options)
    channels_last = X.contiguous(memory_format=torch.channels_last)
    before = [engine(x) for x in (X, X[:1], channels_last)]
    addresses = [tensor.data_ptr() for tensor in _memory(engine)]
    expected = [compile(other, x, **options)(x) for x in (X, X[:1], channels_last)]
    model.load_state_dict(other.state_dict())
    model.own.copy_(other.own)
    with monkeypatch.context() as patch:
        forbid_planning(patch)
        assert torch.equal(engine(X), before[0]), "an engine has copies of the weights"
        engine.refresh()
        assert all(map(torch.equal, [engine(x) for x in (X, X[:1], channels_last)], expected))
    assert addresses == [tensor.data_ptr() for tensor in _memory(engine)], "CUDA graphs have these addresses"
    large = torch.rand(3, 3, 4, 4)
    assert torch.equal(engine(large), compile(other, large, **options)(large)), "planned after the refresh"
    with monkeypatch.context() as patch:
        forbid_planning(patch)
        own = {**made(1).state_dict()}
        engine.load_state_dict(own)
        model.own.copy_(made(1).own)
        engine.refresh()  # the model still has the other weights
        model.load_state_dict(own)
        engine.refresh()
        assert all(map(torch.equal, [engine(x) for x in (X, X[:1], channels_last)], before))


def _memory(engine: Engine) -> list[torch.Tensor]:
    found = []
    for cached in engine._plans.cached.values():
        program: Any = cached.calls.program
        found += program.weights if hasattr(program, "weights") else program._constants.values()
    return found


class Sized(nn.Module):
    """A network for images of any size, whose graph is captured again for each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.first(x))).mean((2, 3))


def test_all_sizes_files_and_moves_see_new_weights(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(4)
    model, other = Sized().eval(), Sized().eval()
    small, large = torch.randn(2, 3, 6, 6), torch.randn(1, 3, 9, 7)
    engine = compile(model, small, device="cpu")
    engine(large)
    state = {name: tensor.half().float() for name, tensor in other.state_dict().items()}
    other.load_state_dict(state)
    engine.load_state_dict(
        {name: tensor.half() for name, tensor in state.items()}
    )  # converted as PyTorch does
    fresh = compile(other, small, device="cpu")
    sizes = (small, large, torch.randn(3, 3, 5, 5))  # the last one is captured with the new weights
    assert all(torch.equal(engine(x), fresh(x)) for x in sizes)
    assert torch.equal(pickle.loads(pickle.dumps(engine))(small), fresh(small))
    compile(model, small, device="cpu").save(tmp_path / "engine")
    loaded = load(tmp_path / "engine", device="cpu")
    loaded(small)
    loaded.load_state_dict(state)
    assert torch.equal(loaded(small), fresh(small))
    assert torch.equal(loaded(small[:1]), fresh(small[:1]))


def test_unreplaceable_weights_are_refused_and_nothing_changes(tmp_path: pathlib.Path) -> None:
    model = made(1)
    engine = compile(model, X, device="cpu")
    before, state = engine(X), dict(model.state_dict())

    def refused(match: str, call: Any = None, **changed: Any) -> None:
        given = {name: tensor for name, tensor in {**state, **changed}.items() if tensor is not None}
        with pytest.raises(UnsupportedError, match=match):
            engine.load_state_dict(given) if call is None else call()
        assert torch.equal(engine(X), before)

    refused("has no shift; weights must have the names", shift=None)
    refused("has an unknown other", other=torch.ones(1))
    refused(
        r"shift of the state dict has shape \(3,\); the engine was compiled for \(12,\)", shift=torch.ones(3)
    )
    refused("shift of the state dict is of type str", shift="none")
    refused(
        "stem.weight holds values that are not finite",
        **{"stem.weight": torch.full((16, 3, 3, 3), torch.inf)},
    )
    refused("was the same tensor as another weight", matrix=torch.ones(12, 12))
    refused("assign=True", lambda: engine.load_state_dict(state, assign=True))
    for other in (None, [1]):
        refused(f"of type {type(other).__name__}", lambda other=other: engine.load_state_dict(other))
    twice = copy.copy(engine)
    refused("shares its weights with a copy", engine.refresh)
    assert torch.equal(twice(X), before)
    del twice
    found = engine.load_state_dict({"shift": model.shift + 1, "other": torch.ones(1)}, strict=False)
    assert "matrix" in found.missing_keys and found.unexpected_keys == ["other"]
    assert not torch.equal(engine(X), before)
    engine.refresh()
    assert torch.equal(engine(X), before)
    engine.save(tmp_path / "engine")
    loaded = load(tmp_path / "engine", device="cpu")
    refused("has no model to read weights from", loaded.refresh)
    refused("does not store how .* was computed", lambda: loaded.load_state_dict(state))
    del model
    refused("no longer exists; keep a reference", engine.refresh)


class Counted(nn.Module):
    """It reads a number from a buffer, and is exported with its value."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("steps", torch.tensor(2))
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(self.steps)):
            x = torch.sin(self.fc(x)) * self.scale
        return x


def test_values_that_a_plan_depends_on_are_refused() -> None:
    model, x = Counted().eval(), torch.randn(2, 4)
    engine = compile(model, x, device="twin")
    with torch.no_grad():
        model.fc.weight.add_(1)
    engine.refresh()
    assert torch.equal(engine(x), compile(model, x, device="twin")(x))
    before = engine(x)
    for name, match in (("steps", "read the values of its steps"), ("scale", "depends on the values")):
        with torch.no_grad():
            getattr(model, name).add_(1)
        with pytest.raises(UnsupportedError, match=match):
            engine.refresh()
        assert torch.equal(engine(x), before)
        with torch.no_grad():
            getattr(model, name).sub_(1)
