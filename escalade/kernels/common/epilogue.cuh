// Epilogue: activated(sum + bias + residual), each part optional.
#pragma once

#include "common/elements.cuh"
#ifdef EXPRESSION
#include "common/expression.cuh"
#endif

// NaN stays NaN, as in PyTorch; fmaxf would hide it.
__device__ __forceinline__ float relu(float value) { return value < 0.f ? 0.f : value; }

#ifdef EXPRESSION_VECTORS  // the numbers of inputs that the expression may have: -1 if it does not
constexpr bool HAS_A = EXPRESSION_A >= 0, HAS_B = EXPRESSION_B >= 0;
#else
constexpr bool HAS_A = false, HAS_B = false;
#endif

// Adds the residual, then applies EXPRESSION (if the prelude defines it), ReLU, or nothing. An expression of two inputs
// takes the sum as input EXPRESSION_X and the residual as the other, and adds the residual itself if at all. One of
// vectors takes numbers of the sum's filter too.
template <bool RESIDUAL, bool RELU>
__device__ __forceinline__ float activated(float sum, float residual, float a = 1.f, float b = 0.f) {
#ifdef EXPRESSION
    static_assert(!RELU && EXPRESSION_RESULTS == 1, "one activation");
    float in[EXPRESSION_INPUTS], out[1];
#ifdef EXPRESSION_VECTORS
    in[EXPRESSION_X] = RESIDUAL && EXPRESSION_RESIDUAL < 0 ? sum + residual : sum;
    if constexpr (EXPRESSION_RESIDUAL >= 0) in[EXPRESSION_RESIDUAL] = residual;
    if constexpr (HAS_A) in[EXPRESSION_A] = a;
    if constexpr (HAS_B) in[EXPRESSION_B] = b;
#else
    static_assert(EXPRESSION_INPUTS <= 2, "sum and residual");
    if constexpr (EXPRESSION_INPUTS == 2) in[EXPRESSION_X] = sum, in[1 - EXPRESSION_X] = residual;
    else in[0] = RESIDUAL ? sum + residual : sum;
#endif
    evaluate(out, in);
    return out[0];
#else
    if (RESIDUAL) sum += residual;
    return RELU ? relu(sum) : sum;
#endif
}

// Two sums at once.
template <bool RESIDUAL, bool RELU>
__device__ __forceinline__ float2 activated_pair(float2 sums, float2 residuals, float2 as = {1.f, 1.f},
                                                 float2 bs = {0.f, 0.f}) {
#ifdef EXPRESSION_PAIR
    float in[2][EXPRESSION_INPUTS], out[2][1];
    if constexpr (EXPRESSION_INPUTS == 2) {
        in[0][EXPRESSION_X] = sums.x, in[0][1 - EXPRESSION_X] = residuals.x;
        in[1][EXPRESSION_X] = sums.y, in[1][1 - EXPRESSION_X] = residuals.y;
    } else {
        in[0][0] = RESIDUAL ? sums.x + residuals.x : sums.x, in[1][0] = RESIDUAL ? sums.y + residuals.y : sums.y;
    }
    evaluate_pair(out, in);
    return make_float2(out[0][0], out[1][0]);
#else
    return make_float2(activated<RESIDUAL, RELU>(sums.x, residuals.x, as.x, bs.x),
                       activated<RESIDUAL, RELU>(sums.y, residuals.y, as.y, bs.y));
#endif
}

template <bool RELU>
__device__ __forceinline__ float activated(float sum) {
    return activated<false, RELU>(sum, 0.f);
}

template <bool BIAS, bool RESIDUAL, bool RELU, class Element>
__device__ __forceinline__ Element finish(float sum, const Element* bias, int filter, const Element* residual,
                                          long long at) {
    if (BIAS) sum += to_float(bias[filter]);
    return from_float<Element>(activated<RESIDUAL, RELU>(sum, RESIDUAL ? to_float(residual[at]) : 0.f));
}

// Epilogue of 8-bit types. Values are stored as multiples of a scale: `scale` of the sum, `residual_scale` of the residual;
// `result_scale` is the reciprocal of the result's.
template <bool BIAS, bool RESIDUAL, bool RELU>
__device__ __forceinline__ float finish_scaled(float sum, float scale, float bias, float residual, float residual_scale,
                                               float result_scale) {
    sum *= scale;
    if (BIAS) sum += bias;
    return activated<RESIDUAL, RELU>(sum, residual * residual_scale) * result_scale;
}
