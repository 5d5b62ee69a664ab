// Shared by the gradients of poolings: position of a pixel of x, and the windows that cover it.
#pragma once

#include "common/pool_shape.cuh"

// Position of pixel `at` of x, in memory order.
template <bool NHWC, class Index>
__device__ __forceinline__ PoolPosition pixel_position(Index at, const PoolShape& shape) {
    return position_among<NHWC>(at, shape.channels, shape.height, shape.width);
}

// Offset of a position's plane in y, and in tensors laid out like y.
template <bool NHWC>
__device__ __forceinline__ long long output_plane(const PoolPosition& position, const PoolShape& shape) {
    const long long outputs = 1LL * shape.output_height * shape.output_width;
    return NHWC ? position.image * outputs * shape.channels + position.channel
                : (1LL * position.image * shape.channels + position.channel) * outputs;
}

// Windows along one dimension that cover a pixel: the half-open range [first, end).
struct CoveringRange {
    int first, end;
};

__device__ __forceinline__ CoveringRange covering(int pixel, int span, int stride, int pad, int outputs) {
    const int reach = pixel + pad;
    return {reach < span ? 0 : (reach - span) / stride + 1, min(reach / stride + 1, outputs)};
}
