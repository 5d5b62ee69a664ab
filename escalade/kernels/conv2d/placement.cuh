// Output offsets where y is a strided subset of a larger image's rows and columns (PLACED).
#pragma once

#include "common/conv_shape.cuh"

struct Placement {  // position of an output pixel in the image that y points to
    int step_h, step_w, offset_h, offset_w, height, width;
};

struct ImagePosition {
    int n, h, w;
};

__device__ __forceinline__ ImagePosition position_in_image(int pixel, const ConvShape& shape,
                                                           const Placement& placement) {
    const int row = pixel / shape.output_width;
    return {row / shape.output_height, row % shape.output_height * placement.step_h + placement.offset_h,
            pixel % shape.output_width * placement.step_w + placement.offset_w};
}

// Offset of a pixel's first filter in y.
__device__ __forceinline__ long long offset(int pixel, const ConvShape& shape, const Placement& placement) {
    if constexpr (!PLACED) return 1LL * pixel * shape.filters;
    const ImagePosition at = position_in_image(pixel, shape, placement);
    return ((1LL * at.n * placement.height + at.h) * placement.width + at.w) * shape.filters;
}
