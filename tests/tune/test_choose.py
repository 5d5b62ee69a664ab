"""Which rung is chosen when none is asked for."""

from __future__ import annotations

import pytest
import torch

from escalade.errors import UnsupportedError
from escalade.ops.conv2d import Conv2dProblem
from escalade.tune import choose

CPU = torch.device("cpu")


def chosen(name: str, dtype: str = "fp32", layout: str = "nchw") -> tuple[str, str]:
    choice = choose("conv2d", Conv2dProblem.parse(name, dtype, layout), CPU)
    assert choice.config in choice.rung.configs(choice.problem)
    return choice.rung.name, choice.problem.layout


def test_tensor_cores_are_worth_a_conversion() -> None:
    assert chosen("64to64_56_k3s1_b8", "fp16", "nhwc") == ("fused_epilogue", "nhwc")
    assert chosen("64to64_56_k3s1_b8", "fp16", "nchw") == ("fused_epilogue", "nhwc")
    assert chosen("64to64_56_k3s1_b8", "fp32", "nchw") == ("implicit_gemm", "nchw")


def test_large_filters_go_through_the_frequency_domain() -> None:
    assert chosen("32to32_64_k31s1_b2")[0] == "fft"
    assert chosen("32to32_64_k31s1g32_b2")[0] == "fft_fused"
    assert chosen("32to32_64_k31s2_b2")[0] == "implicit_gemm", "FFT takes stride 1 only"


def test_groups_have_a_rung() -> None:
    assert chosen("8to8_10_k3s1g4_b1")[0] == "direct"


def test_a_rung_by_name_is_taken_as_it_is() -> None:
    problem = Conv2dProblem.parse("64to64_56_k3s1_b8", "fp16", "nchw")
    assert choose("conv2d", problem, CPU, "tuned").problem == problem
    with pytest.raises(UnsupportedError, match="fused_epilogue of conv2d cannot do"):
        choose("conv2d", problem, CPU, "fused_epilogue")
    with pytest.raises(UnsupportedError, match="no rung 'fastest'"):
        choose("conv2d", problem, CPU, "fastest")
