"""The command line: the list of commands, and how errors are told. Each command is a module of `escalade.commands`."""

from __future__ import annotations

import importlib
import io
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from escalade import interruption
from escalade.errors import EscaladeError
from escalade.terminal_text import printable
from escalade.version import VERSION

_CONTEXT = {"help_option_names": ["-h", "--help"]}
_LINES = "\n\t"
"""What a message may have in it: compilers' have lines."""
COMMANDS = {
    "doctor": "What is here: GPU, driver, compilers, versions, caches; what will and will not work, and what to do "
    "about it.",
    "demo": "A first look: this machine, a ladder, a network that is compared with PyTorch's, and one that learns.",
    "ladder": "Verify the rungs of an operation, then time them beside PyTorch and the card's ceilings.",
    "verify": "Every rung on every problem against the float64 reference. Fails if any result is wrong.",
    "count": "What every rung asks of memory and of each unit, counted on the twin. Needs no GPU.",
    "precompile": "Compile the kernels of an operation into the cache, in parallel. Needs no GPU.",
    "cache": "The kernels that are kept on disk: how many, how large and when they were used last; clears them.",
    "build": "A network as one file with plans and machine code for named architectures. Needs no GPU.",
    "tune": "Measure every rung and config for the steps of networks, or for problems, and remember the fastest.",
    "bench": "Verify a network and its peers, then time them for every batch size and dtype in one run.",
    "layers": "Verify single convolutions and their peers, then time them in turns, layer by layer.",
    "calls": "Time what a call of an operator costs the CPU beside PyTorch's, alone and with its gradients. Needs "
    "a GPU.",
    "coverage": "Compile every network of a module, verify it, count what PyTorch computes of it, and time it beside "
    "PyTorch.",
    "measure": "Re-run benchmarks that are missing or no longer current, within a time budget.",
    "explain": "The plan of a network: each step, the kernel chosen and why, its least cost, what falls back to "
    "PyTorch.",
    "check": "A network's plan beside PyTorch, step by step and as a whole. Fails if PyTorch is faster; needs a GPU.",
    "profile": "Profile the kernels of a rung, a network or a training step: counters or times, and a diagnosis.",
    "classify": "What is on images, by a network that you have. Fails at the end if an image could not be read.",
    "evaluate": "Count a ResNet's right answers on labelled images, per dtype beside PyTorch's fp32. Fails if logits "
    "are off.",
    "train": "Train a network: the autoencoder or a ResNet-18, with checkpoints that a run goes on from bit for bit.",
    "tables": "Write the tables and plots of README.md and docs from the records in results/.",
    "report": "Write all records as one HTML file: README's table and plots, then every network, layer and ladder.",
}
"""Every command, with what `escalade --help` says of it: the opening of its docstring."""


_EXTRAS = {"matplotlib": "bench", "jinja2": "bench", "markdown_it": "bench", "markupsafe": "bench"}
"""The extra of pyproject.toml that brings a package."""
_resolved: list[str] = []
"""Names of commands that typer has looked up to run them."""


class _OnDemand(TyperGroup):
    """Commands whose modules are imported when called: PyTorch takes seconds, and `--help` needs none of it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, placeholder, rest = super().resolve_command(ctx, args)
        _resolved.append(str(name))
        return name, placeholder and _command(str(name)), rest


app = typer.Typer(
    cls=_OnDemand,
    name="escalade",
    help="Convolutional-network kernels for NVIDIA GPUs, as ladders: every rung verified, then timed.",
    no_args_is_help=True,
    context_settings=_CONTEXT,
    pretty_exceptions_enable=False,
)


def _command(name: str) -> Any:
    """The function `command` of the module of that name, with its options."""
    alone = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    alone.command(name, context_settings=_CONTEXT)(
        importlib.import_module(f"escalade.commands.{name}").command
    )
    return typer.main.get_command(alone)


def _placeholder() -> None:
    """Stands in the list of commands until one is called."""


for _name, _summary in COMMANDS.items():
    app.command(_name, help=_summary)(_placeholder)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(VERSION)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it.")
    ] = False,
) -> None: ...


def main() -> None:
    """The entry point: an error that Escalade raises on purpose is one sentence, not a traceback.

    So is what a machine refuses: memory, files, room on a disk. What a terminal cannot spell is shown as `?`. Ctrl-C
    ends every command within a second.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with interruption.watch_ctrl_c():
            app()
    except SystemExit as end:
        if _is_interrupted(end):  # without waiting for threads, and programs that they wait for
            interruption.exit_now()
        if not end.code and _is_skipped():
            _end(f"typer did not run {sys.argv[1]}; its version and that of click do not work together. "
                 "Install newer ones with: pip install --upgrade typer click")  # fmt: skip
        raise
    except EscaladeError as error:
        _end(str(error))
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        _end(f"{error.name} is not installed: pip install 'escalade[{extra}]'")
    except OSError as error:
        _end(": ".join(filter(None, (error.filename, error.strerror or str(error)))))
    except (MemoryError, RuntimeError) as error:
        if not _is_of_memory(error):
            raise
        _end(
            f"there is not enough memory for that ({(str(error).splitlines() or [type(error).__name__])[0]})"
        )


def _end(sentence: str) -> None:
    typer.echo(f"escalade: {printable(sentence, keep=_LINES)}", err=True)
    sys.exit(1)


def _is_skipped() -> bool:
    """True if the command line names a command that never ran. typer < 0.15.4 with click >= 8.2 takes any command line
    for `--version`, and a script would take that for success."""
    return sys.argv[1:2] != [] and sys.argv[1] in COMMANDS and sys.argv[1] not in _resolved


def _is_interrupted(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _is_of_memory(error: Exception) -> bool:
    """Whether it says that memory was refused: Python's error, CUDA's in PyTorch, or that of PyTorch on the CPU."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "not enough memory" in str(error)
