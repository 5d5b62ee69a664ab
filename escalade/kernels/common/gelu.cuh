// GELU, x times the chance that a normal deviate is below x, in four forms; and GELU by tanh, a function of its own.
#pragma once

#include "common/ptx.cuh"

// GELU by erff, some 30 instructions. Off by rounding alone: up to 5e-7 where x is 10 or less.
__device__ __forceinline__ float gelu_erf(float x) { return x * (0.5f + 0.5f * erff(x * 0.70710678f)); }

// p(x), an odd function through the quartic in |x| by which x / (1 + 2^p(x)) has the smallest largest error: 5e-6.
// Beyond 6 the quartic stays where it is: p goes on as a line, away from what could be told from 0 or x.
__device__ __forceinline__ float gelu_power(float x) {
    const float size = fminf(fabsf(x), 6.f);
    float p = fmaf(1.48511047e-3f, size, -1.84459991e-3f);
    p = fmaf(p, size, -1.05843245e-1f);
    p = fmaf(p, size, 2.61633005e-3f);
    p = fmaf(p, size, -2.30318153f);
    return x * p;
}

// Ten instructions, of which the two of the special-function unit take longest. -Inf gives a NaN, as by erf.
__device__ __forceinline__ float gelu_fitted(float x) {
    return x * reciprocal_approximate(1.f + exp2_approximate(gelu_power(x)));
}

// x / (1 + 2^p(x)) with p of the eighth degree: 1e-7 beside its rounding, as good as by erff, in 14 instructions.
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

// sqrt(2 / pi) * (x + 0.044715 x^3), of which GELU by tanh takes the tanh
__device__ __forceinline__ float gelu_tanh_argument(float x) {
    return x * fmaf(0.79788456f * 0.044715f, x * x, 0.79788456f);
}

// As PyTorch has it with approximate="tanh", which differs from GELU by up to 5e-4.
__device__ __forceinline__ float gelu_tanh(float x) { return x * (0.5f + 0.5f * tanhf(gelu_tanh_argument(x))); }

// GELU by tanh: (1 + tanh(a)) / 2 is 1 / (1 + e^(-2 a)), where this is a times -2 / ln 2.
__device__ __forceinline__ float gelu_tanh_power(float x) {
    return x * fmaf(-2.30220819f * 0.044715f, x * x, -2.30220819f);
}

// Off by rounding alone.
__device__ __forceinline__ float gelu_tanh_by_exp2(float x) {
    return x * reciprocal_approximate(1.f + exp2_approximate(gelu_tanh_power(x)));
}

// GELU by the tanh of the special-function unit: seven instructions, off by 2^-11 of x.
__device__ __forceinline__ float gelu_tanh_approximate(float x) {
    const float half = 0.5f * x;
    return fmaf(half, tanh_approximate(gelu_tanh_argument(x)), half);
}
