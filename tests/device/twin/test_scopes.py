"""Fences and atomics apply within their scope, and a launch that starts early waits before it touches memory."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, WeightsReady
from escalade.device.run import Executable, TwinOptions
from escalade.device.twin import Order, TwinError, build
from escalade.errors import LaunchError
from escalade.ops.linear import LinearOperation, LinearProblem
from tests.device.twin.support import ORDERS, launch

# The last CTA to arrive adds up all results; or the second of two CTAs reads the data that the first has flagged.
MEETING = r"""
enum Variant { DEVICE, SYSTEM, BLOCK_FENCE, BLOCK_ATOMIC, NO_FENCE, FLAG, FLAG_WITHOUT_FENCE, FLAG_READ_WITHOUT_FENCE,
           FLAG_NOT_VOLATILE, FLAG_BLOCK_FENCE };

extern "C" __global__ void meeting(float* partial, unsigned* ticket, float* total, int way) {
    __shared__ unsigned before;
    const unsigned blocks = gridDim.x;
    if (way < FLAG) {
        if (threadIdx.x == 0) {
            partial[blockIdx.x] = blockIdx.x + 1.f;
            if (way == BLOCK_FENCE) __threadfence_block();
            else if (way == SYSTEM) __threadfence_system();
            else if (way != NO_FENCE) __threadfence();
            if (way == BLOCK_ATOMIC) before = atomicAdd_block(ticket, 1u);
            else if (way == SYSTEM) before = atomicAdd_system(ticket, 1u);
            else before = atomicAdd(ticket, 1u);
        }
        __syncthreads();
        if (before == blocks - 1 && threadIdx.x == 0) {
            float sum = 0.f;
            for (unsigned i = 0; i < blocks; ++i) sum += partial[i];
            *total = sum;
        }
        return;
    }
    if (threadIdx.x) return;
    volatile unsigned* flag = ticket;
    if (blockIdx.x == 0) {
        partial[0] = 5.f;
        if (way == FLAG_BLOCK_FENCE) __threadfence_block();
        else if (way != FLAG_WITHOUT_FENCE) __threadfence();
        if (way == FLAG_NOT_VOLATILE) *ticket = 1;
        else *flag = 1;
    } else {
        const unsigned there = way == FLAG_NOT_VOLATILE ? *ticket : *flag;
        if (way != FLAG_READ_WITHOUT_FENCE) __threadfence();
        if (there) *total = partial[0];
    }
}
"""
WAYS = (
    *("DEVICE", "SYSTEM", "BLOCK_FENCE", "BLOCK_ATOMIC", "NO_FENCE", "FLAG"),
    *("FLAG_WITHOUT_FENCE", "FLAG_READ_WITHOUT_FENCE", "FLAG_NOT_VOLATILE", "FLAG_BLOCK_FENCE"),
)


def _meet(way: str, order: Order = Order()) -> float:
    total = torch.zeros(1)
    values = (torch.zeros(4), torch.zeros(1, dtype=torch.int32), total, WAYS.index(way))
    launch(build(MEETING, "meeting", checks=True), 2 if "FLAG" in way else 4, 32, values, order=order)
    return float(total[0])


def test_device_scope_orders_all_ctas() -> None:
    for order in ORDERS[:2]:
        assert _meet("DEVICE", order) == _meet("SYSTEM", order) == 10
    assert _meet("FLAG") == 5


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("DEVICE", "SYSTEM", "FLAG")])
def test_narrower_scopes_do_not_order_ctas(way: str) -> None:
    for order in ORDERS[: 1 if "FLAG" in way else 2]:  # the flag's writer must run first
        with pytest.raises(TwinError, match="race"):
            _meet(way, order)


# Threads of one CTA, which need no wider scope.
IN_BLOCK = r"""
extern "C" __global__ void in_block(float* data, unsigned* count, float* y) {
    data[threadIdx.x] = threadIdx.x;
    __threadfence_block();
    const unsigned before = atomicAdd_block(count, 1u);
    if (before == blockDim.x - 1) y[0] = data[0] + data[63];
}
"""


def test_a_block_may_use_fences_and_atomics_of_its_own() -> None:
    for order in ORDERS[:2]:
        y = torch.zeros(1)
        values = (torch.zeros(64), torch.zeros(1, dtype=torch.int32), y)
        launch(build(IN_BLOCK, "in_block", checks=True), 1, 64, values, order=order)
        assert float(y[0]) == 63


# ---------------------------------------------------------------- launches that overlap

EARLY = r"""
#include "common/ptx.cuh"
extern "C" __global__ void early(const float* x, const float* weight, float* y, int weights_ready, int way) {
    __shared__ float ahead[32];
    if (!weights_ready || way == 1) wait_for_previous_launch();
    ahead[threadIdx.x] = weight[threadIdx.x];
    if (way == 5) return;
    if (way == 2) {  // one for all
        if (threadIdx.x == 0) wait_for_previous_launch();
        __syncthreads();
    } else if (way != 3) {
        wait_for_previous_launch();
    }
    if (way == 4) ahead[threadIdx.x] += 0.f * y[threadIdx.x];
    y[threadIdx.x] = x[threadIdx.x] * ahead[threadIdx.x];
}
"""


def _early(weights_ready: bool, told: bool, way: int = 0, overlap: bool = True) -> None:
    x, weight, y = torch.randn(32), torch.randn(32), torch.zeros(32)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, weight, y)]
    build(EARLY, "early", checks=True).launch(
        (1, 1, 1),
        (32, 1, 1),
        [*pointers, ctypes.c_int(told), ctypes.c_int(way)],
        buffers=[(t.data_ptr(), 128) for t in (x, weight, y)],
        overlap=overlap,
        weights_ready=[(weight.data_ptr(), 128)] if weights_ready else [],
    )
    assert torch.equal(y, x * weight)


def test_a_launch_that_waits_as_it_must() -> None:
    _early(weights_ready=False, told=False)
    _early(weights_ready=True, told=True)
    _early(weights_ready=False, told=True, way=1)
    _early(weights_ready=True, told=True, way=2)
    _early(weights_ready=False, told=True, way=3, overlap=False)


@pytest.mark.parametrize(
    ("weights_ready", "way", "message"),
    [
        (False, 0, "reads byte .* of buffer 1 before wait_for_previous_launch"),
        (True, 3, "reads byte .* of buffer 0 before wait_for_previous_launch"),
        (True, 5, "no thread called wait_for_previous_launch"),
    ],
    ids=["weights that are not ready", "no wait for x", "no wait at all"],
)
def test_a_launch_that_reads_ahead_of_its_wait(weights_ready: bool, way: int, message: str) -> None:
    with pytest.raises(TwinError, match=message):
        _early(weights_ready, told=True, way=way)


def _linear(edit: tuple[str, str] | None, weights_ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe's own launch, with a bug planted in its kernel."""
    problem = LinearProblem(batch=2, in_features=64, out_features=8, bias=True)
    rung = LinearOperation.ladder.rung("warp_per_output")
    recipe = rung.recipe(problem, rung.configs(problem)[0])
    if edit:
        whole = Program.text

        def text(program: Program) -> str:
            source = whole(program)
            assert edit[0] in source
            return source.replace(*edit)

        monkeypatch.setattr(Program, "text", text)
    inputs = {"x": torch.randn(2, 64), "weight": torch.randn(8, 64), "bias": torch.randn(8)}
    y = torch.empty(2, 8)
    options = TwinOptions(checks=True)
    Executable(recipe, torch.device("cpu"), options=options, weights_ready=weights_ready).bind(
        {**inputs, "y": y}
    )()
    torch.testing.assert_close(y, torch.nn.functional.linear(inputs["x"], inputs["weight"], inputs["bias"]))


@pytest.mark.parametrize("weights_ready", [False, True])
def test_a_recipe_declares_reads_allowed_early(weights_ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _linear(None, weights_ready, monkeypatch)


@pytest.mark.parametrize(
    ("edit", "weights_ready"),
    [
        (("wait_for_previous_launch();", ";"), False),
        (("wait_for_previous_launch();", ";"), True),
        (("if (!weights_ready) wait_for_previous_launch();", ""), False),
    ],
    ids=["no wait", "no wait for x", "always ready"],
)
def test_a_kernel_that_forgets_its_wait_is_reported(
    edit: tuple[str, str], weights_ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LaunchError, match="before wait_for_previous_launch"):
        _linear(edit, weights_ready, monkeypatch)


def test_readiness_follows_a_renamed_buffer() -> None:
    program = Program.of("linear/warp_per_output.cu", "linear_warp_per_output")
    call = KernelCall(program, (1, 1, 1), (32, 1, 1), (Buffer("weight"), WeightsReady(("weight", "bias"))))
    moved = Recipe((call,)).remap({"weight": Buffer("packed", 64)})
    assert moved.steps == (replace(call, arguments=(Buffer("packed", 64), WeightsReady(("packed", "bias")))),)
