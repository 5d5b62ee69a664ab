"""A convolution in Triton's language: right with every tile, and refused where it is not written for what is asked."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from escalade import ops
from escalade.bench.peers import triton_conv2d
from escalade.bench.peers.layer import error_of
from escalade.bench.peers.registry import LAYERS
from escalade.errors import UnsupportedError
from escalade.ops.conv2d.problem import Conv2dProblem
from tests.bench.peers import fake_triton

CONV2D = ops.operation("conv2d")


@pytest.fixture
def language(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_triton.Language]:
    """The stand-in where Triton would be, and the kernels made of it."""
    monkeypatch.delitem(sys.modules, "escalade.bench.peers.triton_kernels", raising=False)
    for name, module in fake_triton.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    triton_conv2d.kernels.cache_clear()
    yield sys.modules["triton.language"]  # type: ignore[misc]
    triton_conv2d.kernels.cache_clear()


@pytest.mark.parametrize(
    ("name", "dtype", "precision"),
    [
        ("40to72_7x6_k3s2_b2_bias+res+relu", "fp32", "tf32x3"),
        ("3to40_9_k5s1p1d2_b1_bias+relu", "fp16", "ieee"),
        ("64to33_5_k1s1_b3", "tf32", "tf32"),
    ],
)
def test_every_tile_gives_the_right_result(
    language: fake_triton.Language, name: str, dtype: str, precision: str
) -> None:
    problem = Conv2dProblem.parse(name, dtype, "nhwc")
    (peer,) = LAYERS["triton"](CONV2D, problem)
    inputs = CONV2D.inputs(problem, torch.device("cpu"), seed=0)
    error_of(peer, problem, inputs, CONV2D.reference(problem, inputs))
    assert language.precisions == {precision} and "ROWS" in peer.note()


@pytest.mark.parametrize(
    ("name", "dtype", "said"),
    [
        ("16to16_9_k3s1_b1", "fp8", "fp32, tf32, fp16, bf16, not for fp8"),
        ("16to16_9_k3s1g4_b1", "fp16", "without 4 groups"),
        ("16to16_8_k3s1_b1_bias+relu+pool2", "fp16", "without the maxima of windows"),
        ("64to64_4096_k3s1_b4", "fp16", "up to 2147483647 elements, not 4294967296"),
    ],
)
def test_what_the_kernel_is_not_written_for_is_refused(name: str, dtype: str, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        LAYERS["triton"](CONV2D, Conv2dProblem.parse(name, dtype, "nhwc"))


def test_without_triton_the_refusal_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "escalade.bench.peers.triton_kernels", raising=False)
    triton_conv2d.kernels.cache_clear()
    with pytest.raises(UnsupportedError, match="triton needs the package triton"):
        LAYERS["triton"](CONV2D, Conv2dProblem.parse("16to16_9_k3s1_b1", "fp16", "nhwc"))
    gradient = ops.operation("conv2d_weight_gradient")
    with pytest.raises(UnsupportedError, match="forward convolutions, not for conv2d_weight_gradient"):
        LAYERS["triton"](gradient, gradient.problems[0])
