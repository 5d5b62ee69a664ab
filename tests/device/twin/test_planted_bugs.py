"""Correct kernels pass in every order; the same kernels with one planted bug are each reported."""

from __future__ import annotations

import pytest
import torch

from escalade.device.twin import Order, TwinError, build, checks
from tests.device.twin.support import ORDERS, arguments, buffers, launch, line_of, planted, report_of

BODY = r"""
#include "common/ptx.cuh"
template <int SIZE>
__device__ void body(const float* x, float* y) {
    __shared__ float tile[SIZE];
    __shared__ float ones[SIZE];
    __shared__ __align__(16) float copied[SIZE];
    const int i = threadIdx.x, first = blockIdx.x * SIZE;
    copy_async_4(shared_address(&copied[i]), x + first + i, true);
    copy_async_commit();
    tile[i] = x[first + i];
    ones[i] = 1.f;
    copy_async_wait<0>();
    __syncthreads();
    const float sum = tile[(i + 1) % SIZE] + ones[i] + copied[SIZE - 1 - i];
    __syncthreads();
    tile[i] = sum;
    __syncwarp();
    const float swapped = __shfl_xor_sync(~0u, tile[i ^ 1], 1);
    y[first + i] = swapped;
}
extern "C" __global__ void kernel(const float* x, float* y) { body<64>(x, y); }
"""
FIRST_BARRIER = ("__syncthreads();\n    const float sum", "const float sum")
SECOND_BARRIER = "    __syncthreads();\n    tile[i] = sum"


def _tensors() -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers far apart, so that an overrun of one does not hit the other."""
    room = torch.full((9, 64), float("nan"))
    x, y = room[:3], room[6:]
    return x.copy_(torch.randn(3, 64)), y


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_correct_kernel_passes(order: Order) -> None:
    kernel = build(BODY, "kernel", checks=True)
    x, y = _tensors()
    launch(kernel, 3, 64, (x, y), order=order)
    torch.testing.assert_close(y, x.roll(-1, 1) + 1 + x.flip(1))
    checks.require_written(kernel, y.data_ptr(), y.numel() * 4, 4)


BUGS = {
    "missing barrier after the stores": (FIRST_BARRIER, "nothing wrote"),
    "missing barrier before the tile is reused": ((SECOND_BARRIER, "    tile[i] = sum"), "race"),
    "divergent barrier": ((SECOND_BARRIER, f"    if (i < 32) {SECOND_BARRIER.strip()}"), "race"),
    "missing __syncwarp": (("__syncwarp();", ""), "race"),
    "no wait for cp.async": (("copy_async_wait<0>();", ""), "was not waited for"),
    "cp.async group not committed": (("copy_async_commit();", ""), "was not waited for"),
    "one past the end of a shared array": (("tile[i] = sum", "tile[i + 1] = sum"), "past the end of tile"),
    "from one static array far into the next": (
        ("ones[i] = 1.f", "ones[i + 40] = 1.f"),
        "past the end of ones",
    ),
    "uninitialized shared memory": (
        ("ones[i] = 1.f;", "if (i) ones[i] = 1.f;"),
        "ones+0, which nothing wrote",
    ),
    "write past the end of a buffer": (("y[first + i] =", "y[first + i + 1] ="), "past the end of buffer 1"),
    "read before a buffer": (
        ("tile[i] = x[first + i]", "tile[i] = x[first + i - 1]"),
        "outside the launch's buffers",
    ),
    "blocks write the same output": (("y[first + i] =", "y[i] ="), "of block"),
    "misaligned vector access": (
        ("y[first + i] = swapped", "*(float2*)&y[first + (i | 1)] = make_float2(swapped, 0.f)"),
        "no multiple of 8",
    ),
    "shuffle from a lane that does not take part": (
        (
            "__shfl_xor_sync(~0u, tile[i ^ 1], 1)",
            "i % 32 < 16 ? __shfl_xor_sync(0xFFFFu, tile[i ^ 1], 16) : 0.f",
        ),
        "which is not among the lanes",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_reported(bug: str) -> None:
    edit, expected = BUGS[bug]
    report = report_of(planted(BODY, edit), "kernel", 3, 64, _tensors())
    assert expected in report and "kernel.cu:" in report


def test_a_race_names_both_sides() -> None:
    source = planted(BODY, (SECOND_BARRIER, "    tile[i] = sum"))
    report = report_of(source, "kernel", 1, 64, _tensors())
    assert f"kernel.cu:{line_of(source, 'tile[i] = sum')}:" in report
    assert f"at kernel.cu:{line_of(source, 'const float sum')}," in report


def test_an_unwritten_output_is_reported_and_a_computed_nan_is_not() -> None:
    source = planted(BODY, ("y[first + i] = swapped", "if (i != 5) y[first + i] = 0.f / 0.f"))
    kernel = build(source, "kernel", checks=True)
    x, y = _tensors()
    launch(kernel, 3, 64, (x, y))
    assert kernel.unwritten(y.data_ptr(), y.numel() * 4, 4) == [5, 69, 133]
    with pytest.raises(TwinError, match="3 of 192 elements of y unwritten: 5, 69, 133"):
        checks.require_written(kernel, y.data_ptr(), y.numel() * 4, 4, "y")


# ---------------------------------------------------------------- without hooks


def test_threads_at_different_barriers_are_seen_without_checks() -> None:
    source = planted(BODY, (SECOND_BARRIER, f"    if (i < 32) {SECOND_BARRIER.strip()}"))
    source = planted(
        source, ("__syncwarp();", "if (i >= 32) named_barrier_sync(1, 64);"), ("ptx.cuh", "hopper.cuh")
    )
    for order in ORDERS[:2]:
        with pytest.raises(TwinError, match=r"deadlock: nothing can run[\s\S]*32 of 64 threads have arrived"):
            launch(build(source, "kernel"), 1, 64, _tensors(), order=order)


def test_guard_zones_are_looked_at_without_checks() -> None:
    source = planted(BODY, ("tile[i] = sum", "tile[i + 1] = sum"))
    with pytest.raises(TwinError, match="wrote outside its shared memory: 0 bytes past the end of tile"):
        launch(build(source, "kernel"), 1, 64, _tensors())


def test_late_copies_leave_poison_without_a_wait() -> None:
    kernel = build(planted(BODY, ("copy_async_wait<0>();", "")), "kernel")
    x, y = _tensors()
    launch(kernel, 3, 64, (x, y), order=Order(late=True))
    assert y.isnan().all()


# ---------------------------------------------------------------- sanitizers


def _sanitize(source: str) -> torch.Tensor:
    x, y = _tensors()
    values = (x, y)
    checks.sanitize(source, "kernel", (3, 1, 1), (64, 1, 1), arguments(values), buffers=buffers(values))
    torch.testing.assert_close(y, x.roll(-1, 1) + 1 + x.flip(1))
    return y


def test_sanitizers() -> None:
    _sanitize(BODY)
    with pytest.raises(TwinError, match=r"heap-buffer-overflow[\s\S]*kernel\.cu:20"):
        _sanitize(planted(BODY, ("y[first + i] =", "y[first + i + 1] =")))
    with pytest.raises(TwinError, match=r"kernel\.cu:17.*shift exponent"):
        _sanitize(planted(BODY, ("tile[i] = sum", "tile[i] = sum + (1 << (i + first))")))
