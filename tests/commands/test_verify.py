"""The command `verify`: wrong results end it, and are named."""

from __future__ import annotations

import pytest

from tests.bench.fake import Scale, rung
from tests.commands.support import run


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


def test_an_unknown_device_is_refused() -> None:
    assert run("verify", "conv2d", "--device", "abacus").exit_code == 2
