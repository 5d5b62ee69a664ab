// Sizes of a stem, and access to one pixel of the source image.
//
// The prelude of the including file defines Source, SOURCE_NHWC, CHANNELS and NORMALISE.
#pragma once

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Source = float;               // problem.source
using Element = float;              // problem.storage
constexpr bool SOURCE_NHWC = true;  // problem.source_layout == "nhwc"
constexpr int CHANNELS = 1;         // problem.channels
constexpr bool NORMALISE = false;   // problem.normalise
#endif

#include "common/elements.cuh"

struct StemShape {
    int batch, height, width;
    int filters, filter_height, filter_width;
    int stride_h, stride_w;  // problem.stride
    int pad_h, pad_w;        // problem.padding
    int conv_height, conv_width;
    int output_height, output_width;  // (problem.output_height, problem.output_width): pooled
    int row_tiles, column_tiles;      // tiles: per image
};

__device__ __forceinline__ float to_float(unsigned char value) { return value; }

// Offset of channel c of a pixel in its image.
__device__ __forceinline__ int source_offset(int row, int column, int c, const StemShape& shape) {
    const int pixel = row * shape.width + column;
    return SOURCE_NHWC ? pixel * CHANNELS + c : c * shape.height * shape.width + pixel;
}

// Normalized pixel in fp32, before rounding to the product's type.
__device__ __forceinline__ float normalized(Source value, int c, const float* scale, const float* shift) {
    const float pixel = to_float(value);
    return NORMALISE ? fmaf(pixel, scale[c], shift[c]) : pixel;
}
