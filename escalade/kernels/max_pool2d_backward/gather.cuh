// Sum over the windows that cover a pixel, in a fixed order.
#pragma once

#include "common/pool_gradient.cuh"
#include "max_pool2d/windows.cuh"

// share(output_row, output_column, tap) is the contribution of a window in which the pixel is tap `tap`.
template <class Share>
__device__ __forceinline__ float gather(const PoolPosition& pixel, const PoolShape& shape, const Windows& windows,
                                        Share share) {
    const int span_h = (windows.kernel_h - 1) * windows.dilation_h + 1;
    const int span_w = (windows.kernel_w - 1) * windows.dilation_w + 1;
    const CoveringRange rows = covering(pixel.row, span_h, windows.stride_h, windows.pad_h, shape.output_height);
    const CoveringRange columns = covering(pixel.column, span_w, windows.stride_w, windows.pad_w, shape.output_width);
    float sum = 0.f;
    for (int output_row = rows.first; output_row < rows.end; ++output_row) {
        const int down = pixel.row + windows.pad_h - output_row * windows.stride_h;
        if (down % windows.dilation_h) continue;
        for (int output_column = columns.first; output_column < columns.end; ++output_column) {
            const int along = pixel.column + windows.pad_w - output_column * windows.stride_w;
            if (along % windows.dilation_w) continue;
            const int tap = down / windows.dilation_h * windows.kernel_w + along / windows.dilation_w;
            sum += share(output_row, output_column, tap);
        }
    }
    return sum;
}
