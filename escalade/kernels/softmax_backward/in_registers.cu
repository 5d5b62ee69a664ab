// dx[row][class] of a softmax (see softmax_backward.cuh); contiguous rows
//
// ROW_THREADS threads hold a row of dy and of the softmax in registers, PACKS packs of up to 16 bytes of each per thread,
// all loaded at once: part of a warp for short rows, a CTA for long ones. Limiter: memory, each element is read and
// written once.
//
// Rung: `in_registers`. Read softmax_backward.cuh.
#include "common/row_sums.cuh"
#include "softmax_backward/softmax_backward.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int VECTOR = 4;        // vector: elements per access
constexpr int ROW_THREADS = 32;  // config.row_threads: threads per row
constexpr int PACKS = 1;         // config.packs: accesses per thread and tensor
constexpr int THREADS = 128;     // config.threads
#endif

constexpr int ROWS = THREADS / ROW_THREADS;  // per CTA
static_assert(ROW_THREADS <= 32 || ROWS == 1, "warps of one row share the CTA barrier");

extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_backward_in_registers(const Gradient* gradient, const Element* softmax, Result* y, int rows, int classes) {
    wait_for_previous_launch();
    const long long row = 1LL * blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    const int thread = threadIdx.x % ROW_THREADS, packs = classes / VECTOR;
    // Shuffles need every lane: those of a missing row read the last one and write nothing.
    const long long at = (row < rows ? row : rows - 1) * classes;
    Pack<Gradient, VECTOR> gradients[PACKS];
    Pack<Element, VECTOR> values[PACKS];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const int pack = i * ROW_THREADS + thread;
        // Out-of-range packs load a valid one instead, so that no load waits for a branch.
        const long long from = at + (pack < packs ? pack : 0) * VECTOR;
        gradients[i] = load_pack<Gradient, VECTOR>(gradient + from);
        values[i] = load_pack<Element, VECTOR>(softmax + from);
    }
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < PACKS; ++i)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            sum += i * ROW_THREADS + thread < packs ? row_term(gradients[i].at[e], values[i].at[e]) : 0.f;
    sum = sum_over_row_threads<ROW_THREADS>(sum);
    if (row >= rows) return;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const int pack = i * ROW_THREADS + thread;
        if (pack >= packs) continue;
        Pack<Result, VECTOR> results;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) results.at[e] = dx_of(gradients[i].at[e], values[i].at[e], sum);
        store_pack(y + at + pack * VECTOR, results);
    }
}
