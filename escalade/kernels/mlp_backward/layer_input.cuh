// Input of a layer's product: a row unchanged, or normalized, scaled and shifted.
#pragma once

#include "common/elements.cuh"

__device__ __forceinline__ float layer_input(const Input* input, const Element* norm_weight, const Element* norm_bias,
                                             long long row_start, int f) {
    const float value = to_float(input[row_start + f]);
    return HAS_NORM ? value * to_float(norm_weight[f]) + to_float(norm_bias[f]) : value;
}
