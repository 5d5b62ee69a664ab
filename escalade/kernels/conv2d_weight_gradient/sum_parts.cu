// y[i] = sum over parts of parts[part][i]; after the weights the bias gradient, of `bias_count` parts
//
// A thread takes a pack of VECTOR elements and every LANES-th part of them; if parts are many, LANES threads share a
// pack and reduce in smem. The order is fixed, so every run gives the same bits. The bias gradient may not be
// requested. SCALED: each channel of x was multiplied by 2^exponents[channel], each of the gradient by
// 2^exponents[channels + filter]; this undoes both (common/halves.cuh). Limiter: L2, where the parts were just written.
//
// Rungs: `shared_sums`, `direct`, `depthwise`, `tensor_core`, `skinny`, `few_channels`, `wgmma`, `window`, `wgmma_split`,
// `window_split`.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;          // problem.dtype
constexpr int THREADS = 256;    // threads
constexpr int LANES = 1;        // lanes
constexpr int VECTOR = 1;       // vector
constexpr bool SCALED = false;  // scaled
#endif

#include "common/elements.cuh"
#include "common/halves.cuh"
#include "common/ptx.cuh"

using Sums = Pack<float, VECTOR>;
constexpr int PACKS = THREADS / LANES;  // per CTA

__device__ __forceinline__ void add(Sums& sums, const Sums& more) {
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) sums.at[e] += more.at[e];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_weight_gradient_sum_parts(const float* parts, Element* y, Element* bias_gradient, const int* exponents,
                                     int count, int bias_count, long long weights, long long elements,
                                     int channels, int filter_elements) {
    __shared__ Sums others[LANES][PACKS];
    wait_for_previous_launch();
    const int lane = threadIdx.x / PACKS, pack = threadIdx.x % PACKS;
    const long long at = (1LL * PACKS * blockIdx.x + pack) * VECTOR;
    Sums sums = {};
    if (at < elements) {
        const int end = at < weights ? count : bias_count;
#pragma unroll 8
        for (int part = lane; part < end; part += LANES)
            add(sums, load_pack<float, VECTOR>(parts + part * elements + at));
    }
    if (LANES > 1) {
        others[lane][pack] = sums;
        __syncthreads();
#pragma unroll
        for (int other = 1; lane == 0 && other < LANES; ++other) add(sums, others[other][pack]);
    }
    if (lane > 0 || at >= elements) return;
    if (SCALED) {
        const bool is_weight = at < weights;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const long long filter = is_weight ? (at + e) / filter_elements : at + e - weights;
            const float2 of_x = undoing_factors(is_weight ? exponents[(at + e) % channels] : 0);
            const float2 of_gradient = undoing_factors(exponents[channels + filter]);
            sums.at[e] = sums.at[e] * (of_x.x * of_gradient.x) * (of_x.y * of_gradient.y);
        }
    }
    Pack<Element, VECTOR> results;
    from_floats(results, sums.at);
    if (at < weights)
        store_pack(y + at, results);
    else if (bias_gradient != nullptr)
        store_pack(bias_gradient + (at - weights), results);
}
