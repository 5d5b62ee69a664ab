// PyTorch's rule for the divisor of a window.
#pragma once

#include "common/pool_shape.cuh"

// Pixels of a window along one dimension: those inside the image, or also inside its padding.
__device__ __forceinline__ int counted(int first, int kernel, int size, int padding) {
    return COUNT_PADDING ? min(first + kernel, size + padding) - first : min(first + kernel, size) - max(first, 0);
}

__device__ __forceinline__ float one_over_divisor(int rows, int columns) {
    return 1.f / static_cast<float>(DIVISOR ? DIVISOR : rows * columns);
}
