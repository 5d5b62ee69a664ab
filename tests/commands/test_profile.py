"""The command `profile`: its arguments, and its message without a GPU."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from escalade.commands.profiling import Asked, chosen, works_of
from escalade.errors import UnsupportedError
from escalade.ops.base.card import TWIN
from tests.commands.support import run


def asked(target: str, **changed: object) -> Asked:
    usual = {"problem": None, "rung": None, "dtype": None, "layout": None, "batch": 1, "training": False}
    return Asked(target, **{**usual, "device": "cpu", "seed": 0, **changed})  # type: ignore[arg-type]


def test_the_dtype_and_layout_are_those_that_the_rung_takes() -> None:
    found = chosen(asked("conv2d", rung="input_tile"), torch.device("cpu"))
    assert found.rung.name == "input_tile" and found.rung.card == TWIN
    assert found.rung.refusal(found.problem) is None
    found = chosen(
        asked("conv2d", problem="8to16_9_k3s1_b2", dtype="fp32", layout="nchw"), torch.device("cpu")
    )
    assert (found.problem.name, found.problem.dtype) == ("8to16_9_k3s1_b2", "fp32")


@pytest.mark.parametrize(
    ("target", "changed", "sentence"),
    [
        ("resnet18", {"rung": "naive"}, "only for operations, and resnet18 is not one"),
        ("lenet", {"training": True}, "--training supports autoencoder, resnet18"),
        ("conv2d", {"batch": 0}, "batch size 0"),
        ("conv2d", {"rung": "nosuch"}, "conv2d has no rung 'nosuch'"),
        ("nosuch", {}, "'nosuch' is neither an operation .*conv2d.*, a model .*lenet.*nor the file"),
        ("conv2d", {"dtype": "fp15"}, "dtype 'fp15': supported are"),
    ],
)
def test_it_refuses_unsupported_arguments(target: str, changed: dict[str, object], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        chosen(asked(target, **changed), torch.device("cpu"))


def test_without_a_gpu_the_twin_counts(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "profile.json"
    command = ("profile", "softmax", "--problem", "33_b5", "--dtype", "fp32", "--device", "twin")
    result = run(*command, "--json", str(out))
    assert result.exit_code == 0, result.output
    assert (
        "softmax 33_b5 fp32 flat, counted on the twin" in result.output
        and "requests each byte" in result.output
    )
    (part,) = json.loads(out.read_text())["parts"]
    assert part["kernels"][0]["counts"]["unique_read_bytes"] == 33 * 5 * 4 and part["part"]["kernels"]
    for option, sentence in (
        (("--trace", str(tmp_path / "trace.json")), "--trace needs a GPU"),
        (("--beside-twin",), "it needs a GPU"),
        (("--rung", "naive,online"), "several rungs need an operation"),
        (("--results", str(tmp_path)), "use --json for one rung"),
    ):
        result = run(*command, *option)
        assert isinstance(result.exception, UnsupportedError) and sentence in str(result.exception)


def test_the_steps_of_a_plan_are_counted_one_by_one() -> None:
    title, works = works_of(asked("spectral_autoencoder", batch=2))
    assert title == "spectral_autoencoder, batch 2, fp16"
    assert [work.part.operation for work in works] == ["mlp"] and works[0].weights_are_constant
