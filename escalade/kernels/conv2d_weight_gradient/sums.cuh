// Where a CTA stores its sums: DIRECT, the results themselves, as nothing is to be added; else its part of the workspace.
#pragma once

#include "common/elements.cuh"

template <bool DIRECT>
struct SumType {
    using Type = float;
};
template <>
struct SumType<true> {
    using Type = Element;
};
using Sum = SumType<DIRECT>::Type;

struct Sums {
    Sum *weights, *bias;  // `bias` is null if it is not requested

    // A part's bias gradient is behind its weights.
    __device__ __forceinline__ Sums(Sum* to, Sum* bias_gradient, int part, long long weight_elements, int filters)
        : weights(to), bias(bias_gradient) {
        if (DIRECT) return;
        weights += part * (weight_elements + (HAS_BIAS ? filters : 0));
        bias = weights + weight_elements;
    }
};
