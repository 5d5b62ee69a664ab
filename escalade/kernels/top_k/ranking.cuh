// Order of a row's classes: NaN first, then larger logits; of equal ones the lower class.
#pragma once

#include "common/ptx.cuh"
#include "common/softmax.cuh"

// A logit as a sortable integer: larger means earlier. 0 is smaller than any; -0 and 0 are equal, and so are all NaNs.
__device__ __forceinline__ u32 rank_of(float logit) {
    const u32 bits = __float_as_uint(logit + 0.f);  // turns -0 into 0
    if (logit != logit) return 0xFFFFFFFFu;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float logit_of(u32 rank) {
    return __uint_as_float(rank & 0x80000000u ? rank & 0x7FFFFFFFu : ~rank);
}

// Rank and class in one integer; the largest comes first.
__device__ __forceinline__ u64 entry_of(float logit, int class_number) {
    return static_cast<u64>(rank_of(logit)) << 32 | ~static_cast<u32>(class_number);
}

__device__ __forceinline__ u32 rank_in(u64 entry) { return static_cast<u32>(entry >> 32); }
__device__ __forceinline__ int class_in(u64 entry) { return static_cast<int>(~static_cast<u32>(entry)); }

// The best K entries seen by one thread, best first; 0 where there is none.
struct Best {
    u64 entries[K] = {};

    __device__ __forceinline__ void add(u64 entry) {
        if (entry <= entries[K - 1]) return;
#pragma unroll
        for (int i = 0; i < K; ++i) {
            const bool before = entry > entries[i];
            const u64 behind = before ? entries[i] : entry;
            entries[i] = before ? entry : entries[i];
            entry = behind;
        }
    }

    __device__ __forceinline__ void remove_first() {
#pragma unroll
        for (int i = 0; i < K - 1; ++i) entries[i] = entries[i + 1];
        entries[K - 1] = 0;
    }

    // Selects the best K of all lanes: lane i receives number i. Removes them from the lists.
    __device__ __forceinline__ u64 over_warp() {
        u64 mine = 0;
#pragma unroll 1
        for (int i = 0; i < K; ++i) {
            const u32 rank = warp_max(rank_in(entries[0]));
            const u32 rest = warp_max(rank_in(entries[0]) == rank ? static_cast<u32>(entries[0]) : 0u);
            const u64 first = static_cast<u64>(rank) << 32 | rest;
            if (entries[0] == first) remove_first();
            if (threadIdx.x % 32 == i) mine = first;
        }
        return mine;
    }
};

// Stores number i of a row: its probability and its class.
__device__ __forceinline__ void store_entry(float* y, int i, u64 entry, float largest, float scale) {
    y[i] = expf(logit_of(rank_in(entry)) - largest) * scale;
    y[K + i] = static_cast<float>(class_in(entry));
}
