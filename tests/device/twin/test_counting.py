"""The twin's counts: how warps' requests coalesce on any path of their lanes, and the work of each unit."""

from __future__ import annotations

import pathlib
import platform
from collections.abc import Sequence

import pytest
import torch

from escalade.device import Buffer, KernelCall, Program, Recipe, TwinOptions, bind
from escalade.device.twin import Counts, Order, assembly, build, toolchain
from escalade.errors import LaunchError, UnsupportedError
from tests.device.twin.support import launch

MOVES = r"""
extern "C" __global__ void moves(const float* x, const float4* v, float* y, float4* w, int stride) {
    __shared__ float tile[32 * 33];
    const int i = threadIdx.x;
    tile[i * stride] = x[i * stride];
    __syncthreads();
    y[i] = tile[i * stride];
    w[i] = v[i];
}
"""
WIDE = r"""
extern "C" __global__ void wide(const int* order, float4* y, float2* z) {
    __shared__ __align__(16) float4 four[64];
    __shared__ __align__(16) float2 two[64];
    for (int i = threadIdx.x; i < 64; i += 32) four[i] = float4{}, two[i] = float2{};
    __syncthreads();
    y[threadIdx.x] = four[order[threadIdx.x]];
    z[threadIdx.x] = two[order[threadIdx.x]];
}
"""
PARTING = r"""
__noinline__ __device__ float larger(const float* x, int i) {
    float most = x[i];
    for (int step = 1; step <= i % 3; ++step) most = fmaxf(most, x[i + step]);
    return most;
}
extern "C" __global__ void parting(const float* x, const float* w, float* y, int* hits, int n, int taps) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = 0.f;
    for (int tap = 0; tap < taps; ++tap) {
        const int at = i + tap - taps / 2;
        if (at >= 0 && at < n) sum += x[at] * w[tap];
    }
    if (i % 2) sum += __expf(larger(x, i));
    sum += __shfl_xor_sync(~0u, sum, 1);
    if (sum > -1e30f) atomicAdd(hits, 1);
    y[i] = sum;
}
"""


def counted(
    source: str, entry: str, grid: int, block: int, values: list[object], **options: object
) -> Counts:
    kernel = build(source, entry, counts=True)
    launch(kernel, grid, block, values, **options)
    return kernel.counts()


@pytest.mark.parametrize(("stride", "sectors", "turns"), [(1, 4, 1), (2, 8, 2), (32, 32, 32), (33, 32, 1)])
def test_sectors_of_global_memory_and_turns_of_the_banks(stride: int, sectors: int, turns: int) -> None:
    x, v, y, w = torch.randn(1056), torch.randn(128), torch.zeros(32), torch.zeros(128)
    found = counted(MOVES, "moves", 1, 32, [x, v, y, w, stride])
    assert torch.equal(y, x[::stride][:32]) and torch.equal(w, v)
    lines = {(line.memory, line.operation, line.place): line for line in found.lines}
    assert lines["global", "load", "kernel.cu:5"].per_request == sectors
    assert lines["global", "store", "kernel.cu:7"].per_request == 4
    wide = lines["global", "load", "kernel.cu:8"]
    assert (wide.requests, wide.transactions, wide.bytes) == (1, 16, 512), (
        "sixteen bytes a lane are one request"
    )
    for operation in ("load", "store"):
        shared = found.of("shared", operation)
        assert (shared.transactions, shared.conflicts) == (turns, turns - 1)
    assert found.conflicts == 2 * (turns - 1) and found.barriers == 1
    assert "kernel.cu:5 global load: 1 requests" in str(lines["global", "load", "kernel.cu:5"])
    assert found.unique_read_bytes == 4 * 32 + 512 == found.unique_written_bytes


@pytest.mark.parametrize(
    ("order", "quarters", "halves"),
    [
        (range(32), 4, 2),
        ([0] * 32, 2, 1),
        ([lane // 2 for lane in range(32)], 2, 1),
        ([lane % 8 for lane in range(32)], 4, 2),
        ([2 * lane for lane in range(32)], 8, 4),
    ],
    ids=("neighbors", "one", "pairs", "again", "every second"),
)
def test_lanes_with_8_or_16_bytes_take_turns(order: Sequence[int], quarters: int, halves: int) -> None:
    """Requests by halves and quarters of a warp, or twice as wide if pairs of lanes access the same."""
    values: list[object] = [torch.tensor(order, dtype=torch.int32), torch.zeros(128), torch.zeros(64)]
    found = counted(WIDE, "wide", 1, 32, values)
    loads = [line for line in found.lines if (line.memory, line.operation) == ("shared", "load")]
    assert [line.transactions for line in loads] == [quarters, halves]


@pytest.mark.parametrize("order", [Order(), Order(seed=5)])
def test_lanes_that_part_meet_again_behind_the_branch(order: Order) -> None:
    """Counted by hand: a warp issues one request per tap with any active lane, and in a call one per step that any lane
    takes."""
    n, taps, warps = 250, 5, 8
    x, w, y = torch.randn(260), torch.randn(taps), torch.zeros(256)
    hits = torch.zeros(1, dtype=torch.int32)
    found = counted(PARTING, "parting", 2, 128, [x, w, y, hits, n, taps], order=order)
    loads = {line.place: line for line in found.lines if line.operation == "load"}
    inside = sum(0 <= i + tap - taps // 2 < n for i in range(n) for tap in range(taps))
    assert loads["kernel.cu:13"].requests == 2 * taps * warps, "the image and the filter"
    assert loads["kernel.cu:13"].bytes == 2 * 4 * inside
    assert found.fma == inside and found.special == n // 2 and found.shuffles == warps
    assert loads["kernel.cu:3"].requests == warps
    assert loads["kernel.cu:4"].requests == 2 * warps
    atomics = found.of("global", "atomic")
    assert (found.atomics, atomics.requests, atomics.transactions) == (n, warps, warps) and int(hits) == n


CHAIN = r"""
extern "C" __global__ void chain(const float* x, const float* w, float* y, int n) {
    float sum = 0.f;
    for (int i = 0; i < n; ++i) sum += x[i] * w[i];
    y[threadIdx.x] = sum;
}
"""


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="of x86-64, g++ knows processors that it avoids it for"
)
@pytest.mark.parametrize("processor", ["haswell", "znver2"])
def test_a_sum_of_products_is_fused_for_every_processor(
    processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a loop, where g++ for `znver2` splits an operation in two, on which the next iteration depends."""
    options = toolchain.kernel_options
    monkeypatch.setattr(toolchain, "kernel_options", lambda *given: (*options(*given), f"-mtune={processor}"))
    found = counted(CHAIN, "chain", 1, 32, [torch.randn(50), torch.randn(50), torch.zeros(32), 50])
    assert (found.fma, found.add, found.multiply) == (32 * 50, 0, 0)


def test_counts_of_launches_add_up_by_line() -> None:
    x, v, y, w = torch.randn(1056), torch.randn(128), torch.zeros(32), torch.zeros(128)
    one = counted(MOVES, "moves", 1, 32, [x, v, y, w, 1])
    both = one + counted(MOVES, "moves", 1, 32, [x, v, y, w, 2])
    assert len(both.lines) == len(one.lines) and both.barriers == 2
    assert both.figures()["global_load_sectors"] == 4 + 8 + 2 * 16
    assert both.read_bytes == 32 * (4 + 8 + 2 * 16) and both.written_bytes == 32 * (4 + 4 + 2 * 16)


def test_a_call_counts_its_launches_with_or_without_packing(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "moves.cu"
    source.write_text(MOVES)
    x, v, y, w = torch.randn(1056), torch.randn(128), torch.zeros(32), torch.zeros(128)
    program = Program.of(str(source), "moves")
    calls = [
        KernelCall(program, (1, 1, 1), (32, 1, 1), (*map(Buffer, "xvyw"), stride), weights_only=stride == 2)
        for stride in (1, 2)
    ]
    call = bind(Recipe(tuple(calls)), {"x": x, "v": v, "y": y, "w": w}, options=TwinOptions(counts=True))
    call()
    assert call.counts().of("global", "load").transactions == 4 + 8 + 2 * 16
    assert call.counts(packing=False).of("global", "load").transactions == 4 + 16


def test_launches_not_built_for_counting_are_not_counted() -> None:
    with pytest.raises(LaunchError, match="moves .*counts=True"):
        build(MOVES, "moves").counts()
    with pytest.raises(UnsupportedError, match="checks and counts"):
        build(MOVES, "moves", checks=True, counts=True)
    with pytest.raises(LaunchError, match="has not been launched"):
        build(MOVES + "\n", "moves", counts=True).counts()


@pytest.mark.parametrize(
    "block",
    [
        "bl __sanitizer_cov_trace_pc|fmadd s8, s9, s0, s8|fnmsub d1, d2, d3, d1|fadd s1, s2, s3|fmul s1, s2, s3"
        "|bl expf|fsqrt s1, s2|add w19, w19, 1|bl __tsan_read4|fmov s0, s9",
        "call __sanitizer_cov_trace_pc@PLT|vfmadd231ss %xmm1, %xmm2, %xmm0|vfnmadd132sd %xmm1, %xmm2, %xmm0"
        "|vaddss %xmm1, %xmm2, %xmm0|mulss %xmm1, %xmm0|call expf@PLT|vsqrtss %xmm0, %xmm0, %xmm0|addl $1, %eax"
        "|call __tsan_read4@PLT|vmovss %xmm0, (%rax)",
        "call __sanitizer_cov_trace_pc@PLT|vfmadd231sh %xmm1, %xmm2, %xmm0|vfnmsub132sh %xmm1, %xmm2, %xmm0"
        "|vsubsh %xmm1, %xmm2, %xmm0|vmulsh %xmm1, %xmm2, %xmm0|vdivsh %xmm1, %xmm2, %xmm0|vsqrtsh %xmm0, %xmm0, %xmm0"
        "|vmovsh %xmm0, (%rax)",
    ],
    ids=["aarch64", "x86-64", "x86-64 with 16 bits"],
)
def test_operations_are_found_in_either_assembly(block: str) -> None:
    lines = ["kernel:", *("\t" + line.replace(" ", "\t", 1) for line in block.split("|")), "\t.cfi_endproc"]
    text = assembly.add_block_table("\n".join([*lines, "other:", *lines[2:]]))
    assert "\t.quad\t.Ltwin_block_0, 2, 1, 1, 2\n" in text
    assert text.count(".Ltwin_block_0") == 2 and ".Ltwin_block_1" not in text
