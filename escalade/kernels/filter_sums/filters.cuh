// Sizes of filters and of their sums, and the start of a window.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;    // problem.dtype
constexpr int ZEROS = 1;  // int(problem.zeros): taps of zeros around x
#endif

struct Filters {
    int filters;  // problem.batch
    int channels, height, width;
    int rows, columns;

    // First tap of x, down or along, of the window stored at `at` of `count`; -1 is the zeros in front.
    __device__ __forceinline__ static int window(int at, int count) { return count - 1 - at - ZEROS; }
};
