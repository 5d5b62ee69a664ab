// Fallback for non-finite tiles: one output at a time, without tensor cores.
#pragma once

#include "common/epilogue.cuh"
#include "common/halves.cuh"
#include "few_channels/tensor_core_tile.cuh"

// One output of the convolution, as PyTorch computes it.
__device__ __forceinline__ float reference_output(const Source* __restrict__ image, const Element* __restrict__ weights,
                                                  int row, int column) {
    float sum = 0.f;
#pragma unroll 1
    for (int r = 0; r < FILTER_HEIGHT; ++r)
#pragma unroll 1
        for (int s = 0; s < FILTER_WIDTH; ++s) {
            const int source_row = row + r - PAD_H, source_column = column + s - PAD_W;
            if (source_row < 0 || source_row >= HEIGHT || source_column < 0 || source_column >= WIDTH) continue;
            const int pixel = source_row * WIDTH + source_column;
#pragma unroll 1
            for (int c = 0; c < CHANNELS; ++c) {
                const Source value = image[NHWC ? pixel * CHANNELS + c : c * HEIGHT * WIDTH + pixel];
                sum += to_float(from_float<Element>(to_float(value))) *
                       to_float(weights[(c * FILTER_HEIGHT + r) * FILTER_WIDTH + s]);
            }
        }
    return sum;
}

__device__ __forceinline__ void convolve_fallback(const Source* __restrict__ x, const Element* __restrict__ weight,
                                                  const Element* __restrict__ bias, Element* __restrict__ y,
                                                  int images) {
#pragma unroll 1
    for (int at = threadIdx.x; at < images * OUTPUT_IMAGE; at += THREADS) {
        const int image = at / OUTPUT_IMAGE, inside = at % OUTPUT_IMAGE;
        const int filter = NHWC ? inside % FILTERS : inside / (OUTPUT_HEIGHT * OUTPUT_WIDTH);
        const int pixel = NHWC ? inside / FILTERS : inside % (OUTPUT_HEIGHT * OUTPUT_WIDTH);
        const int row = pixel / OUTPUT_WIDTH * POOL, column = pixel % OUTPUT_WIDTH * POOL;
        float maximum = -__uint_as_float(INFINITY_BITS);
#pragma unroll 1
        for (int i = row; i < min(row + POOL, CONV_HEIGHT); ++i)
#pragma unroll 1
            for (int j = column; j < min(column + POOL, CONV_WIDTH); ++j)
                maximum = max_nan(maximum,
                                  reference_output(x + image * IMAGE,
                                                   weight + filter * (CHANNELS * FILTER_HEIGHT * FILTER_WIDTH), i, j));
        y[at] = finish<HAS_BIAS, false, HAS_RELU, Element>(maximum, bias, filter, nullptr, 0);
    }
}
