// counted[block] = number of targets in the CTA's share that are not `ignored`
//
// Precedes a mean over rows some of which may not count. Up to 32 CTAs, whose counts a warp then adds up in a fixed
// order. Limiter: latency.
//
// Rungs: `warp_per_row`, `block_per_row`, `part_of_warp`.
#include "common/ptx.cuh"
#include "common/warp.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int THREADS = 256;  // threads
#endif

constexpr int WARPS = THREADS / 32;

extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy_rows_count(const long long* target, float* counted, int rows, int share, long long ignored) {
    __shared__ float of_warps[WARPS];
    wait_for_previous_launch();
    const long long end = min(1LL * rows, (blockIdx.x + 1LL) * share);
    int count = 0;
#pragma unroll 4
    for (long long row = 1LL * blockIdx.x * share + threadIdx.x; row < end; row += THREADS)
        count += target[row] != ignored;
    const float sum = warp_sum(count);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const float all = warp_sum(threadIdx.x < WARPS ? of_warps[threadIdx.x] : 0.f);
    if (threadIdx.x == 0) counted[blockIdx.x] = all;
}
