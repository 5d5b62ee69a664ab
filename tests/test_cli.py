"""The command line: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import importlib
import inspect
import io
import pathlib
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from escalade import cli
from escalade.commands import doctor
from escalade.measure import records as store
from tests.bench.fake import Scale, ScaleProblem, ScaleRung, rung

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def with_operation(monkeypatch: pytest.MonkeyPatch) -> Scale:
    """One operation, with a rung that is right and one that is wrong."""
    operation = Scale(rung("right"), rung("wrong", "wrong_element", below="right"))
    monkeypatch.setattr("escalade.ops.OPERATIONS", {"scale": operation})
    return operation


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(cli.app, list(arguments))


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "escalade", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_verify_fails_if_a_rung_is_wrong_and_names_it(with_operation: Scale) -> None:
    result = run("verify", "scale", "--device", "twin", "--seed", "3")
    assert result.exit_code == 1
    assert "wrong on scale_100 fp32 nchw" in result.output and "seed 3" in result.output


def test_verify_succeeds_if_nothing_is_wrong(with_operation: Scale) -> None:
    result = run("verify", "--device", "twin", "--rung", "right", "--checks", "--order", "5", "--late")
    assert result.exit_code == 0, result.output
    assert "all right" in result.output


def test_verify_checks_every_config_when_asked(with_operation: Scale) -> None:
    result = run(
        "verify", "scale", "--device", "twin", "--rung", "right", "--layout", "nchw", "--all-configs"
    )
    assert result.exit_code == 0 and "3" in result.output


def test_ladder_on_the_twin_writes_records_and_claims_no_speed(
    with_operation: Scale, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "records.jsonl"
    result = run("ladder", "scale", "--device", "twin", "--json", str(path))
    assert result.exit_code == 1, "one rung is wrong"
    assert "they are no speeds" in result.output and "GFLOP/s" not in result.output
    records = {record.rung: record for record in store.load(path)}
    assert records["right"].median_us and records["right"].tflops is None
    assert records["wrong"].failure and records["wrong"].median_us is None


def test_ladder_files_records_by_device(with_operation: Scale, tmp_path: pathlib.Path) -> None:
    result = run(
        "ladder", "scale", "--device", "twin", "-r", "right", "-p", "scale_50", "--results", str(tmp_path)
    )
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.rglob("*.jsonl")
    assert path.name == "scale.jsonl" and store.load(path)[0].problem == "scale_50"


def test_precompile_compiles_and_says_how_many(
    with_operation: Scale, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESCALADE_CACHE_DIR", str(tmp_path))
    result = run("precompile", "scale", "--arch", "sm_90a", "--workers", "1")
    assert result.exit_code == 0 and "2 of 2 kernels compiled for sm_90a" in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("ladder", "conv9d"), "there is no operation 'conv9d'"),
        (("verify", "conv2d", "--rung", "nosuch", "--device", "twin"), "conv2d has no rung 'nosuch'"),
        (("verify", "conv2d", "--dtype", "int8", "--device", "twin"), "there is no dtype 'int8'"),
        (("ladder", "conv2d", "--problem", "huge", "--device", "twin"), "'huge' names no convolution"),
        (("tables", "--root", "nowhere"), "there is no nowhere/README.md"),
        (("precompile", "conv2d", "--arch", "banana"), "no architecture 'banana' here; there is sm_80"),
        (("precompile", "conv2d", "--arch", "sm_90", "--rung", "direct"), "no architecture 'sm_90' here"),
        (("tune", "resnet18", "--dtype", "fp15"), "fp15"),
        (("tune", "conv2d", "--problem", "8to8_9_k3s1_b1", "--dtype", "fp15"), "conv2d has no dtype 'fp15'"),
        (("tune", "conv2d", "--problem", "8to8_9_k3s1_b1", "--layout", "nwhc"), "no layout 'nwhc'"),
        (("bench", "lenet", "--parts", "nosuch", "--device", "cpu"), "lenet has no part 'nosuch'"),
        (("explain", "nosuch"), "'nosuch' is neither a model"),
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


def said_by(*arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence with which a command fails."""
    monkeypatch.setattr(sys, "argv", ["escalade", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr()
    assert end.value.code == 1 and "all right" not in said.out
    return said.err.strip()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("verify", "scale", "--layout", "nhwc"),
            "nothing to verify for layout nhwc: right takes nchw, not nhwc",
        ),
        (("verify", "--layout", "nhwc"), "nothing to verify for layout nhwc"),
        (("verify", "scale", "--layout", "nchw", "--layout", "nhwc"), "nothing to verify for layout nhwc"),
        (("verify", "scale", "--rung", "right", "--rung", "picky"), "nothing to verify for rung picky"),
        (("verify", "scale", "--rung", "picky"), "nothing to verify for rung picky: it takes nothing"),
        (("verify", "--rung", "nosuch"), "scale has no rung 'nosuch'"),
        (("ladder", "scale", "--layout", "nhwc"), "nothing to measure for layout nhwc"),
        (("ladder", "scale", "--rung", "picky"), "nothing to measure for rung picky"),
        (("precompile", "scale", "--layout", "nhwc"), "nothing to compile for layout nhwc"),
        (("precompile", "scale", "--rung", "picky"), "nothing to compile for rung picky"),
        (("precompile", "scale", "--rung", "newest", "--arch", "sm_80"), "its kernels are for sm_90a"),
    ],
)
def test_nothing_to_do_is_a_mistake(
    arguments: tuple[str, ...],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nor is it right if a part of what was named has nothing to do."""

    class Picky(ScaleRung):
        def supports(self, problem: ScaleProblem) -> str | None:
            return "it takes nothing"

    class Newest(ScaleRung):
        @property
        def architectures(self) -> tuple[str, ...]:
            return ("sm_90a",)

    named = {"summary": "a rung", "below": None, "predicted_gain": None}
    rungs = (rung("right"), Picky("picky", **named), Newest("newest", **named))  # type: ignore[arg-type]
    monkeypatch.setattr("escalade.ops.OPERATIONS", {"scale": Scale(*rungs)})
    where = () if arguments[0] == "precompile" else ("--device", "twin")
    assert sentence in said_by(*arguments, *where, monkeypatch=monkeypatch, capsys=capsys)


def test_a_rung_is_verified_in_every_operation_that_has_it(
    with_operation: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Scale(rung("elsewhere"))
    other.name = "other"
    monkeypatch.setattr("escalade.ops.OPERATIONS", {"other": other, "scale": with_operation})
    result = run("verify", "--device", "twin", "--rung", "right")
    assert result.exit_code == 0 and "all right" in result.output, result.output
    result = run("verify", "--device", "twin", "--rung", "nowhere")
    assert result.exit_code == 1 and "no operation has all that is named" in str(result.exception)


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
    assert result.exit_code == 2 and "names nothing" in result.output


def test_layers_that_a_direction_leaves_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An image has no gradient; and what nothing can do is not measured."""
    image = ("layers", "3to8_9_k3s1_b1", "--direction", "input_gradient", "--device", "twin")
    assert "nothing to measure" in said_by(*image, monkeypatch=monkeypatch, capsys=capsys)
    monkeypatch.setattr("escalade.commands.layers.measure", lambda *_: [])
    other = ("layers", "8to8_9_k3s1_b1", "--device", "twin")
    assert "nothing was measured" in said_by(*other, monkeypatch=monkeypatch, capsys=capsys)


def test_a_bench_without_parts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("escalade.commands.bench.network_device", lambda name: torch.device("cuda", 0))
    given = ("bench", "resnet18", "--parts", "phases", "--no-phases")
    assert "no part is left to measure" in said_by(*given, monkeypatch=monkeypatch, capsys=capsys)


def test_tables_of_nothing_are_not_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("as it is")
    for more in ((), ("--check",)):
        given = ("tables", "--results", str(tmp_path / "nowhere"), "--root", str(tmp_path), *more)
        assert "there are no records under" in said_by(*given, monkeypatch=monkeypatch, capsys=capsys)
    assert (tmp_path / "README.md").read_text() == "as it is" and not (tmp_path / "docs").exists()


def test_the_module_runs_as_a_program_and_shows_no_traceback() -> None:
    done = program("ladder", "conv9d")
    assert done.returncode == 1
    assert (
        done.stderr.startswith("escalade: there is no operation 'conv9d'") and "Traceback" not in done.stderr
    )


def test_help_and_version_do_not_load_pytorch() -> None:
    probe = "import sys, escalade, escalade.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], cwd=ROOT).returncode == 0
    assert program("--version").stdout.strip()


def test_importing_everything_does_not_touch_cuda() -> None:
    probe = (
        "import torch, escalade, escalade.ops, escalade.commands.ladder, escalade.report.tables, sys;"
        "import escalade.commands.doctor;"
        "sys.exit(torch.cuda.is_initialized())"
    )
    assert subprocess.run([sys.executable, "-c", probe], cwd=ROOT).returncode == 0


def test_the_doctor_looks_at_everything_and_raises_nothing() -> None:
    report = doctor.examine()
    found = {finding.topic: finding for finding in report.findings}
    assert set(found) >= {
        "Python",
        "PyTorch",
        "GPU",
        "driver",
        "NVRTC",
        "CUDA headers",
        "g++",
        "twin",
        "cache",
    }
    assert all(finding.value for finding in report.findings)
    assert all(finding.advice for finding in report.findings if finding.good is False)


def test_the_doctor_says_what_to_do_when_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise FileNotFoundError("g++ is not on the PATH")

    monkeypatch.setattr(doctor, "_host_compiler", missing)
    result = run("doctor")
    assert "g++ is not on the PATH" in result.output and "apt install g++" in result.output


def test_the_doctor_shows_any_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets are no markup, and escapes no commands to the terminal."""
    monkeypatch.setenv("ESCALADE_DATA", "[/x]\x1b[2J")
    text = io.StringIO()
    doctor.show(doctor.Report((doctor.Finding("cache", "[/y]\x1b[2J"),), ()), Console(file=text, width=160))
    assert r"[/x]\x1b[2J" in text.getvalue() and r"[/y]\x1b[2J" in text.getvalue()


def test_an_unknown_device_is_refused() -> None:
    assert run("verify", "conv2d", "--device", "abacus").exit_code == 2


def test_the_list_of_commands_says_what_their_docstrings_do() -> None:
    """Else `escalade --help` and `escalade COMMAND --help` would tell two stories."""
    for name, summary in cli.COMMANDS.items():
        command = importlib.import_module(f"escalade.commands.{name}").command
        assert inspect.cleandoc(command.__doc__).partition("\n\n")[0] == summary, name


def test_a_command_is_suggested_for_one_that_there_is_not() -> None:
    result = run("ladders")
    assert result.exit_code == 2 and "Did you mean" in result.output and "'ladder'" in result.output
