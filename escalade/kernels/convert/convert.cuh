// Shared by the conversions: non-float sources, and normalization.
//
// Tensor pointers are not __restrict__: the compiler could then read x before the previous launch has written it (PDL).
// Kernels load everything before they store instead.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Source = float;                // problem.source
using Target = __half;               // problem.dtype
constexpr bool SOURCE_NHWC = false;  // problem.source_layout == "nhwc"
constexpr bool TARGET_NHWC = true;   // problem.layout == "nhwc"
constexpr bool NORMALISE = false;    // problem.normalise
#endif

__device__ __forceinline__ float to_float(unsigned char value) { return value; }

// value * scale[channel] + shift[channel] if NORMALISE; otherwise scale and shift are null.
__device__ __forceinline__ float normalized(float value, const float* scale, const float* shift, int channel) {
    return NORMALISE ? value * scale[channel] + shift[channel] : value;
}
