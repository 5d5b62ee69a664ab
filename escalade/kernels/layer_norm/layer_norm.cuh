// Normalization of an element of a row: activated((x - mean) * scale * weight + bias), scale = 1 / sqrt(variance +
// epsilon). HAS_MEAN is false for RMS norm, whose mean is 0.
#pragma once

#include "common/epilogue.cuh"
#include "common/ptx.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;             // problem.dtype
using Result = float;              // problem.result: the dtype of y
using Parameter = float;           // problem.parameters: the dtype of weight and bias
constexpr bool HAS_MEAN = true;    // not problem.rms
constexpr bool HAS_WEIGHT = true;  // problem.weight
constexpr bool HAS_BIAS = true;    // problem.bias
constexpr bool HAS_RELU = false;   // problem.relu
#endif

template <class Stored>
__device__ __forceinline__ Result normalized(float x, float mean, float scale, const Stored* weight, const Stored* bias,
                                             int feature) {
    float value = (x - mean) * scale;
    if (HAS_WEIGHT) value *= to_float(weight[feature]);
    if (HAS_BIAS) value += to_float(bias[feature]);
    return from_float<Result>(activated<HAS_RELU>(value));
}
