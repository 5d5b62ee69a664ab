"""Command-line options shared by several commands, and parsers for list values."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from escalade import files
from escalade.errors import UnsupportedError
from escalade.terminal_text import printable

MAX_COUNT = 2**31 - 1
MAX_SIDE = 8192
"""Most rows or columns of an image."""
MAX_SEED = 2**32 - 1
"""Largest seed that NumPy, PyTorch and Python all accept."""
_DAY = 24 * 3600.0


def count(
    *names: str, help: str, least: int = 1, most: int = MAX_COUNT, show_default: bool | str = True
) -> Any:
    """Return an integer option between `least` and `most`."""
    return typer.Option(*names, help=help, min=least, max=most, show_default=show_default)


def several(*names: str, help: str, default: str) -> Any:
    """Return an option that takes a list and may be repeated; `default` describes its default."""
    return typer.Option(*names, help=help, show_default=default)


def dtypes_option(default: str) -> Any:
    """Return an option for a list of dtypes, whose default is described by this text."""
    return typer.Option(
        "--dtype", "-t", help="fp32, tf32, fp16, bf16, int8 or fp8, such as fp16,tf32.", show_default=default
    )


def seed_option(help: str, *names: str, show_default: bool | str = True) -> Any:
    """Return an option for a random seed."""
    return typer.Option(*names, help=help, min=0, max=MAX_SEED, show_default=show_default)


def duration(help: str, show_default: bool | str = True) -> Any:
    """Return an option in seconds."""
    return typer.Option(help=help, min=0.0, max=_DAY, show_default=show_default)


def written(
    *names: str,
    help: str,
    endings: tuple[str, ...] = (),
    check: Callable[[pathlib.Path], None] = files.require_writable_file,
    show_default: bool = True,
) -> Any:
    """Return an option for an output path, which is checked for writability before the command runs."""

    def checked(value: pathlib.Path | None) -> pathlib.Path | None:
        if value is None:
            return None
        if endings and value.suffix not in endings:
            listed = " or ".join((", ".join(endings[:-1]), endings[-1]) if endings[1:] else endings)
            raise UnsupportedError(f"{printable(value)}: {names[0]} writes {listed} files")
        check(value)
        return value

    return typer.Option(*names, help=help, callback=checked, show_default=show_default)


def _require_records_file(path: pathlib.Path) -> None:
    from escalade_bench.measure import records

    records.require_file(path)


class KernelDevice(StrEnum):
    """Devices for running kernels."""

    cuda = "cuda"
    twin = "twin"


class NetworkDevice(StrEnum):
    """Devices for measuring networks."""

    cuda = "cuda"
    cpu = "cpu"


class EngineDevice(StrEnum):
    """Devices for running engines."""

    cuda = "cuda"
    cpu = "cpu"
    twin = "twin"


Operation = Annotated[str, typer.Argument(help="Operation, such as conv2d.", show_default=False)]
Model = Annotated[
    str,
    typer.Argument(
        help="A model such as resnet18, a constructor (MODULE:name, torchvision:name, timm:name), a .pt2 or .onnx "
        "file, a folder with config.json and weights, or a saved engine.",
        show_default=False,
    ),
]
PlannedDtype = Annotated[
    str | None, typer.Option("--dtype", "-t", help="fp32, tf32, fp16 or bf16.", show_default="fp16")
]
PlannedBatch = Annotated[int, count("--batch", "-b", help="Batch size to plan for.")]
Problems = Annotated[
    list[str] | None,
    typer.Option(
        "--problem",
        "-p",
        help="Problem such as 64to64_56_k3s1_b1; may be repeated.",
        show_default="some of the operation's",
    ),
]
Rungs = Annotated[
    list[str] | None,
    typer.Option(
        "--rung", "-r", help="Only these rungs, such as direct,tuned; may be repeated.", show_default="all"
    ),
]
Dtypes = Annotated[list[str] | None, dtypes_option("all")]
Layouts = Annotated[
    list[str] | None,
    typer.Option("--layout", "-l", help="nchw or nhwc; may be repeated.", show_default="all"),
]
KernelsOn = Annotated[
    KernelDevice | None,
    typer.Option(
        "--device",
        help="cuda, or twin (the kernels on the CPU). Default: cuda if there is a GPU.",
        show_default=False,
    ),
]
NetworkOn = Annotated[
    NetworkDevice | None,
    typer.Option(
        "--device",
        help="cuda, or cpu (PyTorch's operators). Default: cuda if there is a GPU.",
        show_default=False,
    ),
]
EngineOn = Annotated[
    EngineDevice | None,
    typer.Option(
        "--device",
        help="cuda, cpu (PyTorch's operators) or twin (the kernels on the CPU, slow). "
        "Default: cuda if there is a GPU, else cpu.",
        show_default=False,
    ),
]
ColorMean = Annotated[
    tuple[float, float, float] | None,
    typer.Option(
        "--mean",
        help="Mean of red, green and blue, from 0 to 1. Default: ImageNet's, or 0 for a CIFAR network.",
    ),
]
ColorStd = Annotated[
    tuple[float, float, float] | None,
    typer.Option(
        "--std",
        help="Standard deviation of red, green and blue. Default: ImageNet's, or 1 for a CIFAR network.",
    ),
]
InputSeed = Annotated[int, seed_option("Seed of the random inputs.", "--seed")]
RecordsFile = Annotated[
    pathlib.Path | None,
    written("--json", help="Also write the records to this file.", check=_require_records_file),
]
RecordsFolder = Annotated[
    pathlib.Path | None,
    written(
        "--results",
        help="File the records in this folder, under the name of the GPU, one file per workload.",
        check=files.require_writable_folder,
    ),
]


def listed(given: list[str] | None) -> tuple[str, ...]:
    """Split comma-separated values: `-b 1,8 -b 32` is three values. An option without any value is an error."""
    found = tuple(part.strip() for text in given or () for part in text.split(",") if part.strip())
    if given and not found:
        raise typer.BadParameter(f"{given[0]!r} has no value; leave the option out for the defaults")
    return found


def numbers(option: str, given: tuple[str, ...]) -> tuple[int, ...]:
    """Parse the positive integers passed to an option."""
    for text in given:
        if not (text.isascii() and text.isdecimal() and 1 <= int(text[:20]) <= MAX_COUNT):
            raise typer.BadParameter(f"{text!r} is not an integer from 1 to {MAX_COUNT:,}", param_hint=option)
    return tuple(int(text) for text in given)
