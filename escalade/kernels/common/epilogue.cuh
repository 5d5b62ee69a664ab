// What happens to a finished sum before it is stored: activated(sum + bias + residual), each part optional.
#pragma once

#include "common/elements.cuh"
#ifdef EXPRESSION
#include "common/expression.cuh"
#endif

// A NaN stays a NaN, as in PyTorch; fmaxf would hide it.
__device__ __forceinline__ float relu(float value) { return value < 0.f ? 0.f : value; }

// What a kernel's prelude defines as EXPRESSION, a pointwise program of one input; else ReLU or nothing.
template <bool RELU>
__device__ __forceinline__ float activated(float value) {
#ifdef EXPRESSION
    static_assert(!RELU && EXPRESSION_INPUTS == 1 && EXPRESSION_RESULTS == 1, "one activation, of one number");
    const float in[1] = {value};
    float out[1];
    evaluate(out, in);
    return out[0];
#else
    return RELU ? relu(value) : value;
#endif
}

template <bool BIAS, bool RESIDUAL, bool RELU, class Element>
__device__ __forceinline__ Element finish(float sum, const Element* bias, int filter, const Element* residual,
                                          long long at) {
    if (BIAS) sum += to_float(bias[filter]);
    if (RESIDUAL) sum += to_float(residual[at]);
    return from_float<Element>(activated<RELU>(sum));
}

// The epilogue in FP8, where numbers are stored as multiples of a unit of their own: `scale` is the unit of the sum,
// `residual_scale` that of the residual, `result_scale` one over that of the result.
template <bool BIAS, bool RESIDUAL, bool RELU>
__device__ __forceinline__ float finish_scaled(float sum, float scale, float bias, float residual, float residual_scale,
                                               float result_scale) {
    sum *= scale;
    if (BIAS) sum += bias;
    if (RESIDUAL) sum += residual * residual_scale;
    return activated<RELU>(sum) * result_scale;
}
