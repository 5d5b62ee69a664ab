// PyTorch's rule for the divisor of a window.
#pragma once

#include "common/pool_shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr bool COUNT_PADDING = true;  // problem.count_padding
constexpr bool EVEN = false;          // problem.is_even: no window leaves what is counted
constexpr int DIVISOR = 0;            // problem.divisor: 0 for the size of the window
#endif

// Pixels of a window along one dimension: those inside the image, or also inside its padding.
__device__ __forceinline__ int counted(int first, int kernel, int size, int padding) {
    if (EVEN) return kernel;  // a constant, and so is its reciprocal
    return COUNT_PADDING ? min(first + kernel, size + padding) - first : min(first + kernel, size) - max(first, 0);
}

__device__ __forceinline__ float one_over_divisor(int rows, int columns) {
    return 1.f / static_cast<float>(DIVISOR ? DIVISOR : rows * columns);
}
