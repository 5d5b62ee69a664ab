// y[i] = sum over parts of parts[part][i]
//
// A warp takes 32 adjacent elements and every LANES-th part of them; then the warps reduce in smem. The order is fixed,
// so every run gives the same bits. Limiter: L2, where the parts were just written.
//
// Rungs: all.
#include "common/elements.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int LANES = 8;  // lanes
#endif

extern "C" __global__ void __launch_bounds__(32 * LANES)
    mlp_backward_sum_parts(const float* parts, float* y, int count, long long pitch, long long elements) {
    __shared__ float sums[LANES][32];
    wait_for_previous_launch();
    const int lane = threadIdx.x / 32, in_warp = threadIdx.x % 32;
    const long long at = 32LL * blockIdx.x + in_warp;
    float sum = 0.f;
    if (at < elements) {
#pragma unroll 8
        for (int part = lane; part < count; part += LANES) sum += parts[part * pitch + at];
    }
    sums[lane][in_warp] = sum;
    __syncthreads();
    if (lane > 0 || at >= elements) return;
#pragma unroll
    for (int other = 1; other < LANES; ++other) sum += sums[other][in_warp];
    y[at] = sum;
}
