// Sizes of filters and of their sums, and the start of a window.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"

struct Filters {  // filled by escalade/ops/filter_sums/rungs/sums.py, in this order
    int filters, channels, height, width;
    int rows, columns;  // of y

    // First tap of x, down or along, of the window stored at `at` of `count`; -1 is the zeros in front.
    __device__ __forceinline__ static int window(int at, int count) { return count - 1 - at - ZEROS; }
};
