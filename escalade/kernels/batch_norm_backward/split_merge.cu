// bias_gradient[c], weight_gradient[c] = the sums of partial[0][·][c], and of partial[1][·][c] times rstd[c]
//
// Second of three launches. One CTA per CHANNELS channels, THREADS / CHANNELS threads each, which loop over the parts,
// PACKS in flight, and reduce by shuffles and in smem. The order is fixed, so every run gives the same bits. Limiter:
// latency.
//
// Rungs: `split`, `vectorised`.
#include "common/ptx.cuh"
#include "common/warp.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int THREADS = 512;  // threads
constexpr int CHANNELS = 8;   // channels: channels per CTA
constexpr int PACKS = 5;      // packs: loads in flight per thread
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    batch_norm_backward_split_merge(const float* partial, const float* rstd, float* weight_gradient,
                                    float* bias_gradient, int channels, int splits) {
    constexpr int LANES = THREADS / CHANNELS, WARPS = THREADS / 32;
    __shared__ float of_warps[WARPS][2][CHANNELS];
    wait_for_previous_launch();
    const int in_block = threadIdx.x % CHANNELS, c = blockIdx.x * CHANNELS + in_block;

    float sums[2] = {};
    for (int first = threadIdx.x / CHANNELS; first < splits && c < channels; first += PACKS * LANES) {
        float parts[2][PACKS] = {};
#pragma unroll
        for (int i = 0; i < PACKS; ++i) {
            const int split = first + i * LANES;
            if (split < splits) {
                parts[0][i] = partial[1LL * split * channels + c];
                parts[1][i] = partial[(1LL * splits + split) * channels + c];
            }
        }
#pragma unroll
        for (int i = 0; i < PACKS; ++i) sums[0] += parts[0][i], sums[1] += parts[1][i];
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
#pragma unroll
        for (int distance = 16; distance >= CHANNELS; distance /= 2)
            sums[which] += __shfl_xor_sync(ALL_LANES, sums[which], distance);
        if (threadIdx.x % 32 < CHANNELS) of_warps[threadIdx.x / 32][which][in_block] = sums[which];
    }
    __syncthreads();
    if (threadIdx.x >= 2 * CHANNELS || c >= channels) return;
    const int which = threadIdx.x / CHANNELS;
    float total = 0.f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += of_warps[warp][which][in_block];
    if (which == 0) bias_gradient[c] = total;
    else weight_gradient[c] = total * rstd[c];
}
