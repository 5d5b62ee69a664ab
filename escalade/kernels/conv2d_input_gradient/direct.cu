// dx[n][h][w][c] = sum over k, r, s of dy[n][(h + pad - r*dilation) / stride][...][k] * w[k][r][s][c], where that
// divides
//
// One thread per element of dx gathers every term from global memory, so no two threads add to one element. HAS_MASK:
// the gradient passes where the auxiliary tensor is positive, as through a ReLU; HAS_RESIDUAL: the auxiliary tensor is
// added. A transposed convolution has a bias and an activation instead.
// Limiter: two loads per multiply-add.
//
// Rung: `direct`. Read mask.cuh for the mask.
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                // problem.dtype
constexpr bool NHWC = false;          // problem.layout == "nhwc"
constexpr bool HAS_MASK = true;       // problem.mask
constexpr bool HAS_BIAS = false;      // problem.forward.bias
constexpr bool HAS_RESIDUAL = false;  // problem.forward.residual
constexpr bool HAS_RELU = false;      // problem.forward.relu
#endif

#include "common/epilogue.cuh"
#include "common/ptx.cuh"
#include "conv2d_input_gradient/mask.cuh"

// Row (or column) of dy from which tap `tap` contributes to position `at` of dx; -1 if none.
__device__ __forceinline__ int gradient_index(int at, int tap, int pad, int dilation, int stride, int size) {
    const int moved = at + pad - tap * dilation;
    return moved < 0 || moved % stride || moved / stride >= size ? -1 : moved / stride;
}

extern "C" __global__ void conv2d_input_gradient_direct(const Element* gradient, const Element* weight,
                                                        const Element* aux, const Element* bias, Element* y,
                                                        ConvShape shape) {
    wait_for_previous_launch();
    const long long elements = 1LL * shape.batch * shape.channels * shape.height * shape.width;
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;

    // The innermost index of the layout runs along threads, so that stores coalesce.
    int n, channel, row, column;
    long long rest = at;
    if (NHWC) {
        channel = rest % shape.channels, rest /= shape.channels;
        column = rest % shape.width, rest /= shape.width;
        row = rest % shape.height, n = rest / shape.height;
    } else {
        column = rest % shape.width, rest /= shape.width;
        row = rest % shape.height, rest /= shape.height;
        channel = rest % shape.channels, n = rest / shape.channels;
    }

    const int group_channels = shape.channels / shape.groups, group_filters = shape.filters / shape.groups;
    const int first_filter = channel / group_channels * group_filters;
    const int c = channel % group_channels;
    const int output_pixels = shape.output_height * shape.output_width;
    const int taps = shape.filter_height * shape.filter_width;
    const Element* image = gradient + 1LL * n * shape.filters * output_pixels;

    float sum = 0.f;
    for (int r = 0; r < shape.filter_height; ++r) {
        const int oh = gradient_index(row, r, shape.pad_h, shape.dilation_h, shape.stride_h, shape.output_height);
        if (oh < 0) continue;
        for (int s = 0; s < shape.filter_width; ++s) {
            const int ow = gradient_index(column, s, shape.pad_w, shape.dilation_w, shape.stride_w, shape.output_width);
            if (ow < 0) continue;
            const int pixel = oh * shape.output_width + ow, tap = r * shape.filter_width + s;
            for (int k = first_filter; k < first_filter + group_filters; ++k) {
                const int source = NHWC ? pixel * shape.filters + k : k * output_pixels + pixel;
                const int w = NHWC ? (k * taps + tap) * group_channels + c : (k * group_channels + c) * taps + tap;
                sum += to_float(image[source]) * to_float(weight[w]);
            }
        }
    }
    if (HAS_MASK) sum = masked(sum, aux[at]);
    y[at] = finish<HAS_BIAS, HAS_RESIDUAL, HAS_RELU, Element>(sum, bias, channel, aux, at);
}
