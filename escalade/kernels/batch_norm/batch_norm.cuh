// Normalization of one element, shared by the kernels of batch_norm.
#pragma once

#include "common/channels.cuh"
#include "common/epilogue.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr bool HAS_RESIDUAL = false;  // problem.residual
constexpr bool HAS_RELU = true;       // problem.relu
#endif

// Subtracts the mean first: x * scale + (bias - mean * scale) would save one operation, but loses the digits of y if
// the mean is much larger than the deviation.
__device__ __forceinline__ Element normalized(Element x, float mean, float scale, float bias, Element residual) {
    float value = (to_float(x) - mean) * scale + bias;
    return from_float<Element>(
        activated<HAS_RESIDUAL, HAS_RELU>(value, HAS_RESIDUAL ? to_float(residual) : 0.f));
}
