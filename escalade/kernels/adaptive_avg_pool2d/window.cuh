// PyTorch's rule for the windows of an adaptive pooling.
#pragma once

#include "common/pool_shape.cuh"

__device__ __forceinline__ int window_first(int at, int size, int outputs) { return at * size / outputs; }
__device__ __forceinline__ int window_past(int at, int size, int outputs) {
    return ((at + 1) * size + outputs - 1) / outputs;
}

struct Window {
    int top, left, rows, columns;

    __device__ __forceinline__ static Window of(int output_row, int output_column, const PoolShape& shape) {
        Window window;
        window.top = window_first(output_row, shape.height, shape.output_height);
        window.left = window_first(output_column, shape.width, shape.output_width);
        window.rows = window_past(output_row, shape.height, shape.output_height) - window.top;
        window.columns = window_past(output_column, shape.width, shape.output_width) - window.left;
        return window;
    }

    __device__ __forceinline__ int pixels() const { return rows * columns; }

    // Offset of pixel `at` of the window from its first, in pixels. Windows of whole rows need no division.
    template <bool WHOLE_ROWS>
    __device__ __forceinline__ int offset(unsigned at, const PoolShape& shape) const {
        if (WHOLE_ROWS) return at;
        const unsigned row = at / static_cast<unsigned>(columns);
        return row * shape.width + at - row * columns;
    }
};
