// Count, mean and sum of squared deviations (Welford), and the merge of two of them (Chan).
//
// The shortcut, sums of x and x * x, subtracts two large numbers at the end: with a mean of a thousand standard
// deviations nothing is left of the variance in fp32. Here every square is of a deviation from a mean.
#pragma once

#include "common/elements.cuh"
#include "common/warp.cuh"

struct Moments {
    float count, mean, squares;
};

__device__ __forceinline__ Moments merged(const Moments& a, const Moments& b) {
    if (a.count == 0.f) return b;
    if (b.count == 0.f) return a;
    const float count = a.count + b.count, share = __fdividef(b.count, count), distance = b.mean - a.mean;
    return {count, a.mean + distance * share, a.squares + b.squares + distance * distance * (a.count * share)};
}

// Over the lanes of a warp, in a fixed order; lane 0 has the result.
__device__ __forceinline__ Moments warp_merged(Moments mine) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const Moments other{__shfl_down_sync(ALL_LANES, mine.count, distance),
                            __shfl_down_sync(ALL_LANES, mine.mean, distance),
                            __shfl_down_sync(ALL_LANES, mine.squares, distance)};
        mine = merged(mine, other);
    }
    return mine;
}

// Over a CTA of whole warps; thread 0 has the result.
template <int THREADS>
__device__ __forceinline__ Moments block_merged(Moments mine) {
    static_assert(THREADS % 32 == 0 && THREADS <= 1024);
    __shared__ Moments of_warp[THREADS / 32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    mine = warp_merged(mine);
    if (lane == 0) of_warp[warp] = mine;
    __syncthreads();
    if (warp == 0) mine = warp_merged(lane < THREADS / 32 ? of_warp[lane] : Moments{});
    return mine;
}

// Merges ROWS more rows, `step` elements apart, into the mean and squares of each of COLUMNS columns. The rows' own
// mean and squares are computed first: one merge for all of them.
template <int ROWS, class T, int COLUMNS>
__device__ __forceinline__ void take_rows(const T* from, long long step, float& count, float (&means)[COLUMNS],
                                          float (&squares)[COLUMNS]) {
    Pack<T, COLUMNS> packs[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) packs[i] = load_pack<T, COLUMNS>(from + i * step);
    const float total = count + ROWS, share = __fdividef(ROWS, total);
#pragma unroll
    for (int e = 0; e < COLUMNS; ++e) {
        float sum = 0.f, spread = 0.f;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) sum += to_float(packs[i].at[e]);
        const float mean = sum * (1.f / ROWS);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const float distance = to_float(packs[i].at[e]) - mean;
            spread += distance * distance;
        }
        const float distance = mean - means[e];
        means[e] += distance * share;
        // in this order 0 previous rows add 0, not inf * 0
        squares[e] += spread + distance * (distance * (count * share));
    }
    count = total;
}
