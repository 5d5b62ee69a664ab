"""Networks by the module that makes them: torchvision's, timm's, or those of any module of constructors."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from escalade.errors import UnsupportedError
from escalade.tune.refusal import failure_reason

TORCHVISION, TIMM = "torchvision", "timm"
_LIBRARIES: list[torch.library.Library] = []
"""Kept alive, because operators are removed with the library that defines them."""
_MOST_LISTED = 100
"""Networks of a module that an error message lists."""
_SIZES = {"inception_v3": 299}
"""Networks for images of an unusual size."""


@dataclass(frozen=True)
class Entry:
    """A network by name."""

    name: str
    make: Callable[[], nn.Module]
    """Makes it with random weights."""
    size: int | None = None
    """The side of its images, if it is unusual."""
    item: tuple[int, ...] | None = None
    """Shape of one item of a batch; None for images."""


def entries(wanted: str, only: str | None = None) -> list[Entry]:
    """Return the networks of `module` or `module:name,name`; with `only`, those whose names match the expression."""
    module, colon, names = wanted.partition(":")
    imported = None if module in (TORCHVISION, TIMM) else _imported(module)
    if imported is None:
        found = list(_torchvision() if module == TORCHVISION else _timm(names))
    else:
        found = list(_callables(imported, annotated=not colon))
    if colon:
        found = _named(module, names, found)
    try:
        pattern = re.compile(only or "")
    except re.error as error:
        raise UnsupportedError(f"--only {only!r} is no regular expression: {error}") from error
    chosen = [entry for entry in found if pattern.search(entry.name)]
    if chosen and imported is not None:  # a wrong example_shape matters only for selected networks
        return [replace(entry, item=_item(entry.name, getattr(imported, entry.name))) for entry in chosen]
    if chosen:
        return chosen
    if found:
        raise UnsupportedError(
            f"{wanted} has no network that {only!r} finds; it has {', '.join(entry.name for entry in found)}"
        )
    raise UnsupportedError(
        f"{module} has no networks: classes of nn.Module that take no arguments, or functions annotated to give one. "
        f"Others are named: {module}:name,name"
    )


def _named(module: str, names: str, known: Sequence[Entry]) -> list[Entry]:
    """Return the networks of these names."""
    by_name = {entry.name: entry for entry in known}
    asked = [name.strip() for name in names.split(",") if name.strip()]
    missing = [name for name in asked if name not in by_name]
    if missing or not asked:
        raise UnsupportedError(
            f"{module} has no network {', '.join(missing) or names!r} that takes no arguments; "
            f"{_choices(missing, by_name)}"
        )
    return [by_name[name] for name in asked]


def _choices(missing: Sequence[str], known: Iterable[str]) -> str:
    """List the available networks; of hundreds, only those with similar names."""
    names = list(known)
    if len(names) <= _MOST_LISTED:
        return f"it has {', '.join(names) or 'none'}"
    close = [name for asked in missing for name in difflib.get_close_matches(asked, names, n=5)]
    return f"it has {len(names)}" + (
        f", with similar names: {', '.join(dict.fromkeys(close))}" if close else ""
    )


def _imported(name: str) -> ModuleType:
    """Import the module, also from the working directory."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and not (name == error.name or name.startswith(f"{error.name}.")):
            raise UnsupportedError(f"{name} cannot be imported: {failure_reason(error)}") from error
        top = name.partition(".")[0]
        raise UnsupportedError(
            f"there is no module {name!r} here: a network is of torchvision, or of a module that Python finds; where "
            f"it is a package, `pip install {top}` may be what is missing"
        ) from error
    except Exception as error:  # a module may do anything when it is imported
        raise UnsupportedError(f"{name} cannot be imported: {failure_reason(error)}") from error


def _torchvision() -> Iterator[Entry]:
    """Yield networks of classification and segmentation, and backbones of detectors, which take lists of images."""
    _define_operators()
    models: Any = _imported(f"{TORCHVISION}.models")

    def maker(name: str, part: str = "", **options: Any) -> Callable[[], nn.Module]:
        def make() -> Any:
            model = models.get_model(name, weights=None, **options)
            return getattr(model, part) if part else model

        return _quietly(make)

    for name in models.list_models(module=models):
        yield Entry(name, maker(name), _SIZES.get(name))
    for name in models.list_models(module=models.segmentation):
        aux = None if name.startswith("lraspp") else True  # a second result, which LR-ASPP does not have
        yield Entry(name, maker(name, weights_backbone=None, aux_loss=aux))
    for name in models.list_models(module=models.detection):
        yield Entry(f"{name}.backbone", maker(name, "backbone", weights_backbone=None))


def _timm(names: str) -> Iterator[Entry]:
    """Yield timm's networks; those of names with a tag of pretrained weights, such as resnet50.a1_in1k, too."""
    _define_operators()  # timm imports torchvision
    timm: Any = _imported(TIMM)
    tagged = [name for name in map(str.strip, names.split(",")) if "." in name and timm.is_model(name)]
    for name in (*timm.list_models(), *tagged):
        size = getattr(timm.get_pretrained_cfg(name), "input_size", None)
        yield Entry(
            name, _quietly(partial(timm.create_model, name)), item=None if size is None else tuple(size)
        )


def _define_operators() -> None:
    """Declare torchvision's own operators where its compiled half does not load, as beside a PyTorch without CUDA.

    Importing torchvision registers shapes for them, which fails if they do not exist. No network here calls them.
    """
    try:
        importlib.import_module(TORCHVISION)
    except RuntimeError as error:
        if _LIBRARIES or "torchvision::nms" not in str(error):
            return
        _LIBRARIES.append(torch.library.Library(TORCHVISION, "FRAGMENT"))
        for name in ("nms", "qnms"):
            _LIBRARIES[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except ImportError:
        return


def _callables(module: ModuleType, annotated: bool) -> Iterator[Entry]:
    """Yield public classes and functions that can be called without arguments, in the module's order.

    With `annotated`, only functions that are annotated to return a network: others may do anything when called.
    """
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    for name in names:
        made = getattr(module, name, None)
        if inspect.isclass(made):
            fits = issubclass(made, nn.Module)
        else:
            own = callable(made) and str(getattr(made, "__module__", "")).startswith(module.__name__)
            fits = own and (not annotated or _gives_network(made))
        if fits and callable(made) and _takes_nothing(made):
            yield Entry(name, _quietly(made))


def _item(name: str, made: Callable[..., Any]) -> tuple[int, ...] | None:
    """Return a constructor's `example_shape`, the shape of one item, if it has one."""
    given = getattr(made, "example_shape", None)
    if given is None:
        return None
    if not isinstance(given, tuple) or not all(type(size) is int and size > 0 for size in given):
        raise UnsupportedError(
            f"{name}.example_shape is {given!r}; it is a tuple of the sizes of one item, such as (3, 224, 224)"
        )
    return given


def _gives_network(make: Any) -> bool:
    """True if it is annotated to return a network."""
    try:
        called = make if inspect.isfunction(make) else type(make).__call__
        given = typing.get_type_hints(called).get("return")
    except Exception:  # annotations may name what is not there
        return False
    return inspect.isclass(given) and issubclass(given, nn.Module)


def _takes_nothing(make: Callable[..., Any]) -> bool:
    """True if it can be called without arguments."""
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # some of C's have no signature
        return False
    return all(each.default is not each.empty or each.kind in optional for each in parameters)


def _quietly(make: Callable[[], Any]) -> Callable[[], nn.Module]:
    """Return the constructor without its warnings about missing weights."""

    def made() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = make()
        if not isinstance(model, nn.Module):
            raise UnsupportedError(f"it gives a {type(model).__name__}, not an nn.Module")
        return model

    return made
