// y[i] = x[i] * factor[0], rounded to nearest and saturated
//
// 16 bytes per load, PACKS in flight per thread before the first is used, and as many elements per store. Limiter:
// memory, each element is read and written once.
//
// Rung: `vectorised`.
#include "common/bytes.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;        // problem.dtype
using Output = e4m3;         // problem.output
constexpr int PACKS = 4;      // config.packs: loads in flight per thread
constexpr int THREADS = 256;  // config.threads
#endif

constexpr int VECTOR = 16 / sizeof(Element);

extern "C" __global__ void __launch_bounds__(THREADS)
    quantise_vectorised(const Element* x, const float* factor, Output* y, long long elements) {
    wait_for_previous_launch();
    const long long whole = elements / VECTOR;  // packs; CTA 0 handles the remaining elements
    const long long first = 1LL * blockIdx.x * (THREADS * PACKS) + threadIdx.x;

    Pack<Element, VECTOR> values[PACKS];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const long long pack = first + i * THREADS;
        if (pack < whole) values[i] = load_pack<Element, VECTOR>(x + pack * VECTOR);
    }
    const float times = factor[0];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const long long pack = first + i * THREADS;
        if (pack >= whole) continue;
        float scaled[VECTOR];
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) scaled[e] = to_float(values[i].at[e]) * times;
        Pack<Output, VECTOR> codes;
        from_floats(codes, scaled);
        store_pack(y + pack * VECTOR, codes);
    }

    const long long last = whole * VECTOR + threadIdx.x;
    if (blockIdx.x == 0 && last < elements) y[last] = from_float<Output>(to_float(x[last]) * times);
}
