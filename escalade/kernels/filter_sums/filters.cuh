// The sizes of filters and of their sums, and where a window begins.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"

struct Filters {  // filled by escalade/ops/filter_sums/rungs/sums.py, in this order
    int filters, channels, height, width;
    int rows, columns;  // of y

    // The first tap of x, down or along, of the window that ends up at `at` among `count`; -1 is the zeros in front.
    __device__ __forceinline__ static int window(int at, int count) { return count - 1 - at - ZEROS; }
};
