"""TMA, mbarriers, wgmma and clusters: one tile of a matrix product, with a two-stage pipeline."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from escalade.device.twin import Order, TwinError, build
from escalade.device.twin.tensor_map import encode_im2col, encode_tiled
from escalade.errors import UnsupportedError
from tests.device.twin.support import ORDERS, launch, planted

# d[64][64] = a[64][depth] * b[64][depth]^T, 64 elements of the depth per stage.
PRODUCT = r"""
#include "common/hopper.cuh"
extern __shared__ __align__(1024) unsigned char memory[];
constexpr u32 PANEL = 64 * 128, STAGE = 2 * PANEL;

extern "C" __global__ void product(__grid_constant__ const TensorMap a, __grid_constant__ const TensorMap b,
                                   __grid_constant__ const TensorMap d, int steps) {
    const u32 tiles = (shared_address(memory) + 1023) / 1024 * 1024, barriers = tiles + 2 * STAGE + PANEL;
    const u32 full = barriers, empty = barriers + 16;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < 2; ++stage) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(empty + 8 * stage, 4);
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x >= 128) {  // the producer's warp
        if (threadIdx.x > 128) return;
        for (int step = 0; step < steps; ++step) {
            const int stage = step % 2, round = step / 2;
            barrier_wait(empty + 8 * stage, (round & 1) ^ 1);
            barrier_expect(full + 8 * stage, STAGE);
            tma_load_2d(tiles + stage * STAGE, a, full + 8 * stage, step * 64, 0);
            tma_load_2d(tiles + stage * STAGE + PANEL, b, full + 8 * stage, step * 64, 0);
        }
        return;
    }
    float sums[32];
    for (int step = 0; step < steps; ++step) {
        const int stage = step % 2, round = step / 2;
        barrier_wait(full + 8 * stage, round & 1);
        wgmma_fence();
        for (int k = 0; k < 4; ++k)
            wgmma(sums, operand_descriptor(tiles + stage * STAGE) + 2 * k,
                  operand_descriptor(tiles + stage * STAGE + PANEL) + 2 * k, step || k);
        wgmma_commit();
        wgmma_wait<0>();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * stage);
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 panel = tiles + 2 * STAGE;
    for (int i = 0; i < 32; i += 8) {  // two 8-column blocks, rows 16 * warp and on
        const u32 packed[4] = {pack_half2(sums[i], sums[i + 1]), pack_half2(sums[i + 2], sums[i + 3]),
                               pack_half2(sums[i + 4], sums[i + 5]), pack_half2(sums[i + 6], sums[i + 7])};
        const u32 row = 16 * warp + lane % 16, chunk = i / 4 + lane / 16;
        store_matrices(panel + row * 128 + (chunk ^ row % 8) * 16, packed);
    }
    fence_async_proxy();
    named_barrier_sync(1, 128);
    if (threadIdx.x == 0) {
        tma_store_2d(d, panel, 0, 0);
        tma_store_wait_read<0>();
    }
}
"""


class _Map(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


def _map(t: torch.Tensor) -> ctypes.Structure:
    rows, columns = t.shape
    return _Map.from_buffer_copy(encode_tiled(t.data_ptr(), 2, (columns, rows), (columns * 2,), (64, 64)))


def _run(source: str, order: Order, checks: bool, rows: int = 64, depth: int = 192) -> None:
    a, b = torch.randn(rows, depth).half(), torch.randn(64, depth).half()
    d = torch.full((rows, 64), float("nan")).half()
    kernel = build(source, "product", checks=checks)
    values = [_map(a), _map(b), _map(d), ctypes.c_int(-(-depth // 64))]
    ranges = [(t.data_ptr(), t.numel() * 2) for t in (a, b, d)]
    bytes_needed = 1024 + 5 * 64 * 128 + 64
    kernel.launch((1, 1, 1), (160, 1, 1), values, shared_bytes=bytes_needed, order=order, buffers=ranges)
    torch.testing.assert_close(d, (a.float() @ b.float().T).half(), rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("checks", [False, True])
def test_a_pipelined_product(checks: bool) -> None:
    for order in ORDERS:
        _run(PRODUCT, order, checks)
    _run(PRODUCT, ORDERS[0], checks, rows=50, depth=152)  # out of bounds is read as zero, and not written


BUGS = {
    "no wait for a full stage": (
        ("barrier_wait(full + 8 * stage, round & 1);", ""),
        "is in flight|nothing wrote",
    ),
    "no wait for the products": (("wgmma_wait<0>();", ""), "still has to read"),
    "no wait for an empty stage": (
        ("barrier_wait(empty + 8 * stage, (round & 1) ^ 1);", ""),
        "more arrivals",
    ),
    "wrong parity": (("(round & 1) ^ 1", "round & 1"), "deadlock"),
    "no proxy fence": (("fence_async_proxy();", ""), "without a proxy fence"),
    "no wait for the store": (("tma_store_wait_read<0>();", ""), "may still read shared memory"),
    "one thread skips a barrier": (
        ("named_barrier_sync(1, 128)", "if (threadIdx.x != 100) named_barrier_sync(1, 128)"),
        "deadlock",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_reported(bug: str) -> None:
    edit, expected = BUGS[bug]
    with pytest.raises(TwinError, match=expected):
        _run(planted(PRODUCT, edit), Order(late=True), checks=True)


# d[64][COLUMNS] = a[64][...] * b[COLUMNS][...]^T over a panel of 128 bytes, COLUMNS and MULTIPLY from above.
ONE_PANEL = r"""
#include "common/hopper.cuh"
extern "C" __global__ void panel(__grid_constant__ const TensorMap a, __grid_constant__ const TensorMap b, float* d) {
    __shared__ __align__(1024) unsigned char tiles[(64 + COLUMNS) * 128];
    __shared__ u64 barrier;
    const u32 address = shared_address(&barrier), rows = shared_address(tiles), columns = rows + 64 * 128;
    if (threadIdx.x == 0) {
        barrier_init(address, 1);
        fence_barrier_init();
        barrier_expect(address, sizeof(tiles));
        tma_load_2d(rows, a, address, 0, 0);
        tma_load_2d(columns, b, address, 0, 0);
    }
    __syncthreads();
    barrier_wait(address, 0);
    float sums[COLUMNS / 2];
    wgmma_fence();
    for (int k = 0; k < 4; ++k)
        MULTIPLY(sums, operand_descriptor(rows) + 2 * k, operand_descriptor(columns) + 2 * k, k);
    wgmma_commit();
    wgmma_wait<0>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = 0; i < COLUMNS / 2; ++i)
        d[(16 * warp + 8 * (i / 2 % 2) + lane / 4) * COLUMNS + 8 * (i / 4) + 2 * (lane % 4) + i % 2] = sums[i];
}
"""


def _truncated(values: torch.Tensor) -> torch.Tensor:
    return (values.view(torch.int32) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("columns", [64, 128, 232])
@pytest.mark.parametrize(
    ("multiply", "storage", "seen"),
    [
        ("wgmma", torch.float16, torch.Tensor.double),
        ("wgmma_bf16", torch.bfloat16, torch.Tensor.double),
        ("wgmma_tf32", torch.float32, lambda values: _truncated(values).double()),
        ("wgmma_e4m3", torch.float8_e4m3fn, torch.Tensor.double),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_products_of_every_type(
    multiply: str, storage: torch.dtype, seen: Callable[[torch.Tensor], torch.Tensor], columns: int
) -> None:
    a, b = (torch.randn(rows, 128 // storage.itemsize).to(storage) for rows in (64, columns))
    d = torch.full((64, columns), float("nan"))
    maps = [
        _Map.from_buffer_copy(
            encode_tiled(t.data_ptr(), storage.itemsize, t.shape[::-1], (128,), (t.shape[1], t.shape[0]))
        )
        for t in (a, b)
    ]
    source = f"#define COLUMNS {columns}\n#define MULTIPLY {multiply}\n" + ONE_PANEL
    build(source, "panel", checks=True).launch((1, 1, 1), (128, 1, 1), [*maps, ctypes.c_void_p(d.data_ptr())])
    torch.testing.assert_close(d.double(), seen(a) @ seen(b).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("row_bytes", "descriptor"), [(128, "operand"), (64, "narrow_operand")])
def test_products_of_integers_are_exact(row_bytes: int, descriptor: str) -> None:
    """From -128 to 127, in rows swizzled within 128 or 64 bytes."""
    columns = 48
    a, b = (torch.randint(-128, 128, (rows, row_bytes), dtype=torch.int8) for rows in (64, columns))
    a[0], b[0] = -128, -128
    d = torch.full((64, columns), float("nan"))
    maps = [
        _Map.from_buffer_copy(
            encode_tiled(t.data_ptr(), 1, t.shape[::-1], (row_bytes,), (row_bytes, t.shape[0]), row_bytes)
        )
        for t in (a, b)
    ]
    edits = {
        "float sums": "int sums", "* 128": f"* {row_bytes}", "k < 4": f"k < {row_bytes // 32}",
        "operand_descriptor": f"{descriptor}_descriptor",
    }  # fmt: skip
    source = f"#define COLUMNS {columns}\n#define MULTIPLY wgmma_s8\n" + ONE_PANEL
    for old, new in edits.items():
        assert old in source
        source = source.replace(old, new)
    build(source, "panel", checks=True).launch((1, 1, 1), (128, 1, 1), [*maps, ctypes.c_void_p(d.data_ptr())])
    assert torch.equal(d.double(), a.double() @ b.double().T)


# d[64][COLUMNS] = the sum over 32 rows k of a[k][64] * b[k][COLUMNS], both as stored in memory: b in boxes of 64
# columns, GAP bytes apart.
TRANSPOSED = r"""
#include "common/hopper.cuh"
extern "C" __global__ void panel(__grid_constant__ const TensorMap a, __grid_constant__ const TensorMap b, float* d) {
    __shared__ __align__(1024) unsigned char tiles[32 * 128 + COLUMNS / 64 * GAP];
    __shared__ u64 barrier;
    const u32 address = shared_address(&barrier), rows = shared_address(tiles), columns = rows + 32 * 128;
    if (threadIdx.x == 0) {
        barrier_init(address, 1);
        fence_barrier_init();
        barrier_expect(address, 32 * (64 + COLUMNS) * 2);
        tma_load_2d(rows, a, address, 0, 0);
        for (int i = 0; i < COLUMNS / 64; ++i) tma_load_2d(columns + i * GAP, b, address, i * 64, 0);
    }
    __syncthreads();
    barrier_wait(address, 0);
    float sums[COLUMNS / 2];
    wgmma_fence();
    for (int k = 0; k < 2; ++k)
        MULTIPLY(sums, transposed_descriptor(rows + 2048 * k, 0), transposed_descriptor(columns + 2048 * k, GAP), k);
    wgmma_commit();
    wgmma_wait<0>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = 0; i < COLUMNS / 2; ++i)
        d[(16 * warp + 8 * (i / 2 % 2) + lane / 4) * COLUMNS + 8 * (i / 4) + 2 * (lane % 4) + i % 2] = sums[i];
}
"""


@pytest.mark.parametrize(("columns", "gap"), [(64, 4096), (192, 4096), (256, 6144)])
@pytest.mark.parametrize(
    ("multiply", "storage"),
    [("wgmma_transposed", torch.float16), ("wgmma_bf16_transposed", torch.bfloat16)],
    ids=["fp16", "bf16"],
)
def test_products_of_transposed_operands(multiply: str, storage: torch.dtype, columns: int, gap: int) -> None:
    a, b = (torch.randn(32, width).to(storage) for width in (64, columns))
    d = torch.full((64, columns), float("nan"))
    maps = [
        _Map.from_buffer_copy(
            encode_tiled(t.data_ptr(), 2, t.shape[::-1], (2 * t.shape[1],), (64, t.shape[0]))
        )
        for t in (a, b)
    ]
    source = f"#define COLUMNS {columns}\n#define GAP {gap}\n#define MULTIPLY {multiply}\n" + TRANSPOSED
    build(source, "panel", checks=True).launch((1, 1, 1), (128, 1, 1), [*maps, ctypes.c_void_p(d.data_ptr())])
    torch.testing.assert_close(d.double(), a.double().T @ b.double(), rtol=1e-5, atol=1e-5)


# The same over 64 k with one operand that is [k][64] or [k][COLUMNS], and one that has its k side by side.
HALF_TRANSPOSED = r"""
#include "common/hopper.cuh"
template <bool TRANSPOSED>
__device__ u64 descriptor(u32 address, int k) {
    return TRANSPOSED ? transposed_descriptor(address + 2048 * k, 8192) : operand_descriptor(address + 32 * k);
}
extern "C" __global__ void panel(__grid_constant__ const TensorMap a, __grid_constant__ const TensorMap b, float* d) {
    __shared__ __align__(1024) unsigned char tiles[(64 + COLUMNS) * 128];
    __shared__ u64 barrier;
    const u32 address = shared_address(&barrier), rows = shared_address(tiles), columns = rows + 8192;
    if (threadIdx.x == 0) {
        barrier_init(address, 1);
        fence_barrier_init();
        barrier_expect(address, sizeof(tiles));
        tma_load_2d(rows, a, address, 0, 0);
        for (int i = 0; i < COLUMNS; i += 64)
            tma_load_2d(columns + i * 128, b, address, ROWS_TRANSPOSED ? 0 : i, ROWS_TRANSPOSED ? i : 0);
    }
    __syncthreads();
    barrier_wait(address, 0);
    float sums[COLUMNS / 2];
    wgmma_fence();
    for (int k = 0; k < 4; ++k)
        MULTIPLY(sums, descriptor<ROWS_TRANSPOSED>(rows, k), descriptor<!ROWS_TRANSPOSED>(columns, k), k);
    wgmma_commit();
    wgmma_wait<0>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = 0; i < COLUMNS / 2; ++i)
        d[(16 * warp + 8 * (i / 2 % 2) + lane / 4) * COLUMNS + 8 * (i / 4) + 2 * (lane % 4) + i % 2] = sums[i];
}
"""


@pytest.mark.parametrize("which", ["rows", "columns"])
@pytest.mark.parametrize(
    ("prefix", "storage"), [("wgmma", torch.float16), ("wgmma_bf16", torch.bfloat16)], ids=["fp16", "bf16"]
)
def test_products_of_one_transposed_operand(prefix: str, storage: torch.dtype, which: str) -> None:
    columns = 128
    a, b = (torch.randn(size, 64).to(storage) for size in (64, columns))
    lie = (a.T.contiguous(), b) if which == "rows" else (a, b.T.contiguous())
    d = torch.full((64, columns), float("nan"))
    maps = [
        _Map.from_buffer_copy(encode_tiled(t.data_ptr(), 2, t.shape[::-1], (2 * t.shape[1],), (64, 64)))
        for t in lie
    ]
    source = f"#define COLUMNS {columns}\n#define MULTIPLY {prefix}_{which}_transposed\n"
    source += f"constexpr bool ROWS_TRANSPOSED = {int(which == 'rows')};\n" + HALF_TRANSPOSED
    build(source, "panel", checks=True).launch((1, 1, 1), (128, 1, 1), [*maps, ctypes.c_void_p(d.data_ptr())])
    torch.testing.assert_close(d.double(), a.double() @ b.double().T, rtol=1e-5, atol=1e-5)


# d[64][32] = a[64][16] * b[32][16]^T without a swizzle: core matrices of 8 rows of 8 elements, the second 8 elements
# GAP bytes further, the next 8 rows 128 bytes.
UNSWIZZLED = r"""
#include "common/hopper.cuh"
constexpr u32 GAP = 1280;
__device__ void put(unsigned char* panel, const u16* from, int rows) {
    for (int i = threadIdx.x; i < rows * 16; i += 128)
        *reinterpret_cast<u16*>(panel + i % 16 / 8 * GAP + i / 16 / 8 * 128 + i / 16 % 8 * 16 + i % 8 * 2) = from[i];
}
extern "C" __global__ void panel(const u16* a, const u16* b, float* d) {
    __shared__ __align__(128) unsigned char rows[2 * GAP], columns[2 * GAP];
    put(rows, a, 64);
    put(columns, b, 32);
    fence_async_proxy();
    __syncthreads();
    float sums[16];
    wgmma_fence();
    wgmma(sums, overlapping_descriptor(shared_address(rows), GAP, 128),
          overlapping_descriptor(shared_address(columns), GAP, 128), 0);
    wgmma_commit();
    wgmma_wait<0>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = 0; i < 16; ++i)
        d[(16 * warp + 8 * (i / 2 % 2) + lane / 4) * 32 + 8 * (i / 4) + 2 * (lane % 4) + i % 2] = sums[i];
}
"""


@pytest.mark.parametrize("order", ORDERS[::2], ids=str)
def test_products_of_operands_without_a_swizzle(order: Order) -> None:
    a, b, d = torch.randn(64, 16).half(), torch.randn(32, 16).half(), torch.full((64, 32), float("nan"))
    launch(build(UNSWIZZLED, "panel", checks=True), 1, 128, (a, b, d), order=order)
    torch.testing.assert_close(d.double(), a.double() @ b.double().T, rtol=1e-5, atol=1e-5)


CLUSTER = r"""
#include "common/hopper.cuh"
extern "C" __global__ void exchange(const float4* x, float4* y) {
    __shared__ float4 mine[32];
    store_shared(shared_address(&mine[threadIdx.x]), x[blockIdx.x * 32 + threadIdx.x]);
    cluster_sync();
    const u32 peer = (cluster_rank() + 1) % cluster_size();
    y[blockIdx.x * 32 + threadIdx.x] = load_cluster(shared_address(&mine[threadIdx.x]), peer);
    cluster_sync();
}
"""


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_blocks_of_a_cluster_read_each_others_shared_memory(order: Order) -> None:
    x, y = torch.randn(2, 4, 32, 4), torch.zeros(2, 4, 32, 4)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, y)]
    build(CLUSTER, "exchange", checks=True).launch(
        (8, 1, 1), (32, 1, 1), pointers, cluster=(4, 1, 1), order=order
    )
    assert torch.equal(y, x.roll(-1, 1))


def test_a_missing_cluster_barrier_is_a_race() -> None:
    x, y = torch.randn(4, 32, 4), torch.zeros(4, 32, 4)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, y)]
    kernel = build(planted(CLUSTER, ("cluster_sync();\n    const", "const")), "exchange", checks=True)
    with pytest.raises(TwinError, match="which need not have started"):
        kernel.launch((4, 1, 1), (32, 1, 1), pointers, cluster=(4, 1, 1))


# Every CTA pushes its x to the next one and exits; y is the value received.
PUSH = r"""
#include "common/hopper.cuh"
extern "C" __global__ void push(const float4* x, float4* y) {
    __shared__ float4 received[32];
    __shared__ u64 barrier;
    const u32 address = shared_address(&barrier), own = shared_address(&received[threadIdx.x]);
    if (threadIdx.x == 0) {
        barrier_init(address, 1);
        barrier_expect(address, 32 * 16);
        fence_barrier_init();
    }
    cluster_arrive_relaxed();
    cluster_wait();
    push_cluster(own, address, (cluster_rank() + 1) % cluster_size(), x[blockIdx.x * 32 + threadIdx.x]);
    barrier_wait(address, 0);
    y[blockIdx.x * 32 + threadIdx.x] = load_shared_16(shared_address(&received[31 - threadIdx.x]));
}
"""


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("blocks", [1, 4])
def test_blocks_push_into_each_others_shared_memory(order: Order, blocks: int) -> None:
    x, y = torch.randn(2, blocks, 32, 4), torch.zeros(2, blocks, 32, 4)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, y)]
    kernel = build(PUSH, "push", checks=True)
    kernel.launch((2 * blocks, 1, 1), (32, 1, 1), pointers, cluster=(blocks, 1, 1), order=order)
    assert torch.equal(y, x.roll(1, 1).flip(2))


@pytest.mark.parametrize(
    ("mistake", "late", "message"),
    [
        (("barrier_wait(address, 0);", ""), False, "race|nothing wrote"),
        (("barrier_wait(address, 0);", "cluster_sync();"), True, "in flight"),
        (("barrier_wait(address, 0);", "return;"), True, "returned before its st.async"),
        (("32 * 16);", "33 * 16);"), False, "16 bytes missing"),
        (("barrier_init(address, 1);\n        barrier_expect(address, 32 * 16);", ""), False, "no mbarrier"),
        (("push_cluster(own,", "push_cluster(own + 4,"), False, "no multiple of 16"),
        (("(cluster_rank() + 1) % cluster_size()", "4"), False, "cluster of 4"),
        (("cluster_wait();", "cluster_wait();\n    if (cluster_rank() == 1) return;"), False,
         "have returned|none of its threads waited"),
    ],
)  # fmt: skip
def test_errors_of_a_push(mistake: tuple[str, str], late: bool, message: str) -> None:
    x, y = torch.randn(4, 32, 4), torch.zeros(4, 32, 4)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, y)]
    kernel = build(planted(PUSH, mistake), "push", checks=True)
    with pytest.raises(TwinError, match=message):
        kernel.launch((4, 1, 1), (32, 1, 1), pointers, cluster=(4, 1, 1), order=Order(late=late))


IM2COL = r"""
#include "common/hopper.cuh"
extern "C" __global__ void pixels(__grid_constant__ const TensorMap map, u32* y, int w, int h, int tap_w, int tap_h) {
    __shared__ __align__(1024) u32 tile[16 * 32];
    __shared__ u64 barrier;
    const u32 address = shared_address(&barrier);
    if (threadIdx.x == 0) {
        barrier_init(address, 1);
        fence_barrier_init();
        barrier_expect(address, 16 * 128);
        tma_load_im2col(shared_address(tile), map, address, 0, w, h, 0, tap_w, tap_h);
    }
    __syncthreads();
    barrier_wait(address, 0);
    for (int row = 0; row < 16; ++row)  // undo the swizzle
        y[row * 32 + threadIdx.x] = tile[row * 32 + (threadIdx.x / 4 ^ row % 8) * 4 + threadIdx.x % 4];
}
"""


@pytest.mark.parametrize("tap", [(0, 0), (2, 1)])
def test_im2col_walks_the_windows_of_a_convolution(tap: tuple[int, int]) -> None:
    """16 output pixels of a 3x3 filter with stride 2 and padding 1 over two images of 7x5."""
    x = torch.randn(2, 7, 5, 64).half()  # N, H, W, C
    strides = (128, 5 * 128, 7 * 5 * 128)
    encoded = encode_im2col(x.data_ptr(), 2, (64, 5, 7, 2), strides, (-1, -1), (-1, -1), 64, 16, (2, 2))
    values = [_Map.from_buffer_copy(encoded), *(ctypes.c_int(v) for v in (-1, -1, *tap))]
    padded = torch.nn.functional.pad(x, (0, 0, 1, 1, 1, 1))
    windows = padded[:, tap[1] : tap[1] + 7 : 2, tap[0] : tap[0] + 5 : 2].reshape(-1, 64)[:16]
    for order in ORDERS[::2]:
        y = torch.zeros(16, 64).half()
        kernel = build(IM2COL, "pixels", checks=True)
        kernel.launch(
            (1, 1, 1), (32, 1, 1), [values[0], ctypes.c_void_p(y.data_ptr()), *values[1:]], order=order
        )
        assert torch.equal(y, windows)


def test_maps_that_cannot_be_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="multiples of 16 bytes"):
        encode_tiled(8, 2, (64, 64), (128,), (64, 64))
    with pytest.raises(UnsupportedError, match="64 bytes with a swizzle of 128"):
        encode_tiled(0, 2, (64, 64), (128,), (32, 64))
