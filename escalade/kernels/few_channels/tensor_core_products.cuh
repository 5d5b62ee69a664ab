// Mainloop of a warp: fragments of image rows, each loaded once, times weights in registers.
#pragma once

#include "common/mma_tile.cuh"
#include "few_channels/tensor_core_tile.cuh"

using Accumulators = float[TILES_N][4];
using Weights = u32[PACKED * 2][2];

// Adjacent k-steps of one output row: `a` are pixels, `at` is the first fragment of the weights.
template <int STEPS>
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[STEPS][SETS][4], const Weights& weights,
                                         int at, int t) {
    if constexpr (SPLIT) {  // small products first
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            multiply_add<Operand>(sum, a[step][1], weights[(at + step) * TILES_N + t]);
            multiply_add<Operand>(sum, a[step][0], weights[(FRAGMENTS + at + step) * TILES_N + t]);
        }
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
        multiply_add<Operand>(sum, a[step][0], weights[(at + step) * TILES_N + t]);
}

// Accumulators of an output row. If SPLIT, every JOINT consecutive calls have separate accumulators.
struct Row {
    static constexpr int JOINT = SINGLE ? 2 : 1;
    Accumulators acc;
    Accumulators part;

    // Call number `call` of `calls`.
    template <int STEPS>
    __device__ __forceinline__ void add(const u32 (&a)[STEPS][SETS][4], const Weights& weights, int at, int call,
                                        int calls) {
        const bool begins = SPLIT ? call % JOINT == 0 : call == 0;
        const bool ends = call % JOINT == JOINT - 1 || call == calls - 1;
#pragma unroll
        for (int t = 0; t < TILES_N; ++t) {
            if (begins)
#pragma unroll
                for (int e = 0; e < 4; ++e) part[t][e] = 0.f;
            multiply(part[t], a, weights, at, t);
            if (!SPLIT || ends)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[t][e] = SPLIT && call >= JOINT ? acc[t][e] + part[t][e] : part[t][e];
        }
    }
};

// Zero that depends on `sum`: the compiler does not know that `none` is zero. Added to addresses, it keeps the compiler
// from starting too many image rows at once and running out of registers.
__device__ __forceinline__ int zero_after(float sum, int none) { return SPLIT ? __float_as_int(sum) & none : 0; }

// ROWS output rows of block m; calls finish(r, acc) for each complete row.
template <class Finish>
__device__ __forceinline__ void convolve(const Operand* operands, const Weights& weights, int m, int none,
                                         Finish finish) {
    const int lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
    Row rows[ROWS];
    if constexpr (SINGLE) {
        const u32* upper = reinterpret_cast<const u32*>(operands + RowPosition(m, group).operand()) + member;
        const u32* lower = reinterpret_cast<const u32*>(operands + RowPosition(m, group + 8).operand()) + member;
#pragma unroll
        for (int j = 0; j < (ROWS + FILTER_HEIGHT) / 2; ++j) {
            if (j >= 2) {
                const int zero = zero_after(rows[min(2 * j - 3, ROWS - 1)].part[0][0], none);
                upper += zero, lower += zero;
            }
            u32 a[1][SETS][4];
#pragma unroll
            for (int set = 0; set < SETS; ++set)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int word = set * (BUFFER / 2) + (2 * j + i) * (ROW_BYTES / 4);
                    a[0][set][2 * i] = upper[word], a[0][set][2 * i + 1] = lower[word];
                }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int step = j - r / 2, steps = (FILTER_HEIGHT + r % 2 + 1) / 2;
                if (step < 0 || step >= steps) continue;
                rows[r].add(a, weights, r % 2 * ROW_PAIR_STEPS + step, step, steps);
                if (step == steps - 1) finish(r, rows[r].acc);
            }
        }
    } else {
        u32 pixels = shared_address(operands + RowPosition(m, lane % 16).operand()) + lane / 16 * 16;
#pragma unroll
        for (int i = 0; i < ROWS + FILTER_HEIGHT - 1; ++i) {
            if (i >= 2) pixels += zero_after(rows[min(i - 2, ROWS - 1)].acc[0][0], none);
            u32 a[ROW_STEPS][SETS][4];
#pragma unroll
            for (int step = 0; step < ROW_STEPS; ++step)
#pragma unroll
                for (int set = 0; set < SETS; ++set)
                    load_matrices(a[step][set], pixels + set * (BUFFER * 2) + i * ROW_BYTES + step * 32);
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                if (r <= i && i - r < FILTER_HEIGHT)
                    rows[r].add(a, weights, (i - r) * ROW_STEPS, i - r, FILTER_HEIGHT);
            if (i >= FILTER_HEIGHT - 1) finish(i - FILTER_HEIGHT + 1, rows[i - FILTER_HEIGHT + 1].acc);
        }
    }
}
