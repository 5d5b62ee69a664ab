"""Every load and store is checked, for every type and spelling."""

from __future__ import annotations

import pytest
import torch

from escalade.device.twin import TwinError, build
from tests.device.twin.support import launch, line_of, report_of

VECTORS = [
    f"{kind}{count}"
    for kind in ("char", "ushort", "int", "longlong", "float", "double")
    for count in (1, 2, 3, 4)
]
"""Accesses of every size and alignment, from both kinds of registers; signedness changes no access."""
HALVES = ["__half", "__half2", "__nv_bfloat16", "__nv_bfloat162", "__half_raw", "__nv_bfloat162_raw"]
OWN = ["Byte", "Three", "Pair", "Tagged", "Block", "Bits", "Wrapped"]
TYPES = [*VECTORS, *HALVES, *OWN, "float", "uint8_t", "double"]
WRITES = (
    "*p = made<T>(v);",
    "T* const q = p; q[0] = twice(made<T>(v));",
    "*p = v ? made<T>(v) : T();",
    "reinterpret_cast<Holder<T>*>(p)->value = made<T>(v);",
    "*reinterpret_cast<Holder<T>*>(p) = Holder<T>{made<T>(v)};",
    "*reinterpret_cast<Holder<T>*>(p) = made<Holder<T>>(v);",
    "assign(p, made<T>(v));",
    "__stcs(p, made<T>(v));",
    "memcpy(p, local, v * sizeof(T));",
    "for (int b = 0; b < (int)sizeof(T); ++b) ((volatile char*)p)[b] = 1;",
    "memset(p, v, v * sizeof(T));",
)
READS = (
    "total += used(*p);",
    "total += [&](T value) { return used(value); }(*p);",
    "total += used(reinterpret_cast<const Holder<T>*>(p)->value);",
    "total += used(*reinterpret_cast<const Holder<T>*>(p));",
    "*local = *p; total += used(*local);",
    "total += used(__ldg(p));",
    "total += used(v ? *p : *local);",
    "total += used(first(p));",
)


def _source() -> str:
    stores = "\n".join(f"        case {i}: {{ {code} break; }}" for i, code in enumerate(WRITES))
    loads = "\n".join(f"        case {i}: {{ {code} break; }}" for i, code in enumerate(READS))
    types = "\n".join(f"        case {i}: work<{name}>(x, y, v); break;" for i, name in enumerate(TYPES))
    return rf"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
struct Byte {{ unsigned char value; }};
struct Three {{ unsigned char value[3]; }};
struct Pair {{ int first; float second; }};
struct Tagged {{ char tag; double value; short rest; }};
struct Block {{ float values[23]; }};
struct Bits {{ unsigned low : 5, high : 27; unsigned short more : 9; }};
struct Wrapped {{ __half value; Three others[2]; }};
template <class T> struct Holder {{ T value; }};
// Neither is inlined, and g++ cannot see what they do.
template <class T> __noinline__ __device__ T made(int v) {{
    T value = T();
    asm("" : "+m"(value) : "r"(v));
    return value;
}}
template <class T> __noinline__ __device__ int used(T value) {{
    int result;
    asm volatile("" : "=r"(result) : "m"(value));
    return result;
}}
template <class T> __noinline__ __device__ T twice(T value) {{ asm("" : "+m"(value)); return value; }}
template <class T> __noinline__ __device__ T first(const T* p) {{ return *p; }}
template <class T> __noinline__ __device__ void assign(T* p, T value) {{ *p = value; }}

template <class T> __device__ void store(T* p, T* local, int v, int kind) {{
    switch (kind) {{
{stores}
    }}
}}
template <class T> __device__ int load(const T* p, T* local, int v, int kind) {{
    int total = 0;
    switch (kind) {{
{loads}
    }}
    return total;
}}
template <class T> __device__ void work(const char* x, char* y, int v) {{
    T local = made<T>(v);
    for (int kind = 0; kind < {len(READS)}; ++kind) load((const T*)(x + 128 * kind), &local, v, kind);
    for (int kind = 0; kind < {len(WRITES)}; ++kind) store((T*)(y + 128 * kind), &local, v, kind);
}}
extern "C" __global__ void kinds(const char* x, char* y, int type, int v, int* size) {{
    static const int all[] = {{{", ".join(f"sizeof({name})" for name in TYPES)}}};
    *size = all[type];
    switch (type) {{
{types}
    }}
}}
"""


SOURCE = _source()


@pytest.mark.parametrize("name", TYPES)
def test_every_load_and_store_of_a_type_is_seen(name: str) -> None:
    kernel = build(SOURCE, "kinds", checks=True)
    x, y = (torch.zeros(len(kinds) * 128, dtype=torch.uint8) for kinds in (READS, WRITES))
    size = torch.zeros(1, dtype=torch.int32)
    launch(kernel, 1, 1, (x, y, TYPES.index(name), 1, size))
    loads = build(SOURCE, "kinds", counts=True)
    launch(loads, 1, 1, (x, y, TYPES.index(name), 1, size))
    read = loads.counts().of("global", "load").bytes
    assert read == len(READS) * int(size), f"loads of {name} that are not seen, or twice"
    starts = [y.data_ptr() + 128 * kind for kind in range(len(WRITES))]
    lost = [code for code, start in zip(WRITES, starts, strict=True) if kernel.unwritten(start, int(size))]
    assert not lost, f"stores of {name} that are not seen"


PAST_THE_END = r"""
#include <cuda_fp16.h>
struct Large { float values[12]; };
__noinline__ __device__ Large large(float v) { return Large{v, v}; }
__noinline__ __device__ float sum(Large v) { return v.values[0] + v.values[11]; }
extern "C" __global__ void overrun(__half* h, Large* l, float* y, int mode, int by) {
    const int i = threadIdx.x + by;
    switch (mode) {
        case 0: h[i] = __float2half(i); break;
        case 1: l[i] = large(i); break;
        case 2: y[threadIdx.x] = sum(l[i]); break;
        case 3: memset(&y[threadIdx.x], 0, by && threadIdx.x == 31 ? 8 : 4); break;
        case 4: h[threadIdx.x] = __float2half(modff(1.5f * i, &y[i])); break;
    }
}
"""


@pytest.mark.parametrize("mode", range(5))
def test_an_overrun_by_a_call_is_reported(mode: int) -> None:
    kernel = build(PAST_THE_END, "overrun", checks=True)
    room = torch.zeros(8192)
    h, large, y = room[:16].view(torch.half), room[1000 : 1000 + 32 * 12], room[4000:4032]
    launch(kernel, 1, 32, (h, large, y, mode, 0))
    report = report_of(PAST_THE_END, "overrun", 1, 32, (h, large, y, mode, 1))
    assert f"kernel.cu:{line_of(PAST_THE_END, f'case {mode}')}: thread 31 of block" in report
    assert "past the end of buffer" in report


ARRAYS = r"""
struct Pair { float values[2]; int count; };
extern "C" __global__ void arrays(const float* x, float* y, int by) {
    float mine[8];
    Pair pair{{1.f, 2.f}, 3};
    for (int i = 0; i < 8; ++i) mine[i] = x[i];
    y[threadIdx.x] = mine[threadIdx.x / 4 + by] + pair.values[threadIdx.x / 16];
}
"""


def test_an_index_outside_a_threads_own_array_is_reported() -> None:
    values = (torch.ones(8), torch.zeros(32))
    launch(build(ARRAYS, "arrays", checks=True), 1, 32, (*values, 0))
    report = report_of(ARRAYS, "arrays", 1, 32, (*values, 1))
    assert (
        "kernel.cu:7: thread 28 of block (0, 0, 0): index 8 is outside an array of type 'float [8]'" in report
    )
    report = report_of(ARRAYS, "arrays", 1, 32, (*values, -1))
    assert "thread 0 of block (0, 0, 0): index -1 is outside an array" in report


ASSERTIONS = r"""
#include <cassert>
extern "C" __global__ void asserts(float* y, int least) {
    assert(int(threadIdx.x) >= least);
    y[threadIdx.x] = 1.f;
}
"""


@pytest.mark.parametrize("checks", [False, True])
def test_a_failed_assertion_is_reported(checks: bool) -> None:
    kernel = build(ASSERTIONS, "asserts", checks=checks)
    launch(kernel, 1, 32, (torch.zeros(32), 0))
    with pytest.raises(
        TwinError, match=r"kernel.cu:4: thread 0 of .*: assertion failed: int\(threadIdx.x\) >= least"
    ):
        launch(kernel, 1, 32, (torch.zeros(32), 3))
