// The backward pass of a ReLU: a gradient passes where what went into the ReLU, or came out of it, is positive.
#pragma once

#include "common/elements.cuh"

// As PyTorch has it: a gradient that is stopped is zero even if it was NaN, and a mask that is NaN stops nothing.
__device__ __forceinline__ float masked(float gradient, Element mask) {
    return to_float(mask) <= 0.f ? 0.f : gradient;
}
