"""Convolutions in INT8 on the twin: exact sums, rounding, saturation, scales, and machine code without spills."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from escalade.device.nvrtc import compile_program
from escalade.device.recipe import KernelCall
from escalade.device.run import bind
from escalade.ops import OPERATIONS, Config
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import to_int8
from escalade.ops.base.rung import Rung
from escalade.ops.conv2d import Conv2dProblem
from escalade.ops.conv2d.reference import empty_output, peer, random_inputs
from escalade.tune.verification import VerificationCase
from tests.support import Sample

CPU = torch.device("cpu")
CONV2D = OPERATIONS["conv2d"]
RUNGS = [rung for rung in CONV2D.ladder if "int8" in rung.dtypes]  # type: ignore[attr-defined]
each_rung = pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
FEW_COUNTERS = 64
"""Spills allowed next to 128 accumulators: a few counters, which are loaded once per tile."""
EDGES = [
    -200.0,
    -128.5,
    -128.0,
    -127.5,
    -2.5,
    -1.5,
    -0.5,
    -0.0,
    0.5,
    1.5,
    2.5,
    126.5,
    127.0,
    127.49,
    127.5,
    1e9,
]


def run(
    problem: Conv2dProblem, inputs: dict[str, torch.Tensor], rung: Rung[Conv2dProblem], config: Config
) -> torch.Tensor:
    recipe = rung.recipe(problem, config)
    spaces = {workspace.name: workspace.allocate(CPU) for workspace in recipe.workspaces}
    y = empty_output(problem, CPU)
    bind(recipe, {**inputs, **spaces, "y": y}, problem.name)()
    return y


def supporting(problem: Conv2dProblem) -> list[Rung[Conv2dProblem]]:
    return [rung for rung in RUNGS if rung.supports(problem) is None]


def problems(dtype: str = "int8") -> list[Conv2dProblem]:
    base = Conv2dProblem.square(32, 64, 5, 3, batch=2, dtype=dtype, layout="nhwc", bias=True, relu=True)
    return [
        replace(base, residual=True),
        replace(base, channels=144, filters=128, residual=True, relu=False),
        replace(
            base, filters=48, stride=(2, 2), shortcut_channels=16, shortcut_stride=2, shortcut_size=(5, 5)
        ),
        replace(base, filters=80, residual=True, output="fp16"),
        replace(base, channels=256, filters=64, filter_height=1, filter_width=1, padding=(0, 0), bias=False),
    ]


@each_rung
def test_results_are_exact(rung: Rung[Conv2dProblem], seed: int, sample: Sample) -> None:
    """s32 sums are exact in every order, so kernels and reference agree to the last bit where fp32 holds the rest."""
    for problem in (each for each in problems() if rung.supports(each) is None):
        inputs = random_inputs(problem, Draw(CPU, seed))
        inputs |= {"scale": torch.full((problem.filters,), 2.0**-14), "scales": torch.tensor([2.0**-6, 32.0])}
        wide = {name: tensor.double() for name, tensor in inputs.items()}
        expected = peer(problem, wide)
        for config in sample(list(rung.configs(problem)), 1):
            assert torch.equal(run(problem, inputs, rung, config), expected), (problem.name, config)


def test_windows_of_an_odd_width_are_copied_row_by_row(seed: int) -> None:
    """A pixel's 64 filters are 64 bytes, and TMA's boxes begin at multiples of 128."""
    problem = Conv2dProblem(1, 64, 6, 21, 64, 3, 3, padding=(1, 1), dtype="int8", layout="nhwc", bias=True)
    window = CONV2D.ladder.rung("window")
    case = VerificationCase(CONV2D, problem, CPU, seed)
    for config in window.configs(problem):
        assert not case.check(window, "nhwc", config).failure


def test_the_largest_sums_do_not_overflow() -> None:
    problem = Conv2dProblem.square(512, 64, 3, 3, dtype="int8", layout="nhwc", output="fp16")
    inputs = random_inputs(problem, Draw(CPU, 0))
    inputs["x"].fill_(-128), inputs["weight"].fill_(127)
    inputs |= {"scale": torch.full((64,), 2.0**-16), "scales": torch.ones(2)}
    expected = peer(problem, inputs)
    assert float(expected.abs().max()) == pytest.approx(128 * 127 * 512 * 9 / 2**16, rel=1e-3)
    for rung in supporting(problem):
        assert torch.equal(run(problem, inputs, rung, rung.configs(problem)[0]), expected), rung.name


def test_results_round_to_even_and_saturate() -> None:
    """A bias is added to zeros, at a scale of one and at a tiny one."""
    for scale in (1.0, 2.0**-30):
        problem = Conv2dProblem.square(16, 16, 2, 1, dtype="int8", layout="nhwc", bias=True)
        inputs = random_inputs(problem, Draw(CPU, 0))
        inputs["x"].zero_()
        inputs |= {"bias": torch.tensor(EDGES) * scale, "scales": torch.tensor([0.0, 1 / scale])}
        expected = torch.tensor(EDGES).round().clamp(-128, 127).to(torch.int8)
        assert expected.tolist()[:9] == [-128, -128, -128, -128, -2, -2, 0, 0, 0]
        for rung in supporting(problem):
            y = run(problem, inputs, rung, rung.configs(problem)[0])
            assert torch.equal(y, expected.view(1, 16, 1, 1).expand(1, 16, 2, 2)), rung.name
    assert torch.equal(to_int8(torch.tensor(EDGES)), expected)


def test_every_code_is_multiplied_and_added_as_what_it_means() -> None:
    codes = torch.arange(-128, 128, dtype=torch.int8).view(1, 4, 4, 16).permute(0, 3, 1, 2)
    zeros = torch.zeros_like(codes)
    eye = torch.eye(16, dtype=torch.int8).view(16, 16, 1, 1)
    problem = Conv2dProblem.square(16, 16, 4, 1, dtype="int8", layout="nhwc", residual=True)
    given = {"weight": eye, "scale": torch.ones(16), "scales": torch.ones(2)}
    for output in ("", "fp16"):
        for rung in supporting(problem):
            config = rung.configs(problem)[0]
            for x, residual in ((codes, zeros), (zeros, codes)):
                y = run(
                    replace(problem, output=output), {**given, "x": x, "residual": residual}, rung, config
                )
                assert torch.equal(y.float(), codes.float()), (rung.name, output)


def test_random_problems_match_an_integer_reference(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def number(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    for _ in range(6):
        size, taps = number(3, 4, 7), number(1, 3)
        problem = Conv2dProblem.square(
            number(16, 48, 128, 144), number(16, 64, 96), size, taps, batch=number(1, 2), stride=number(1, 2),
            dtype="int8", layout="nhwc", bias=bool(number(0, 1)), relu=bool(number(0, 1)),
        )  # fmt: skip
        inputs = random_inputs(problem, Draw(CPU, seed))
        x, weight = (inputs[name].to(torch.int64).float().double() for name in ("x", "weight"))
        sums = F.conv2d(x, weight, None, problem.stride, problem.padding)
        values = sums.float() * inputs["scale"].view(-1, 1, 1)
        values = values + inputs["bias"].view(-1, 1, 1) if problem.bias else values
        values = (values.relu() if problem.relu else values) * inputs["scales"][1]
        rung = supporting(problem)[0]
        y = run(problem, inputs, rung, rung.configs(problem)[0])
        # Kernels may fuse a multiplication with an addition, which decides ties.
        tie = (values.double() - values.double().floor() - 0.5).abs() < 1e-4
        assert torch.equal(y[~tie], to_int8(values)[~tie]), (problem.name, rung.name)


@each_rung
def test_no_config_spills(rung: Rung[Conv2dProblem], sample: Sample) -> None:
    large = Conv2dProblem.square(128, 128, 28, 3, batch=256, dtype="int8", layout="nhwc")
    few = replace(large, channels=512, filters=512, height=7, width=7, batch=1)
    for problem in (replace(large, bias=True, residual=True, relu=True), replace(few, output="fp16")):
        configs = rung.configs(problem) if rung.supports(problem) is None else ()
        for config in sample(list(configs), 1):
            (call,) = (step for step in rung.recipe(problem, config).steps if isinstance(step, KernelCall))
            spilled = compile_program(call.program, "sm_90a").resources.spill_bytes
            assert spilled <= (FEW_COUNTERS if problem.residual else 0), config


def test_what_is_refused_is_said() -> None:
    small = problems()[0]
    for rung in CONV2D.ladder:
        if rung not in RUNGS:
            assert "int8" in (rung.supports(small) or ""), rung.name
    assert "multiples of 16 channels in int8" in (RUNGS[0].supports(replace(small, channels=24)) or "")
