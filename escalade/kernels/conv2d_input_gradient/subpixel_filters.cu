// spread[(p*classes_w + q)*channels + c][r'][s'][k] = w[k][r][s][c]                                             (NHWC)
//     where r*dilation_h = p + pad_h - (r' + corner_h)*stride_h and s likewise; 0 where there is no such tap
// spread_bias[(p*classes_w + q)*channels + c] = bias[c]
//
// Filters of one convolution whose results are the stride x stride blocks of a transposed convolution: the filters of
// every sub-pixel phase, zero where the windows of other phases reach. One thread per element. Limiter: memory, and at
// these sizes the launch.
//
// Rung: `subpixel`.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;            // forward.dtype
constexpr bool HAS_BIAS = false;  // forward.bias
#endif

#include "common/elements.cuh"
#include "common/ptx.cuh"

struct Spread {  // filled by escalade/ops/conv2d_input_gradient/rungs/subpixel.py, in this order
    int filters, channels, filter_height, filter_width;
    int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    int classes_h, classes_w, taps_h, taps_w, corner_h, corner_w;  // of the spread filters
};

// Tap that connects pixels of a phase with a pixel of their window; -1 if none.
__device__ __forceinline__ int tap_at(int phase, int place, int stride, int pad, int dilation, int taps) {
    const int reach = phase + pad - place * stride;
    return reach >= 0 && reach % dilation == 0 && reach / dilation < taps ? reach / dilation : -1;
}

extern "C" __global__ void conv2d_input_gradient_subpixel_filters(const Element* weight, const Element* bias,
                                                                  Element* spread, Element* spread_bias, Spread shape) {
    wait_for_previous_launch();
    const long long elements =
        1LL * shape.classes_h * shape.classes_w * shape.channels * shape.taps_h * shape.taps_w * shape.filters;
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;
    long long rest = at;
    const int k = rest % shape.filters;
    rest /= shape.filters;
    const int across = rest % shape.taps_w;
    rest /= shape.taps_w;
    const int down = rest % shape.taps_h;
    const int row = rest / shape.taps_h;  // of the spread filters
    const int c = row % shape.channels, pixel = row / shape.channels;
    const int p = pixel / shape.classes_w, q = pixel % shape.classes_w;
    const int r = tap_at(p, down + shape.corner_h, shape.stride_h, shape.pad_h, shape.dilation_h, shape.filter_height);
    const int s = tap_at(q, across + shape.corner_w, shape.stride_w, shape.pad_w, shape.dilation_w, shape.filter_width);
    const long long tap = (1LL * k * shape.filter_height + r) * shape.filter_width + s;
    spread[at] = r < 0 || s < 0 ? from_float<Element>(0.f) : weight[tap * shape.channels + c];
    if (HAS_BIAS && k == 0 && down == 0 && across == 0) spread_bias[row] = bias[c];
}
