// Gradients of y = function(n * weight + bias), where n = (x - mean) * rstd and the statistics are those of a group of
// channels of an image. With g the gradient before the function and h = g * weight,
//
//   dx = rstd * (h - sum(h) / count - n * sum(h * n) / count),  dweight = sum(g * n),  dbias = sum(g),
//
// the first two sums over a group of an image, the last two over a channel of all images. The generated EXPRESSION, if
// any, computes g from dy and from n * weight + bias, which is recomputed.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"
#ifdef EXPRESSION
#include "common/expression.cuh"
#endif

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;             // problem.dtype: that of x
using Gradient = float;            // problem.read: the dtype of dy
using Result = float;              // problem.result: the dtype of dx
constexpr bool NHWC = true;        // problem.layout == "nhwc" or problem.pixels == 1: one pixel is alike in both
constexpr bool HAS_WEIGHT = true;  // problem.weight
constexpr bool HAS_BIAS = false;   // problem.bias
constexpr int IMAGE_CHANNELS = 8;  // problem.channels
constexpr int PIXELS = 49;         // problem.pixels
constexpr int IMAGE_GROUPS = 2;    // problem.groups
constexpr int THREADS = 256;       // config.threads
#endif

constexpr int GROUP_CHANNELS = IMAGE_CHANNELS / IMAGE_GROUPS;

__device__ __forceinline__ float weight_of(const float* weight, int channel) {
    return HAS_WEIGHT ? weight[channel] : 1.f;
}

// Gradient before the function that follows the norm; `scale` is rstd * weight.
__device__ __forceinline__ float before_function(float gradient, float distance, float scale, float bias) {
#ifdef EXPRESSION
    static_assert(EXPRESSION_INPUTS == 2 && EXPRESSION_RESULTS == 1, "inputs are the gradient and x");
    float in[2], out[1];
    in[EXPRESSION_X] = distance * scale + bias, in[1 - EXPRESSION_X] = gradient;
    evaluate(out, in);
    return out[0];
#else
    return gradient;
#endif
}

#ifdef EXPRESSION
constexpr bool HAS_FUNCTION = true;
#else
constexpr bool HAS_FUNCTION = false;
#endif

__device__ __forceinline__ float bias_of(const float* bias, int channel) {
    return HAS_FUNCTION && HAS_BIAS ? bias[channel] : 0.f;
}
