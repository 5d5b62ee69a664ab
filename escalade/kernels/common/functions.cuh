// Pointwise functions in fp32, named as in escalade/ops/expressions/functions.py. NaN propagates wherever PyTorch
// propagates it. Booleans are 1 and 0.
//
// FAST_FUNCTIONS uses the special-function unit's exp, log and division: off by about 2^-21 of the result, invisible in
// 16 bits and in sums of TF32 products.
#pragma once

#include "common/gelu.cuh"

#ifndef INFINITY  // NVRTC has no C library that defines it
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
#endif

namespace of {

#define FUNCTION(name) __device__ __forceinline__ float name

FUNCTION(neg)(float x) { return -x; }
FUNCTION(abs)(float x) { return fabsf(x); }
FUNCTION(sign)(float x) { return float(x > 0.f) - float(x < 0.f); }  // 0 for NaN, as in PyTorch
FUNCTION(square)(float x) { return x * x; }
FUNCTION(sqrt)(float x) { return sqrtf(x); }
FUNCTION(rsqrt)(float x) { return rsqrtf(x); }
FUNCTION(exp)(float x) { return FAST_FUNCTIONS ? __expf(x) : expf(x); }
FUNCTION(exp2)(float x) { return exp2f(x); }
FUNCTION(expm1)(float x) { return expm1f(x); }
FUNCTION(log)(float x) { return FAST_FUNCTIONS ? __logf(x) : logf(x); }
FUNCTION(log2)(float x) { return log2f(x); }
FUNCTION(log10)(float x) { return log10f(x); }
FUNCTION(log1p)(float x) { return log1pf(x); }
FUNCTION(sin)(float x) { return sinf(x); }
FUNCTION(cos)(float x) { return cosf(x); }
FUNCTION(tan)(float x) { return tanf(x); }
FUNCTION(asin)(float x) { return asinf(x); }
FUNCTION(acos)(float x) { return acosf(x); }
FUNCTION(atan)(float x) { return atanf(x); }
FUNCTION(sinh)(float x) { return sinhf(x); }
FUNCTION(cosh)(float x) { return coshf(x); }
FUNCTION(asinh)(float x) { return asinhf(x); }
FUNCTION(acosh)(float x) { return acoshf(x); }
FUNCTION(atanh)(float x) { return atanhf(x); }
FUNCTION(erf)(float x) { return erff(x); }
FUNCTION(erfc)(float x) { return erfcf(x); }
FUNCTION(floor)(float x) { return floorf(x); }
FUNCTION(ceil)(float x) { return ceilf(x); }
FUNCTION(trunc)(float x) { return truncf(x); }
FUNCTION(round)(float x) { return rintf(x); }  // ties to even

FUNCTION(add)(float a, float b) { return a + b; }
FUNCTION(sub)(float a, float b) { return a - b; }
FUNCTION(mul)(float a, float b) { return a * b; }
FUNCTION(div)(float a, float b) { return a / b; }
__device__ __forceinline__ float div_by(float a, float number, float reciprocal) {  // both known when it is compiled
    return FAST_FUNCTIONS ? a * reciprocal : a / number;
}
FUNCTION(reciprocal)(float x) { return 1.f / x; }
FUNCTION(atan2)(float a, float b) { return atan2f(a, b); }
FUNCTION(fmod)(float a, float b) { return fmodf(a, b); }
FUNCTION(remainder)(float a, float b) {  // with the sign of b
    const float rest = fmodf(a, b);
    return rest != 0.f && (rest < 0.f) != (b < 0.f) ? rest + b : rest;
}
FUNCTION(maximum)(float a, float b) { return a != a || a > b ? a : b; }
FUNCTION(minimum)(float a, float b) { return a != a || a < b ? a : b; }
FUNCTION(fmax)(float a, float b) { return fmaxf(a, b); }
FUNCTION(fmin)(float a, float b) { return fminf(a, b); }
FUNCTION(copysign)(float a, float b) { return copysignf(a, b); }
FUNCTION(hypot)(float a, float b) { return hypotf(a, b); }
FUNCTION(pow)(float a, float b) {  // integer exponents are common, and multiplications are cheaper than powf
    if (b == 2.f) return a * a;
    if (b == 3.f) return a * a * a;
    return powf(a, b);
}

FUNCTION(lt)(float a, float b) { return a < b; }
FUNCTION(le)(float a, float b) { return a <= b; }
FUNCTION(gt)(float a, float b) { return a > b; }
FUNCTION(ge)(float a, float b) { return a >= b; }
FUNCTION(eq)(float a, float b) { return a == b; }
FUNCTION(ne)(float a, float b) { return a != b; }
FUNCTION(isnan)(float x) { return x != x; }
FUNCTION(isinf)(float x) { return fabsf(x) == INFINITY; }
FUNCTION(logical_not)(float x) { return x == 0.f; }
FUNCTION(logical_and)(float a, float b) { return a != 0.f && b != 0.f; }
FUNCTION(logical_or)(float a, float b) { return a != 0.f || b != 0.f; }
FUNCTION(logical_xor)(float a, float b) { return (a != 0.f) != (b != 0.f); }
FUNCTION(where)(float test, float yes, float no) { return test != 0.f ? yes : no; }

FUNCTION(clamp)(float x, float low, float high) { return minimum(maximum(x, low), high); }
FUNCTION(lerp)(float a, float b, float t) { return fabsf(t) < 0.5f ? a + t * (b - a) : b - (b - a) * (1.f - t); }
FUNCTION(relu)(float x) { return x < 0.f ? 0.f : x; }
FUNCTION(leaky_relu)(float x, float slope) { return x > 0.f ? x : slope * x; }
FUNCTION(elu)(float x, float scale) {
    if (x > 0.f) return x;
    if (!FAST_FUNCTIONS) return scale * expm1f(x);
    return scale * (x > -0.1f ? x * fmaf(x, fmaf(x, fmaf(x, 1.f / 24.f, 1.f / 6.f), 0.5f), 1.f) : __expf(x) - 1.f);
}
// Next to 1, a denormal e^-x may be flushed to 0: ex2.approx.ftz saves two multiplications and a comparison.
FUNCTION(sigmoid)(float x) {
    return FAST_FUNCTIONS ? reciprocal_approximate(1.f + exp2_approximate(-1.44269504f * x)) : 1.f / (1.f + expf(-x));
}
FUNCTION(silu)(float x) {
    return FAST_FUNCTIONS ? x * sigmoid(x) : x / (1.f + expf(-x));
}
// x / (1 + 2^power) of two numbers with one reciprocal, because the special-function unit is the bottleneck. Powers are
// clamped to 2^63, so that their product is finite, and numbers to -44, so that their product with 2^-63 vanishes; a
// NaN in one does not reach the other.
__device__ __forceinline__ void over_powers(float (&y)[2], float a, float power_a, float b, float power_b) {
    const float below_a = 1.f + exp2_approximate(fminf(power_a, 63.f));
    const float below_b = 1.f + exp2_approximate(fminf(power_b, 63.f));
    const float both = reciprocal_approximate(below_a * below_b);
    y[0] = maximum(a, -44.f) * (both * below_b), y[1] = maximum(b, -44.f) * (both * below_a);
}
__device__ __forceinline__ void silu_pair(float (&y)[2], float a, float b) {
    if (FAST_FUNCTIONS) over_powers(y, a, -1.44269504f * a, b, -1.44269504f * b);
    else y[0] = silu(a), y[1] = silu(b);
}
// Both ranges of tanh and softplus are computed: few warps hide the latency of a branch in an epilogue.
FUNCTION(tanh)(float x) {  // 1 - 2 / (1 + e^(2x)) cancels for small x
    if (!FAST_FUNCTIONS) return tanhf(x);
    const float square = x * x, small = x * fmaf(square, fmaf(square, 2.f / 15.f, -1.f / 3.f), 1.f);
    const float large = fmaf(-2.f, reciprocal_approximate(1.f + exp2_approximate(2.88539008f * x)), 1.f);
    return square < 0.01f ? small : large;
}
FUNCTION(softplus)(float x) {  // log(1 + e) cancels for small e too
    if (!FAST_FUNCTIONS) return x > 20.f ? x : log1pf(expf(x));
    const float e = exp2_approximate(1.44269504f * x), small = e * fmaf(e, fmaf(e, 1.f / 3.f, -0.5f), 1.f);
    const float large = x > 20.f ? x : __logf(1.f + e);
    return x < -4.f ? small : large;
}
FUNCTION(log_sigmoid)(float x) { return minimum(x, 0.f) - log1pf(expf(-fabsf(x))); }
FUNCTION(mish)(float x) {  // with e = e^x: x tanh(log(1 + e)) = x (e^2 + 2e) / (e^2 + 2e + 2)
    const float most = minimum(x, 20.f), e = FAST_FUNCTIONS ? exp2_approximate(1.44269504f * most) : expf(most);
    const float n = e * (e + 2.f);
    return FAST_FUNCTIONS ? x * n * reciprocal_approximate(n + 2.f) : x * (n / (n + 2.f));
}
FUNCTION(hardsigmoid)(float x) { return clamp(x + 3.f, 0.f, 6.f) * (1.f / 6.f); }
FUNCTION(hardswish)(float x) { return x * hardsigmoid(x); }
FUNCTION(gelu)(float x) { return FAST_FUNCTIONS ? gelu_fitted(x) : gelu_fine(x); }
__device__ __forceinline__ void gelu_pair(float (&y)[2], float a, float b) {
    if (FAST_FUNCTIONS) over_powers(y, a, gelu_power(a), b, gelu_power(b));
    else y[0] = gelu(a), y[1] = gelu(b);
}
FUNCTION(gelu_tanh)(float x) { return FAST_FUNCTIONS ? ::gelu_tanh_by_exp2(x) : ::gelu_tanh(x); }
__device__ __forceinline__ void gelu_tanh_pair(float (&y)[2], float a, float b) {
    if (FAST_FUNCTIONS) over_powers(y, a, gelu_tanh_power(a), b, gelu_tanh_power(b));
    else y[0] = gelu_tanh(a), y[1] = gelu_tanh(b);
}

#undef FUNCTION

}  // namespace of
