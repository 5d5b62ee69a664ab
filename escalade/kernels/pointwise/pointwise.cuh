// What happens to one element: clip(x + residual), where the residual, the floor at 0 and the limit are optional.
#pragma once

#include "common/epilogue.cuh"

__device__ __forceinline__ Element pointwise(Element x, Element residual, float limit) {
    float value = to_float(x);
    if (HAS_RESIDUAL) value += to_float(residual);
    if (HAS_RELU) value = relu(value);
    if (HAS_LIMIT) value = value > limit ? limit : value;  // a NaN stays a NaN
    return from_float<Element>(value);
}
