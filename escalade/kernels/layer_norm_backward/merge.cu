// bias_gradient[f], weight_gradient[f] = sums of partial[0][·][f] and partial[1][·][f]
//
// Second of two launches. A warp covers 32 features; the warps of a CTA share the partial sums of the first launch's
// CTAs and add theirs in smem, in a fixed order. Limiter: latency.
//
// Rung: `in_registers`.
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int THREADS = 512;  // threads
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    layer_norm_backward_merge(const float* partial, float* weight_gradient, float* bias_gradient, int features,
                              int splits) {
    constexpr int WARPS = THREADS / 32;
    __shared__ float of_warps[WARPS][32];
    wait_for_previous_launch();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, f = blockIdx.x * 32 + lane;
    const float* const parts = partial + 1LL * blockIdx.y * splits * features;
    float sum = 0.f;
#pragma unroll 4
    for (int split = warp; split < splits; split += WARPS)
        if (f < features) sum += parts[1LL * split * features + f];
    of_warps[warp][lane] = sum;
    __syncthreads();
    if (warp || f >= features) return;
    float total = 0.f;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) total += of_warps[other][lane];
    (blockIdx.y == 0 ? bias_gradient : weight_gradient)[f] = total;
}
