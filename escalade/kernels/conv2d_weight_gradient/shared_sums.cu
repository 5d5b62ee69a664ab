// parts[part][k][r][s][c] = sum over the part's pixels p of gradient[p][k] * x[window(p, r, s)][c]; for the bias, of
// gradient[p][k] alone
//
// Like atomics.cu, but a CTA accumulates TILE weights of one filter in smem: its warps take one pixel each, their lanes
// one weight each, so a warp's own additions never conflict. Each sum is written to global memory once per part, and a
// second launch reduces the parts; within a part, the order of additions varies from run to run. Limiter: smem atomics,
// one per product.
//
// Rung: `shared_sums`.
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;           // problem.dtype
constexpr bool HAS_BIAS = true;  // problem.bias
constexpr bool NHWC = false;     // problem.layout == "nhwc"
constexpr int THREADS = 256;     // config.threads
constexpr int TILE = 128;        // tile
#endif

#include "common/elements.cuh"
#include "common/ptx.cuh"

constexpr int WARPS = THREADS / 32;

extern "C" __global__ void __launch_bounds__(THREADS)
    conv2d_weight_gradient_shared_sums(const Element* x, const Element* gradient, float* parts, ConvShape shape,
                                       long long part_pixels) {
    __shared__ float sums[TILE];
    __shared__ float bias;
    const int group_channels = shape.channels / shape.groups, taps = shape.filter_height * shape.filter_width;
    const int filter_elements = group_channels * taps, tiles = (filter_elements + TILE - 1) / TILE;
    const int filter = blockIdx.x / tiles, first = blockIdx.x % tiles * TILE;
    const int first_channel = filter / (shape.filters / shape.groups) * group_channels;
    const int count = min(TILE, filter_elements - first);
    for (int i = threadIdx.x; i < TILE; i += THREADS) sums[i] = 0.f;
    if (threadIdx.x == 0) bias = 0.f;
    wait_for_previous_launch();
    __syncthreads();

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int image_pixels = shape.output_height * shape.output_width;
    const long long end = min(1LL * shape.batch * image_pixels, (blockIdx.y + 1) * part_pixels);
    for (long long pixel = blockIdx.y * part_pixels + warp; pixel < end; pixel += WARPS) {
        const int n = static_cast<int>(pixel / image_pixels), within = static_cast<int>(pixel % image_pixels);
        const Element* gradients = gradient + 1LL * n * shape.filters * image_pixels;
        const Element* image = x + 1LL * n * shape.channels * shape.height * shape.width;
        const float g = to_float(gradients[NHWC ? within * shape.filters + filter : filter * image_pixels + within]);
        if (HAS_BIAS && first == 0 && lane == 0) atomicAdd(&bias, g);
        for (int i = lane; i < count; i += 32) {
            const int rest = first + i;
            const int tap = NHWC ? rest / group_channels : rest % taps;
            const int channel = first_channel + (NHWC ? rest % group_channels : rest / taps);
            const int row = within / shape.output_width * shape.stride_h - shape.pad_h +
                            tap / shape.filter_width * shape.dilation_h;
            const int column = within % shape.output_width * shape.stride_w - shape.pad_w +
                               tap % shape.filter_width * shape.dilation_w;
            if (row < 0 || row >= shape.height || column < 0 || column >= shape.width) continue;
            const int from = row * shape.width + column;
            const int source =
                NHWC ? from * shape.channels + channel : channel * shape.height * shape.width + from;
            atomicAdd(&sums[i], g * to_float(image[source]));
        }
    }
    __syncthreads();

    const long long weights = 1LL * shape.filters * filter_elements;
    float* part = parts + blockIdx.y * (weights + (HAS_BIAS ? shape.filters : 0));
    for (int i = threadIdx.x; i < count; i += THREADS) part[1LL * filter * filter_elements + first + i] = sums[i];
    if (HAS_BIAS && first == 0 && threadIdx.x == 0) part[weights + filter] = bias;
}
