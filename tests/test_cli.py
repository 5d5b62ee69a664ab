"""The command line: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import io
import pathlib
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from escalade import cli, doctor
from escalade.bench import store
from tests.bench.fake import Scale, rung

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
        "import torch, escalade, escalade.ops, escalade.bench.commands, escalade.report.tables, escalade.doctor, sys;"
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
