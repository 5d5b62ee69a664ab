"""Programs of `torch.export` (.pt2) in a model's place."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import torch

from escalade.errors import UnsupportedError

SUFFIX = ".pt2"


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
        return torch.export.load(place)
    except Exception as error:  # whatever its reader stumbles over
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(
            f"{place} is no program that torch.export.save has written, or is damaged: {said}"
        ) from error


def module_of(program: torch.export.ExportedProgram) -> torch.nn.Module:
    """The program as a module that takes other sizes than those of its example too, where its operations do."""
    return program.module(check_guards=False)


def example_of(program: torch.export.ExportedProgram) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The inputs that the program was exported with, in order and by name."""
    given = program.example_inputs
    if given is None:
        raise UnsupportedError("the program has no example inputs: give compile some like those to come")
    return tuple(given[0]), dict(given[1])
