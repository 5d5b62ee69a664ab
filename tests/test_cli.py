"""The command line: its output, its files, and its exit status."""

from __future__ import annotations

import importlib
import inspect
import os
import pathlib
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from escalade import cli
from escalade.commands import bench
from escalade_apps.train.tasks import TASKS
from escalade_bench.calls import CALLS
from escalade_bench.networks.workloads import WORKLOADS
from escalade_bench.peers.registry import LAYERS, NETWORKS
from escalade_bench.report import plots
from tests import fresh
from tests.commands.support import run, said_by

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("ladder", "conv9d"), "unknown operation 'conv9d'"),
        (("verify", "conv2d", "--rung", "nosuch", "--device", "twin"), "conv2d has no rung 'nosuch'"),
        (("verify", "conv2d", "--dtype", "int4", "--device", "twin"), "dtype 'int4': supported are"),
        (("ladder", "conv2d", "--problem", "huge", "--device", "twin"), "'huge' does not name a convolution"),
        (("tables", "--root", "nowhere"), "there is no nowhere/README.md"),
        (("precompile", "conv2d", "--arch", "banana"), "architecture 'banana': supported are sm_80"),
        (
            ("precompile", "conv2d", "--arch", "sm_90", "--rung", "direct"),
            "architecture 'sm_90': supported are",
        ),
        (("tune", "resnet18", "--dtype", "fp15"), "fp15"),
        (("tune", "conv2d", "--problem", "8to8_9_k3s1_b1", "--dtype", "fp15"), "conv2d with dtype 'fp15'"),
        (("tune", "conv2d", "--problem", "8to8_9_k3s1_b1", "--layout", "nwhc"), "layout 'nwhc'"),
        (("bench", "lenet", "--parts", "nosuch", "--device", "cpu"), "lenet has no part 'nosuch'"),
        (("explain", "nosuch"), "'nosuch' is neither a model"),
        (("explain", "nosuch.onnx"), "there is no file nosuch.onnx"),
        (("classify", ".", "--weights", "nosuch.pth", "--dtype", "fp15"), "fp15"),
    ],
)
def test_mistakes_are_answered_by_one_sentence(
    arguments: tuple[str, ...],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["escalade", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr().err.strip()
    assert end.value.code == 1
    assert sentence in said and len(said.splitlines()) == 1


def test_a_package_of_an_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def needing(package: str) -> None:
        raise ModuleNotFoundError(f"No module named '{package}'", name=package)

    monkeypatch.setattr(cli, "app", lambda: needing("matplotlib.figure"))
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1 and "pip install 'escalade[bench]'" in capsys.readouterr().err
    monkeypatch.setattr(cli, "app", lambda: needing("nosuch"))
    with pytest.raises(ModuleNotFoundError):
        cli.main()


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "lenet", "--batch", ","),
        ("bench", "lenet", "--dtype", ""),
        ("layers", "resnet18", "--batch", " , "),
        ("tune", "resnet18", "--batch", ""),
    ],
)
def test_an_option_that_names_nothing_is_a_mistake(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and "has no value" in result.output


def test_a_command_that_was_not_run_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with versions of typer and click that read every command line as `--version`."""

    def exit_early() -> None:
        raise SystemExit(0)

    monkeypatch.setattr(cli, "_resolved", [])
    monkeypatch.setattr(cli, "app", exit_early)
    for arguments, code in ((["verify", "conv2d"], 1), (["--version"], 0), ([], 0)):
        monkeypatch.setattr(sys, "argv", ["escalade", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == code, arguments
    assert "typer did not run verify" in capsys.readouterr().err


def test_the_requested_command_runs(tmp_path: pathlib.Path) -> None:
    """With the installed typer and click: the command's own output, and flags default to off."""
    environment = {**os.environ, "ESCALADE_CACHE_DIR": str(tmp_path / "cache")}
    plain, clear = (
        subprocess.run(
            [sys.executable, "-m", "escalade", "cache", *flags],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
        ).stdout
        for flags in ((), ("--clear",))
    )  # fmt: skip
    assert str(tmp_path) in plain and plain != clear


def test_the_module_runs_as_a_program_and_shows_no_traceback() -> None:
    done = fresh.python("-m", "escalade", "ladder", "conv9d")
    assert done.returncode == 1
    assert done.stderr.startswith("escalade: unknown operation 'conv9d'") and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_has_room_on_a_narrow_terminal(command: str) -> None:
    if int(version("rich").split(".")[0]) < 15:
        pytest.skip("rich before 15 crops words that are wider than their column")
    result = run(command, "--help", columns=80)
    assert result.exit_code == 0 and "…" not in result.output


def test_help_and_version_do_not_load_pytorch() -> None:
    probe = "import sys, escalade, escalade.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], cwd=ROOT).returncode == 0
    shown = subprocess.run([sys.executable, "-m", "escalade", "--version"], cwd=ROOT, capture_output=True)
    assert shown.stdout.strip()


HELP = """
import sys
from typer.testing import CliRunner
from escalade import cli

for name in cli.COMMANDS:
    result = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "300"})
    slow = {"numpy", "torch", "matplotlib"} & sys.modules.keys()
    if result.exit_code or slow or "<bool>" in result.output or "2147483647" in result.output:
        sys.exit(f"{name}: {slow} {result.output}")
"""


def test_help_of_every_command_loads_nothing_slow() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_commands_are_grouped_in_help() -> None:
    shown = run("--help", columns=100).output
    order = [name for names in cli.PANELS.values() for name in names]
    assert sorted(order) == sorted(cli.COMMANDS.keys() - cli.PARENTS.keys())
    for words in (list(cli.PANELS), order):
        places = [re.search(rf"^(│ |╭─ ){word} ", shown, re.MULTILINE) for word in words]
        assert all(places) and [one.start() for one in places if one] == sorted(
            one.start() for one in places if one
        )


WITHOUT_DEFAULT = {
    *(
        "--against",
        "--budget",
        "--csv",
        "--gpu",
        "--json",
        "--judge",
        "--labels",
        "--limit",
        "--network",
        "--only",
    ),
    *("--output", "--plot", "--ray", "--results", "--sweep", "--trace", "--weights"),
}
"""Options that do nothing unless they are given."""


def test_help_shows_every_default() -> None:
    """As a value, or in words if it depends on something else."""
    for name in cli.COMMANDS:
        for option in cli._command(name).params:
            if option.param_type_name == "option" and option.default is None and not option.required:
                told = isinstance(option.show_default, str) or "Default: " in option.help
                assert told or option.opts[0] in WITHOUT_DEFAULT, (name, option.opts[0], option.help)


def test_help_lists_every_choice() -> None:
    """Lists in help are literal, since their modules are slow to import."""
    names = [peer for workload in WORKLOADS.values() for peer in workload.peers]
    for command, wanted in (("bench", names), ("layers", LAYERS), ("coverage", NETWORKS), ("calls", CALLS)):
        shown = " ".join(run(command, "--help", columns=300).output.split())
        assert all(f"{name}" in shown for name in wanted), command
    assert bench.PICTURES == plots.PICTURES
    help_of = {option.name: option.show_default for option in cli._command("train").params}
    for task in TASKS.values():
        for name, value in task.defaults.items():
            told = f"{value:g}" if isinstance(value, float) else str(value)
            assert name == "flip" or told in str(help_of[name]), (task.name, name, value, help_of[name])


def test_importing_everything_does_not_touch_cuda() -> None:
    probe = (
        "import torch, escalade, escalade.ops, escalade.commands.ladder, escalade_bench.report.tables, sys;"
        "import escalade.commands.doctor;"
        "sys.exit(torch.cuda.is_initialized())"
    )
    assert fresh.python("-c", probe).returncode == 0


NETWORK = """
import sys, torch

with_torch = set(sys.modules)
import escalade
from torch import nn

layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)
model = nn.Sequential(*layers).eval()
engine = escalade.compile(model, torch.ones(2, 3, 8, 8))
x = torch.ones(3, 3, 8, 8)
if not torch.allclose(engine(x), model(x), atol=1e-5):
    sys.exit("it computes something else")
print(*sys.modules.keys() - with_torch)
"""
LATE = {
    "PIL",
    "cuda.bindings",
    "escalade.engine.training",
    "escalade.models",
    "jinja2",
    "matplotlib",
    "rich",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.export._trace",
    "typer",
}
"""Modules that are slow to load, besides PyTorch itself, and not needed to compile a network."""


def test_compiling_a_network_loads_only_needed_modules() -> None:
    done = fresh.python("-c", NETWORK)
    loaded = set(done.stdout.split())
    assert done.returncode == 0 and "escalade.engine.compiler" in loaded, done.stderr
    assert LATE & loaded == set()


def test_the_list_of_commands_matches_their_docstrings() -> None:
    """Otherwise `escalade --help` and `escalade COMMAND --help` would differ."""
    for name, summary in cli.COMMANDS.items():
        command = importlib.import_module(f"escalade.commands.{name}").command
        assert inspect.cleandoc(command.__doc__).partition("\n\n")[0] == summary, name


def test_a_command_is_suggested_for_one_that_there_is_not() -> None:
    result = run("ladders")
    assert result.exit_code == 2 and "Did you mean" in result.output and "'ladder'" in result.output


@pytest.mark.parametrize("name", cli.PARENTS)
def test_a_subcommand_runs_by_its_path_and_by_its_old_name(name: str) -> None:
    asked = [run(*words, "--help", columns=80).output for words in (cli.path(name).split(), [name])]
    assert asked[0] == asked[1] and f"escalade {cli.path(name)} " in " ".join(asked[0].split())
    assert cli.COMMANDS[name].split(".")[0] in " ".join(
        run(cli.PARENTS[name], "--help", columns=300).output.split()
    )


WITHOUT_GPU = {
    "bench": ("lenet", "--device", "cuda"),
    "calls": ("conv2d",),
    "check": ("lenet",),
    "classify": ("nowhere", "--weights", "nothing", "--device", "cuda"),
    "coverage": ("torchvision", "--device", "cuda"),
    "evaluate": ("resnet18", "-w", "nothing", "-d", "nowhere", "--device", "cuda"),
    "explain": ("lenet", "--device", "cuda"),
    "ladder": ("conv2d", "--device", "cuda"),
    "layers": ("resnet18", "--device", "cuda"),
    "measure": ("calls",),
    "profile": ("conv2d", "--device", "cuda"),
    "train": ("autoencoder", "--device", "cuda"),
    "tune": ("lenet",),
    "verify": ("conv2d", "--device", "cuda"),
}


@pytest.mark.parametrize("name", WITHOUT_GPU)
def test_options_that_are_suggested_exist(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    """Return the output of a command without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = said_by(name, *WITHOUT_GPU[name], monkeypatch=monkeypatch, capsys=capsys)
    assert "GPU" in said and set(re.findall(r"--[a-z-]+", said)) <= options_of(name), said


def test_a_list_of_rungs_is_one_option_everywhere() -> None:
    given = ("relu", "--problem", "relu6_7", "--rung", "naive,vectorised", "--dtype", "fp32,fp16")
    assert "--rung" not in {flag for name in cli.COMMANDS.keys() - WITH_RUNGS for flag in options_of(name)}
    for name in WITH_RUNGS - {"profile"}:
        result = run(
            name, *given, *(("--device", "twin") if "--device" in options_of(name) else ()), columns=200
        )
        assert result.exit_code == 0, result.output
        if name != "precompile":
            assert "naive" in result.output and "vectorised" in result.output
    several = run("profile", *given[:5], "--dtype", "fp32", "--device", "twin")
    assert "several rungs need an operation" in str(several.exception), several.output


WITH_RUNGS = {"count", "ladder", "precompile", "profile", "verify"}


def options_of(command: str) -> set[str]:
    return {flag for option in cli._command(command).params for flag in option.opts}
