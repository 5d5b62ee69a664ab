// Sizes of a pixel shuffle. One image is large and has few channels, the other is small and has many.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int FACTOR = 2;     // problem.factor
constexpr bool DOWN = false;  // problem.down: from the large image to the small one
#endif

constexpr int BLOCK = FACTOR * FACTOR;  // pixels of the large image per pixel of the small one

struct Shuffle {
    int batch;
    int channels;       // problem.few_channels: of the large image
    int height, width;  // problem.small: size of the small image
    int large_step;     // large_step: elements from pixel to pixel in NHWC
    int small_step;     // small_step
};
