"""Programs of `torch.export` (.pt2) in a model's place."""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import torch

from escalade.engine.capture.muted_logs import muted
from escalade.engine.graph.aten import RANDOM_UNLESS
from escalade.errors import UnsupportedError

logger = logging.getLogger("escalade")

SUFFIX = ".pt2"
_STATISTICS = {"batch_norm": "training", "instance_norm": "use_input_stats"}
"""Operators that use and change statistics where this argument is true, and those that they have where it is not."""
_COUNTS = "num_batches_tracked"
"""The buffer in which modules count the batches that their statistics are of."""


def read_program(path: str | os.PathLike[str]) -> torch.export.ExportedProgram:
    """The program of a file that `torch.export.save` has written; PyTorch reads it, and trusts whoever wrote it."""
    place = pathlib.Path(path)
    if place.suffix != SUFFIX:
        raise UnsupportedError(
            f"compile takes a model, or the {SUFFIX} file of a program of torch.export, not {place}; an engine that "
            "was saved is read by escalade.load"
        )
    if not place.is_file():
        raise UnsupportedError(f"there is no file {place}")
    try:
        with muted(torch.export.__name__):
            return torch.export.load(place)
    except Exception as error:  # whatever its reader stumbles over
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(
            f"{place} is no program that torch.export.save has written, or is damaged: {said}"
        ) from error


def module_of(program: torch.export.ExportedProgram) -> torch.nn.Module:
    """The program as a module that takes other sizes than those of its example too, where its operations do.

    One that was exported in training mode computes what it would in evaluation mode, as a model does that is compiled.
    """
    module = program.module(check_guards=False)
    parts = [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
    if any([_evaluating(part) for part in parts]):
        logger.warning(
            "the program was exported in training mode; its dropout draws nothing, and its batch norms use the "
            "statistics that they have, as in evaluation mode"
        )
    return module


def example_of(program: torch.export.ExportedProgram) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The inputs that the program was exported with, in order and by name."""
    given = program.example_inputs
    if given is None:
        raise UnsupportedError("the program has no example inputs: give compile some like those to come")
    return tuple(given[0]), dict(given[1])


def _evaluating(part: torch.fx.GraphModule) -> bool:
    """Puts every operator that has a mode into that of evaluation; whether one was not."""
    trained = False
    for node in part.graph.nodes:
        if not isinstance(operator := node.target, torch._ops.OpOverload):
            continue
        name = operator._schema.name.removeprefix("aten::")
        given = {argument.name: argument.default_value for argument in operator._schema.arguments}
        given |= dict(zip(given, node.args, strict=False)) | node.kwargs
        if name in _STATISTICS and given["running_mean"] is None:
            continue  # it has none of its own, and computes them in either mode
        if switch := RANDOM_UNLESS.get(name, _STATISTICS.get(name)):
            if given.get(switch):
                _give(node, list(given).index(switch), switch, 0.0 if type(given[switch]) is float else False)
                trained = True
        elif name == "add_" and _is_count(given["self"]) and not node.users:
            part.graph.erase_node(node)
            trained = True
    if trained:
        part.recompile()
    return trained


def _give(node: torch.fx.Node, place: int, name: str, value: Any) -> None:
    if place < len(node.args):
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)


def _is_count(value: Any) -> bool:
    return isinstance(value, torch.fx.Node) and value.op == "get_attr" and str(value.target).endswith(_COUNTS)
