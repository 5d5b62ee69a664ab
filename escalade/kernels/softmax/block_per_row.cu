// y[row][class] = activated(exp(x[row][class] - largest) / sum over classes of exp(x[row][class] - largest)),
// or with LOG activated(its logarithm)
//
// As many warps per row as hold it in registers, PACKS packs of up to 16 bytes per thread, all loaded at once: the row
// is read once, and each exponential computed once. A row held by one warp needs no barrier, and ROWS of them share a
// CTA. A row too wide for registers (PACKS = 0) is read twice, the second time from L2 if it fits. Limiter: memory,
// each element is read and written once.
//
// Rung: `block_per_row`. Read softmax.cuh.
#include "common/ptx.cuh"
#include "common/row.cuh"
#include "softmax/softmax.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int VECTOR = 4;    // vector: elements per access
constexpr int WARPS = 8;     // config.warps: warps per row
constexpr int PACKS = 1;     // config.packs: accesses per thread, held in registers; 0 to read the row twice
constexpr int ROWS = 1;      // config.rows: rows per CTA
#endif

constexpr int THREADS = WARPS * 32;  // per row
constexpr int IN_FLIGHT = 4;
using Values = Pack<Element, VECTOR>;

__device__ __forceinline__ void store_results(Element* y, const float (&terms)[VECTOR], float divisor) {
    Values results;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) results.at[e] = finished(terms[e], divisor);
    store_pack(y, results);
}

__device__ __forceinline__ void in_registers(const Element* x, Element* y, int packs, int thread) {
    constexpr int COUNT = PACKS > 0 ? PACKS : 1;
    Values loaded[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int pack = i * THREADS + thread;
        // Out-of-range packs load a valid one instead, so that no load waits for a branch.
        loaded[i] = load_pack<Element, VECTOR>(x + 1LL * (pack < packs ? pack : 0) * VECTOR);
    }
    float values[COUNT][VECTOR];
    SoftmaxSums sums;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        to_floats(values[i], loaded[i]);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            values[i][e] = i * THREADS + thread < packs ? values[i][e] : minus_infinity();
            sums.largest = fmaxf(sums.largest, values[i][e]);
        }
    }
    sums.largest = largest_of_row(sums.largest);
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            values[i][e] = softmax_term<LOG>(values[i][e], sums.largest);
            sums.sum += LOG ? expf(values[i][e]) : values[i][e];
        }
    sums.sum = sum_of_row(sums.sum);
    const float divisor = sums.divisor<LOG>();
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (i * THREADS + thread < packs) store_results(y + 1LL * (i * THREADS + thread) * VECTOR, values[i], divisor);
}

// IN_FLIGHT packs of the row, from `first` on; out-of-range packs load a valid one.
__device__ __forceinline__ void load_in_flight(Values (&loaded)[IN_FLIGHT], const Element* x, int first, int packs) {
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
        const int pack = first + i * THREADS;
        loaded[i] = load_pack<Element, VECTOR>(x + 1LL * (pack < packs ? pack : first) * VECTOR);
    }
}

__device__ __forceinline__ void read_twice(const Element* x, Element* y, int packs, int thread) {
    SoftmaxSums sums;
    for (int first = thread; first < packs; first += IN_FLIGHT * THREADS) {
        Values loaded[IN_FLIGHT];
        load_in_flight(loaded, x, first, packs);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            float values[VECTOR];
            to_floats(values, loaded[i]);
            if (first + i * THREADS < packs) sums.add(values);
        }
    }
    const float mine = sums.largest;
    sums.largest = largest_of_row(mine);
    sums.sum = sum_of_row(sums.sum * exp_below(mine, sums.largest));
    const float divisor = sums.divisor<LOG>();
    // Each thread overwrites only what it reads itself, in case y is x.
    for (int first = thread; first < packs; first += IN_FLIGHT * THREADS) {
        Values loaded[IN_FLIGHT];
        load_in_flight(loaded, x, first, packs);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            float values[VECTOR];
            to_floats(values, loaded[i]);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) values[e] = softmax_term<LOG>(values[e], sums.largest);
            const int pack = first + i * THREADS;
            if (pack < packs) store_results(y + 1LL * pack * VECTOR, values, divisor);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS* ROWS)
    softmax_block_per_row(const Element* x, Element* y, int rows, int classes) {
    wait_for_previous_launch();
    const long long row = 1LL * blockIdx.x * ROWS + threadIdx.x / THREADS;
    if (row >= rows) return;  // all of its warps exit; with several warps per row there is no such row
    const Element* logits = x + row * classes;
    Element* results = y + row * classes;
    if constexpr (PACKS > 0)
        in_registers(logits, results, classes / VECTOR, threadIdx.x % THREADS);
    else
        read_twice(logits, results, classes / VECTOR, threadIdx.x % THREADS);
}
