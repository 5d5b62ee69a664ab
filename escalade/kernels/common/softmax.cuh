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

    // Factor of `softmax_term<false>`, or what is subtracted from `softmax_term<true>`.
    template <bool IS_LOG>
    __device__ __forceinline__ float divisor() const {
        return IS_LOG ? logf(sum) + (largest - largest) : scale();
    }
};

// Numerator of a class, or with IS_LOG its logarithm: a probability that underflows has one, too.
template <bool IS_LOG>
__device__ __forceinline__ float softmax_term(float logit, float largest) {
    return IS_LOG ? logit - largest : expf(logit - largest);
}

template <bool IS_LOG>
__device__ __forceinline__ float softmax_result(float term, float divisor) {
    return IS_LOG ? term - divisor : term * divisor;
}

template <class Element, int VECTOR>
__device__ __forceinline__ void to_floats(float (&values)[VECTOR], const Pack<Element, VECTOR>& pack) {
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) values[e] = to_float(pack.at[e]);
}
