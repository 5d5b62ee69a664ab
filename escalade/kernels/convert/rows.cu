// y[row][c] = x[row][c]                                                                               (NHWC to NHWC)
//
// A row is a pixel's channels, pitched by `x_pitch` in x and `y_pitch` in y: parts of larger buffers. A thread moves
// PACKS packs of VECTOR elements, all loads in flight before the first store. Limiter: memory.
//
// Rung: `rows`.
#include "common/elements.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;        // problem.dtype
constexpr int VECTOR = 4;     // vector: channels per access
constexpr int PACKS = 4;      // config.packs: accesses in flight per thread
constexpr int THREADS = 256;  // config.threads
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    convert_rows(const Element* x, Element* y, unsigned row_packs, long long x_pitch, long long y_pitch, unsigned packs) {
    wait_for_previous_launch();
    const unsigned first = blockIdx.x * (THREADS * PACKS) + threadIdx.x;
    Pack<Element, VECTOR> values[PACKS];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const unsigned pack = first + i * THREADS, row = pack / row_packs;
        if (pack < packs) values[i] = load_pack<Element, VECTOR>(x + row * x_pitch + (pack - row * row_packs) * VECTOR);
    }
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const unsigned pack = first + i * THREADS, row = pack / row_packs;
        if (pack < packs) store_pack(y + row * y_pitch + (pack - row * row_packs) * VECTOR, values[i]);
    }
}
