// What the gradients of poolings share: the place of a pixel of x, the windows that see it, and where theirs begin.
#pragma once

#include "common/pool_shape.cuh"

// The place of pixel `at` of x, counted as x lies in memory.
template <bool NHWC, class Index>
__device__ __forceinline__ PoolPlace pixel_place(Index at, const PoolShape& shape) {
    return place_among<NHWC>(at, shape.channels, shape.height, shape.width);
}

// Where the plane of a place begins in y, and in what lies as y does.
template <bool NHWC>
__device__ __forceinline__ long long output_plane(const PoolPlace& place, const PoolShape& shape) {
    const long long outputs = 1LL * shape.output_height * shape.output_width;
    return NHWC ? place.image * outputs * shape.channels + place.channel
                : (1LL * place.image * shape.channels + place.channel) * outputs;
}

// The windows along one dimension that see a pixel: from the first up to, but not including, the end.
struct Seeing {
    int first, end;
};

__device__ __forceinline__ Seeing seeing(int pixel, int span, int stride, int pad, int outputs) {
    const int reach = pixel + pad;
    return {reach < span ? 0 : (reach - span) / stride + 1, min(reach / stride + 1, outputs)};
}
