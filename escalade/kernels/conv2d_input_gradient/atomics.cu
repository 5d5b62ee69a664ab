// sums[window(p, r, s)][c] += dy[p][k] * w[k][r][s][c] for every pixel p
//
// The foot of the ladder: one thread an element of dy, which adds a product to every element of dx that its window has.
// All filters of a pixel, and windows that overlap, add to the same elements, in an order that is another in every run.
// What bounds it: atomics, one for each product, in L2.
//
// Serves `atomics`. atomics_finish.cu makes results of the sums.
#include "common/conv_shape.cuh"
#include "common/elements.cuh"
#include "common/ptx.cuh"

extern "C" __global__ void conv2d_input_gradient_atomics(const Element* gradient, const Element* weight, float* sums,
                                                         ConvShape shape) {
    wait_for_previous_launch();
    const int output_pixels = shape.output_height * shape.output_width;
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= 1LL * shape.batch * shape.filters * output_pixels) return;

    const int n = static_cast<int>(at / (1LL * shape.filters * output_pixels));
    const int rest = static_cast<int>(at % (1LL * shape.filters * output_pixels));
    const int filter = NHWC ? rest % shape.filters : rest / output_pixels;
    const int pixel = NHWC ? rest / shape.filters : rest % output_pixels;
    const int group_channels = shape.channels / shape.groups, taps = shape.filter_height * shape.filter_width;
    const int first_channel = filter / (shape.filters / shape.groups) * group_channels;
    const int first_row = pixel / shape.output_width * shape.stride_h - shape.pad_h;
    const int first_column = pixel % shape.output_width * shape.stride_w - shape.pad_w;
    float* image = sums + 1LL * n * shape.channels * shape.height * shape.width;
    const Element* weights = weight + 1LL * filter * group_channels * taps;
    const float g = to_float(gradient[at]);

    for (int tap = 0; tap < taps; ++tap) {
        const int row = first_row + tap / shape.filter_width * shape.dilation_h;
        const int column = first_column + tap % shape.filter_width * shape.dilation_w;
        if (row < 0 || row >= shape.height || column < 0 || column >= shape.width) continue;
        const int to = row * shape.width + column;
        for (int c = 0; c < group_channels; ++c) {
            const int channel = first_channel + c;
            const float w = to_float(weights[NHWC ? tap * group_channels + c : c * taps + tap]);
            atomicAdd(image + (NHWC ? to * shape.channels + channel : channel * shape.height * shape.width + to), g * w);
        }
    }
}
