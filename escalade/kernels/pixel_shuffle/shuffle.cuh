// Sizes of a pixel shuffle. One image is large and has few channels, the other is small and has many.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"

constexpr int BLOCK = FACTOR * FACTOR;  // pixels of the large image per pixel of the small one

struct Shuffle {  // filled by escalade/ops/pixel_shuffle/rungs/arguments.py, in this order
    int batch, channels;  // of the large image
    int height, width;    // of the small image
    int large_step, small_step;  // elements from pixel to pixel in NHWC
};
