// Hopper PTX instructions (compute capability 9.0a), one named function each: mbarriers, TMA, clusters, named barriers,
// setmaxnreg, wgmma.
#pragma once

#include "common/descriptors.cuh"
#include "common/ptx.cuh"

struct __align__(64) TensorMap { unsigned char opaque[128]; };  // a CUtensorMap, passed by value as __grid_constant__

constexpr long long WAIT_LIMIT_CYCLES = 2000000000;  // about a second: a bug faults instead of hanging

// ------------------------------------------------------------------ mbarriers

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Arrives at the barrier at this address in CTA `rank` of the cluster (own rank included). No .release.cluster here,
// nor .acquire.cluster on the waits: they compile to MEMBAR.ALL.GPU before every arrival and CCTL.IVALL after every
// wait, and cost a quarter to two thirds of the speed. The arrival only orders wgmma's reads, which wgmma.wait_group
// has already seen complete.
__device__ __forceinline__ void barrier_arrive_cluster(u32 barrier, u32 rank) {
    asm volatile("{\n.reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}"
                 :: "r"(barrier), "r"(rank) : "memory");
}

__device__ __forceinline__ bool barrier_try_wait(u32 barrier, u32 parity) {
    u32 done;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}

// Stops the kernel with an illegal-address error. A trap instruction in the consumers' branch would make the compiler
// (13.0) limit them to the 168 registers of kernel entry, with spills.
__device__ __forceinline__ void fault() {
    asm volatile("st.global.u32 [%0], %1;" :: "l"(0ull), "r"(0) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    if (barrier_try_wait(barrier, parity)) return;
    const long long start = clock64();
    while (!barrier_try_wait(barrier, parity))
        if (clock64() - start > WAIT_LIMIT_CYCLES) fault();
}

// Makes initialized barriers visible to the cluster and to TMA.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// ------------------------------------------------------------------ TMA

// `pixelsPerColumn` output pixels starting at (n, h, w), read at filter tap (tap_h, tap_w). Coordinates are those of
// the window's corner in the input, so -pad at the first output pixel.
__device__ __forceinline__ void tma_load_im2col(u32 destination, const TensorMap& map, u32 barrier,
                                                int c, int w, int h, int n, u16 tap_w, u16 tap_h) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
                 :: "r"(destination), "l"(&map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n),
                    "h"(tap_w), "h"(tap_h) : "memory");
}

// The same for volumes (NDHWC): windows also have a corner d, and taps an offset, along the frames.
__device__ __forceinline__ void tma_load_im2col_5d(u32 destination, const TensorMap& map, u32 barrier, int c, int w,
                                                   int h, int d, int n, u16 tap_w, u16 tap_h, u16 tap_d) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};"
                 :: "r"(destination), "l"(&map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(d), "r"(n),
                    "h"(tap_w), "h"(tap_h), "h"(tap_d) : "memory");
}

__device__ __forceinline__ void tma_load_2d(u32 destination, const TensorMap& map, u32 barrier,
                                            int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4}], [%2];"
                 :: "r"(destination), "l"(&map), "r"(barrier), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void tma_load_3d(u32 destination, const TensorMap& map, u32 barrier,
                                            int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5}], [%2];"
                 :: "r"(destination), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z) : "memory");
}

__device__ __forceinline__ void tma_load_4d(u32 destination, const TensorMap& map, u32 barrier,
                                            int c, int w, int h, int n) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2];"
                 :: "r"(destination), "l"(&map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n)
                 : "memory");
}

// Writes the box, and signals the barrier, at the same offsets in every CTA of the mask `blocks`.
__device__ __forceinline__ void tma_load_3d_multicast(u32 destination, const TensorMap& map, u32 barrier, int x,
                                                      int y, int z, u16 blocks) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;"
                 :: "r"(destination), "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(blocks)
                 : "memory");
}

// Elements outside the tensor are not written: edges need no mask.
__device__ __forceinline__ void tma_store_2d(const TensorMap& map, u32 source, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];\n"
                 "cp.async.bulk.commit_group;"
                 :: "l"(&map), "r"(source), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void tma_store_4d(const TensorMap& map, u32 source, int c, int w, int h,
                                             int n) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group"
                 " [%0, {%2, %3, %4, %5}], [%1];\n"
                 "cp.async.bulk.commit_group;"
                 :: "l"(&map), "r"(source), "r"(c), "r"(w), "r"(h), "r"(n) : "memory");
}

template <int PENDING>
__device__ __forceinline__ void tma_store_wait_read() {  // sources of all but PENDING are reusable
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(PENDING) : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

// ------------------------------------------------------------------ fences, barriers, registers

// Makes generic-proxy smem writes visible to TMA (the async proxy).
__device__ __forceinline__ void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Barrier `id` (1 to 15) of the CTA, for `threads` threads.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// Barriers of one consumer warpgroup, or of both, in a CTA that also has a producer.
__device__ __forceinline__ void warpgroup_sync(int consumer) { named_barrier_sync(1 + consumer, 128); }
__device__ __forceinline__ void consumers_sync() { named_barrier_sync(3, 256); }

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive;" ::: "memory"); }
// No memory ordering: enough for barriers, which fence_barrier_init published, and avoids a full memory fence.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ u32 cluster_size() {
    u32 blocks;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return blocks;
}

template <int REGISTERS>
__device__ __forceinline__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void claim_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}

__device__ __forceinline__ void store_shared(u32 address, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// A load that stays where it is written: the compiler moves others down to where their values are used.
__device__ __forceinline__ u32 load_early(const void* address) {
    u32 v;
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
    return v;
}

__device__ __forceinline__ void prefetch_line(const void* address) {  // into L2
    asm volatile("prefetch.global.L2 [%0];" :: "l"(address));
}

__device__ __forceinline__ void store_shared(u32 address, float v) {
    asm volatile("st.shared.f32 [%0], %1;" :: "r"(address), "f"(v) : "memory");
}

__device__ __forceinline__ float load_shared(u32 address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ float4 load_shared_16(u32 address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}

// Loads from the same address in CTA `rank` of the cluster.
__device__ __forceinline__ float4 load_cluster(u32 address, u32 rank) {
    float4 v;
    asm volatile("{\n.reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address), "r"(rank) : "memory");
    return v;
}

// Stores to this address in CTA `rank` of the cluster (own rank included); its `barrier` counts the 16 bytes on
// arrival. That CTA must not have exited.
__device__ __forceinline__ void push_cluster(u32 address, u32 barrier, u32 rank, float4 v) {
    asm volatile("{\n.reg .b32 remote, counted;\n"
                 "mapa.shared::cluster.u32 remote, %0, %2;\n"
                 "mapa.shared::cluster.u32 counted, %1, %2;\n"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
                 " [remote], {%3, %4, %5, %6}, [counted];\n}"
                 :: "r"(address), "r"(barrier), "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// ------------------------------------------------------------------ wgmma

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}

// No instruction: reads of accumulators stay behind the wait for them. The compiler does not know that wgmma writes later,
// and has copied accumulators to local memory before it.
template <int COUNT>
__device__ __forceinline__ void hold(float (&accumulators)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(accumulators[i])::"memory");
}

#define REGISTERS_0 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define REGISTERS_1 \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define REGISTERS_2 \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define REGISTERS_3 \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
    "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define REGISTERS_96_TO_115 \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115"
#define ACCUMULATORS_OF_4(KIND, i) KIND(d[i]), KIND(d[(i) + 1]), KIND(d[(i) + 2]), KIND(d[(i) + 3])
#define ACCUMULATORS_OF_8(KIND, i) ACCUMULATORS_OF_4(KIND, i), ACCUMULATORS_OF_4(KIND, (i) + 4)
#define ACCUMULATORS_OF_32(KIND, i) \
    ACCUMULATORS_OF_8(KIND, i), ACCUMULATORS_OF_8(KIND, (i) + 8), ACCUMULATORS_OF_8(KIND, (i) + 16), \
        ACCUMULATORS_OF_8(KIND, (i) + 24)
#define ACCUMULATORS_4(i) ACCUMULATORS_OF_4("+f", i)
#define ACCUMULATORS_8(i) ACCUMULATORS_OF_8("+f", i)
#define ACCUMULATORS_32(i) ACCUMULATORS_OF_32("+f", i)

// Templates on a type that is always float (int for S8): the compiler front end parses bodies of functions in any case,
// those of templates only if instantiated. That halves what these cost every program.
//
// d (+)= A * B^T over 32 bytes of K, DEPTH elements; d is overwritten if accumulate is 0. MAJORS: both operands
// K-major, for types that allow others.
#define WGMMA(DEPTH, TYPE, MAJORS, N, REGISTERS, A, B, P) \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n" \
    "wgmma.mma_async.sync.aligned.m64n" N "k" DEPTH ".f32." TYPE "." TYPE " {" REGISTERS "}, " A ", " B \
    ", p, 1, 1" MAJORS ";\n}"
#define WGMMA_S8(N, REGISTERS, A, B, P) \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n" \
    "wgmma.mma_async.sync.aligned.m64n" N "k32.s32.s8.s8 {" REGISTERS "}, " A ", " B ", p;\n}"

#define DEFINE_WGMMA(NAME, DEPTH, TYPE, MAJORS) \
    template <class Sum> \
    __device__ __forceinline__ void NAME(Sum (&d)[32], u64 a, u64 b, u32 accumulate) { \
        asm volatile(WGMMA(DEPTH, TYPE, MAJORS, "64", REGISTERS_0, "%32", "%33", "%34") \
                     : ACCUMULATORS_32(0) : "l"(a), "l"(b), "r"(accumulate)); \
    } \
    template <class Sum> \
    __device__ __forceinline__ void NAME(Sum (&d)[64], u64 a, u64 b, u32 accumulate) { \
        asm volatile(WGMMA(DEPTH, TYPE, MAJORS, "128", REGISTERS_0 "," REGISTERS_1, "%64", "%65", "%66") \
                     : ACCUMULATORS_32(0), ACCUMULATORS_32(32) : "l"(a), "l"(b), "r"(accumulate)); \
    } \
    template <class Sum> \
    __device__ __forceinline__ void NAME(Sum (&d)[96], u64 a, u64 b, u32 accumulate) { \
        asm volatile(WGMMA(DEPTH, TYPE, MAJORS, "192", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2, "%96", "%97", \
                           "%98") \
                     : ACCUMULATORS_32(0), ACCUMULATORS_32(32), ACCUMULATORS_32(64) \
                     : "l"(a), "l"(b), "r"(accumulate)); \
    } \
    template <class Sum> \
    __device__ __forceinline__ void NAME(Sum (&d)[116], u64 a, u64 b, u32 accumulate) { \
        asm volatile(WGMMA(DEPTH, TYPE, MAJORS, "232", \
                           REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_96_TO_115, "%116", "%117", \
                           "%118") \
                     : ACCUMULATORS_32(0), ACCUMULATORS_32(32), ACCUMULATORS_32(64), ACCUMULATORS_8(96), \
                       ACCUMULATORS_8(104), ACCUMULATORS_4(112) \
                     : "l"(a), "l"(b), "r"(accumulate)); \
    } \
    template <class Sum> \
    __device__ __forceinline__ void NAME(Sum (&d)[128], u64 a, u64 b, u32 accumulate) { \
        asm volatile(WGMMA(DEPTH, TYPE, MAJORS, "256", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3, \
                           "%128", "%129", "%130") \
                     : ACCUMULATORS_32(0), ACCUMULATORS_32(32), ACCUMULATORS_32(64), ACCUMULATORS_32(96) \
                     : "l"(a), "l"(b), "r"(accumulate)); \
    }

// BF16 is defined only if the program includes its header: parsing it for nothing costs time.
DEFINE_WGMMA(wgmma, "16", "f16", ", 0, 0")
DEFINE_WGMMA(wgmma_tf32, "8", "tf32", "")  // of fp32 elements; ignores the low 13 bits
DEFINE_WGMMA(wgmma_e4m3, "32", "e4m3", "")  // the products of an instruction are added with about 14 bits only

// Exact: s32 accumulators, which wrap around. N is a multiple of 16 (from 32 on); both operands are K-major.
template <class Sum>
__device__ __forceinline__ void wgmma_s8(Sum (&d)[32], u64 a, u64 b, u32 accumulate) {
    asm volatile(WGMMA_S8("64", REGISTERS_0, "%32", "%33", "%34")
                 : ACCUMULATORS_OF_32("+r", 0) : "l"(a), "l"(b), "r"(accumulate));
}
template <class Sum>
__device__ __forceinline__ void wgmma_s8(Sum (&d)[64], u64 a, u64 b, u32 accumulate) {
    asm volatile(WGMMA_S8("128", REGISTERS_0 "," REGISTERS_1, "%64", "%65", "%66")
                 : ACCUMULATORS_OF_32("+r", 0), ACCUMULATORS_OF_32("+r", 32) : "l"(a), "l"(b), "r"(accumulate));
}
template <class Sum>
__device__ __forceinline__ void wgmma_s8(Sum (&d)[96], u64 a, u64 b, u32 accumulate) {
    asm volatile(WGMMA_S8("192", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2, "%96", "%97", "%98")
                 : ACCUMULATORS_OF_32("+r", 0), ACCUMULATORS_OF_32("+r", 32), ACCUMULATORS_OF_32("+r", 64)
                 : "l"(a), "l"(b), "r"(accumulate));
}
template <class Sum>
__device__ __forceinline__ void wgmma_s8(Sum (&d)[128], u64 a, u64 b, u32 accumulate) {
    asm volatile(WGMMA_S8("256", REGISTERS_0 "," REGISTERS_1 "," REGISTERS_2 "," REGISTERS_3, "%128", "%129", "%130")
                 : ACCUMULATORS_OF_32("+r", 0), ACCUMULATORS_OF_32("+r", 32), ACCUMULATORS_OF_32("+r", 64),
                   ACCUMULATORS_OF_32("+r", 96)
                 : "l"(a), "l"(b), "r"(accumulate));
}

DEFINE_WGMMA(wgmma_transposed, "16", "f16", ", 1, 1")
DEFINE_WGMMA(wgmma_rows_transposed, "16", "f16", ", 1, 0")  // A only
DEFINE_WGMMA(wgmma_columns_transposed, "16", "f16", ", 0, 1")  // B only

#ifdef __CUDA_BF16_H__
DEFINE_WGMMA(wgmma_bf16, "16", "bf16", ", 0, 0")
DEFINE_WGMMA(wgmma_bf16_transposed, "16", "bf16", ", 1, 1")
DEFINE_WGMMA(wgmma_bf16_rows_transposed, "16", "bf16", ", 1, 0")
DEFINE_WGMMA(wgmma_bf16_columns_transposed, "16", "bf16", ", 0, 1")
#endif

// ------------------------------------------------------------------ wgmma with A in registers

#define REGISTERS_0_TO_15 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define REGISTERS_32_TO_55 \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55"

// d (+)= A * B^T over 32 bytes of K, DEPTH elements; each warp's 16 rows of A as an mma A fragment.
#define WGMMA_FROM_REGISTERS(DEPTH, TYPE, MAJOR, N, REGISTERS, A, B, P) \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n" \
    "wgmma.mma_async.sync.aligned.m64n" N "k" DEPTH ".f32." TYPE "." TYPE " {" REGISTERS "}, {" A "}, " B \
    ", p, 1, 1" MAJOR ";\n}"
#define ROWS_IN_REGISTERS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)

#define DEFINE_WGMMA_FROM_REGISTERS(NAME, DEPTH, TYPE, MAJOR) \
    template <class Sum> \
    __device__ __forceinline__ void NAME(Sum (&d)[16], const u32 (&a)[4], u64 b, u32 accumulate) { \
        asm volatile(WGMMA_FROM_REGISTERS(DEPTH, TYPE, MAJOR, "32", REGISTERS_0_TO_15, "%16,%17,%18,%19", "%20", \
                                          "%21") \
                     : ACCUMULATORS_8(0), ACCUMULATORS_8(8) : ROWS_IN_REGISTERS); \
    } \
    template <class Sum> \
    __device__ __forceinline__ void NAME(Sum (&d)[32], const u32 (&a)[4], u64 b, u32 accumulate) { \
        asm volatile(WGMMA_FROM_REGISTERS(DEPTH, TYPE, MAJOR, "64", REGISTERS_0, "%32,%33,%34,%35", "%36", "%37") \
                     : ACCUMULATORS_32(0) : ROWS_IN_REGISTERS); \
    } \
    template <class Sum> \
    __device__ __forceinline__ void NAME(Sum (&d)[56], const u32 (&a)[4], u64 b, u32 accumulate) { \
        asm volatile(WGMMA_FROM_REGISTERS(DEPTH, TYPE, MAJOR, "112", REGISTERS_0 "," REGISTERS_32_TO_55, \
                                          "%56,%57,%58,%59", "%60", "%61") \
                     : ACCUMULATORS_32(0), ACCUMULATORS_8(32), ACCUMULATORS_8(40), ACCUMULATORS_8(48) \
                     : ROWS_IN_REGISTERS); \
    } \
    template <class Sum> \
    __device__ __forceinline__ void NAME(Sum (&d)[64], const u32 (&a)[4], u64 b, u32 accumulate) { \
        asm volatile(WGMMA_FROM_REGISTERS(DEPTH, TYPE, MAJOR, "128", REGISTERS_0 "," REGISTERS_1, \
                                          "%64,%65,%66,%67", "%68", "%69") \
                     : ACCUMULATORS_32(0), ACCUMULATORS_32(32) : ROWS_IN_REGISTERS); \
    }

DEFINE_WGMMA_FROM_REGISTERS(wgmma_from_registers, "16", "f16", ", 0")
DEFINE_WGMMA_FROM_REGISTERS(wgmma_tf32_from_registers, "8", "tf32", "")  // ignores the low 13 bits
#ifdef __CUDA_BF16_H__
DEFINE_WGMMA_FROM_REGISTERS(wgmma_bf16_from_registers, "16", "bf16", ", 0")
#endif
