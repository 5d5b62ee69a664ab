// Rows whose elements are `inner` apart, such as an image's channels in NCHW: adjacent rows are contiguous.
//
// A CTA takes 32 packs of VECTOR rows, one pack per lane. Its PARTS warps split the elements: warp i % PARTS has
// element i. Their results are reduced in smem.
#pragma once

#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int VECTOR = 4;  // config.vector: adjacent rows per lane
constexpr int PARTS = 8;   // config.parts: warps that share the elements of a row
#endif

struct Column {
    long long at;  // start of its rows; a pack that does not exist repeats the first
    bool there;
    int part;

    __device__ __forceinline__ static Column of_thread(int rows, int length, int inner) {
        const u32 packs = inner / VECTOR;
        const u32 asked = blockIdx.x * 32 + threadIdx.x % 32;
        Column column;
        column.there = asked < static_cast<u32>(rows) / VECTOR;
        const u32 pack = column.there ? asked : 0;
        column.at = 1LL * (pack / packs) * length * inner + pack % packs * VECTOR;
        column.part = threadIdx.x / 32;
        return column;
    }
};

// Reduces each row of a pack over the parts; every part receives the result.
template <class Reduce>
__device__ __forceinline__ void over_parts(float (&values)[VECTOR], Reduce reduce) {
    if constexpr (PARTS > 1) {
        __shared__ float met[PARTS][VECTOR][32];
        const int lane = threadIdx.x % 32;
        __syncthreads();  // the previous round has been read
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) met[threadIdx.x / 32][e][lane] = values[e];
        __syncthreads();
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) values[e] = met[0][e][lane];
#pragma unroll 1  // out of registers otherwise
        for (int part = 1; part < PARTS; ++part)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) values[e] = reduce(values[e], met[part][e][lane]);
    }
}

__device__ __forceinline__ void sum_over_parts(float (&values)[VECTOR]) {
    over_parts(values, [](float one, float other) { return one + other; });
}
