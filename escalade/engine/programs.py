"""Read models from files: programs of `torch.export` (.pt2), ONNX files, and folders in Hugging Face's layout."""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from escalade.engine.capture.muted_logs import muted
from escalade.engine.graph.aten import RANDOM_UNLESS
from escalade.errors import UnsupportedError
from escalade.terminal_text import first_line

logger = logging.getLogger("escalade")

SUFFIX = ".pt2"
ONNX_SUFFIX = ".onnx"
SUFFIXES = (SUFFIX, ONNX_SUFFIX)
"""Suffixes of the files that models are read from."""
MODEL_FILES = (
    f"a {SUFFIX} file from torch.export, an {ONNX_SUFFIX} file, a folder with config.json and weights"
)
"""Files that models are read from, to complete a sentence with."""
_STATISTICS = {"batch_norm": "training", "instance_norm": "use_input_stats"}
"""Operators that compute batch statistics if this argument is true, and use running statistics otherwise."""
_COUNTS = "num_batches_tracked"
"""The buffer in which normalization modules count training batches."""


@dataclass(frozen=True)
class ModelFile:
    """A model from a file, with the inputs that it was exported with or that its file describes."""

    model: torch.nn.Module | torch.export.ExportedProgram
    arguments: tuple[Any, ...] | None
    """None for a program without example inputs."""
    keywords: Mapping[str, Any]

    def require_arguments(self) -> tuple[Any, ...]:
        if self.arguments is None:
            raise UnsupportedError("the program has no example inputs; pass example_inputs to compile")
        return self.arguments


def is_model_file(path: str | os.PathLike[str]) -> bool:
    """Return True if a path can be a model: a file with a known suffix, or a folder."""
    return pathlib.Path(path).suffix in SUFFIXES or os.path.isdir(path)


def read_model(path: str | os.PathLike[str]) -> ModelFile:
    """Read a model from a .pt2 file, an .onnx file, or a folder in Hugging Face's layout."""
    file = pathlib.Path(path)
    if file.suffix == SUFFIX:
        return of_program(read_program(file))
    if file.suffix == ONNX_SUFFIX:
        from escalade.models.onnx_import.reader import read_onnx

        read = read_onnx(file)
        return ModelFile(read.module, read.example, {})
    if file.is_dir():
        from escalade.models.folder import read_folder

        model, x = read_folder(file)
        return ModelFile(model, (x,), {})
    raise UnsupportedError(
        f"compile takes a model, {MODEL_FILES}, not {file}; read saved engines with escalade.load"
    )


def of_program(program: torch.export.ExportedProgram) -> ModelFile:
    """Return a program with the positional and keyword arguments that it was exported with."""
    example = program.example_inputs
    return ModelFile(program, *((None, {}) if example is None else (tuple(example[0]), dict(example[1]))))


def read_program(path: str | os.PathLike[str]) -> torch.export.ExportedProgram:
    """Read a file written by `torch.export.save`. PyTorch's reader trusts its contents."""
    file = pathlib.Path(path)
    if not file.is_file():
        raise UnsupportedError(f"there is no file {file}")
    try:
        with muted(torch.export.__name__):
            return torch.export.load(file)
    except Exception as error:  # PyTorch's reader raises exceptions of many types
        raise UnsupportedError(
            f"{file} was not written by torch.export.save, or is damaged: {first_line(error)}"
        ) from error


def module_of(program: torch.export.ExportedProgram) -> torch.nn.Module:
    """Return the program as a module, without guards on the example's sizes, in evaluation mode."""
    module = program.module(check_guards=False)
    parts = [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
    if any([_set_eval_mode(part) for part in parts]):
        logger.warning(
            "the program was exported in training mode; it is compiled as in evaluation mode, without dropout and with "
            "running statistics in batch norms"
        )
    return module


def _set_eval_mode(part: torch.fx.GraphModule) -> bool:
    """Switch every operator with a training mode to evaluation mode; return True if any was in training mode."""
    trained = False
    for node in part.graph.nodes:
        if not isinstance(operator := node.target, torch._ops.OpOverload):
            continue
        name = operator._schema.name.removeprefix("aten::")
        arguments = {argument.name: argument.default_value for argument in operator._schema.arguments}
        arguments |= dict(zip(arguments, node.args, strict=False)) | node.kwargs
        if name in _STATISTICS and arguments["running_mean"] is None:
            continue  # without running statistics it computes them in either mode
        if switch := RANDOM_UNLESS.get(name, _STATISTICS.get(name)):
            if arguments.get(switch):
                _set_argument(
                    node,
                    list(arguments).index(switch),
                    switch,
                    0.0 if type(arguments[switch]) is float else False,
                )
                trained = True
        elif name == "add_" and _is_count(arguments["self"]) and not node.users:
            part.graph.erase_node(node)
            trained = True
    if trained:
        part.recompile()
    return trained


def _set_argument(node: torch.fx.Node, position: int, name: str, value: Any) -> None:
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)


def _is_count(value: Any) -> bool:
    return isinstance(value, torch.fx.Node) and value.op == "get_attr" and str(value.target).endswith(_COUNTS)
