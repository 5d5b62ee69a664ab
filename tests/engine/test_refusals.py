"""Messages for wrong uses of an engine: one sentence for any argument."""

from __future__ import annotations

import logging
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import escalade
from escalade import ops
from escalade.engine import Engine
from escalade.errors import EscaladeError

X = torch.randn(2, 3, 6, 6)


class Block(nn.Module):
    """A convolution under a dotted name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer1(x)


class Counting(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        return x * 2, x.sum().item()


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


def with_weights(value: float) -> nn.Module:
    model = Block().eval()
    nn.init.constant_(model.get_parameter("layer1.0.0.weight"), value)
    return model


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        ((X[:0],), {}, "of shape (0, 3, 6, 6) have no elements"),
        ((None,), {}, "compile needs example inputs: tensors like those"),
        ((5,), {}, "example_inputs is of type int; pass a tensor"),
        ((X.numpy(),), {}, "example_inputs is of type ndarray"),
        (({"x": X},), {}, "and keyword arguments as example_keywords"),
        ((X, 5), {}, "example_keywords is int"),
        ((X,), {"normalize": (0.5, 0.5)}, "pass (mean, std) with 3 finite means and 3 positive"),
        ((X,), {"normalize": "imagenet"}, "pass (mean, std)"),
        ((X,), {"normalize": ((0.5,) * 3, (float("inf"),) * 3)}, "pass (mean, std)"),
        ((X,), {"dtype": ["fp16"]}, "dtype ['fp16']: compile takes fp32"),
        ((X,), {"device": []}, "device []: engines run on cuda, cpu or twin"),
        ((X,), {"plans": "8"}, "plans='8': pass a whole number"),
        ((X,), {"sizes": 224}, "sizes=224: pass a list of (rows, columns), as [(224, 224), (256, 320)]"),
        ((X,), {"sizes": None}, "sizes=None: pass a list"),
        ((X,), {"sizes": [(2**40, 2**40)]}, "not enough memory for an input of shape (2, 3, 1099511627776, "),
        ((X,), {"batches": 8}, "batches=8: pass a list of batch sizes, as [1, 8, 32]"),
        ((X,), {"batches": "8"}, "batches='8': pass a list"),
        ((X,), {"device": ""}, "device '': engines run on cuda, cpu or twin"),
        ((X,), {"dtype": "fp8", "calibration": 5}, "calibration is of type int"),
        ((X,), {"dtype": "fp8", "calibration": ["a"]}, "a calibration batch is of type str"),
        ((X,), {"dtype": "fp8", "calibration": [X.to("meta")]}, "a calibration batch is on the meta device"),
        (
            (X,),
            {"dtype": "int8", "calibration": [X.to_sparse()]},
            "a calibration batch is a tensor in layout sparse",
        ),
    ],
)
def test_compile_refuses_unsupported_arguments(
    arguments: tuple[Any, ...], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(EscaladeError, match=re.escape(sentence)):
        escalade.compile(nn.Sequential(nn.Conv2d(3, 4, 3)), *arguments, **options)


def test_weights_have_the_models_names() -> None:
    with pytest.raises(
        EscaladeError, match=r"the model's layer1\.0\.0\.weight holds values that are not finite"
    ):
        escalade.compile(with_weights(float("nan")), X)
    with pytest.raises(EscaladeError, match=r"^layer1\.0\.0\.weight has values beyond the range of fp16"):
        escalade.compile(with_weights(1e9), X, dtype="fp16")


def test_a_model_that_returns_a_number_from_a_tensor_gets_advice() -> None:
    with pytest.raises(EscaladeError, match="^Counting returns a number that .* return the tensor"):
        escalade.compile(Counting(), X)


def test_a_model_that_branches_is_refused_in_one_sentence_that_names_the_line(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch prints everything it traced, and logs."""
    with caplog.at_level(logging.WARNING), pytest.raises(EscaladeError) as refused:
        escalade.compile(Branching(), X)
    line = Branching.forward.__code__.co_firstlineno + 1
    assert f"({__file__}, line {line})" in str(refused.value)
    assert capfd.readouterr() == ("", "") and not caplog.records


@pytest.mark.parametrize(
    ("misuse", "sentence"),
    [
        (
            lambda engine, folder: engine.save(folder),
            "cannot be written: it exists and is not a regular file",
        ),
        (
            lambda engine, folder: engine.save(folder / "no" / "x"),
            "x cannot be written: No such file or directory",
        ),
        (lambda engine, folder: engine.stream(5), "batches is of type int"),
        (lambda engine, folder: ops.conv2d(None, X), "conv2d: x must be a strided tensor, not NoneType"),  # type: ignore[arg-type]
        (lambda engine, folder: ops.conv2d(X, None), "conv2d: weight must be a strided tensor, not NoneType"),  # type: ignore[arg-type]
        (lambda engine, folder: ops.top_k(X, X), "top_k: k must be an integer, not Tensor"),  # type: ignore[arg-type]
        (lambda engine, folder: ops.softmax(X, rung=5), "softmax: rung must be a str, not int"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_wrong_kinds_are_named(
    misuse: Callable[[Engine, pathlib.Path], object], sentence: str, tmp_path: pathlib.Path
) -> None:
    engine = escalade.compile(nn.Sequential(nn.Conv2d(3, 4, 3)), X)
    with pytest.raises(EscaladeError, match=re.escape(sentence)):
        misuse(engine, tmp_path)
