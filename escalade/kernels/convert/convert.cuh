// What the conversions share: the sources that are no floats, and the normalisation.
//
// Their pointers to tensors are not __restrict__: that would let the compiler read x before the launch in front has
// written it. They load all that they need before they store instead.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"

__device__ __forceinline__ float to_float(unsigned char value) { return value; }

// value * scale[channel] + shift[channel] if the problem normalises; scale and shift are null otherwise.
__device__ __forceinline__ float normalised(float value, const float* scale, const float* shift, int channel) {
    return NORMALISE ? value * scale[channel] + shift[channel] : value;
}
