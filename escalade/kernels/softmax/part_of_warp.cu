// y[row][class] = activated(exp(x[row][class] - largest) / sum over classes of exp(x[row][class] - largest)),
// or with LOG activated(its logarithm)
//
// LANES adjacent lanes of a warp hold a short row in registers, PACKS packs of up to 16 bytes each, all loaded at once,
// and reduce by shuffles. Limiter: memory, each element is read and written once.
//
// Rung: `part_of_warp`. Read softmax.cuh.
#include "common/ptx.cuh"
#include "softmax/softmax.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int VECTOR = 4;     // vector: elements per access
constexpr int LANES = 4;      // config.lanes: lanes per row
constexpr int PACKS = 4;      // config.packs: accesses per lane
constexpr int THREADS = 128;  // threads
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_part_of_warp(const Element* x, Element* y, int rows, int classes) {
    wait_for_previous_launch();
    const long long row = 1LL * blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    const int lane = threadIdx.x % LANES, packs = classes / VECTOR;
    // Shuffles need every lane: those of a missing row read the last one and write nothing.
    const long long at = (row < rows ? row : rows - 1) * classes;
    Pack<Element, VECTOR> loaded[PACKS];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const int pack = i * LANES + lane;
        loaded[i] = load_pack<Element, VECTOR>(x + at + (pack < packs ? pack : 0) * VECTOR);
    }
    float values[PACKS][VECTOR];
    SoftmaxSums sums;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        to_floats(values[i], loaded[i]);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            values[i][e] = i * LANES + lane < packs ? values[i][e] : minus_infinity();
            sums.largest = fmaxf(sums.largest, values[i][e]);
        }
    }
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        sums.largest = fmaxf(sums.largest, __shfl_xor_sync(ALL_LANES, sums.largest, distance));
#pragma unroll
    for (int i = 0; i < PACKS; ++i)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            values[i][e] = softmax_term<LOG>(values[i][e], sums.largest);
            sums.sum += LOG ? expf(values[i][e]) : values[i][e];
        }
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        sums.sum += __shfl_xor_sync(ALL_LANES, sums.sum, distance);
    if (row >= rows) return;
    const float divisor = sums.divisor<LOG>();
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const int pack = i * LANES + lane;
        if (pack >= packs) continue;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) loaded[i].at[e] = finished(values[i][e], divisor);
        store_pack(y + at + pack * VECTOR, loaded[i]);
    }
}
