// What happens to a finished sum before it is stored: relu(sum + bias + residual), each part optional.
#pragma once

#include "common/elements.cuh"

// A NaN stays a NaN, as in PyTorch; fmaxf would hide it.
__device__ __forceinline__ float relu(float value) { return value < 0.f ? 0.f : value; }

template <bool BIAS, bool RESIDUAL, bool RELU, class Element>
__device__ __forceinline__ Element finish(float sum, const Element* bias, int filter, const Element* residual,
                                          long long at) {
    if (BIAS) sum += to_float(bias[filter]);
    if (RESIDUAL) sum += to_float(residual[at]);
    if (RELU) sum = relu(sum);
    return from_float<Element>(sum);
}
