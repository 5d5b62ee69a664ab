// Backward pass of a ReLU: a gradient passes where the ReLU's input, or its output, is positive.
#pragma once

#include "common/elements.cuh"

// As in PyTorch: a blocked gradient is zero even if it was NaN, and a NaN mask blocks nothing.
__device__ __forceinline__ float masked(float gradient, Element mask) {
    return to_float(mask) <= 0.f ? 0.f : gradient;
}
