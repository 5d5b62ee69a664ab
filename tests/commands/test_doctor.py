"""The command `doctor`: its checks and output."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from escalade.commands import doctor
from escalade.device import nvrtc, nvrtc_library
from escalade.errors import CompileError
from escalade_bench.measure import records
from tests.commands.support import run


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
        "Nsight Compute",
        "cache",
    }
    assert all(finding.value for finding in report.findings)
    assert all(finding.advice for finding in report.findings if finding.good is False)


def test_the_doctor_gives_advice_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise FileNotFoundError("g++ is not on the PATH")

    monkeypatch.setattr(doctor, "_host_compiler", missing)
    result = run("doctor")
    assert "g++ is not on the PATH" in result.output and "apt install g++" in result.output


def test_the_doctor_shows_any_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets are not markup, and escapes do not reach the terminal."""
    monkeypatch.setenv("ESCALADE_DATA", "[/x]\x1b[2J")
    text = io.StringIO()
    doctor.show(doctor.Report((doctor.Finding("cache", "[/y]\x1b[2J"),), ()), Console(file=text, width=160))
    assert r"[/x]\x1b[2J" in text.getvalue() and r"[/y]\x1b[2J" in text.getvalue()


def test_a_compiler_that_is_installed_but_refuses_is_named_and_not_to_be_installed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> tuple[bytes, bytes]:
        raise CompileError("unknown option")

    monkeypatch.setattr(nvrtc, "compile_source", refuse)
    found = doctor._compiler()
    assert found.good is False and "unknown option" in found.value
    assert nvrtc_library.library().path in found.advice and "is installed" in found.advice


def test_a_driver_older_than_the_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    major, minor = nvrtc_library.library().version
    monkeypatch.setattr(records, "driver_version", lambda: "550.54")
    monkeypatch.setattr(nvrtc_library, "driver_cuda_version", lambda: (major, minor))
    assert doctor._driver() == f"550.54 (CUDA {major}.{minor})"
    monkeypatch.setattr(nvrtc_library, "driver_cuda_version", lambda: (major - 1, 4))
    with pytest.raises(RuntimeError, match=rf"CUDA {major - 1}\.4\) cannot load .* NVRTC {major}\.{minor}"):
        doctor._driver()
