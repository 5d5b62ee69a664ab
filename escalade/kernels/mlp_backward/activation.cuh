// Activation of a layer and its slope, by number: 0 none, 1 ReLU, 2 GELU, 3 GELU with tanh.
//
// The slope is stored instead of the activation's input; both are computed from the same intermediate values.
#pragma once

#include "common/gelu.cuh"

struct Activated {
    float value, slope;
};

template <int ACTIVATION>
__device__ __forceinline__ Activated activate_with_slope(float z) {
    if constexpr (ACTIVATION == 1) {
        return {z < 0.f ? 0.f : z, z <= 0.f ? 0.f : 1.f};  // NaN stays NaN
    } else if constexpr (ACTIVATION == 2) {
        // z Phi(z), and Phi(z) + z phi(z)
        const float below = 0.5f * (1.f + erff(z * 0.70710678118654752f));
        const float density = 0.39894228040143268f * expf(-0.5f * z * z);
        return {z * below, below + z * density};
    } else if constexpr (ACTIVATION == 3) {
        constexpr float SCALE = 0.79788456080286536f, CUBIC = 0.044715f;
        const float square = z * z;
        const float t = tanhf(SCALE * (z + CUBIC * square * z));
        const float half = 0.5f * (1.f + t);
        return {z * half, half + 0.5f * z * (1.f - t * t) * SCALE * (1.f + 3.f * CUBIC * square)};
    } else {
        return {z, 1.f};
    }
}

// The same for results of 16 bits, by the special-function unit: an error of 5e-6, in half of the instructions.
template <int ACTIVATION>
__device__ __forceinline__ Activated activate_with_slope_fitted(float z) {
    if constexpr (ACTIVATION == 2) {
        const float below = reciprocal_approximate(1.f + exp2_approximate(gelu_power(z)));
        return {z * below, fmaf(z * 0.39894228f, exp2_approximate(z * z * -0.72134752f), below)};
    } else if constexpr (ACTIVATION == 3) {
        const float below = reciprocal_approximate(1.f + exp2_approximate(gelu_tanh_power(z)));  // (1 + tanh) / 2
        const float inner = fmaf(z * z, 3.f * 0.79788456f * 0.044715f, 0.79788456f);  // slope of tanh's argument
        return {z * below, fmaf(2.f * z * inner, fmaf(-below, below, below), below)};
    } else {
        return activate_with_slope<ACTIVATION>(z);
    }
}

// Gradient before an activation. Where ReLU is flat nothing passes, not even NaN.
template <int ACTIVATION>
__device__ __forceinline__ float through_slope(float gradient, float slope) {
    if constexpr (ACTIVATION == 0) return gradient;
    if constexpr (ACTIVATION == 1) return slope == 0.f ? 0.f : gradient;
    return gradient * slope;
}
