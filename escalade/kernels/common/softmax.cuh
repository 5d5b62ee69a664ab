// Mergeable partial sums of a softmax: sum over classes of exp(logit - largest).
#pragma once

#include "common/elements.cuh"
#include "common/warp.cuh"

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xFF800000); }

// 1 for equal values, including infinities, whose difference would be NaN.
__device__ __forceinline__ float exp_below(float logit, float largest) {
    return logit == largest ? 1.f : expf(logit - largest);
}

struct SoftmaxSums {
    float largest = minus_infinity();
    float sum = 0.f;

    // Adds COUNT logits; rescales the sum once for all of them. A NaN is never the largest, but reaches the sum.
    template <int COUNT>
    __device__ __forceinline__ void add(const float (&logits)[COUNT]) {
        float highest = largest;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) highest = fmaxf(highest, logits[i]);
        sum *= exp_below(largest, highest);
        largest = highest;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sum += exp_below(logits[i], highest);
    }

    // Over all lanes; every lane receives the result.
    __device__ __forceinline__ void merge_warp() {
        const float highest = warp_max(largest);
        sum = warp_sum(sum * exp_below(largest, highest));
        largest = highest;
    }

    // Factor of exp(logit - largest). As in PyTorch, a row with +Inf, or of -Inf only, is all NaN: an infinite
    // `largest` minus itself is NaN.
    __device__ __forceinline__ float scale() const { return 1.f / sum + (largest - largest); }
};

template <class Element, int VECTOR>
__device__ __forceinline__ void to_floats(float (&values)[VECTOR], const Pack<Element, VECTOR>& pack) {
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) values[e] = to_float(pack.at[e]);
}
