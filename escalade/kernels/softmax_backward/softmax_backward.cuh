// Gradient of the softmax y of a row: dx = y * (dy - sum of dy * y), or with LOG dx = dy - exp(y) * sum of dy.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;   // problem.dtype: of the softmax
using Gradient = float;  // problem.read: the dtype of dy
using Result = float;    // problem.result: the dtype of dx
#define LOG false        // "true" if problem.log else "false"
#endif

// Term of a class in the sum of its row.
__device__ __forceinline__ float row_term(Gradient dy, Element y) {
    return LOG ? to_float(dy) : to_float(dy) * to_float(y);
}

__device__ __forceinline__ Result dx_of(Gradient dy, Element y, float sum) {
    return from_float<Result>(LOG ? to_float(dy) - expf(to_float(y)) * sum : to_float(y) * (to_float(dy) - sum));
}
