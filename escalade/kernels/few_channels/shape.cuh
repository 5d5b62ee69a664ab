// Sizes of a convolution of few channels, and access to its image.
//
// The prelude of the including file defines Source, Element, NHWC and CHANNELS.
#pragma once

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Source = float;         // problem.x_type
using Element = float;        // problem.storage
constexpr bool NHWC = false;  // problem.layout == "nhwc"
constexpr int CHANNELS = 1;   // problem.channels
#endif

#include "common/elements.cuh"

struct FewChannelsShape {
    int batch, height, width;
    int filters, filter_height, filter_width;
    int pad_h, pad_w;  // problem.padding
    int conv_height, conv_width;
    int output_height, output_width;  // (problem.output_height, problem.output_width): pooled
};

__device__ __forceinline__ float to_float(unsigned char value) { return value; }

// Channel of a pixel of the image at `image`; zero in the padding.
__device__ __forceinline__ float pixel_at(const Source* image, int channel, int row, int column,
                                          const FewChannelsShape& shape) {
    if (row < 0 || row >= shape.height || column < 0 || column >= shape.width) return 0.f;
    const int pixel = row * shape.width + column;
    return to_float(image[NHWC ? pixel * CHANNELS + channel : channel * shape.height * shape.width + pixel]);
}

// Offset of an output of the convolution in its image.
__device__ __forceinline__ int output_offset(int filter, int pixel, int filters, int pixels) {
    return NHWC ? pixel * filters + filter : filter * pixels + pixel;
}
