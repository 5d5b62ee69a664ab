// dx = rstd * weight * g - coefficients.z - coefficients.w * (x - mean), and weight_gradient[c], bias_gradient[c]
//
// Last of three launches: one pack per thread, in memory order. The first `merging` CTAs add up the sums of 32 channels
// over all images instead, in a fixed order. Limiter: memory, each element is read and written once.
//
// Rungs: `naive` (VECTOR 1), `split`. Read group_norm_backward.cuh, coefficients.cu.
#include "group_norm_backward/group_norm_backward.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int VECTOR = 4;  // vector: elements per access, which divide an image's
#endif

__device__ __forceinline__ void merge_images(const float2* by_channel, float* weight_gradient, float* bias_gradient,
                                             int images) {
    constexpr int WARPS = THREADS / 32;
    __shared__ float2 of_warps[WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, channel = blockIdx.x * 32 + lane;
    float2 total = make_float2(0.f, 0.f);
    if (channel < IMAGE_CHANNELS) {
#pragma unroll 4
        for (int image = warp; image < images; image += WARPS) {
            const float2 part = by_channel[1LL * image * IMAGE_CHANNELS + channel];
            total.x += part.x, total.y += part.y;
        }
    }
    of_warps[warp][lane] = total;
    __syncthreads();
    if (warp || channel >= IMAGE_CHANNELS) return;
    for (int other = 1; other < WARPS; ++other)
        total.x += of_warps[other][lane].x, total.y += of_warps[other][lane].y;
    bias_gradient[channel] = total.x, weight_gradient[channel] = total.y;
}

// `blocks` CTAs cover an image.
extern "C" __global__ void __launch_bounds__(THREADS)
    group_norm_backward_apply(const Gradient* gradient, const Element* x, const float* __restrict__ weight,
                              const float* __restrict__ bias, const float4* __restrict__ coefficients,
                              const float2* __restrict__ by_channel, Result* y, float* weight_gradient,
                              float* bias_gradient, int images, int merging, int blocks) {
    wait_for_previous_launch();
    if (blockIdx.x < merging) return merge_images(by_channel, weight_gradient, bias_gradient, images);
    const unsigned block = blockIdx.x - merging, image = block / static_cast<unsigned>(blocks);
    const unsigned at = ((block - image * blocks) * THREADS + threadIdx.x) * VECTOR;  // in the image
    if (at >= 1u * IMAGE_CHANNELS * PIXELS) return;
    const long long from = 1LL * image * IMAGE_CHANNELS * PIXELS + at;
    const Pack<Gradient, VECTOR> gradients = load_pack<Gradient, VECTOR>(gradient + from);
    const Pack<Element, VECTOR> xs = load_pack<Element, VECTOR>(x + from);
    Pack<Result, VECTOR> results;
    // Sizes are constants: a pack within one plane or one group loads its values once.
    constexpr bool ONE_ROW = NHWC && IMAGE_CHANNELS % VECTOR == 0, ONE_PLANE = !NHWC && PIXELS % VECTOR == 0;
    constexpr bool ONE_GROUP = ONE_PLANE || (ONE_ROW && GROUP_CHANNELS % VECTOR == 0);
    const unsigned start = NHWC ? at % IMAGE_CHANNELS : at / PIXELS;
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
        const unsigned channel = ONE_PLANE ? start
                                 : ONE_ROW ? start + e
                                 : NHWC    ? (start + e) % IMAGE_CHANNELS
                                           : (at + e) / PIXELS;
        const float4 group = coefficients[image * IMAGE_GROUPS + (ONE_GROUP ? start : channel) / GROUP_CHANNELS];
        const float distance = to_float(xs.at[e]) - group.x, scale = group.y * weight_of(weight, channel);
        const float before = before_function(to_float(gradients.at[e]), distance, scale, bias_of(bias, channel));
        results.at[e] = from_float<Result>(scale * before - group.z - group.w * distance);
    }
    store_pack(y + from, results);
}
