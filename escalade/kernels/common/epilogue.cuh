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

// The epilogue in FP8, where numbers are stored as multiples of a unit of their own: `scale` is the unit of the sum,
// `residual_scale` that of the residual, `result_scale` one over that of the result.
template <bool BIAS, bool RESIDUAL, bool RELU>
__device__ __forceinline__ float finish_scaled(float sum, float scale, float bias, float residual, float residual_scale,
                                               float result_scale) {
    sum *= scale;
    if (BIAS) sum += bias;
    if (RESIDUAL) sum += residual * residual_scale;
    if (RELU) sum = relu(sum);
    return sum * result_scale;
}
