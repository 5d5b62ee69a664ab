// Argmax of a window.
#pragma once

#include "common/elements.cuh"
#include "common/placed_maximum.cuh"
#include "common/pool_shape.cuh"
#include "max_pool2d/windows.cuh"

// First tap along one dimension inside the image, for a window that may begin in the padding.
__device__ __forceinline__ int first_inside(int begin, int dilation) {
    return begin < 0 ? (dilation - 1 - begin) / dilation : 0;
}

__device__ __forceinline__ Largest largest_in_window(const Element* plane, int step, int output_row, int output_column,
                                                     const PoolShape& shape, const Windows& windows) {
    const int top = output_row * windows.stride_h - windows.pad_h;
    const int left = output_column * windows.stride_w - windows.pad_w;
    const int first_r = first_inside(top, windows.dilation_h), first_s = first_inside(left, windows.dilation_w);
    Largest largest{__int_as_float(0xFF800000), first_r * windows.kernel_w + first_s};  // -inf
    for (int r = first_r; r < windows.kernel_h; ++r) {
        const int row = top + r * windows.dilation_h;
        if (row >= shape.height) break;
        for (int s = first_s; s < windows.kernel_w; ++s) {
            const int column = left + s * windows.dilation_w;
            if (column >= shape.width) break;
            largest.update(to_float(plane[(row * shape.width + column) * step]), r * windows.kernel_w + s);
        }
    }
    return largest;
}
