// y[i] = sum over parts of parts[part][i]; behind the weights' elements those of the bias gradient
//
// A warp takes 32 neighbouring packs of VECTOR elements and every LANES-th part of them, then the warps' sums meet in
// shared memory: always in the same order, so that every run gives the same bits. Nobody may have asked for the bias
// gradient's values. What bounds it: L2, where the parts have just been written.
#include "common/elements.cuh"
#include "common/ptx.cuh"

using Sums = Pack<float, VECTOR>;

extern "C" __global__ void __launch_bounds__(32 * LANES)
    conv2d_weight_gradient_sum_parts(const float* parts, Element* y, Element* bias_gradient, int count,
                                     long long weights, long long elements) {
    __shared__ Sums others[LANES][32];
    wait_for_previous_launch();
    const int lane = threadIdx.x / 32, in_warp = threadIdx.x % 32;
    const long long at = (32LL * blockIdx.x + in_warp) * VECTOR;
    Sums sums = {};
    if (at < elements) {
#pragma unroll 8
        for (int part = lane; part < count; part += LANES) {
            const Sums more = load_pack<float, VECTOR>(parts + part * elements + at);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) sums.at[e] += more.at[e];
        }
    }
    others[lane][in_warp] = sums;
    __syncthreads();
    if (lane > 0 || at >= elements) return;
#pragma unroll
    for (int other = 1; other < LANES; ++other)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) sums.at[e] += others[other][in_warp].at[e];
    Pack<Element, VECTOR> results;
    from_floats(results, sums.at);
    if (at < weights)
        store_pack(y + at, results);
    else if (bias_gradient != nullptr)
        store_pack(bias_gradient + (at - weights), results);
}
