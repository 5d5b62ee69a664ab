"""Options that several commands have, and lists as they are written on the command line."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from escalade import files
from escalade.errors import UnsupportedError
from escalade.terminal_text import printable
from escalade_bench.measure import records

MOST = 2**31 - 1
"""The largest number that an option counts anything by."""
LARGEST_SIDE = 8192
"""The most rows or columns of an image."""
LARGEST_SEED = 2**32 - 1
"""The largest that every generator of random numbers takes."""
_DAY = 24 * 3600.0


def count(*names: str, help: str, least: int = 1, most: int = MOST, show_default: bool = True) -> Any:
    """An option that counts something."""
    return typer.Option(*names, help=help, min=least, max=most, show_default=show_default)


def several(*names: str, help: str) -> Any:
    """An option that takes a list and may be repeated."""
    return typer.Option(*names, help=help, show_default=False)


def seed_option(help: str, *names: str, show_default: bool = True) -> Any:
    """An option that random numbers are drawn by."""
    return typer.Option(*names, help=help, min=0, max=LARGEST_SEED, show_default=show_default)


def duration(help: str, show_default: bool = True) -> Any:
    """An option of seconds."""
    return typer.Option(help=help, min=0.0, max=_DAY, show_default=show_default)


def written(
    *names: str,
    help: str,
    endings: tuple[str, ...] = (),
    check: Callable[[pathlib.Path], None] = files.require_writable_file,
    show_default: bool = True,
) -> Any:
    """An option for a file or folder that a command writes: what cannot be written is refused before the run."""

    def place(value: pathlib.Path | None) -> pathlib.Path | None:
        if value is None:
            return None
        if endings and value.suffix not in endings:
            listed = " or ".join((", ".join(endings[:-1]), endings[-1]) if endings[1:] else endings)
            raise UnsupportedError(f"{printable(value)}: {names[0]} writes {listed} files")
        check(value)
        return value

    return typer.Option(*names, help=help, callback=place, show_default=show_default)


class KernelDevice(StrEnum):
    """The devices that kernels run on."""

    cuda = "cuda"
    twin = "twin"


class NetworkDevice(StrEnum):
    """The devices that networks are measured on."""

    cuda = "cuda"
    cpu = "cpu"


class EngineDevice(StrEnum):
    """The devices that engines run on."""

    cuda = "cuda"
    cpu = "cpu"
    twin = "twin"


Operation = Annotated[str, typer.Argument(help="The operation, such as conv2d.", show_default=False)]
Problems = Annotated[
    list[str] | None,
    typer.Option("--problem", "-p", help="A problem such as 64to64_56_k3s1_b1; may be repeated."),
]
Rungs = Annotated[list[str] | None, typer.Option("--rung", "-r", help="Only this rung; may be repeated.")]
Dtypes = Annotated[
    list[str] | None, typer.Option("--dtype", "-t", help="fp32, tf32, fp16, bf16 or fp8; may be repeated.")
]
Layouts = Annotated[list[str] | None, typer.Option("--layout", "-l", help="nchw or nhwc; may be repeated.")]
KernelsOn = Annotated[
    KernelDevice | None,
    typer.Option(
        "--device",
        help="cuda, or twin: the kernels on the CPU. Without it: cuda if there is a GPU.",
        show_default=False,
    ),
]
NetworkOn = Annotated[
    NetworkDevice | None,
    typer.Option(
        "--device",
        help="cuda, or cpu: PyTorch's operators. Without it: cuda if there is a GPU.",
        show_default=False,
    ),
]
EngineOn = Annotated[
    EngineDevice | None,
    typer.Option(
        "--device",
        help="cuda, cpu (PyTorch's operators) or twin (the kernels on the CPU: slow). "
        "Without it: cuda if there is a GPU, else cpu.",
        show_default=False,
    ),
]
ColourMean = Annotated[
    tuple[float, float, float] | None,
    typer.Option(
        "--mean",
        help="Of red, green and blue, from 0 to 1. Without it: ImageNet's, or 0 for a CIFAR network.",
    ),
]
ColourDeviation = Annotated[
    tuple[float, float, float] | None,
    typer.Option(
        "--std", help="Their standard deviations. Without it: ImageNet's, or 1 for a CIFAR network."
    ),
]
InputSeed = Annotated[int, seed_option("Of the random inputs.", "--seed")]
RecordsFile = Annotated[
    pathlib.Path | None,
    written("--json", help="Write the records to this file too.", check=records.require_file),
]
RecordsFolder = Annotated[
    pathlib.Path | None,
    written(
        "--results",
        help="File the records under this folder, in one of the GPU's name: a file a workload.",
        check=files.require_writable_folder,
    ),
]


def listed(given: list[str] | None) -> tuple[str, ...]:
    """`-b 1,8 -b 32` is three values; what is given and has none is a mistake, not the usual ones."""
    found = tuple(part.strip() for text in given or () for part in text.split(",") if part.strip())
    if given and not found:
        raise typer.BadParameter(f"{given[0]!r} names nothing; leave the option out for the usual ones")
    return found


def numbers(option: str, given: tuple[str, ...]) -> tuple[int, ...]:
    """The numbers, of something that there is at least one of, that were given for an option."""
    for text in given:
        if not (text.isascii() and text.isdecimal() and 1 <= int(text[:20]) <= MOST):
            raise typer.BadParameter(f"{text!r} is no whole number from 1 to {MOST:,}", param_hint=option)
    return tuple(int(text) for text in given)
