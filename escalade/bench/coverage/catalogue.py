"""Networks by the module that makes them: torchvision's, or those of any module of constructors."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from escalade.errors import UnsupportedError
from escalade.measure.refusal import reason

TORCHVISION = "torchvision"
_LIBRARIES: list[torch.library.Library] = []
"""Kept alive: an operator goes with the library that defines it."""
_SIZES = {"inception_v3": 299}
"""The networks that were made for images of another size than is usual."""


@dataclass(frozen=True)
class Entry:
    """A network that can be made."""

    name: str
    make: Callable[[], nn.Module]
    """Makes it with random weights."""
    size: int | None = None
    """The size of its images, where it was made for others than is usual."""
    item: tuple[int, ...] | None = None
    """The sizes of one item of a batch, where it says what it takes; without them, images."""


def entries(wanted: str, only: str | None = None) -> list[Entry]:
    """What `module` or `module:name,name` has; with `only`, the networks whose names that expression finds."""
    module, colon, names = wanted.partition(":")
    imported = None
    if module == TORCHVISION:
        found = _named(module, names, list(_torchvision())) if colon else list(_torchvision())
    else:
        imported = _imported(module)
        found = _named(module, names, list(_callables(imported))) if colon else list(_networks(imported))
    try:
        pattern = re.compile(only or "")
    except re.error as error:
        raise UnsupportedError(f"--only {only!r} is no regular expression: {error}") from error
    chosen = [entry for entry in found if pattern.search(entry.name)]
    if chosen and imported is not None:  # what is wrong with others is not asked
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
    """The networks of these names."""
    by_name = {entry.name: entry for entry in known}
    asked = [name.strip() for name in names.split(",") if name.strip()]
    missing = [name for name in asked if name not in by_name]
    if missing or not asked:
        raise UnsupportedError(
            f"{module} has no network {', '.join(missing) or names!r} that takes no arguments; it has "
            f"{', '.join(by_name) or 'none'}"
        )
    return [by_name[name] for name in asked]


def _imported(name: str) -> ModuleType:
    """The module, also from the folder that the command runs in."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and not (name == error.name or name.startswith(f"{error.name}.")):
            raise UnsupportedError(f"{name} cannot be imported: {reason(error)}") from error
        top = name.partition(".")[0]
        raise UnsupportedError(
            f"there is no module {name!r} here: a network is of torchvision, or of a module that Python finds; where "
            f"it is a package, `pip install {top}` may be what is missing"
        ) from error
    except Exception as error:  # whatever a module does when it is imported
        raise UnsupportedError(f"{name} cannot be imported: {reason(error)}") from error


def _torchvision() -> Iterator[Entry]:
    """Classification and segmentation, and the backbones of detectors: what is around those takes lists of images."""
    _define_operators()
    models: Any = _imported(f"{TORCHVISION}.models")
    for name in models.list_models(module=models):
        yield Entry(name, _quietly(partial(models.get_model, name, weights=None)), _SIZES.get(name))
    for name in models.list_models(module=models.segmentation):
        yield Entry(
            name,
            _quietly(
                partial(models.get_model, name, weights=None, weights_backbone=None, aux_loss=_aux(name))
            ),
        )
    for name in models.list_models(module=models.detection):
        yield Entry(f"{name}.backbone", _quietly(partial(_backbone, models, name)))


def _define_operators() -> None:
    """Declare torchvision's own operators where its compiled half does not load, as beside a PyTorch without CUDA.

    torchvision registers shapes for them when it is imported, which fails if they do not exist. No network here calls
    them.
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


def _aux(name: str) -> bool | None:
    """Segmentation networks have a second result, from halfway; LR-ASPP has none."""
    return None if name.startswith("lraspp") else True


def _backbone(models: Any, name: str) -> nn.Module:
    return models.get_model(name, weights=None, weights_backbone=None).backbone


def _networks(module: ModuleType) -> Iterator[Entry]:
    """What is known to be a network before it is called: a module's other functions may do anything."""
    for entry in _callables(module):
        made = getattr(module, entry.name)
        if inspect.isclass(made) or _gives_network(made):
            yield entry


def _callables(module: ModuleType) -> Iterator[Entry]:
    """What the module offers by name and can be called without arguments, in the order in which it has them."""
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    for name in names:
        made = getattr(module, name, None)
        if inspect.isclass(made):
            fits = issubclass(made, nn.Module)
        else:
            fits = callable(made) and str(getattr(made, "__module__", "")).startswith(module.__name__)
        if fits and callable(made) and _takes_nothing(made):
            yield Entry(name, _quietly(made))


def _item(name: str, made: Callable[..., Any]) -> tuple[int, ...] | None:
    """The sizes of one item of what it takes, where a constructor says them as its `example_shape`."""
    given = getattr(made, "example_shape", None)
    if given is None:
        return None
    if not isinstance(given, tuple) or not all(type(size) is int and size > 0 for size in given):
        raise UnsupportedError(
            f"{name}.example_shape is {given!r}; it is a tuple of the sizes of one item, such as (3, 224, 224)"
        )
    return given


def _gives_network(make: Callable[..., Any]) -> bool:
    """Whether its annotation says that it gives a network."""
    try:
        called = make if inspect.isfunction(make) else type(make).__call__
        given = typing.get_type_hints(called).get("return")
    except Exception:  # annotations may name what is not there
        return False
    return inspect.isclass(given) and issubclass(given, nn.Module)


def _takes_nothing(make: Callable[..., Any]) -> bool:
    """Whether it can be called without arguments."""
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # some of C's have no signature
        return False
    return all(each.default is not each.empty or each.kind in optional for each in parameters)


def _quietly(make: Callable[[], Any]) -> Callable[[], nn.Module]:
    """The constructor without its warnings, which are about weights that nobody asked for."""

    def made() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = make()
        if not isinstance(model, nn.Module):
            raise UnsupportedError(f"it gives a {type(model).__name__}, not an nn.Module")
        return model

    return made
