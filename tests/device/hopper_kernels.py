"""Small kernels for features of Hopper launches: tensor maps, clusters, overlapping launches.

The twin and the GPU run the same kernels, and are compared with the same results.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Im2colMap, KernelCall, Recipe, TiledMap
from escalade.device.run import Executable

COPY = """#include "common/hopper.cuh"
// y = the box of x at (FIRST_X, FIRST_Y), read through a tensor map and written as rows of ROW_BYTES.
extern "C" __global__ void copy_box(const __grid_constant__ TensorMap map, unsigned char* y) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 barrier = shared_address(shared), tile = barrier + 1024;
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        barrier_expect(barrier, ROWS * ROW_BYTES);
        if (RANK == 5) tma_load_im2col_5d(tile, map, barrier, 0, FIRST_X, FIRST_Y, FIRST_Z, 0, TAP_X, TAP_Y, TAP_Z);
        else if (IM2COL) tma_load_im2col(tile, map, barrier, 0, FIRST_X, FIRST_Y, 0, TAP_X, TAP_Y);
        else tma_load_2d(tile, map, barrier, FIRST_X, FIRST_Y);
    }
    barrier_wait(barrier, 0);
    for (int byte = threadIdx.x; byte < ROWS * ROW_BYTES; byte += blockDim.x) {
        const int row = byte / ROW_BYTES, chunk = byte % ROW_BYTES / 16;
        const int where = SWIZZLED ? chunk ^ (row % 8) : chunk;
        y[byte] = shared[1024 + row * ROW_BYTES + where * 16 + byte % 16];
    }
}
"""

CLUSTER = """#include "common/hopper.cuh"
// y[block] = the sum of what the blocks of its cluster hold: 1 + blockIdx each.
extern "C" __global__ void cluster_sum(float* y) {
    __shared__ float4 mine;
    if (threadIdx.x == 0) mine = make_float4(1.f + blockIdx.x, 0.f, 0.f, 0.f);
    cluster_sync();
    if (threadIdx.x == 0) {
        float sum = 0.f;
        for (u32 rank = 0; rank < cluster_size(); ++rank) sum += load_cluster(shared_address(&mine), rank).x;
        y[blockIdx.x] = sum;
    }
    cluster_sync();  // nobody leaves while others read its memory
}
"""

PUSH = """#include "common/hopper.cuh"
// y[block][thread] = the sum of what the blocks of its cluster push to it: each 100 * its blockIdx + the thread.
extern "C" __global__ void push_sum(float* y) {
    __shared__ float4 parts[8][128];
    __shared__ u64 barrier;
    const u32 counted = shared_address(&barrier), rank = cluster_rank();
    if (threadIdx.x == 0) {
        barrier_init(counted, 1);
        barrier_expect(counted, cluster_size() * 128 * 16);
        fence_barrier_init();
    }
    cluster_arrive_relaxed();
    cluster_wait();
    for (u32 to = 0; to < cluster_size(); ++to)
        push_cluster(shared_address(&parts[rank][threadIdx.x]), counted, to,
                     make_float4(100.f * blockIdx.x, 0.f, 0.f, threadIdx.x));
    barrier_wait(counted, 0);
    float sum = 0.f;
    for (u32 from = 0; from < cluster_size(); ++from) {
        const float4 part = load_shared_16(shared_address(&parts[from][127 - threadIdx.x]));
        sum += part.x + part.w;
    }
    y[blockIdx.x * 128 + threadIdx.x] = sum;
}
"""

CHAIN = """#include "common/hopper.cuh"
// y += 1; each launch may start while the one before still runs, and waits for what it wrote.
extern "C" __global__ void add_one(float* y, int count) {
    let_next_launch_start();
    wait_for_previous_launch();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) y[i] += 1.f;
}
"""

SOURCES = {"copy_box.cu": COPY, "cluster_sum.cu": CLUSTER, "push_sum.cu": PUSH, "add_one.cu": CHAIN}


@dataclasses.dataclass(frozen=True)
class Copy:
    """One load through a tensor map, and its expected result."""

    tensor_map: TiledMap | Im2colMap
    rows: int
    first: tuple[int, ...]
    taps: tuple[int, ...] = (0, 0)

    def recipe(self) -> Recipe:
        im2col = isinstance(self.tensor_map, Im2colMap)
        inner = self.tensor_map.channels if isinstance(self.tensor_map, Im2colMap) else self.tensor_map.box[0]
        constants = {
            "ROWS": self.rows, "ROW_BYTES": 2 * inner, "IM2COL": im2col, "SWIZZLED": self.tensor_map.swizzle == 128,
            "RANK": len(self.tensor_map.sizes),
        }  # fmt: skip
        for name, (x, y, z) in {"FIRST": (*self.first, 0)[:3], "TAP": (*self.taps, 0)[:3]}.items():
            constants |= {f"{name}_X": x, f"{name}_Y": y, f"{name}_Z": z}
        program = Program.of("copy_box.cu", "copy_box", constants)
        call = KernelCall(
            program,
            (1, 1, 1),
            (64, 1, 1),
            (self.tensor_map, Buffer("y")),
            shared_bytes=1024 + self.rows * 2 * inner,
        )
        return Recipe((call,))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.recipe().steps[0].program
        columns = dict(inner.constants)["ROW_BYTES"]
        assert isinstance(columns, int)
        y = torch.full((self.rows, columns // 2), torch.nan, dtype=x.dtype, device=x.device)
        Executable(self.recipe(), x.device).bind({"x": x, "y": y})()
        return y


def check_tiled(device: torch.device) -> None:
    """A box beyond two edges of a 40x72 matrix, with and without swizzle."""
    x = torch.randn(40, 72, device=device).half()
    padded = F.pad(x, (8, 64, 4, 64))
    for swizzle in (0, 128):
        copy = Copy(TiledMap(Buffer("x"), "fp16", (72, 40), (64, 16), swizzle), 16, (-8, 30))
        assert torch.equal(copy.run(x), padded[34:50, 0:64]), swizzle
        copy = Copy(TiledMap(Buffer("x"), "fp16", (72, 40), (64, 16), swizzle), 16, (24, -4))
        assert torch.equal(copy.run(x), padded[0:16, 32:96]), swizzle


def check_im2col(device: torch.device) -> None:
    """The first 64 window positions of a 3x5 filter with stride 2, at one of its taps, over three images."""
    batch, height, width, channels = 3, 9, 11, 64
    filter_h, filter_w, pad_h, pad_w, stride = 3, 5, 1, 2, 2
    x = torch.randn(batch, channels, height, width, device=device).half()
    windows = F.unfold(x.float(), (filter_h, filter_w), padding=(pad_h, pad_w), stride=stride)
    windows = windows.view(batch, channels, filter_h, filter_w, -1).half()
    for tap_h, tap_w in ((0, 0), (2, 1), (1, 4)):
        tensor_map = Im2colMap(
            Buffer("x"), "fp16", (channels, width, height, batch), (-pad_w, -pad_h),
            (pad_w - (filter_w - 1), pad_h - (filter_h - 1)), channels, 64, (stride, stride),
        )  # fmt: skip
        y = Copy(tensor_map, 64, (-pad_w, -pad_h), (tap_w, tap_h)).run(x.permute(0, 2, 3, 1).contiguous())
        expected = windows[:, :, tap_h, tap_w].permute(0, 2, 1).reshape(-1, channels)[:64]
        assert torch.equal(y, expected), (tap_h, tap_w)


def check_im2col_of_volumes(device: torch.device) -> None:
    """The first 64 window positions of a 3x2x3 filter with strides, at one of its taps, over three volumes."""
    x = torch.randn(3, 64, 5, 4, 6, device=device).half()  # N, C, D, H, W
    pads, taps, strides = (1, 0, 2), (3, 2, 3), (2, 1, 2)
    padded = F.pad(x, (2, 2, 0, 0, 1, 1))
    for tap in ((0, 0, 0), (2, 0, 1), (1, 1, 2)):
        tensor_map = Im2colMap(
            Buffer("x"), "fp16", (64, 6, 4, 5, 3), (-pads[2], -pads[1], -pads[0]),
            (pads[2] - (taps[2] - 1), pads[1] - (taps[1] - 1), pads[0] - (taps[0] - 1)), 64, 64, strides[::-1],
        )  # fmt: skip
        copy = Copy(tensor_map, 64, (-pads[2], -pads[1], -pads[0]), tap[::-1])
        y = copy.run(x.permute(0, 2, 3, 4, 1).contiguous())
        windows = padded.unfold(2, 3, 2).unfold(3, 2, 1).unfold(4, 3, 2)[..., tap[0], tap[1], tap[2]]
        assert torch.equal(y, windows.permute(0, 2, 3, 4, 1).reshape(-1, 64)[:64]), tap


def check_cluster(device: torch.device) -> None:
    y = torch.full((8,), torch.nan, device=device)
    call = KernelCall(
        Program.of("cluster_sum.cu", "cluster_sum"), (8, 1, 1), (32, 1, 1), (Buffer("y"),), cluster=(4, 1, 1)
    )
    Executable(Recipe((call,)), device).bind({"y": y})()
    assert y.tolist() == [10.0] * 4 + [26.0] * 4


def check_push(device: torch.device) -> None:
    """No thread waits at the end: a CTA may exit only when all data pushed to it has arrived."""
    blocks, size = 512, 8
    y = torch.full((blocks // size, size, 128), torch.nan, device=device)
    call = KernelCall(
        Program.of("push_sum.cu", "push_sum"),
        (blocks, 1, 1),
        (128, 1, 1),
        (Buffer("y"),),
        cluster=(size, 1, 1),
    )
    Executable(Recipe((call,)), device).bind({"y": y})()
    cluster, thread = torch.arange(blocks // size), torch.arange(128)
    expected = 100 * (size * size * cluster[:, None] + 28) + size * (127 - thread)
    assert torch.equal(y.cpu(), expected[:, None].expand(-1, size, -1).float())


def check_overlap(device: torch.device) -> None:
    count, launches = 1000, 50
    y = torch.zeros(count, device=device)
    call = KernelCall(
        Program.of("add_one.cu", "add_one"),
        (math.ceil(count / 128), 1, 1),
        (128, 1, 1),
        (Buffer("y"), count),
        overlap=True,
    )
    Executable(Recipe((call,) * launches), device).bind({"y": y})()
    assert torch.equal(y, torch.full_like(y, launches))


CHECKS = {
    "tiled": check_tiled,
    "im2col": check_im2col,
    "im2col_of_volumes": check_im2col_of_volumes,
    "cluster": check_cluster,
    "push": check_push,
    "overlap": check_overlap,
}
