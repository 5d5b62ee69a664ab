// coefficients[n][group] = (mean, rstd, rstd * sum(h) / count, rstd^2 * sum(h * n) / count), and by_channel[n][c] =
// sums of g and of g * n over the pixels of a channel of an image
//
// Second of three launches: one CTA per group of an image, a warp per channel, lanes over what the first launch left of
// it, in a fixed order. Limiter: latency.
//
// Rungs: `naive`, `split`. Read group_norm_backward.cuh.
#include "common/warp.cuh"
#include "group_norm_backward/group_norm_backward.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int MERGE_WARPS = 8;  // merge_warps
#endif

extern "C" __global__ void __launch_bounds__(32 * MERGE_WARPS)
    group_norm_backward_coefficients(const float2* partial, const float* weight, const float* mean, const float* rstd,
                                     float4* coefficients, float2* by_channel, int splits) {
    __shared__ float2 of_warps[MERGE_WARPS];
    wait_for_previous_launch();
    const long long image = blockIdx.x / IMAGE_GROUPS;
    const int first = blockIdx.x % IMAGE_GROUPS * GROUP_CHANNELS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float2 mine = make_float2(0.f, 0.f);
    for (int channel = first + warp; channel < first + GROUP_CHANNELS; channel += MERGE_WARPS) {
        float2 total = make_float2(0.f, 0.f);
#pragma unroll 2
        for (int split = lane; split < splits; split += 32) {
            const float2 part = partial[NHWC ? (image * splits + split) * IMAGE_CHANNELS + channel
                                             : (image * IMAGE_CHANNELS + channel) * splits + split];
            total.x += part.x, total.y += part.y;
        }
        total = make_float2(warp_sum(total.x), warp_sum(total.y));
        const float factor = weight_of(weight, channel);
        mine.x += total.x * factor, mine.y += total.y * factor;
        if (lane == 0) by_channel[image * IMAGE_CHANNELS + channel] = total;
    }
    if (lane == 0) of_warps[warp] = mine;
    __syncthreads();
    if (threadIdx.x) return;
    for (int other = 1; other < MERGE_WARPS; ++other) mine.x += of_warps[other].x, mine.y += of_warps[other].y;
    constexpr float SHARE = 1.f / (1.f * GROUP_CHANNELS * PIXELS);
    const float deviation = rstd[blockIdx.x];
    coefficients[blockIdx.x] =
        make_float4(mean[blockIdx.x], deviation, deviation * mine.x * SHARE, deviation * deviation * mine.y * SHARE);
}
