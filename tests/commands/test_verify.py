"""The command `verify`: wrong results end it, and are named."""

from __future__ import annotations

import errno
import os
import pathlib
import re
import subprocess
from typing import Any

import pytest

from escalade import subprocesses
from escalade.device import precompilation
from escalade.device.twin import building, toolchain
from tests.bench.fake import Scale, rung
from tests.commands.support import run, said_by


def test_verify_fails_if_a_rung_is_wrong_and_names_it(with_operation: Scale) -> None:
    result = run("verify", "scale", "--device", "twin", "--seed", "3")
    assert result.exit_code == 1
    assert "wrong on scale_100 fp32 nchw" in result.output and "seed 3" in result.output


def test_verify_succeeds_if_nothing_is_wrong(with_operation: Scale) -> None:
    result = run("verify", "--device", "twin", "--rung", "right", "--checks", "--order", "5", "--late")
    assert result.exit_code == 0, result.output
    assert "all right" in result.output


def test_verify_checks_every_config_on_request(with_operation: Scale) -> None:
    result = run(
        "verify", "scale", "--device", "twin", "--rung", "right", "--layout", "nchw", "--all-configs"
    )
    assert result.exit_code == 0 and "3" in result.output


def test_a_rung_is_verified_in_every_operation_that_has_it(
    with_operation: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Scale(rung("elsewhere"))
    other.name = "other"
    monkeypatch.setattr("escalade.ops.OPERATIONS", {"other": other, "scale": with_operation})
    result = run("verify", "--device", "twin", "--rung", "right")
    assert result.exit_code == 0 and "all right" in result.output, result.output
    result = run("verify", "--device", "twin", "--rung", "nowhere")
    assert result.exit_code == 1 and "no operation has all of these names" in str(result.exception)


def test_an_unknown_device_is_refused() -> None:
    assert run("verify", "conv2d", "--device", "abacus").exit_code == 2


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("no compiler", "the twin compiles kernels with g++, which is not on the PATH"),
        (
            "a full disk",
            "has no space for compiled kernels (No space left on device); set ESCALADE_CACHE_DIR",
        ),
        ("no temporary files", "g++ needs a folder for temporary files, and none can be created"),
        ("a broken compiler", "g++ does not work here: g++ cannot compile the twin's runtime"),
    ],
)
def test_a_compiler_failure_is_reported_once_and_not_as_a_wrong_result(
    fault: str,
    sentence: str,
    with_operation: Scale,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ESCALADE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(building, "_runtimes", {})

    def fail(*_: object, **__: object) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if fault == "no compiler":
        monkeypatch.setattr(subprocesses, "find_program", lambda name: None)
        monkeypatch.setattr(toolchain, "compiler", toolchain.compiler.__wrapped__)
    elif fault == "a full disk":
        monkeypatch.setattr(toolchain, "run", fail)
    elif fault == "no temporary files":
        monkeypatch.setattr(toolchain.tempfile, "TemporaryDirectory", fail)
    else:
        monkeypatch.setattr(toolchain, "compiler", lambda: "g++")
        refusal = subprocess.CompletedProcess([], 1, "", "g++: fatal error: cannot execute 'cc1plus'")
        monkeypatch.setattr(subprocesses, "run", lambda *_, **__: refusal)
    said = said_by("verify", "scale", "--device", "twin", monkeypatch=monkeypatch, capsys=capsys)
    assert said.count(sentence) == 1 and "wrong" not in said


def test_long_work_is_announced_with_an_estimate_and_a_way_to_take_less(
    monkeypatch: pytest.MonkeyPatch, with_operation: Scale
) -> None:
    """Reported only if it takes long: cached kernels take no time."""
    short = run("verify", "scale", "--rung", "right", "--device", "twin", columns=200)
    assert "to compile" not in short.output and short.exit_code == 0, short.output
    monkeypatch.setattr(precompilation, "_TWIN_SECONDS", 3600.0)
    monkeypatch.setattr(precompilation, "is_built", lambda *_: False)
    told = run("verify", "scale", "--rung", "right", "--device", "twin", columns=200)
    lines = told.output.splitlines()
    work = r"\d+ kernels? \(\d+ to compile\), \d+ results? to check: about .+ (min|h)\. Take less"
    assert re.match(work, lines[0]), lines
    assert set(re.findall(r"--[a-z]+", lines[0])) == {"--problem", "--rung", "--dtype", "--layout"}
