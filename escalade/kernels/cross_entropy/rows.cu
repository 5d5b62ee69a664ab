// partials[block] = sum over its rows of w * (log(sum(exp(x))) - (1 - s) * x[target] - s * mean(x))
// gradient[row][c] = w * scale * (softmax(x)[c] - (1 - s) * (c == target) - s / classes)
//
// s is the label smoothing; w is 1, or for a mean one over the number of rows that count: each warp counts a few
// targets itself (COUNTS_HERE), many were counted by rows_count.cu, in at most 32 numbers. A row whose target is
// `ignored` has no loss and no gradient; a target that is not a class makes its row NaN. WARPS warps hold a row in
// registers, PACKS packs per thread: it is read once, and each exponential computed once; with PACKS = 0 it is read
// again for the gradient. A CTA adds up its rows in order, and a second launch the CTAs. Limiter: memory, each element
// is read once and each gradient written once.
//
// Rung             switches
//   warp_per_row   VECTOR 1, WARPS 1, PACKS 0
//   block_per_row  VECTOR up to 16 bytes, as many WARPS as hold the row, PACKS per thread (0 if no CTA holds it)
// Read rows.cuh (state of a row) first.
#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int PACKS = 1;  // config.packs: accesses per thread, held in registers; 0 to read the row twice
constexpr int WARPS = 8;  // config.warps: warps per row
constexpr int ROWS = 1;   // config.rows: rows per CTA
#endif

#include "common/ptx.cuh"
#include "common/row.cuh"
#include "cross_entropy/rows.cuh"

constexpr int THREADS = WARPS * 32;  // per row
constexpr int HELD = PACKS > 0 ? PACKS : 1;

__device__ __forceinline__ RowSums in_registers(const Row& row, const Targets& targets) {
    Values loaded[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int pack = i * THREADS + row.thread;
        // Out-of-range packs load a valid one instead, so that no load waits for a branch.
        loaded[i] = load_pack<Element, VECTOR>(row.x + 1LL * (pack < row.packs ? pack : 0) * VECTOR);
    }
    float values[HELD][VECTOR];
    RowSums sums;
    sums.load_target(row, targets);
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        to_floats(values[i], loaded[i]);
        const bool inside = i * THREADS + row.thread < row.packs;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            if (SMOOTHED) sums.total += inside ? values[i][e] : 0.f;
            values[i][e] = inside ? values[i][e] : minus_infinity();
            sums.of.largest = fmaxf(sums.of.largest, values[i][e]);
        }
    }
    sums.of.largest = largest_of_row(sums.of.largest);
#pragma unroll
    for (int i = 0; i < HELD; ++i)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            values[i][e] = expf(values[i][e] - sums.of.largest);
            sums.of.sum += values[i][e];
        }
    sums.of.sum = sum_of_row(sums.of.sum);
    if (SMOOTHED) sums.total = sum_of_row(sums.total);
    if constexpr (HAS_GRADIENT) {
        const float over_sum = sums.of.scale(), weight = sums.weight * row.scale;
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (i * THREADS + row.thread < row.packs) row.store(i * THREADS + row.thread, values[i], over_sum, weight);
    }
    return sums;
}

__device__ __forceinline__ RowSums read_again(const Row& row, const Targets& targets) {
    RowSums sums;
#pragma unroll 4
    for (int pack = row.thread; pack < row.packs; pack += THREADS) {
        float values[VECTOR];
        to_floats(values, load_pack<Element, VECTOR>(row.x + 1LL * pack * VECTOR));
        sums.of.add(values);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            if (SMOOTHED) sums.total += values[e];
    }
    const float highest = largest_of_row(sums.of.largest);
    sums.of.sum = sum_of_row(sums.of.sum * exp_below(sums.of.largest, highest));
    sums.of.largest = highest;
    if (SMOOTHED) sums.total = sum_of_row(sums.total);
    sums.load_target(row, targets);
    if constexpr (HAS_GRADIENT) {
        const float over_sum = sums.of.scale(), weight = sums.weight * row.scale;
#pragma unroll 4
        for (int pack = row.thread; pack < row.packs; pack += THREADS) {
            float values[VECTOR];
            to_floats(values, load_pack<Element, VECTOR>(row.x + 1LL * pack * VECTOR));
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) values[e] = expf(values[e] - sums.of.largest);
            row.store(pack, values, over_sum, weight);
        }
    }
    return sums;
}

extern "C" __global__ void __launch_bounds__(THREADS* ROWS)
    cross_entropy_rows(const Element* x, const long long* target, const float* scale, const float* counted,
                       Element* gradient, float* partials, int rows, int classes, int counters, long long ignored,
                       float spread, float sure) {
    __shared__ float of_rows[ROWS];
    wait_for_previous_launch();
    const int in_block = threadIdx.x / THREADS;
    const long long number = 1LL * blockIdx.x * ROWS + in_block;
    float loss = 0.f;
    if (number < rows) {
        const Arguments arguments{x,       gradient, scale, {target, counted, rows, counters, ignored},
                                  classes, spread,   sure};
        const Row row(arguments, number, threadIdx.x % THREADS);
        loss = (PACKS > 0 ? in_registers(row, arguments.targets) : read_again(row, arguments.targets)).loss(row);
    }
    if (threadIdx.x % THREADS == 0) of_rows[in_block] = loss;
    __syncthreads();
    if (threadIdx.x > 0) return;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) sum += of_rows[i];
    partials[blockIdx.x] = sum;
}
