"""Launches: streams, graphs, errors with names, and the host time of a launch."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from escalade.device.program import Program, Type
from escalade.device.recipe import Buffer, KernelCall, Recipe, Workspace
from escalade.device.run import Executable, bind
from escalade.device.streams import dedicated_stream
from escalade.errors import LaunchError, UnsupportedError
from escalade.ops import OPERATIONS
from escalade.ops.conv2d import Conv2dProblem

pytestmark = pytest.mark.gpu

CONV2D = OPERATIONS["conv2d"]
SMALL = Conv2dProblem.square(8, 16, 9, 3, batch=2)
DIRECT = Program.of(
    "conv2d/direct.cu",
    "conv2d_direct",
    {"Element": Type("float"), "NHWC": False, "HAS_BIAS": False, "HAS_RESIDUAL": False, "HAS_RELU": False},
)


def direct_recipe(shared_bytes: int = 0, threads: int = 256) -> Recipe:
    rung = CONV2D.ladder.rung("direct")
    (call,) = rung.recipe(SMALL, rung.configs(SMALL)[0]).steps
    assert isinstance(call, KernelCall)
    return Recipe((KernelCall(DIRECT, (1, 1, 1), (threads, 1, 1), call.arguments, shared_bytes),))


def test_too_much_shared_memory_is_named(cuda: torch.device) -> None:
    with pytest.raises(
        LaunchError, match=r"conv2d_direct of conv2d/direct\.cu .* for 8to16, config a=1: CUDA_ERROR"
    ):
        Executable(direct_recipe(shared_bytes=1 << 20), cuda, "8to16, config a=1")


def test_too_many_threads_are_named(cuda: torch.device) -> None:
    tensors = {**CONV2D.inputs(SMALL, cuda, 0), "y": CONV2D.output(SMALL, cuda)}
    with pytest.raises(
        LaunchError, match="launching conv2d_direct .* for the label: CUDA_ERROR_INVALID_VALUE"
    ):
        bind(direct_recipe(threads=2048), tensors, "the label")()
    torch.cuda.synchronize()  # the context is still usable


def test_tensors_on_two_devices_are_refused(cuda: torch.device) -> None:
    with pytest.raises(UnsupportedError, match="on one device"):
        bind(direct_recipe(), {"x": torch.ones(1, device=cuda), "y": torch.ones(1)})


def test_a_second_device(cuda: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    other = torch.device("cuda", 1)
    inputs = CONV2D.inputs(SMALL, other, 0)
    y = CONV2D.output(SMALL, other)
    rung = CONV2D.ladder.rung("direct")
    bind(rung.recipe(SMALL, rung.configs(SMALL)[0]), {**inputs, "y": y})()
    torch.testing.assert_close(y.double(), CONV2D.reference(SMALL, inputs), rtol=1e-5, atol=1e-5)


def test_workspaces_are_on_the_device(cuda: torch.device) -> None:
    recipe = Recipe(direct_recipe().steps, (Workspace("unused", 1024),))
    executable = bind(recipe, {**CONV2D.inputs(SMALL, cuda, 0), "y": CONV2D.output(SMALL, cuda)})
    assert executable._workspaces["unused"].device == cuda


def test_sync_names_the_kernel_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a separate process, since an illegal access leaves the context unusable."""
    code = """
import torch
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.device.run import bind
from escalade.errors import LaunchError
from tests.gpu.test_launch import CONV2D, SMALL, direct_recipe
cuda = torch.device("cuda", 0)
(call,) = direct_recipe().steps
away = tuple(Buffer("y", offset=1 << 46) if a == Buffer("y") else a for a in call.arguments)
broken = Recipe((KernelCall(call.program, call.grid, call.block, away),))
try:
    bind(broken, {**CONV2D.inputs(SMALL, cuda, 0), "y": CONV2D.output(SMALL, cuda)}, "the label")()
except LaunchError as error:
    print("named:", error)
"""
    monkeypatch.setenv("ESCALADE_SYNC", "1")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "named: launching conv2d_direct" in done.stdout and "the label" in done.stdout, (
        done.stdout + done.stderr
    )


def test_the_host_cost_of_a_launch(cuda: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, not asserted: it depends on the machine."""
    rung = CONV2D.ladder.rung("direct")
    tensors = {**CONV2D.inputs(SMALL, cuda, 0), "y": CONV2D.output(SMALL, cuda)}
    executable = bind(rung.recipe(SMALL, rung.configs(SMALL)[0]), tensors)
    costs = {}
    for name, work in (("launch", executable), ("bind and launch", lambda: executable.bind(tensors)())):
        for _ in range(100):
            work()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(1000):
            work()
        costs[name] = (time.perf_counter() - began) * 1000
        torch.cuda.synchronize()
    with capsys.disabled():
        print("\nhost cost, us:", ", ".join(f"{name} {cost:.1f}" for name, cost in costs.items()))
    assert Buffer("y") in executable.recipe.steps[0].arguments  # type: ignore[union-attr]


@pytest.mark.parametrize("captured", (False, True))
def test_lanes_fork_from_the_stream_and_join_it_again(cuda: torch.device, captured: bool) -> None:
    """Every lane sees work before the recipe, and work after the recipe sees all lanes."""
    operation = OPERATIONS["few_channels"]
    problem = operation.parse("4to16_40_k7_b64_relu_pool4c")
    rung = operation.ladder.rung("streams")
    inputs = operation.inputs(problem, cuda, 0)
    expected = operation.reference(problem, inputs).float()
    given, inputs["x"] = inputs["x"], torch.zeros_like(inputs["x"])
    y = operation.output(problem, cuda)
    result = torch.zeros_like(y)
    executable = bind(rung.recipe(problem, rung.configs(problem)[0]), {**inputs, "bias": None, "y": y})

    def work() -> None:
        inputs["x"].copy_(given)
        executable()
        result.copy_(y)

    with torch.cuda.stream(torch.cuda.Stream(cuda)):
        work()
        torch.cuda.synchronize()
        inputs["x"].zero_()
        y.zero_()
        result.zero_()
        if captured:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                work()
            graph.replay()
        else:
            work()
        torch.cuda.synchronize()
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)


def test_own_streams_are_lent_again_and_are_not_pytorchs(cuda: torch.device) -> None:
    """Far more of them than PyTorch has streams in its pool, one after another: a single stream serves all."""
    pool = {torch.cuda.Stream(cuda).cuda_stream for _ in range(64)}
    with torch.cuda.stream(dedicated_stream(cuda)):
        torch.ones(8, device=cuda).add_(1)
    seen = set()
    for _ in range(100):
        stream = dedicated_stream(cuda)
        seen.add(stream.cuda_stream)
        del stream
    assert len(seen) == 1 and not seen & pool
    held = [dedicated_stream(cuda) for _ in range(40)]
    assert len({stream.cuda_stream for stream in held}) == 40
