"""Errors of asynchronous units on memory and registers are reported in every order, not only in an unlucky one."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch

from escalade.device.sources import KERNELS
from escalade.device.twin import Order, TwinError, build, toolchain
from escalade.device.twin.tensor_map import encode_tiled
from tests.device.twin.support import ORDERS, launch

# d[64][64] = a[64][depth] * b[64][depth]^T, 64 elements of the depth per stage. One build for all mistakes: an argument
# selects one.
PRODUCT = r"""
#include "common/hopper.cuh"
extern __shared__ __align__(1024) unsigned char memory[];
constexpr u32 PANEL = 64 * 128, STAGE = 2 * PANEL;
enum Mistake { NONE, MISTAKES };

extern "C" __global__ void product(__grid_constant__ const TensorMap a, __grid_constant__ const TensorMap b,
                                   __grid_constant__ const TensorMap d, const u32* result, float* y, int steps,
                                   int mistake) {
    const u32 tiles = (shared_address(memory) + 1023) / 1024 * 1024, barriers = tiles + 2 * STAGE + PANEL;
    const u32 full = barriers, empty = barriers + 16;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < 2; ++stage) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(empty + 8 * stage, mistake == FREED_BY_ONE_WARP ? 1 : 4);
        }
        if (mistake == INITIALIZED_TWICE) barrier_init(full, 1);
        if (mistake == FENCED_BY_PROXY) fence_async_proxy();
        else if (mistake != NO_INIT_FENCE) fence_barrier_init();
    }
    if (threadIdx.x == 64 && (mistake == WRITTEN_BEFORE_LOAD || mistake == FENCED_BEFORE_LOAD)) {
        store_shared(tiles, 1.f);
        if (mistake == FENCED_BEFORE_LOAD) fence_async_proxy();
    }
    if (mistake != NO_BARRIER_AFTER_INIT) __syncthreads();
    if (threadIdx.x >= 128) {  // the producer's warp
        if (mistake == UNEVEN_REGISTERS && threadIdx.x % 32 < 16) release_registers<24>();
        if (threadIdx.x > 128) return;
        for (int step = 0; step < steps + (mistake == LOAD_NOBODY_WAITS_FOR); ++step) {
            const int stage = step % 2, round = step / 2;
            if (mistake != NO_EMPTY_WAIT) barrier_wait(empty + 8 * stage, (round & 1) ^ 1);
            barrier_expect(full + 8 * stage, mistake == TOO_FEW_BYTES ? PANEL : STAGE);
            tma_load_2d(tiles + stage * STAGE, a, full + 8 * stage, step * 64, 0);
            tma_load_2d(tiles + stage * STAGE + PANEL, b, full + 8 * stage, step * 64, 0);
            if (mistake == ISSUER_READS) y[0] = load_shared(tiles + stage * STAGE);
        }
        return;
    }
    if (mistake == TOO_MANY_REGISTERS) claim_registers<256>();
    float sums[32], spoiled = 0.f;
    for (int step = 0; step < steps; ++step) {
        const int stage = step % 2, round = step / 2;
        if (mistake != NO_FULL_WAIT)
            barrier_wait(full + 8 * stage, mistake == SAME_PARITY && step == 2 ? 0 : round & 1);
        if (mistake == CLEARED_BEFORE_FENCE)
            for (float& sum : sums) if (!step) sum = 0.f;
        if (mistake != NO_WGMMA_FENCE && !(mistake == NO_SECOND_FENCE && step)) wgmma_fence();
        if (mistake == CLEARED_AFTER_FENCE)
            for (float& sum : sums) sum = 0.f;
        u64 rows = operand_descriptor(tiles + stage * STAGE);
        u64 columns = operand_descriptor(tiles + stage * STAGE + PANEL);
        if (mistake == LEADING_OFFSET) rows += u64(63) << 16;
        if (mistake == RESERVED_BITS) rows |= u64(1) << 14;
        if (mistake == STRIDE) columns -= u64(512 >> 4) << 32;
        for (int k = 0; k < 4; ++k)
            wgmma(sums, rows + 2 * k, columns + 2 * k,
                  mistake == NEVER_CLEARED || mistake == CLEARED_BEFORE_FENCE || step || k);
        if (mistake == OTHER_SHAPE) wgmma(reinterpret_cast<float (&)[16]>(sums), rows, columns, 1);
        if (mistake != NO_COMMIT) wgmma_commit();
        if (mistake == READ_BEFORE_WAIT) spoiled += sums[5];
        if (mistake == WRITTEN_BEFORE_WAIT && step == 1) sums[7] = 0.f;
        if (mistake == FREED_BEFORE_WAIT && threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * stage);
        if (mistake == WAIT_TOO_FEW) wgmma_wait<1>();
        else if (mistake != NO_WGMMA_WAIT) wgmma_wait<0>();
        if (mistake == NO_SECOND_FENCE) spoiled += sums[3];
        if (threadIdx.x % 32 == 0 && mistake != FREED_BEFORE_WAIT && (mistake != FREED_BY_ONE_WARP || threadIdx.x == 0))
            barrier_arrive(empty + 8 * stage);
    }
    if (mistake == WAIT_TOO_FEW) wgmma_wait<0>();
    if (spoiled == 1e30f) y[threadIdx.x] = spoiled;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 panel = tiles + 2 * STAGE;
    for (int i = 0; i < 32; i += 8) {  // two 8-column blocks, rows 16 * warp and on
        const u32 packed[4] = {pack_half2(sums[i], sums[i + 1]), pack_half2(sums[i + 2], sums[i + 3]),
                               pack_half2(sums[i + 4], sums[i + 5]), pack_half2(sums[i + 6], sums[i + 7])};
        const u32 row = 16 * warp + lane % 16, chunk = i / 4 + lane / 16;
        store_matrices(panel + row * 128 + (chunk ^ row % 8) * 16, packed);
    }
    if (mistake != NO_PROXY_FENCE && mistake != LATE_PROXY_FENCE && mistake != PROXY_FENCE_OF_THE_COPIER)
        fence_async_proxy();
    named_barrier_sync(1, 128);
    if (mistake == LATE_PROXY_FENCE && threadIdx.x) fence_async_proxy();
    if (threadIdx.x == 0) {
        if (mistake == PROXY_FENCE_OF_THE_COPIER) fence_async_proxy();
        tma_store_2d(d, panel, 0, 0);
    }
    if (mistake == SOURCE_WRITTEN_BY_ANOTHER) {
        named_barrier_sync(1, 128);
        if (threadIdx.x == 64) store_shared(panel + 256, 1.f);
    }
    if (threadIdx.x == 0) {
        if (mistake == SOURCE_WRITTEN) store_shared(panel + 256, 1.f);
        if (mistake != NO_STORE_WAIT) tma_store_wait_read<0>();
        if (mistake == SOURCE_WRITTEN_AFTER_WAIT) store_shared(panel + 256, 1.f);
        if (mistake == RESULT_READ) y[0] = *result;
    }
}
"""

IN_FLIGHT = "in flight"
STILL_READ = "still has to read"
MISTAKES = {
    "INITIALIZED_TWICE": "where an mbarrier is in use",
    "NO_INIT_FENCE": "no fence.mbarrier_init or fence.proxy.async",
    "NO_BARRIER_AFTER_INIT": "nothing orders it after the barrier's initialization|no mbarrier was initialized",
    "WRITTEN_BEFORE_LOAD": "writes .* asynchronously, which thread 64 .* without a proxy fence",
    "UNEVEN_REGISTERS": "of a warpgroup hold",
    "TOO_MANY_REGISTERS": "the warps want",
    "LOAD_NOBODY_WAITS_FOR": "none of its threads waited",
    "NO_EMPTY_WAIT": f"{IN_FLIGHT}|{STILL_READ}|more arrivals|race",
    "TOO_FEW_BYTES": f"{IN_FLIGHT}|more arrivals|deadlock",
    "ISSUER_READS": IN_FLIGHT,
    "NO_FULL_WAIT": f"{IN_FLIGHT}|nothing wrote|race",
    "SAME_PARITY": f"{IN_FLIGHT}|{STILL_READ}|race|deadlock",
    "NO_WGMMA_FENCE": "no wgmma.fence before it",
    "NO_SECOND_FENCE": "register 3 was read or written after the last wgmma.fence",
    "CLEARED_AFTER_FENCE": "register 0 was read or written after the last wgmma.fence",
    "LEADING_OFFSET": "leading offset",
    "RESERVED_BITS": "reserved bits",
    "NEVER_CLEARED": "register 0, which nothing wrote",
    "OTHER_SHAPE": "in another shape",
    "NO_COMMIT": f"{STILL_READ}|accumulator register|not waited for",
    "READ_BEFORE_WAIT": "uses accumulator register 5 of the wgmma of kernel.cu:",
    "WRITTEN_BEFORE_WAIT": "uses accumulator register 7 of the wgmma of kernel.cu:",
    "WAIT_TOO_FEW": STILL_READ,
    "NO_WGMMA_WAIT": f"{STILL_READ}|accumulator register",
    "FREED_BEFORE_WAIT": STILL_READ,
    "FREED_BY_ONE_WARP": f"{STILL_READ}|{IN_FLIGHT}|nothing wrote",
    "NO_PROXY_FENCE": "without a proxy fence of its own",
    "LATE_PROXY_FENCE": "without a proxy fence",
    "PROXY_FENCE_OF_THE_COPIER": "which thread [1-9].* without a proxy fence of its own",
    "SOURCE_WRITTEN": STILL_READ,
    "SOURCE_WRITTEN_BY_ANOTHER": STILL_READ,
    "NO_STORE_WAIT": "may still read shared memory",
    "RESULT_READ": "in flight",
}
WRONG = ("STRIDE",)  # no report, but a wrong result
FINE = (
    *("NONE", "FENCED_BY_PROXY", "CLEARED_BEFORE_FENCE"),
    *("SOURCE_WRITTEN_AFTER_WAIT", "FENCED_BEFORE_LOAD"),
)
NAMES = ("NONE", *MISTAKES, *WRONG, *FINE[1:])


class _Map(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


def _map(t: torch.Tensor) -> ctypes.Structure:
    rows, columns = t.shape
    return _Map.from_buffer_copy(encode_tiled(t.data_ptr(), 2, (columns, rows), (columns * 2,), (64, 64)))


def _multiply(variant: str, order: Order) -> None:
    a, b = torch.randn(64, 256).half(), torch.randn(64, 256).half()
    d, y = torch.full((64, 64), float("nan")).half(), torch.zeros(128)
    kernel = build(PRODUCT.replace("MISTAKES", ", ".join(NAMES[1:])), "product", checks=True)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (d, y)]
    values = [*map(_map, (a, b, d)), *pointers, ctypes.c_int(4), ctypes.c_int(NAMES.index(variant))]
    ranges = [(t.data_ptr(), t.numel() * t.element_size()) for t in (a, b, d, y)]
    kernel.launch(
        (1, 1, 1), (160, 1, 1), values, shared_bytes=1024 + 5 * 64 * 128 + 64, order=order, buffers=ranges
    )
    torch.testing.assert_close(d, (a.float() @ b.float().T).half(), rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("variant", FINE)
def test_a_product_that_waits_and_fences_as_it_must(variant: str) -> None:
    for order in ORDERS:
        _multiply(variant, order)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_product_with_a_mistake_is_reported_in_every_order(mistake: str) -> None:
    for order in ORDERS:
        with pytest.raises(TwinError, match=MISTAKES[mistake]):
            _multiply(mistake, order)


@pytest.mark.parametrize("mistake", WRONG)
def test_a_descriptor_points_to_its_target(mistake: str) -> None:
    with pytest.raises(AssertionError, match="not close"):
        _multiply(mistake, Order())


def test_descriptors_are_those_of_the_kernels() -> None:
    """Mistakes in those functions then show on the twin."""
    names = re.findall(r"u64 (\w+)\(", (KERNELS / "common" / "descriptors.cuh").read_text())
    assert len(names) == 4
    for file in (toolchain.STAND_INS / "common").glob("*.cuh"):
        assert not [name for name in names if name in file.read_text()]


# ---------------------------------------------------------------- rows in registers, sums in a structure

STRUCTURE = r"""
#include "common/hopper.cuh"
enum Variant { NONE, WAYS };
struct Sums {
    float at[2][16];
    int other;
};
__device__ __noinline__ float look(const Sums& sums) { return sums.at[1][3]; }

extern "C" __global__ void structure(const u16* columns, float* y, int way) {
    __shared__ __align__(1024) unsigned char panel[32 * 128];
    for (int i = threadIdx.x; i < 32 * 64; i += 128) reinterpret_cast<u16*>(panel)[i] = columns[i];
    fence_async_proxy();
    __syncthreads();
    Sums sums;
    u32 rows[4] = {1, 2, 3, 4};
    const u64 first = operand_descriptor(shared_address(panel));
    if (way == CLEARED) sums = Sums();
    wgmma_fence();
    if (way == ROWS_AFTER_FENCE)
        for (u32& pair : rows) pair = way;
    wgmma_from_registers(sums.at[0], rows, first, way == CLEARED);
    wgmma_from_registers(sums.at[1], rows, first + 2, way == CLEARED || way == HALF_CLEARED);
    sums.other = 5;  // none of the registers
    if (way != CONTINUED)
        for (u32& pair : rows) pair = 0;  // nor are these: the instruction has their values
    wgmma_commit();
    if (way == SEEN_BY_A_CALL) y[threadIdx.x] = look(sums);
    if (way == COPIED) {
        Sums copy = sums;
        y[threadIdx.x] = copy.at[0][0];
    }
    if (way == COLUMNS_WRITTEN) panel[threadIdx.x] = 0;
    wgmma_wait<0>();
    if (way == CHANGED) sums.at[0][0] += 1.f;
    if (way == CHANGED || way == CONTINUED) {
        wgmma_from_registers(sums.at[0], rows, first, 1);
        wgmma_commit();
        wgmma_wait<0>();
    }
    y[threadIdx.x] = look(sums) + sums.at[0][1] + sums.other;
}
"""
STRUCTURE_WAYS = {
    "ROWS_AFTER_FENCE": "register 0 of its rows was read or written after the last wgmma.fence",
    "HALF_CLEARED": "adds to accumulator register 0, which nothing wrote",
    "SEEN_BY_A_CALL": "uses accumulator register 3 of the wgmma",
    "COPIED": "uses accumulator register 0 of the wgmma",
    "COLUMNS_WRITTEN": STILL_READ,
    "CHANGED": "register 0 was read or written after the last wgmma.fence",
    "CLEARED": "",
    "CONTINUED": "",
    "NONE": "",
}


@pytest.mark.parametrize("way", STRUCTURE_WAYS)
def test_registers_are_followed_into_structures_and_calls(way: str) -> None:
    names = [name for name in STRUCTURE_WAYS if name != "NONE"]
    kernel = build(STRUCTURE.replace("WAYS }", ", ".join(names) + " }"), "structure", checks=True)
    for order in ORDERS:
        columns, y = torch.randn(32, 64).half(), torch.zeros(128)
        values = (columns, y, 1 + names.index(way) if way in names else 0)
        if STRUCTURE_WAYS[way]:
            with pytest.raises(TwinError, match=STRUCTURE_WAYS[way]):
                launch(kernel, 1, 128, values, order=order)
        else:
            launch(kernel, 1, 128, values, order=order)
            assert y.isfinite().all() and (y > 4).all()  # rows take almost no memory


# ---------------------------------------------------------------- clusters

# Every CTA pushes x to the next one, and lets it read x in place.
EXCHANGE = r"""
#include "common/hopper.cuh"
enum Mistake { NONE, MISTAKES };
extern "C" __global__ void exchange(const float4* x, float4* pushed, float4* read, int mistake) {
    __shared__ float4 mine[32], received[32];
    __shared__ u64 barriers[2];
    const u32 full = shared_address(&barriers[0]), ready = shared_address(&barriers[1]);
    const u32 next = (cluster_rank() + 1) % cluster_size(), i = blockIdx.x * 32 + threadIdx.x;
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        barrier_init(ready, 32);
        barrier_expect(full, 32 * 16);
        if (mistake != NO_INIT_FENCE) fence_barrier_init();
    }
    store_shared(shared_address(&mine[threadIdx.x]), x[i]);
    if (mistake == NO_CLUSTER_BARRIER) {
        __syncthreads();
    } else if (mistake == NO_INIT_FENCE || mistake == RELAXED || mistake == RELAXED_FOR_BARRIERS) {
        cluster_arrive_relaxed();
        cluster_wait();
    } else {
        cluster_sync();
    }
    push_cluster(shared_address(&received[threadIdx.x]), full, next, x[i]);
    if (mistake != RELAXED_FOR_BARRIERS && mistake != ARRIVAL_AFTER_LEAVING)
        read[i] = load_cluster(shared_address(&mine[threadIdx.x]), next);
    if (mistake != READ_AFTER_LEAVING) barrier_arrive_cluster(ready, next);
    if (mistake != PUSH_NOT_WAITED_FOR) {
        barrier_wait(full, 0);
        pushed[i] = load_shared_16(shared_address(&received[31 - threadIdx.x]));
    }
    if (mistake != READ_AFTER_LEAVING && mistake != ARRIVAL_AFTER_LEAVING) cluster_sync();
}
"""
CLUSTER_MISTAKES = {
    "NO_INIT_FENCE": "of another block, and nothing orders it after the barrier's initialization",
    "NO_CLUSTER_BARRIER": "which need not have started",
    "RELAXED": "race",
    "READ_AFTER_LEAVING": "none of its threads waited|have returned",
    "ARRIVAL_AFTER_LEAVING": "none of its threads waited|have returned",
    "PUSH_NOT_WAITED_FOR": "none of its threads waited|before its st.async has arrived",
}
CLUSTER_NAMES = ("NONE", *CLUSTER_MISTAKES, "RELAXED_FOR_BARRIERS")


def _exchange(variant: str, order: Order) -> None:
    x, pushed, read = torch.randn(2, 4, 32, 4), torch.zeros(2, 4, 32, 4), torch.zeros(2, 4, 32, 4)
    kernel = build(EXCHANGE.replace("MISTAKES", ", ".join(CLUSTER_NAMES[1:])), "exchange", checks=True)
    values = [ctypes.c_void_p(t.data_ptr()) for t in (x, pushed, read)]
    kernel.launch(
        (8, 1, 1),
        (32, 1, 1),
        [*values, ctypes.c_int(CLUSTER_NAMES.index(variant))],
        cluster=(4, 1, 1),
        order=order,
    )
    assert torch.equal(pushed, x.roll(1, 1).flip(2))
    assert variant == "RELAXED_FOR_BARRIERS" or torch.equal(read, x.roll(-1, 1))


def test_blocks_of_a_cluster_that_wait_for_each_other() -> None:
    for order in ORDERS:
        _exchange("NONE", order)
        _exchange("RELAXED_FOR_BARRIERS", order)


@pytest.mark.parametrize("mistake", CLUSTER_MISTAKES)
def test_blocks_of_a_cluster_that_do_not_are_reported_in_every_order(mistake: str) -> None:
    for order in ORDERS:
        with pytest.raises(TwinError, match=CLUSTER_MISTAKES[mistake]):
            _exchange(mistake, order)


# ---------------------------------------------------------------- named barriers

# Warps meet at barrier `id`; those from `boundary` on pass other_id and other_count.
MEETING = r"""
#include "common/hopper.cuh"
extern "C" __global__ void meeting(float* y, int boundary, int id, int count, int other_id, int other_count,
                                   int rounds) {
    __shared__ float tile[128];
    tile[threadIdx.x] = threadIdx.x;
    for (int round = 0; round < rounds; ++round) {
        if (threadIdx.x < boundary) named_barrier_sync(id, count);
        else if (other_count > 0) named_barrier_sync(other_id, other_count);
        else named_barrier_arrive(other_id, -other_count);
    }
    y[threadIdx.x] = tile[threadIdx.x];
}
"""


def _meet(order: Order, *numbers: int) -> None:
    y = torch.zeros(128)
    values = [ctypes.c_void_p(y.data_ptr()), *map(ctypes.c_int, numbers)]
    build(MEETING, "meeting", checks=True).launch((1, 1, 1), (128, 1, 1), values, order=order)
    assert y.tolist() == list(range(128))


@pytest.mark.parametrize(
    "numbers",
    [(128, 1, 128, 1, 128, 3), (64, 1, 64, 2, 64, 3), (32, 15, 32, 2, 96, 3), (64, 1, 128, 1, -128, 1)],
    ids=["one", "two", "uneven", "arrive"],
)
def test_named_barriers_of_whole_warps(numbers: tuple[int, ...]) -> None:
    for order in ORDERS[:2]:
        _meet(order, *numbers)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((128, 16, 128, 16, 128, 1), "barrier 16; a block has 0 to 15"),
        ((100, 1, 100, 2, 28, 1), "whole warps of 32"),
        ((128, 1, 160, 1, 160, 1), "the block has 128 threads"),
        ((32, 1, 32, 1, 96, 1), "used with|nothing orders the two"),
        ((64, 1, 64, 1, 64, 1), "nothing orders the two|more threads arrive at it than it counts"),
        ((64, 1, 128, 1, -128, 2), "a second time|nothing orders the two"),
    ],
    ids=["id", "count", "more than there are", "two counts", "two groups", "arrives ahead"],
)
def test_named_barriers_that_count_the_wrong_threads(numbers: tuple[int, ...], message: str) -> None:
    for order in ORDERS[:2]:
        with pytest.raises(TwinError, match=message):
            _meet(order, *numbers)
