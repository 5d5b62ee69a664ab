// partials[block] = sum over its rows of w * (log(sum(exp(x))) - (1 - s) * x[target] - s * mean(x))
// gradient[row][c] = w * scale * (softmax(x)[c] - (1 - s) * (c == target) - s / classes)
//
// rows.cu for short rows: LANES adjacent lanes of a warp hold a row in registers, PACKS packs of up to 16 bytes each,
// all loaded at once, and reduce by shuffles. A CTA adds up the losses of its rows in a fixed order, and a second
// launch the CTAs. Limiter: memory with wide packs; if no vector divides a row, the number of accesses of lanes a few
// bytes apart.
//
// Rung: `part_of_warp`. Read rows.cuh (state of a row) first.
#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int LANES = 4;      // config.lanes: lanes per row
constexpr int PACKS = 4;      // config.packs: accesses per lane
constexpr int THREADS = 128;  // threads
#endif

#include "common/ptx.cuh"
#include "cross_entropy/rows.cuh"

constexpr int BLOCK_WARPS = THREADS / 32;

template <class Combine>
__device__ __forceinline__ float over_lanes(float value, Combine combine) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        value = combine(value, __shfl_xor_sync(ALL_LANES, value, distance));
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy_rows_part_of_warp(const Element* x, const long long* target, const float* scale,
                                    const float* counted, Element* gradient, float* partials, int rows, int classes,
                                    int counters, long long ignored, float spread, float sure) {
    __shared__ float of_warps[BLOCK_WARPS];
    wait_for_previous_launch();
    const Arguments arguments{x, gradient, scale, {target, counted, rows, counters, ignored}, classes, spread, sure};
    const long long number = 1LL * blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    // Shuffles need every lane: those of a missing row read the last one and write nothing.
    const bool is_there = number < rows;
    const Row row(arguments, is_there ? number : rows - 1LL, threadIdx.x % LANES);
    Values loaded[PACKS];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const int pack = i * LANES + row.thread;
        loaded[i] = load_pack<Element, VECTOR>(row.x + (pack < row.packs ? pack : 0) * VECTOR);
    }
    float values[PACKS][VECTOR];
    RowSums sums;
    sums.load_target(row, arguments.targets);
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        to_floats(values[i], loaded[i]);
        const bool inside = i * LANES + row.thread < row.packs;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            if (SMOOTHED) sums.total += inside ? values[i][e] : 0.f;
            values[i][e] = inside ? values[i][e] : minus_infinity();
            sums.of.largest = fmaxf(sums.of.largest, values[i][e]);
        }
    }
    const auto add = [](float mine, float other) { return mine + other; };
    sums.of.largest = over_lanes(sums.of.largest, [](float mine, float other) { return fmaxf(mine, other); });
#pragma unroll
    for (int i = 0; i < PACKS; ++i)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            values[i][e] = expf(values[i][e] - sums.of.largest);
            sums.of.sum += values[i][e];
        }
    sums.of.sum = over_lanes(sums.of.sum, add);
    if (SMOOTHED) sums.total = over_lanes(sums.total, add);
    if constexpr (HAS_GRADIENT) {
        const float over_sum = sums.of.scale(), weight = sums.weight * row.scale;
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int pack = i * LANES + row.thread;
            if (is_there && pack < row.packs) row.store(pack, values[i], over_sum, weight);
        }
    }
    const float of_warp = warp_sum(is_there && row.thread == 0 ? sums.loss(row) : 0.f);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
    __syncthreads();
    if (threadIdx.x > 0) return;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < BLOCK_WARPS; ++i) sum += of_warps[i];
    partials[blockIdx.x] = sum;
}
