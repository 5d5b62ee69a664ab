// Hopper's instructions as CPU functions: mbarriers, TMA, wgmma, clusters, named barriers. Same names and
// meaning as escalade/kernels/common/hopper.cuh; what they do is in runtime/ (mbarriers.cpp, tensor_copies.cpp,
// wgmma.cpp).
#pragma once

#include "common/descriptors.cuh"
#include "common/ptx.cuh"

struct __align__(64) TensorMap { unsigned char opaque[128]; };  // encoded by tensor_map.py

namespace twin {

u32 own_rank();
u32 cluster_blocks();
void mbarrier_init(u32 barrier, u32 arrivals, Where where);
void mbarrier_arrive(u32 barrier, u32 rank, u32 bytes, Where where);
void tensor_load(u32 destination, const TensorMap& map, u32 barrier, const int* at, int rank, const u16* taps,
                 u32 blocks, Where where);
void tensor_store(const TensorMap& map, u32 source, const int* at, int rank, Where where);
void tensor_store_close_group();
void tensor_store_wait_read(u32 pending);
void fence_proxy();
void fence_mbarrier_init();
void set_registers(u32 count);
unsigned char* shared_bytes(u32 address, u32 rank, u32 bytes, bool write, Where where);
void push(u32 address, u32 barrier, u32 rank, float4 value, Where where);
void wgmma_issue(Element element, float* d, int n, u64 a, u64 b, bool accumulate, Where where,
                 bool rows_transposed = false, bool columns_transposed = false);
void wgmma_close_group();
void wgmma_wait_groups(u32 pending);

namespace wait {

void wgmma_fence(Where where);
void wgmma_from_registers(Element element, float* d, int n, const u32* a, u64 b, bool accumulate, Where where);
bool mbarrier(u32 barrier, u32 parity, Where where);
void cluster_arrive(bool orders, Where where);
void cluster_wait(Where where);

}  // namespace wait
}  // namespace twin

// ------------------------------------------------------------------ mbarriers

inline void barrier_init(u32 barrier, u32 arrivals, TWIN_WHERE) { twin::mbarrier_init(barrier, arrivals, where); }
inline void barrier_expect(u32 barrier, u32 bytes, TWIN_WHERE) {
    twin::mbarrier_arrive(barrier, twin::own_rank(), bytes, where);
}
inline void barrier_arrive(u32 barrier, TWIN_WHERE) { twin::mbarrier_arrive(barrier, twin::own_rank(), 0, where); }
inline void barrier_arrive_cluster(u32 barrier, u32 rank, TWIN_WHERE) {
    twin::mbarrier_arrive(barrier, rank, 0, where);
}
// try_wait may suspend the thread for any time: here until the phase is complete.
inline bool barrier_try_wait(u32 barrier, u32 parity, TWIN_WHERE) {
    return twin::wait::mbarrier(barrier, parity, where);
}
inline void barrier_wait(u32 barrier, u32 parity, TWIN_WHERE) { twin::wait::mbarrier(barrier, parity, where); }
inline void fence_barrier_init() { twin::fence_mbarrier_init(); }
[[noreturn]] inline void fault(TWIN_WHERE) { twin::fail(where, "fault()"); }

// ------------------------------------------------------------------ bulk tensor copies

inline void tma_load_im2col(u32 destination, const TensorMap& map, u32 barrier, int c, int w, int h, int n, u16 tap_w,
                            u16 tap_h, TWIN_WHERE) {
    const int at[] = {c, w, h, n};
    const u16 taps[] = {tap_w, tap_h};
    twin::tensor_load(destination, map, barrier, at, 4, taps, 1u << twin::own_rank(), where);
}
inline void tma_load_im2col_5d(u32 destination, const TensorMap& map, u32 barrier, int c, int w, int h, int d, int n,
                               u16 tap_w, u16 tap_h, u16 tap_d, TWIN_WHERE) {
    const int at[] = {c, w, h, d, n};
    const u16 taps[] = {tap_w, tap_h, tap_d};
    twin::tensor_load(destination, map, barrier, at, 5, taps, 1u << twin::own_rank(), where);
}
inline void tma_load_2d(u32 destination, const TensorMap& map, u32 barrier, int x, int y, TWIN_WHERE) {
    const int at[] = {x, y};
    twin::tensor_load(destination, map, barrier, at, 2, nullptr, 1u << twin::own_rank(), where);
}
inline void tma_load_3d(u32 destination, const TensorMap& map, u32 barrier, int x, int y, int z, TWIN_WHERE) {
    const int at[] = {x, y, z};
    twin::tensor_load(destination, map, barrier, at, 3, nullptr, 1u << twin::own_rank(), where);
}
inline void tma_load_4d(u32 destination, const TensorMap& map, u32 barrier, int c, int w, int h, int n, TWIN_WHERE) {
    const int at[] = {c, w, h, n};
    twin::tensor_load(destination, map, barrier, at, 4, nullptr, 1u << twin::own_rank(), where);
}
inline void tma_load_3d_multicast(u32 destination, const TensorMap& map, u32 barrier, int x, int y, int z, u16 blocks,
                                  TWIN_WHERE) {
    const int at[] = {x, y, z};
    twin::tensor_load(destination, map, barrier, at, 3, nullptr, blocks, where);
}
// Each store is its own group, since the kernels' functions commit each.
inline void tma_store_2d(const TensorMap& map, u32 source, int x, int y, TWIN_WHERE) {
    const int at[] = {x, y};
    twin::tensor_store(map, source, at, 2, where);
    twin::tensor_store_close_group();
}
inline void tma_store_4d(const TensorMap& map, u32 source, int c, int w, int h, int n, TWIN_WHERE) {
    const int at[] = {c, w, h, n};
    twin::tensor_store(map, source, at, 4, where);
    twin::tensor_store_close_group();
}
template <int PENDING>
void tma_store_wait_read() { twin::tensor_store_wait_read(PENDING); }
inline void prefetch_map(const TensorMap&) {}

// ------------------------------------------------------------------ fences, barriers, roles

inline void fence_async_proxy() { twin::fence_proxy(); }
inline void named_barrier_sync(int id, int threads, TWIN_WHERE) {
    twin::wait::block_barrier(id, threads, false, twin::wait::Vote::any, where);
}
inline void named_barrier_arrive(int id, int threads, TWIN_WHERE) { twin::wait::block_arrive(id, threads, where); }
inline void warpgroup_sync(int consumer, TWIN_WHERE) { named_barrier_sync(1 + consumer, 128, where); }
inline void consumers_sync(TWIN_WHERE) { named_barrier_sync(3, 256, where); }
inline void cluster_arrive(TWIN_WHERE) { twin::wait::cluster_arrive(true, where); }
inline void cluster_arrive_relaxed(TWIN_WHERE) { twin::wait::cluster_arrive(false, where); }
inline void cluster_wait(TWIN_WHERE) { twin::wait::cluster_wait(where); }
inline void cluster_sync(TWIN_WHERE) {
    twin::wait::cluster_arrive(true, where);
    twin::wait::cluster_wait(where);
}
inline u32 cluster_rank() { return twin::own_rank(); }
inline u32 cluster_size() { return twin::cluster_blocks(); }
template <int REGISTERS>
void release_registers() {
    static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256);
    twin::set_registers(REGISTERS);
}
template <int REGISTERS>
void claim_registers() { release_registers<REGISTERS>(); }

inline void store_shared(u32 address, float4 v, TWIN_WHERE) {
    std::memcpy(twin::shared_bytes(address, twin::own_rank(), 16, true, where), &v, 16);
}
inline void store_shared(u32 address, float v, TWIN_WHERE) {
    std::memcpy(twin::shared_bytes(address, twin::own_rank(), 4, true, where), &v, 4);
}
inline u32 load_early(const void* address) { return *static_cast<const u32*>(address); }
inline void prefetch_line(const void*) {}
inline float load_shared(u32 address, TWIN_WHERE) {
    float v;
    std::memcpy(&v, twin::shared_bytes(address, twin::own_rank(), 4, false, where), 4);
    return v;
}
inline float4 load_shared_16(u32 address, TWIN_WHERE) {
    float4 v;
    std::memcpy(&v, twin::shared_bytes(address, twin::own_rank(), 16, false, where), 16);
    return v;
}
inline float4 load_cluster(u32 address, u32 rank, TWIN_WHERE) {
    float4 v;
    std::memcpy(&v, twin::shared_bytes(address, rank, 16, false, where), 16);
    return v;
}
inline void push_cluster(u32 address, u32 barrier, u32 rank, float4 v, TWIN_WHERE) {
    twin::push(address, barrier, rank, v, where);
}

// ------------------------------------------------------------------ wgmma

// .sync.aligned: the warp continues when all its lanes have arrived. Kernels rely on that when one lane then
// frees a stage for the warp.
inline void wgmma_fence(TWIN_WHERE) { twin::wait::wgmma_fence(where); }
inline void wgmma_commit() { twin::wgmma_close_group(); }
template <int COUNT>
inline void hold(float (&)[COUNT]) {}
template <int PENDING>
void wgmma_wait(TWIN_WHERE) {
    twin::wgmma_wait_groups(PENDING);
    twin::wait::warp_barrier(~0u, "wgmma.wait_group", where);
}

template <size_t REGISTERS>
void wgmma(float (&d)[REGISTERS], u64 a, u64 b, u32 accumulate, TWIN_WHERE) {
    twin::wgmma_issue(twin::Element::f16, d, 2 * REGISTERS, a, b, accumulate, where);
}
template <size_t REGISTERS>
void wgmma_bf16(float (&d)[REGISTERS], u64 a, u64 b, u32 accumulate, TWIN_WHERE) {
    twin::wgmma_issue(twin::Element::bf16, d, 2 * REGISTERS, a, b, accumulate, where);
}
template <size_t REGISTERS>
void wgmma_tf32(float (&d)[REGISTERS], u64 a, u64 b, u32 accumulate, TWIN_WHERE) {
    twin::wgmma_issue(twin::Element::tf32, d, 2 * REGISTERS, a, b, accumulate, where);
}
template <size_t REGISTERS>
void wgmma_e4m3(float (&d)[REGISTERS], u64 a, u64 b, u32 accumulate, TWIN_WHERE) {
    twin::wgmma_issue(twin::Element::e4m3, d, 2 * REGISTERS, a, b, accumulate, where);
}
template <size_t REGISTERS>
void wgmma_s8(int (&d)[REGISTERS], u64 a, u64 b, u32 accumulate, TWIN_WHERE) {
    static_assert(REGISTERS % 8 == 0, "N is a multiple of 16");
    twin::wgmma_issue(twin::Element::s8, reinterpret_cast<float*>(d), 2 * REGISTERS, a, b, accumulate, where);
}

#define TWIN_TRANSPOSED(NAME, ELEMENT, ROWS, COLUMNS) \
    template <size_t REGISTERS> \
    void NAME(float (&d)[REGISTERS], u64 a, u64 b, u32 accumulate, TWIN_WHERE) { \
        twin::wgmma_issue(twin::Element::ELEMENT, d, 2 * REGISTERS, a, b, accumulate, where, ROWS, COLUMNS); \
    }
TWIN_TRANSPOSED(wgmma_transposed, f16, true, true)
TWIN_TRANSPOSED(wgmma_bf16_transposed, bf16, true, true)
TWIN_TRANSPOSED(wgmma_rows_transposed, f16, true, false)
TWIN_TRANSPOSED(wgmma_bf16_rows_transposed, bf16, true, false)
TWIN_TRANSPOSED(wgmma_columns_transposed, f16, false, true)
TWIN_TRANSPOSED(wgmma_bf16_columns_transposed, bf16, false, true)
#undef TWIN_TRANSPOSED

// ------------------------------------------------------------------ wgmma with its rows in registers

template <size_t REGISTERS>
void wgmma_from_registers(float (&d)[REGISTERS], const u32 (&a)[4], u64 b, u32 accumulate, TWIN_WHERE) {
    twin::wait::wgmma_from_registers(twin::Element::f16, d, 2 * REGISTERS, a, b, accumulate, where);
}
template <size_t REGISTERS>
void wgmma_bf16_from_registers(float (&d)[REGISTERS], const u32 (&a)[4], u64 b, u32 accumulate, TWIN_WHERE) {
    twin::wait::wgmma_from_registers(twin::Element::bf16, d, 2 * REGISTERS, a, b, accumulate, where);
}
template <size_t REGISTERS>
void wgmma_tf32_from_registers(float (&d)[REGISTERS], const u32 (&a)[4], u64 b, u32 accumulate, TWIN_WHERE) {
    twin::wait::wgmma_from_registers(twin::Element::tf32, d, 2 * REGISTERS, a, b, accumulate, where);
}
