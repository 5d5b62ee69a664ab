// y[row][c] = x[row][c / WAYS + c % WAYS * step]                                                      (NHWC to NHWC)
//
// Interleaves channels, as a channel shuffle of groups does. A row is a pixel's channels, pitched by `x_pitch` in x and
// `y_pitch` in y. A thread writes PACKS packs of VECTOR channels; if WAYS divides VECTOR, a pack is RUN adjacent
// channels of each way, one access each. All loads are in flight before the first store. Limiter: memory, and with odd
// WAYS single-element loads from L1.
//
// Rung: `dealt`.
#include "common/elements.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;        // problem.dtype
constexpr int VECTOR = 4;     // vector: channels per store
constexpr int RUN = 2;        // run: channels of one way per load
constexpr int WAYS = 2;       // problem.ways
constexpr int PACKS = 2;      // config.packs: stores per thread
constexpr int THREADS = 256;  // config.threads
#endif

using Vector = Pack<Element, VECTOR>;

__device__ __forceinline__ Vector dealt(const Element* row, unsigned channel, int step) {
    Vector found;
    if constexpr (RUN > 1) {
#pragma unroll
        for (int way = 0; way < WAYS; ++way) {
            const Pack<Element, RUN> run = load_pack<Element, RUN>(row + channel / WAYS + way * step);
#pragma unroll
            for (int e = 0; e < RUN; ++e) found.at[e * WAYS + way] = run.at[e];
        }
    } else {
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const unsigned c = channel + e;
            found.at[e] = row[c / WAYS + c % WAYS * step];
        }
    }
    return found;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    convert_dealt(const Element* x, Element* y, unsigned row_packs, int step, long long x_pitch, long long y_pitch,
                  unsigned packs) {
    wait_for_previous_launch();
    const unsigned first = blockIdx.x * (THREADS * PACKS) + threadIdx.x;
    Vector values[PACKS];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const unsigned pack = first + i * THREADS, row = pack / row_packs;
        if (pack < packs) values[i] = dealt(x + row * x_pitch, (pack - row * row_packs) * VECTOR, step);
    }
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const unsigned pack = first + i * THREADS, row = pack / row_packs;
        if (pack < packs) store_pack(y + row * y_pitch + (pack - row * row_packs) * VECTOR, values[i]);
    }
}
