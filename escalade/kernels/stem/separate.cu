// y[n][oh][ow][k] = relu(sum over c, r, s of pixel[n][c][oh*stride + r - pad][...] * w[k][c][r][s] + bias[k])
//
// The foot of the ladder: one thread per output, filters along threads; every pixel is converted and normalized each
// time it is used. Limiter: loads, one of w and (a broadcast) one of x per multiply-add.
//
// Rung: `separate`. Read shape.cuh (sizes, pixel access).
#include "common/bytes.cuh"
#include "common/epilogue.cuh"
#include "common/ptx.cuh"
#include "stem/shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Output = float;            // problem.storage if problem.pool else problem.stored
constexpr bool HAS_RELU = true;  // problem.relu
#endif

extern "C" __global__ void stem_separate(const Source* __restrict__ x, const Element* __restrict__ weight,
                                       const Element* __restrict__ bias, const float* __restrict__ scale,
                                       const float* __restrict__ shift, Output* __restrict__ y, StemShape shape) {
    wait_for_previous_launch();
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x;
    const long long outputs = 1LL * shape.batch * shape.conv_height * shape.conv_width * shape.filters;
    if (at >= outputs) return;
    const long long pixel = at / shape.filters;
    const int filter = at % shape.filters;
    const int column = pixel % shape.conv_width;
    const int row = pixel / shape.conv_width % shape.conv_height;
    const long long n = pixel / shape.conv_width / shape.conv_height;

    const Source* image = x + n * CHANNELS * shape.height * shape.width;
    const int taps = shape.filter_height * shape.filter_width;
    const Element* weights = weight + 1LL * filter * CHANNELS * taps;
    float sum = 0.f;
    for (int r = 0; r < shape.filter_height; ++r)
        for (int s = 0; s < shape.filter_width; ++s) {
            const int source_row = row * shape.stride_h - shape.pad_h + r;
            const int source_column = column * shape.stride_w - shape.pad_w + s;
            if (source_row < 0 || source_row >= shape.height || source_column < 0 || source_column >= shape.width)
                continue;
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) {
                const Source value = image[source_offset(source_row, source_column, c, shape)];
                const Element rounded = from_float<Element>(normalized(value, c, scale, shift));
                sum += to_float(rounded) * to_float(weights[c * taps + r * shape.filter_width + s]);
            }
        }
    const Element rounded = finish<true, false, HAS_RELU, Element>(sum, bias, filter, nullptr, 0);
    if constexpr (sizeof(Output) == 1) y[at] = from_float<Output>(to_float(rounded));
    else reinterpret_cast<Element*>(y)[at] = rounded;
}
