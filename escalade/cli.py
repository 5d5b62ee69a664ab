"""Command line: the list of commands, and error reporting. Each command is a module of `escalade.commands`."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from escalade import interruption
from escalade.errors import EscaladeError
from escalade.terminal_text import printable
from escalade.version import VERSION

_CONTEXT = {"help_option_names": ["-h", "--help"]}
_MAX_SHOWN = 10**6
"""Largest upper bound of an option that its help shows."""
_KEPT_CHARACTERS = "\n\t"
"""Control characters allowed in messages; compiler errors span lines."""
COMMANDS = {
    "doctor": "Check this machine: GPU, driver, compilers, versions and caches. Report what does not work and how to "
    "fix it.",
    "demo": "Take a short tour: this machine, a ladder, a network compared with PyTorch, and one that trains.",
    "ladder": "Verify the rungs of an operation, then time them against PyTorch and the card's ceilings.",
    "verify": "Compare every rung on every problem with the float64 reference. Fails if a result is wrong.",
    "count": "Count the memory traffic and unit usage of every rung on the twin. Needs no GPU.",
    "precompile": "Compile the kernels of an operation into the cache, in parallel. Needs no GPU.",
    "cache": "Show the kernels cached on disk (count, size, last use), or remove them.",
    "build": "Save a network as one file with plans and machine code for given architectures. Needs no GPU.",
    "tune": "Measure every rung and config for the steps of networks, or for given problems, and save the fastest.",
    "bench": "Verify a network and its peers, then time them for every batch size and dtype in one run.",
    "layers": "Verify single convolutions and their peers, then time them interleaved, layer by layer.",
    "calls": "Time the CPU overhead of an operator call against PyTorch's, with and without gradients. Needs a GPU.",
    "coverage": "Compile every network of a module, verify it, count the steps left to PyTorch, and time it against "
    "PyTorch.",
    "measure": "Re-run benchmarks that are missing or no longer current, within a time budget.",
    "explain": "Show the plan of a network: each step, its kernel and why it was chosen, its lower bound, and "
    "fallbacks.",
    "check": "Time a network's plan against PyTorch, per step and in total. Fails if PyTorch is faster. Needs a GPU.",
    "profile": "Profile the kernels of a rung, a network or a training step: counters or times, and a diagnosis.",
    "classify": "Classify images with your own network. Fails if an image could not be read.",
    "evaluate": "Count a ResNet's correct predictions on labeled images, by dtype and for PyTorch. Fails if logits "
    "are off.",
    "train": "Train the autoencoder or a ResNet-18, with checkpoints that resume bit for bit.",
    "tables": "Write the tables and plots of README.md and docs from the records in results/.",
    "report": "Write all records as one HTML file: README's table and plots, then every network, layer and ladder.",
}
"""Summary of every command for `escalade --help`, equal to the first paragraph of its docstring."""
SUBCOMMANDS = {
    "bench": ("layers", "calls", "coverage", "check", "evaluate"),
    "cache": ("precompile",),
    "profile": ("count",),
    "report": ("tables",),
}
"""Commands that belong to another: `escalade bench layers`. `escalade layers`, as it was called, works too."""
PANELS = {
    "Use": ("doctor", "demo", "explain", "build", "classify", "train"),
    "Measure": ("bench", "ladder", "profile", "measure", "report"),
    "Develop": ("verify", "tune", "cache"),
}
"""Groups of commands in `escalade --help`, in their order."""
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}
PARENTS = {name: parent for parent, names in SUBCOMMANDS.items() for name in names}
_EXTRAS = {"matplotlib": "bench", "jinja2": "bench", "markdown_it": "bench", "markupsafe": "bench"}
"""Extra of pyproject.toml that installs a package."""
_resolved: list[str] = []
"""Commands that typer has looked up to run them."""


def _tidied(parameters: list[Any]) -> list[Any]:
    """Show no type for flags, `<int>` for `<int range>`, and no upper bound that only guards against overflow."""
    for one in parameters:
        if not hasattr(one, "display_type_rich"):  # older versions of typer, which show no type for flags
            continue
        is_flag, name, number_range = (
            getattr(one, "is_flag", False),
            one.display_type_rich,
            (one.min, one.max),
        )
        one.display_type_rich = partial(_type_name, name, is_flag)
        if number_range[1] is not None and number_range[1] > _MAX_SHOWN:
            one._get_number_range_help_str = partial(str, f"x>={number_range[0]:g}")
    return parameters


def _type_name(name: Callable[..., str | None], is_flag: bool, ctx: Any) -> str | None:
    found = None if is_flag else name(ctx=ctx)
    return found and found.replace(" range", "").replace("list[str]", "str")


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _tidied(super().get_params(ctx))


class _LazyGroup(TyperGroup):
    """Imports the module of a command when it runs."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _tidied(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if PARENTS.get("".join(args[1:2])) == args[0]:
            args = args[1:]
        name, placeholder, rest = super().resolve_command(ctx, args)
        _resolved.append(str(name))
        return path(str(name)), placeholder and _command(str(name)), rest


app = typer.Typer(
    cls=_LazyGroup,
    name="escalade",
    help="Convolutional-network kernels for NVIDIA GPUs, as ladders: every rung verified, then timed.",
    no_args_is_help=True,
    context_settings=_CONTEXT,
    pretty_exceptions_enable=False,
)


def path(name: str) -> str:
    """Return a command as it is typed: `bench layers`."""
    return f"{PARENTS[name]} {name}" if name in PARENTS else name


def _command(name: str) -> Any:
    """Import a command and return it as a click command."""
    single = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    further = [f"escalade {path(one)}: {COMMANDS[one]}" for one in SUBCOMMANDS.get(name, ())]
    single.command(path(name), cls=_Command, context_settings=_CONTEXT, epilog="\n\n".join(further))(
        importlib.import_module(f"escalade.commands.{name}").command
    )
    return typer.main.get_command(single)


def _placeholder() -> None:
    """Placeholder for a command that has not been imported."""


for _name in sorted(COMMANDS, key=lambda name: list(_PANEL_OF).index(PARENTS.get(str(name), str(name)))):
    _summary, _panel = COMMANDS[_name], _PANEL_OF[PARENTS.get(_name, _name)]
    _further = "".join(f" Also: {', '.join(names)}." for names in [SUBCOMMANDS.get(_name)] if names)
    app.command(_name, help=_summary + _further, hidden=_name in PARENTS, rich_help_panel=_panel)(
        _placeholder
    )


def _version(requested: bool) -> None:
    if requested:
        typer.echo(VERSION)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


def main() -> None:
    """Entry point. Escalade's own errors, and errors of files and memory, are reported as one sentence.

    Characters that the terminal cannot encode are printed as `?`. Ctrl-C ends every command within a second.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with interruption.watch_ctrl_c():
            app()
    except SystemExit as end:
        if _is_interrupted(end):  # leave without waiting for threads and subprocesses
            interruption.exit_now()
        if not end.code and _is_skipped():
            _end(f"typer did not run {sys.argv[1]}: the installed versions of typer and click are incompatible. "
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
        if not _is_out_of_memory(error):
            raise
        _end(f"out of memory ({(str(error).splitlines() or [type(error).__name__])[0]})")


def _end(sentence: str) -> None:
    typer.echo(f"escalade: {printable(sentence, keep=_KEPT_CHARACTERS)}", err=True)
    sys.exit(1)


def _is_skipped() -> bool:
    """Return True if the command never ran: typer < 0.15.4 with click >= 8.2 treats any command line as `--version`."""
    return sys.argv[1:2] != [] and sys.argv[1] in COMMANDS and not _resolved


def _is_interrupted(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _is_out_of_memory(error: Exception) -> bool:
    """Return True for out-of-memory errors of Python, of CUDA, and of PyTorch on the CPU (a plain RuntimeError)."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "not enough memory" in str(error)
