// Epilogue of an FFT convolution: selects the output pixels of an inverse-transformed tile and stores them.
#pragma once

#include "common/epilogue.cuh"
#include "conv2d/fft_planes.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr bool HAS_BIAS = false;      // problem.bias
constexpr bool HAS_RESIDUAL = false;  // problem.residual
constexpr bool HAS_RELU = false;      // problem.relu
#endif

struct PixelSink {
    const Element* bias;
    const Element* residual;
    Element* y;
    const FftPlanes& shape;
    const PlanePosition* positions;

    struct Line {
        const Element* residual;
        Element* y;
        long long first;
        int stride, outputs;
        Element bias;

        __device__ __forceinline__ void operator()(int offset, float sum) const {
            if (offset >= outputs) return;
            const long long at = first + offset * stride;
            y[at] = finish<HAS_BIAS, HAS_RESIDUAL, HAS_RELU>(sum, &bias, 0, residual, at);
        }
    };

    __device__ __forceinline__ Line line(int plane, int tile_row, int tile_column) const {
        const PlanePosition& position = positions[plane];
        const int row = position.row + tile_row, column = position.column + tile_column;
        // Past `step` the circular convolution has wrapped around.
        const bool inside = tile_row < shape.step_h && row < shape.height;
        const int outputs = inside ? min(shape.step_w - tile_column, shape.width - column) : 0;
        const Element own_bias = HAS_BIAS ? bias[position.channel] : from_float<Element>(0.f);
        return {residual, y, element_at(shape, position, row, column), column_stride(shape), outputs, own_bias};
    }
};
