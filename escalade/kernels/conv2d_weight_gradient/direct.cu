// parts[part][k][r][s][c] = sum over the part's pixels p of gradient[p][k] * x[window(p, r, s)][c]; for the bias, of
// gradient[p][k] alone
//
// One thread per weight, in memory order, and one per filter's bias, so no two threads add to one element; output
// pixels are divided into parts, one per blockIdx.y. Limiter: two loads per product.
//
// Rung: `direct`.
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;           // problem.dtype
constexpr bool HAS_BIAS = true;  // problem.bias
constexpr bool NHWC = false;     // problem.layout == "nhwc"
#endif

#include "common/elements.cuh"
#include "common/ptx.cuh"

extern "C" __global__ void conv2d_weight_gradient_direct(const Element* x, const Element* gradient, float* parts,
                                                         ConvShape shape, long long part_pixels) {
    wait_for_previous_launch();
    const int group_channels = shape.channels / shape.groups, taps = shape.filter_height * shape.filter_width;
    const long long weights = 1LL * shape.filters * group_channels * taps;
    const long long elements = weights + (HAS_BIAS ? shape.filters : 0);
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;

    const bool bias = at >= weights;
    const int filter = static_cast<int>(bias ? at - weights : at / (group_channels * taps));
    const int rest = bias ? 0 : static_cast<int>(at % (group_channels * taps));
    const int tap = NHWC ? rest / group_channels : rest % taps;
    const int first_channel = filter / (shape.filters / shape.groups) * group_channels;
    const int channel = first_channel + (NHWC ? rest % group_channels : rest / taps);
    const int first_row = tap / shape.filter_width * shape.dilation_h - shape.pad_h;
    const int first_column = tap % shape.filter_width * shape.dilation_w - shape.pad_w;

    const int image_pixels = shape.output_height * shape.output_width;
    const long long pixels = 1LL * shape.batch * image_pixels;
    const long long end = min(pixels, (blockIdx.y + 1) * part_pixels);
    float sum = 0.f;
    for (long long pixel = blockIdx.y * part_pixels; pixel < end; ++pixel) {
        const int n = static_cast<int>(pixel / image_pixels), within = static_cast<int>(pixel % image_pixels);
        const Element* gradients = gradient + 1LL * n * shape.filters * image_pixels;
        const float g = to_float(gradients[NHWC ? within * shape.filters + filter : filter * image_pixels + within]);
        if (bias) {
            sum += g;
            continue;
        }
        const int row = within / shape.output_width * shape.stride_h + first_row;
        const int column = within % shape.output_width * shape.stride_w + first_column;
        if (row < 0 || row >= shape.height || column < 0 || column >= shape.width) continue;
        const int from = row * shape.width + column;
        const Element* image = x + 1LL * n * shape.channels * shape.height * shape.width;
        const int at_channel = NHWC ? from * shape.channels + channel : channel * shape.height * shape.width + from;
        sum += g * to_float(image[at_channel]);
    }
    parts[blockIdx.y * elements + at] = sum;
}
