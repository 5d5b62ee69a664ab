// What the kernels of batch_norm share: what becomes of an element.
#pragma once

#include "common/channels.cuh"
#include "common/epilogue.cuh"

// The mean is subtracted first. x * scale + (bias - mean * scale) would be one operation less, and loses the digits of
// y where the mean is much larger than the deviation.
__device__ __forceinline__ Element normalised(Element x, float mean, float scale, float bias, Element residual) {
    float value = (to_float(x) - mean) * scale + bias;
    return from_float<Element>(
        activated<HAS_RESIDUAL, HAS_RELU>(value, HAS_RESIDUAL ? to_float(residual) : 0.f));
}
