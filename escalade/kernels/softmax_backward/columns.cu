// dx[row][class] of a softmax (see softmax_backward.cuh); classes `inner` apart
//
// Adjacent rows are contiguous: a thread takes VECTOR of them, up to 16 bytes, and PARTS groups of warps split the
// classes, STEPS each, held in registers and all loaded at once. One tile per CTA. Limiter: memory, each element is
// read and written once.
//
// Rung: `columns`. Read common/columns.cuh (tiles), softmax_backward.cuh.
#include "common/columns.cuh"
#include "softmax_backward/softmax_backward.cuh"

extern "C" __global__ void __launch_bounds__(COLUMN_THREADS)
    softmax_backward_columns(const Gradient* gradient, const Element* softmax, Result* y, int rows, int classes,
                             int inner) {
    wait_for_previous_launch();
    const Column column = Column::of_thread(blockIdx.x, rows, classes, inner);
    Pack<Gradient, VECTOR> gradients[STEPS];
    Pack<Element, VECTOR> values[STEPS];
    float sums[VECTOR] = {};
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        // A class that does not exist repeats the first.
        const long long from = column.at + (column.has(i, classes) ? 1LL * column.element(i) * inner : 0);
        gradients[i] = load_pack<Gradient, VECTOR>(gradient + from);
        values[i] = load_pack<Element, VECTOR>(softmax + from);
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            sums[e] += column.has(i, classes) ? row_term(gradients[i].at[e], values[i].at[e]) : 0.f;
    sum_over_parts(sums);
    if (!column.there) return;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        if (!column.has(i, classes)) continue;
        Pack<Result, VECTOR> results;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) results.at[e] = dx_of(gradients[i].at[e], values[i].at[e], sums[e]);
        store_pack(y + column.at + 1LL * column.element(i) * inner, results);
    }
}
