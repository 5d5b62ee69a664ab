"""Regions of dynamic shared memory, declared where a kernel carves them: overruns into the next one are reported."""

from __future__ import annotations

import pytest
import torch

from escalade.device.twin import Order, TwinError, build
from tests.device.twin.support import ORDERS, launch, planted, report_of

SOURCE = r"""
#include "common/ptx.cuh"
extern "C" __global__ void parts(const float* x, float* y, int by) {
    extern __shared__ __align__(16) float shared[];
    float* const rows = shared_part(shared, 64);
    float* const sums = shared_part(shared + 64, 2);
    float4* const copies = shared_part(reinterpret_cast<float4*>(shared + 68), REST);
    const int i = threadIdx.x;
    rows[i + by] = x[i];
    copy_async_4(shared_address(&reinterpret_cast<float*>(copies)[i]), x + i, true);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    if (i < 2) {
        sums[i] = 0.f;
        for (int j = 0; j < 32; ++j) sums[i] += rows[32 * i + j];
    }
    __syncthreads();
    y[i] = sums[i / 32] + reinterpret_cast<float*>(copies)[63 - i];
}
"""
BYTES = 4 * (68 + 64)


def _tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(-8, 9, (64,)).float(), torch.zeros(64)


@pytest.mark.parametrize("checks", [False, True])
def test_parts_are_memory_like_any_other(checks: bool) -> None:
    for order in ORDERS:
        x, y = _tensors()
        launch(build(SOURCE, "parts", checks=checks), 1, 64, (x, y, 0), shared_bytes=BYTES, order=order)
        assert torch.equal(y, x.view(2, 32).sum(1).repeat_interleave(32) + x.flip(0))


BUGS = {
    "past the end of a part, into the next": (
        (),
        1,
        "0 bytes past the end of the part of 256 bytes of kernel.cu:5",
    ),
    "far past the end of a part, where another is": (
        (("rows[i + by]", "rows[i + by * 72]"),),
        1,
        "32 bytes past the end of the part of 256 bytes of kernel.cu:5",
    ),
    "before a part": ((("rows[i + by]", "sums[i + by]"),), -1, "writes 4 bytes outside shared memory: "),
    "a vector across two parts": (
        (("sums[i] = 0.f;", "*(float4*)sums = float4();"),),
        0,
        "past the end of the part of 8 bytes of kernel.cu:6",
    ),
    "cp.async past the end of a part": (
        (("&reinterpret_cast<float*>(copies)[i])", "rows + 64 + i)"),),
        0,
        "cp.async writes outside shared memory: 0 bytes past the end of the part of 256 bytes",
    ),
    "by another pointer": (
        (("rows[i + by]", "shared[i + by]"),),
        0,
        "byte 0 of the part of 256 bytes of kernel.cu:5, by another pointer than its declaration gave",
    ),
    "no barrier between the uses of a part": ((("__syncthreads();\n    if", "if"),), 0, "nothing wrote"),
    "parts that overlap": (
        (("shared + 64, 2)", "shared + 60, 6)"),),
        0,
        "kernel.cu:6: thread 0 of block (0, 0, 0): declares a part of shared memory that overlaps the part of",
    ),
    "more than there is": (
        (("shared + 68), REST", "shared + 68), 17"),),
        0,
        "declares 272 bytes of dynamic shared memory from byte 272 on; there are 528",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_with_parts_is_reported(bug: str) -> None:
    edits, by, expected = BUGS[bug]
    report = report_of(planted(SOURCE, *edits), "parts", 1, 64, (*_tensors(), by), shared_bytes=BYTES)
    assert expected in report


@pytest.mark.parametrize("order", ORDERS[:2], ids=str)
def test_a_part_of_a_part_is_the_same_memory(order: Order) -> None:
    """Reused regions are declared once, so that races between both uses are detected."""
    source = planted(SOURCE, ("shared + 64, 2)", "shared + 8, 2)"))
    x, y = _tensors()
    with pytest.raises(
        TwinError, match="race: writes shared byte 3[26] of the part of 256 bytes of kernel.cu:5"
    ):
        launch(build(source, "parts", checks=True), 1, 64, (x, y, 0), shared_bytes=BYTES, order=order)


def test_unhooked_stores_are_found_between_regions() -> None:
    source = planted(
        SOURCE,
        ("rows[i + by] = x[i];", 'rows[i] = x[i]; asm volatile("" ::: "memory"); unseen(rows + 64 * by);'),
    )
    source = planted(
        source,
        (
            'extern "C"',
            '__attribute__((no_sanitize("thread"), noinline)) void unseen(float* p) { *p = 1.f; }\n'
            'extern "C"',
        ),
    )
    with pytest.raises(
        TwinError, match="wrote outside its shared memory: 0 bytes past the end of the part of 256 by"
    ):
        launch(build(source, "parts", checks=True), 1, 64, (*_tensors(), 1), shared_bytes=BYTES)


LARGE = r"""
#include "common/ptx.cuh"
template <int FLOATS>
__device__ void body(const float* x, float* y, int by) {
    extern __shared__ __align__(16) float shared[];
    float* const first = shared_part(shared, FLOATS);
    float* const second = shared_part(shared + FLOATS, FLOATS);
    const int i = threadIdx.x;
    second[i] = x[i];
    __syncthreads();
    first[i] = 2.f * x[i];
    if (i == 0 && by) first[by] = 1.f;
    y[i] = second[i] + first[i];
}
extern "C" __global__ void large(const float* x, float* y, int by) { body<25600>(x, y, by); }
"""


def test_regions_of_maximal_shared_memory_are_isolated_from_far_indices() -> None:
    for by in (0, 25600, 25600 + 300, 2 * 25600 - 1):
        x, y = _tensors()
        if not by:
            launch(build(LARGE, "large", checks=True), 1, 64, (x, y, by), shared_bytes=2 * 4 * 25600)
            assert torch.equal(y, 3 * x)
            continue
        report = report_of(LARGE, "large", 1, 64, (x, y, by), shared_bytes=2 * 4 * 25600)
        past = 4 * (by - 25600)
        assert (
            f"writes 4 bytes outside shared memory: {past} bytes past the end of the part of 102400" in report
        )


TYPED = r"""
struct Parts { float rows[64], sums[64]; };
extern "C" __global__ void typed(const float* x, float* y, int by) {
    extern __shared__ __align__(16) unsigned char memory[];
    CARVE;
    const int i = threadIdx.x;
    sums[i] = 1.f;
    __syncthreads();
    rows[i + by] = x[i];
    y[i] = sums[i];
}
"""


@pytest.mark.parametrize(
    "carve",
    [
        "Parts& parts = *reinterpret_cast<Parts*>(memory); auto &rows = parts.rows, &sums = parts.sums",
        "auto &rows = reinterpret_cast<float (&)[64]>(memory), &sums = reinterpret_cast<float (&)[64]>(memory[256])",
    ],
    ids=["members", "references"],
)
def test_arrays_of_a_known_size_need_no_declaration(carve: str) -> None:
    source = TYPED.replace("CARVE", carve)
    launch(build(source, "typed", checks=True), 1, 64, (*_tensors(), 0), shared_bytes=512)
    report = report_of(source, "typed", 1, 64, (*_tensors(), 1), shared_bytes=512)
    assert "thread 63 of block (0, 0, 0): index 64 is outside an array of type 'float [64]'" in report
