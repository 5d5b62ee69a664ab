"""Models as users write them, with state, counters, caches, random numbers and modes; some cannot be compiled."""

from __future__ import annotations

import functools
import random
import threading
import types
import warnings
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

SIZE = 4
BACKEND = "eager"
"""Models wrapped by `torch.compile` with any backend: they are unwrapped."""
Function = Callable[..., Any]


class Model(nn.Module):
    """Two layers, plus the attributes and the `forward` that a test gives it."""

    def __init__(self, run: Function, **attributes: Any) -> None:
        super().__init__()
        self.run = run
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.run(self, *arguments, **keywords)


def shared() -> nn.Module:
    model = Model(lambda self, x: self.again(F.relu(self.first(x))))
    model.again = model.first
    return model


def tied() -> nn.Module:
    model = Model(lambda self, x: self.second(self.first(x)))
    model.second.weight = model.first.weight
    return model


def _cached(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.cache is None:
        self.cache = torch.arange(float(SIZE), device=x.device) + self.first.bias
    return self.second(x) + self.cache


def _counting(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    self.log.append(x)
    self.by_name["x"], self.by_name["n"] = x, self.calls
    self.last.append(x.shape)
    self.kept = (x, self.second.weight)
    self.counts[0] += 1
    self.ordered.move_to_end("b")
    self.groups["x"].append(x)
    return self.first(x)


class Store:
    """User-defined object with a lock, which cannot be copied, and mutable state."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.items: dict[str, Any] = {"nested": {"lock": self.lock, "cache": []}}


class Slotted:
    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: Any = None


def _stores(self: Any, x: torch.Tensor) -> torch.Tensor:
    with self.store.lock:
        self.store.items["nested"]["cache"].append(x)
        self.store.latest = x
    self.slotted.kept = x
    self.pair.left.append(x)
    return self.first(x)


def hooked() -> nn.Module:
    features: dict[str, Any] = {}
    order: list[str] = []
    model = Model(lambda self, x: self.second(self.first(x)))

    def keep(module: nn.Module, given: Any, result: torch.Tensor) -> None:
        features["first"] = result
        order.append("hook")

    model.first.register_forward_hook(keep)
    model.second.register_forward_pre_hook(functools.partial(_put, order))
    model.handle = model.register_forward_hook(lambda *_: order.append("whole"))  # type: ignore[assignment]
    model.features = features  # type: ignore[assignment]
    return model


def _put(order: list[str], *_: Any) -> None:
    order.append("before")


def closed_over() -> nn.Module:
    """A function that holds the model itself, a bound method in place of `forward`, and a counter in a closure.

    `forward` and a function that it calls share a variable.
    """
    count, times = 0, 2.0
    model = Model(lambda self, x: self.inner(x))

    def inner(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        model.kept = x
        return model.first(x)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * times

    def forward(self: Model, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        return scaled(self.run(self, x)) + times

    model.inner = inner  # type: ignore[assignment]
    model.forward = types.MethodType(forward, model)  # type: ignore[method-assign]
    return model


def remembering() -> nn.Module:
    model = Model(lambda self, x: self.first(x) + self.table(SIZE))
    model.table = functools.lru_cache(lambda size: torch.arange(float(size)))  # type: ignore[assignment]
    return model


class OfTheClass(nn.Module):
    calls = 0
    seen: list[Any] = []  # noqa: RUF012
    latest: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    @functools.lru_cache(maxsize=None)  # noqa: B019, UP033
    def table(self, size: int) -> torch.Tensor:
        return torch.arange(float(size))

    def forward(self, x: torch.Tensor, kept: list[Any] = []) -> torch.Tensor:  # noqa: B006
        type(self).calls += 1
        self.seen.append(x)
        OfTheClass.latest = x
        OfTheClass.new = x  # type: ignore[attr-defined]
        kept.append(x)
        return self.layer(x) + self.table(SIZE)


TABLES: dict[int, torch.Tensor] = {}
COUNT = 0
STORE = Store()
ASIDE = Model(_cached, cache=None)


@functools.cache
def table(size: int) -> torch.Tensor:
    return torch.arange(float(size))


def _uses_globals(self: Any, x: torch.Tensor) -> torch.Tensor:
    global COUNT
    COUNT += 1
    if SIZE not in TABLES:
        TABLES[SIZE] = torch.arange(float(SIZE))
    STORE.items["x"] = x
    return self.first(x) + TABLES[SIZE] + table(SIZE) + ASIDE(x)


def _draws(self: Any, x: torch.Tensor) -> torch.Tensor:
    random.random()
    np.random.rand()
    torch.manual_seed(3)
    torch.rand(2)
    self.generator.manual_seed(5)
    self.dice.random()
    self.numbers.random()
    return self.first(x)


def _switches(self: Any, x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    warnings.simplefilter("error")
    return self.first(x)


def writes_input(self: Any, x: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
    y = more.pop("y")
    x.mul_(2)
    y.view(-1).add_(1)
    return self.first(x) + y


def modes() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Dropout(), nn.BatchNorm1d(SIZE), nn.Linear(SIZE, SIZE)
    )
    model.train()
    model[1].eval()
    model[0].weight.requires_grad_(False)
    model[4].weight.grad = torch.ones(SIZE, SIZE)
    model[4].weight.tag = ["mine"]  # type: ignore[union-attr]
    return model


class TrainsOtherwise(nn.Module):
    """Changes with its mode, and refuses to be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)
        self.scale = nn.Parameter(torch.ones(SIZE) * 2)
        self.merged = False

    def train(self, mode: bool = True) -> TrainsOtherwise:
        if not mode and not self.merged:
            self.layer.weight.data.mul_(self.scale[:, None])
            self.merged = True
        return super().train(mode)

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("not this one")

    def __getstate__(self) -> Any:
        raise RuntimeError("nor like this")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.layer.weight)


def old_weight_norm() -> nn.Module:
    model = Model(lambda self, x: self.second(self.first(x)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model.first)
        nn.utils.spectral_norm(model.second)
    return model


def parametrized() -> nn.Module:
    model = Model(lambda self, x: self.second(self.first(x)))
    nn.utils.parametrizations.weight_norm(model.first)
    nn.utils.parametrizations.orthogonal(model.second)
    return model


def compiled_inside() -> nn.Module:
    model = Model(lambda self, x: self.twice(self.inner(x)))
    model.inner = torch.compile(nn.Linear(SIZE, SIZE), backend=BACKEND)  # type: ignore[assignment]
    model.twice = torch.compile(lambda x: x * 2, backend=BACKEND)  # type: ignore[assignment]
    return model


def compiled_itself() -> nn.Module:
    model = Model(_cached, cache=None)
    model.compile(backend=BACKEND)
    return model


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    @torch.compile(backend=BACKEND)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def made_for_inference() -> nn.Module:
    with torch.inference_mode():
        return Model(_cached, cache=None)


def traced() -> nn.Module:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.add, (x, graph.get_attr("shift"))))
    return torch.fx.GraphModule({"shift": torch.arange(float(SIZE))}, graph)


MISSING = object()
CONFIG = Store()


def _compares(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The model's attributes are the names used by the code."""
    same = self.default is MISSING and self.config is CONFIG and self.act is _activation
    return self.act(self.first(x)) if same else x


def _closure() -> Function:
    slope = [0.5]
    return lambda x: torch.where(x > 0, x, x * slope[0])


_activation = _closure()

Pair = namedtuple("Pair", ["left", "right"])


def _grad_mode(self: Any, x: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(True)
    return _cached(self, x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a mode of PyTorch's": lambda: Model(_grad_mode, cache=None),
    "shared modules": shared,
    "tied parameters": tied,
    "a cache": lambda: Model(_cached, cache=None),
    "a cache that is full": lambda: Model(_cached, cache=torch.ones(SIZE)),
    "counters and lists": lambda: Model(
        _counting, calls=0, log=[], by_name={}, last=deque(maxlen=2), kept=None, counts=np.zeros(2),
        ordered=OrderedDict(b=1, a=2), groups=defaultdict(list),
    ),
    "objects and a lock": lambda: Model(_stores, store=Store(), slotted=Slotted(), pair=Pair([], [])),
    "hooks": hooked,
    "closures": closed_over,
    "a cached function": remembering,
    "attributes of the class": OfTheClass,
    "globals": lambda: Model(_uses_globals),
    "what is a global too": lambda: Model(_compares, default=MISSING, config=CONFIG, act=_activation),
    "random numbers": lambda: Model(
        _draws, generator=torch.Generator(), dice=random.Random(1), numbers=np.random.default_rng(1)
    ),
    "switches": lambda: Model(_switches),
    "mixed modes": modes,
    "a mode that changes weights": TrainsOtherwise,
    "weight norm": old_weight_norm,
    "parametrizations": parametrized,
    "compiled": lambda: torch.compile(Model(_cached, cache=None), backend=BACKEND),  # type: ignore[dict-item,return-value]
    "compiled inside": compiled_inside,
    "compiled itself": compiled_itself,
    "a compiled method": Compiled,
    "for several devices": lambda: nn.DataParallel(Model(_cached, cache=None)),
    "inference tensors": made_for_inference,
    "a graph": traced,
    "an exported program": lambda: torch.export.export(shared(), (torch.ones(2, SIZE),)).module(),
    "a result with gradients": lambda: (
        lambda model: Model(lambda self, x: self.first(x) + self.kept, kept=model(torch.ones(1, SIZE)))
    )(nn.Linear(SIZE, SIZE)),
}  # fmt: skip


def _fails(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = _counting(self, _cached(self, x))
    TABLES[0] = y
    return self.missing(y)


def _decides(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x if _cached(self, x).sum() > 0 else x + 1


def _state(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.total.add_(x.sum())
    self.first.weight.data.mul_(2)
    return self.first(_cached(self, x))


def _infinite() -> nn.Linear:
    layer = nn.Linear(SIZE, SIZE)
    nn.init.constant_(layer.weight, float("inf"))
    return layer


FAILING: dict[str, Callable[[], nn.Module]] = {
    "an error": lambda: Model(
        _fails, cache=None, calls=0, log=[], by_name={}, last=deque(), kept=None, counts=np.zeros(2),
        ordered=OrderedDict(b=1, a=2), groups=defaultdict(list),
    ),
    "a decision by values": lambda: Model(_decides, cache=None),
    "state": lambda: Model(_state, cache=None, total=nn.Buffer(torch.zeros(()))),
    "an object as a result": lambda: Model(lambda self, x: (_cached(self, x), object()), cache=None),
    "weights that are not finite": lambda: Model(
        lambda self, x: self.infinite(_cached(self, x)), cache=None, infinite=_infinite(),
    ),
    "no contents": lambda: nn.Linear(SIZE, SIZE, device="meta"),
    "lazy modules": lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.LazyLinear(3)),
    "TorchScript": lambda: nn.Sequential(nn.Linear(SIZE, SIZE), torch.jit.script(nn.Linear(SIZE, SIZE))),
    "traced TorchScript": lambda: torch.jit.trace(nn.Linear(SIZE, SIZE), torch.ones(1, SIZE)),
}  # fmt: skip


@contextmanager
def forgotten() -> Iterator[None]:
    """Clear state that PyTorch's compiler and cached functions keep from other tests."""
    torch._dynamo.reset()
    table.cache_clear()
    OfTheClass.table.cache_clear()
    yield
    torch._dynamo.reset()


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    return make()
