// y[row][output] = relu(sum over parts of parts[part][row][output] + bias[output])
//
// Reduction of a split-K GEMM. VECTOR outputs per thread, a divisor of the outputs per row. Limiter: memory, mostly L2,
// where the parts were just written.
//
// Rung: `tiled`.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;           // problem.dtype
constexpr bool HAS_BIAS = true;  // problem.bias
constexpr bool HAS_RELU = true;  // problem.relu
constexpr int VECTOR = 1;        // width
constexpr int SPLITS = 8;        // splits
#endif

#include "common/epilogue.cuh"
#include "common/ptx.cuh"

extern "C" __global__ void linear_tiled_sum_parts(const float* parts, const Element* bias, Element* y, int out_features,
                                            long long outputs) {
    wait_for_previous_launch();
    const long long at = (1LL * blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
    if (at >= outputs) return;

    float sums[VECTOR] = {};
#pragma unroll
    for (int part = 0; part < SPLITS; ++part) {
        const Pack<float, VECTOR> pack = load_pack<float, VECTOR>(parts + part * outputs + at);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) sums[e] += pack.at[e];
    }
    const int output = at % out_features;
    Pack<Element, VECTOR> results;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e)
        results.at[e] = finish<HAS_BIAS, false, HAS_RELU>(sums[e], bias, output + e,
                                                          static_cast<const Element*>(nullptr), 0);
    store_pack(y + at, results);
}
