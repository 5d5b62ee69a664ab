// U[point][channel][filter] = (G g G')[point] of the 3x3 filter g = w[filter][channel]; with CHANNELS_INSIDE,
// U[point][filter][channel].
//
// Depends on the weights only: once per network. Channels and filters are zero-padded to multiples of 4 for 16-byte
// copies. Limiter: memory.
//
// Rungs                                                  switches
//   winograd_f2, winograd_f2_fused                       TILE 2
//   winograd_f4, winograd_f4_fused, winograd_f4_blocked  TILE 4
//   winograd_f4_split, winograd_f4_pipelined             TILE 4, CHANNELS_INSIDE
#include "common/conv_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;                   // problem.dtype
constexpr bool NHWC = false;             // problem.layout == "nhwc"
constexpr int TILE = 2;                  // tile: outputs per side of a tile
constexpr bool CHANNELS_INSIDE = false;  // channels_inside: order of U: channels innermost
#endif

#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "common/winograd.cuh"

extern "C" __global__ void conv2d_winograd_filter(const Element* __restrict__ weight, float* __restrict__ transformed,
                                                  ConvShape shape) {
    wait_for_previous_launch();
    constexpr int PATCH = Winograd<TILE>::PATCH;
    const int channels = (shape.channels + 3) / 4 * 4, filters = (shape.filters + 3) / 4 * 4;
    const int inside = CHANNELS_INSIDE ? channels : filters;
    const long long at = 1LL * blockIdx.x * blockDim.x + threadIdx.x, all = 1LL * channels * filters;
    if (at >= all) return;
    const int outer = at / inside, inner = at - 1LL * outer * inside;
    const int channel = CHANNELS_INSIDE ? inner : outer, filter = CHANNELS_INSIDE ? outer : inner;

    float taps[3][3] = {};
    if (channel < shape.channels && filter < shape.filters) {
        const Element* first = weight + 1LL * filter * shape.channels * 9 + (NHWC ? channel : channel * 9);
#pragma unroll
        for (int tap = 0; tap < 9; ++tap) taps[tap / 3][tap % 3] = to_float(first[NHWC ? tap * shape.channels : tap]);
    }
    float points[PATCH][PATCH];
    transform_filter(taps, points);
#pragma unroll
    for (int i = 0; i < PATCH; ++i)
#pragma unroll
        for (int j = 0; j < PATCH; ++j) transformed[(i * PATCH + j) * all + at] = points[i][j];
}
