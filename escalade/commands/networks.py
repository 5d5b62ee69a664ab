"""Resolve the network argument of a command: a model name, a constructor, a model's file, or a saved engine."""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from escalade import models
from escalade.device import host_memory
from escalade.engine import compile, load
from escalade.engine.engine import Engine
from escalade.engine.graph.graph import fixed_shape
from escalade.engine.graph.trees import flatten
from escalade.engine.programs import MODEL_FILES, is_model_file, read_model
from escalade.engine.settings import DEFAULT_PLANS
from escalade.errors import UnsupportedError
from escalade.models.registry import SEED
from escalade.models.weight_files import load_weights, read_tensors
from escalade.ops.base.dtypes import QUANTIZED
from escalade.terminal_text import printable
from escalade_apps.classify.preparation import Normalization
from escalade_bench.coverage.catalogue import entries

KINDS = (
    f"a model ({', '.join(models.MODELS)}), a constructor (module:name, torchvision:name, timm:name), {MODEL_FILES} "
    "nor the file of a saved engine"
)
"""Supported networks, to complete a sentence with `neither`."""
_CONSTRUCTOR = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.-]*")
_IMAGE = (3, 224, 224)
"""Default input of a constructor's network."""
Normalizing = Callable[[Sequence[int]], Normalization]


@dataclass(frozen=True)
class Uncompiled:
    """PyTorch network with example inputs."""

    model: torch.nn.Module | torch.export.ExportedProgram
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def inputs(self, batch: int, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `batch` copies of the first item on a device."""

        def repeated(tensor: torch.Tensor) -> torch.Tensor:
            return (torch.cat([tensor[:1]] * batch) if tensor.dim() > 1 else tensor).to(device)

        tensors, structure = flatten((self.arguments, dict(self.keywords)))
        return pytree.tree_unflatten(map(repeated, tensors), structure)


def is_network(name: str) -> bool:
    """Return True if the name has the form of a network."""
    return name in models.MODELS or bool(_CONSTRUCTOR.fullmatch(name)) or pathlib.Path(name).exists()


def is_saved(name: str) -> bool:
    """Return True if the name has the form of an engine file."""
    return name not in models.MODELS and not is_model_file(name) and pathlib.Path(name).is_file()


def uncompiled(name: str) -> Uncompiled | None:
    """Return a model with random weights, or one from a file; None for a saved engine."""
    if name in models.MODELS:
        model, x = models.model(name)
        return Uncompiled(model, (x,), {})
    if is_model_file(name):
        file = read_model(name)
        return Uncompiled(file.model, file.require_arguments(), file.keywords)
    if _CONSTRUCTOR.fullmatch(name) and not is_saved(name):
        (entry,) = entries(name)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(SEED)
            side = entry.size or _IMAGE[-1]
            x = torch.randn(1, *(entry.item or (_IMAGE[0], side, side)))
            return Uncompiled(entry.make().eval(), (x,), {})
    return None


def network(
    name: str,
    batch: int,
    dtype: str | None,
    device: str,
    *,
    measured: bool = False,
    plans: int = DEFAULT_PLANS,
    normalize: Normalizing | None = None,
    weights: pathlib.Path | None = None,
) -> tuple[Engine, tuple[torch.Tensor, ...]]:
    """Compile or load a network. Return its engine and inputs for it.

    `normalize` returns the normalization for the shape of the network's input; `weights` is a file with weights for a
    network that is made by name.
    """
    home = torch.device("cpu" if device == "twin" else device)
    if not is_network(name) and not is_model_file(name):  # a missing file is reported by its reader
        raise UnsupportedError(f"{name!r} is neither {KINDS}")
    found = uncompiled(name)
    if weights is not None:
        _load_weights(name, found, weights)
    if found is None:
        engine = load(name, device=device, measured=measured, plans=plans)
        if dtype not in (None, engine.dtype):
            raise UnsupportedError(
                f"{name} was compiled for {engine.dtype}, not {dtype}; compile its model again for {dtype}"
            )
        return engine, inputs_of(engine, name, batch, home)
    dtype = dtype or "fp16"
    host_memory.require(batch * _bytes(found.arguments), f"{name} for a batch of {batch:,}")
    arguments, keywords = found.inputs(batch, home)
    engine = compile(
        found.model, arguments, keywords, dtype=dtype, device=device, measured=measured, plans=plans,
        calibration=[arguments] if dtype in QUANTIZED else None,
        normalize=None if normalize is None else normalize(arguments[0].shape),
    )  # fmt: skip
    return engine, engine.flatten(arguments, keywords)


def _load_weights(name: str, found: Uncompiled | None, weights: pathlib.Path) -> None:
    if found is None or is_model_file(name) or isinstance(found.model, torch.export.ExportedProgram):
        raise UnsupportedError(f"{name} has its own weights; leave out --weights")
    load_weights(found.model, read_tensors(weights), printable(weights))


def inputs_of(engine: Engine, name: str, batch: int, home: torch.device) -> tuple[torch.Tensor, ...]:
    """Return zero inputs for an engine."""
    needed = sum(math.prod(fixed_shape(each.shape, batch)) for each in engine.graph.inputs)
    host_memory.require(needed, f"{name} for a batch of {batch:,}")
    return tuple(
        torch.zeros(fixed_shape(each.shape, batch), dtype=getattr(torch, each.dtype), device=home)
        for each in engine.graph.inputs
    )


def _bytes(arguments: Sequence[Any]) -> int:
    return sum(leaf[:1].nbytes for leaf in arguments if isinstance(leaf, torch.Tensor) and leaf.dim())
