// y[n][k][oh][ow] = sum over c, r, s of x[n][c][oh*stride + r*dilation - pad][...] * w[k][c][r][s]
//
// The foot of the ladder: one thread per output, and every operand is read from global memory each time it is used.
// Reuse is left to the caches. The limiter is the loads of x and w, two for each multiply-add.
//
// A prologue is recomputed for every filter.
//
// Serves `direct`.
#include "common/conv_shape.cuh"
#include "common/epilogue.cuh"
#include "common/prologue.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                // problem.dtype
constexpr bool NHWC = false;          // problem.layout == "nhwc"
constexpr bool HAS_BIAS = true;       // problem.bias
constexpr bool HAS_RESIDUAL = false;  // problem.residual
constexpr bool HAS_RELU = true;       // problem.relu
#endif

extern "C" __global__ void conv2d_direct(const Element* x, const Element* weight, const Element* bias,
                                         const Element* residual, Element* y, const float* gains, const float* shifts,
                                         const Element* gates, ConvShape shape) {
    wait_for_previous_launch();
    const long long outputs = 1LL * shape.batch * shape.filters * shape.output_height * shape.output_width;
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= outputs) return;

    // The innermost index of the layout runs along threads, so that stores coalesce.
    int n, filter, output_row, output_column;
    long long rest = at;
    if (NHWC) {
        filter = rest % shape.filters, rest /= shape.filters;
        output_column = rest % shape.output_width, rest /= shape.output_width;
        output_row = rest % shape.output_height, n = rest / shape.output_height;
    } else {
        output_column = rest % shape.output_width, rest /= shape.output_width;
        output_row = rest % shape.output_height, rest /= shape.output_height;
        filter = rest % shape.filters, n = rest / shape.filters;
    }

    const int group_channels = shape.channels / shape.groups;
    const int first_channel = filter / (shape.filters / shape.groups) * group_channels;
    const Element* image = x + 1LL * n * shape.channels * shape.height * shape.width;
    const Element* filter_weights = weight + 1LL * filter * group_channels * shape.filter_height * shape.filter_width;

    float sum = 0.f;
    for (int c = 0; c < group_channels; ++c)
        for (int r = 0; r < shape.filter_height; ++r)
            for (int s = 0; s < shape.filter_width; ++s) {
                const int row = output_row * shape.stride_h - shape.pad_h + r * shape.dilation_h;
                const int column = output_column * shape.stride_w - shape.pad_w + s * shape.dilation_w;
                if (row < 0 || row >= shape.height || column < 0 || column >= shape.width) continue;
                const int channel = first_channel + c;
                const int pixel = row * shape.width + column;
                const int source = NHWC ? pixel * shape.channels + channel : channel * shape.height * shape.width + pixel;
                const int tap = r * shape.filter_width + s;
                const int w = NHWC ? tap * group_channels + c : c * shape.filter_height * shape.filter_width + tap;
                const Element value =
                    prepared(image[source], gains, shifts, gates, channel, 1LL * n * shape.channels + channel);
                sum += to_float(value) * to_float(filter_weights[w]);
            }
    y[at] = finish<HAS_BIAS, HAS_RESIDUAL, HAS_RELU>(sum, bias, filter, residual, at);
}
