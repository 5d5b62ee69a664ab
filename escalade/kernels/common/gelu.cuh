// GELU, x times the normal CDF of x, in four forms; and the tanh approximation, a function of its own.
#pragma once

#include "common/ptx.cuh"

// GELU by erff, about 30 instructions. Rounding error only: up to 5e-7 for x <= 10.
__device__ __forceinline__ float gelu_erf(float x) { return x * (0.5f + 0.5f * erff(x * 0.70710678f)); }

// p(x) of x / (1 + 2^p(x)): x times the minimax quartic in |x|, error 5e-6. Past 6 the quartic is clamped: p continues
// linearly, where the result is indistinguishable from 0 or x.
__device__ __forceinline__ float gelu_power(float x) {
    const float size = fminf(fabsf(x), 6.f);
    float p = fmaf(1.48511047e-3f, size, -1.84459991e-3f);
    p = fmaf(p, size, -1.05843245e-1f);
    p = fmaf(p, size, 2.61633005e-3f);
    p = fmaf(p, size, -2.30318153f);
    return x * p;
}

// Ten instructions; the two of the special-function unit take longest. -Inf gives NaN, as with erf.
__device__ __forceinline__ float gelu_fitted(float x) {
    return x * reciprocal_approximate(1.f + exp2_approximate(gelu_power(x)));
}

// x / (1 + 2^p(x)) with p of degree eight: 1e-7 beside its rounding, as accurate as erff, in 14 instructions.
__device__ __forceinline__ float gelu_fine(float x) {
    const float size = fminf(fabsf(x), 6.f);
    float p = fmaf(4.85985174e-6f, size, -4.53196553e-5f);
    p = fmaf(p, size, -1.35750988e-5f);
    p = fmaf(p, size, 1.21843861e-3f);
    p = fmaf(p, size, -2.80051865e-3f);
    p = fmaf(p, size, 3.52175208e-3f);
    p = fmaf(p, size, -1.0711997e-1f);
    p = fmaf(p, size, 7.27621082e-4f);
    p = fmaf(p, size, -2.30229497f);
    return x * reciprocal_approximate(1.f + exp2_approximate(x * p));
}

// sqrt(2 / pi) * (x + 0.044715 x^3), the argument of tanh in the tanh approximation
__device__ __forceinline__ float gelu_tanh_argument(float x) {
    return x * fmaf(0.79788456f * 0.044715f, x * x, 0.79788456f);
}

// PyTorch's approximate="tanh", which differs from GELU by up to 5e-4.
__device__ __forceinline__ float gelu_tanh(float x) { return x * (0.5f + 0.5f * tanhf(gelu_tanh_argument(x))); }

// Tanh approximation: (1 + tanh(a)) / 2 = 1 / (1 + e^(-2 a)); this is a times -2 / ln 2.
__device__ __forceinline__ float gelu_tanh_power(float x) {
    return x * fmaf(-2.30220819f * 0.044715f, x * x, -2.30220819f);
}

// Rounding error only.
__device__ __forceinline__ float gelu_tanh_by_exp2(float x) {
    return x * reciprocal_approximate(1.f + exp2_approximate(gelu_tanh_power(x)));
}

// GELU by the tanh of the special-function unit: seven instructions, off by 2^-11 of x.
__device__ __forceinline__ float gelu_tanh_approximate(float x) {
    const float half = 0.5f * x;
    return fmaf(half, tanh_approximate(gelu_tanh_argument(x)), half);
}
