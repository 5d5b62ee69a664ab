// Shared by the kernels of batch_norm_backward: the gradient through the function after the norm, and the gradient of
// x.
//
// MASK of a ReLU: NO_MASK; BY_X, recomputed from x with the forward pass's own operations; or BY_OUTPUT, from the
// ReLU's stored output. For another function, the generated EXPRESSION computes the gradient, also from x.
//
// With RECOMPUTED, generated too, the last launch also writes what the forward pass computed from the normalized x.
#pragma once

#include "common/channels.cuh"
#if defined(EXPRESSION) || defined(RECOMPUTED)
#include "common/functions.cuh"
#endif
#ifdef EXPRESSION
#include "common/expression.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int MASK = 0;  // ("none", "x", "output").index(mask)
#endif
#endif

constexpr int NO_MASK = 0, BY_X = 1, BY_OUTPUT = 2;

#ifdef RECOMPUTED
constexpr bool RECOMPUTES = true;
__device__ __forceinline__ float recomputed(float x) { RECOMPUTED }
#else
constexpr bool RECOMPUTES = false;
__device__ __forceinline__ float recomputed(float x) { return x; }
#endif
constexpr bool NEEDS_BIAS = MASK == BY_X || RECOMPUTES;

// True if the gradient passes the ReLU: where the output, rounded as it was stored, is positive or NaN. `distance` is x
// minus the mean.
__device__ __forceinline__ bool passes(float distance, float scale, float bias, Element output) {
    if (MASK == BY_X) output = from_float<Element>(distance * scale + bias);
    return MASK == NO_MASK || !(to_float(output) <= 0.f);
}

// Gradient before the function that follows the norm.
__device__ __forceinline__ float before_function(float gradient, float distance, float scale, float bias, Element output) {
#ifdef EXPRESSION
    static_assert(MASK == BY_X && EXPRESSION_INPUTS == 2 && EXPRESSION_RESULTS == 1, "inputs are the gradient and x");
    float in[2], out[1];
    in[EXPRESSION_X] = distance * scale + bias, in[1 - EXPRESSION_X] = gradient;
    evaluate(out, in);
    return out[0];
#else
    return passes(distance, scale, bias, output) ? gradient : 0.f;
#endif
}

// Gradient of x for the elements of a channel: along * gradient + across * (x - mean) + shift.
struct Slope {
    float mean, along, across, shift, bias;

    __device__ __forceinline__ Slope() {}
    // `share` is one over the number of elements of the channel.
    __device__ __forceinline__ Slope(float mean, float rstd, float weight, float bias, float weight_gradient,
                                     float bias_gradient, float share)
        : mean(mean), along(weight * rstd), across(-along * rstd * weight_gradient * share),
          shift(-along * bias_gradient * share), bias(bias) {}

    __device__ __forceinline__ Element of(Element gradient, Element x, Element output) const {
        const float distance = to_float(x) - mean;
        const float before = before_function(to_float(gradient), distance, along, bias, output);
        return from_float<Element>(along * before + (across * distance + shift));
    }

    // The forward pass's result.
    __device__ __forceinline__ Element again(Element x) const {
        return from_float<Element>(recomputed((to_float(x) - mean) * along + bias));
    }
};

// Values of all channels; the bias only if NEEDS_BIAS.
struct Channels {
    const float *mean, *rstd, *weight, *bias, *weight_gradient, *bias_gradient;

    __device__ __forceinline__ Slope slope(int c, float share) const {
        return Slope(mean[c], rstd[c], weight[c], NEEDS_BIAS ? bias[c] : 0.f, weight_gradient[c], bias_gradient[c],
                     share);
    }
};
