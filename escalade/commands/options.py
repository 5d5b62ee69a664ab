"""Options that several commands have, and lists as they are written on the command line."""

from __future__ import annotations

import pathlib
from enum import StrEnum
from typing import Annotated

import typer


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
    typer.Option("--problem", "-p", help="A problem such as 64to64_56_k3s1_b256; may be repeated."),
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
InputSeed = Annotated[int, typer.Option("--seed", help="Of the random inputs.")]
RecordsFile = Annotated[
    pathlib.Path | None, typer.Option("--json", help="Write the records to this file too.")
]
RecordsFolder = Annotated[
    pathlib.Path | None,
    typer.Option("--results", help="File the records under this folder, as FOLDER/<gpu>/<workload>.jsonl."),
]


def listed(given: list[str] | None) -> tuple[str, ...]:
    """`-b 1,8 -b 32` is three values; what is given and has none is a mistake, not the usual ones."""
    found = tuple(part.strip() for text in given or () for part in text.split(",") if part.strip())
    if given and not found:
        raise typer.BadParameter(f"{given[0]!r} names nothing; leave the option out for the usual ones")
    return found


def numbers(option: str, given: tuple[str, ...]) -> tuple[int, ...]:
    """The whole numbers that were given for an option."""
    for text in given:
        if not text.isdecimal():
            raise typer.BadParameter(f"{text!r} is no whole number", param_hint=option)
    return tuple(int(text) for text in given)
