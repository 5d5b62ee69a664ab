// Products of a layer with the rows of IMAGES images, by all THREADS threads of a CTA.
#pragma once

#include "common/elements.cuh"
#include "common/warp.cuh"

// Calls found(row, image, sum) for the products of every row of a matrix with values[IMAGES][stride]; TEAM adjacent
// lanes share a row.
template <int COUNT, int TEAM, class Found>
__device__ __forceinline__ void multiply(const Element* weight, int pitch, int rows, int packs, const float* values,
                                         int stride, Found found) {
    constexpr int SOME = COUNT < 4 ? COUNT : 4;
    const int lane = threadIdx.x % TEAM;
#pragma unroll 1
    for (int first = 0; first < rows; first += THREADS / TEAM) {  // uniform over the lanes of a warp
        const int row = first + threadIdx.x / TEAM;
        float sums[IMAGES] = {};
        if (row < rows) {
#pragma unroll 2
            for (int pack = lane; pack < packs; pack += TEAM) {
                const auto factors = load_pack<Element, COUNT>(weight + row * pitch + pack * COUNT);
#pragma unroll
                for (int i = 0; i < IMAGES; ++i)
#pragma unroll
                    for (int e = 0; e < COUNT; e += SOME) {
                        const auto some = load_pack<float, SOME>(values + i * stride + pack * COUNT + e);
#pragma unroll
                        for (int j = 0; j < SOME; ++j) sums[i] += to_float(factors.at[e + j]) * some.at[j];
                    }
            }
        }
#pragma unroll
        for (int distance = TEAM / 2; distance > 0; distance /= 2)
#pragma unroll
            for (int i = 0; i < IMAGES; ++i) sums[i] += __shfl_xor_sync(ALL_LANES, sums[i], distance);
        if (row < rows && lane == 0)
#pragma unroll
            for (int i = 0; i < IMAGES; ++i) found(row, i, sums[i]);
    }
}
