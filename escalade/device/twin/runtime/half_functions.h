// Device-only functions of NVIDIA's header for a 16-bit type. Included with these macros set:
//   TWIN_T, TWIN_T2 the type and its pair; TWIN_TO(x) to float; TWIN_FROM(x) from float, rounding to nearest.
// Products of two such values are exact in double, so that a fused multiply-add rounds as the card's does (but for
// ties that the sum in double already rounded away).

inline TWIN_T __hfma(TWIN_T a, TWIN_T b, TWIN_T c) {
    return TWIN_FROM_DOUBLE(double(TWIN_TO(a)) * TWIN_TO(b) + TWIN_TO(c));
}
inline TWIN_T2 __hfma2(TWIN_T2 a, TWIN_T2 b, TWIN_T2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
inline TWIN_T __hfma_relu(TWIN_T a, TWIN_T b, TWIN_T c) {
    const TWIN_T value = __hfma(a, b, c);
    return TWIN_TO(value) < 0.f ? TWIN_FROM(0.f) : value;
}
inline TWIN_T2 __hfma2_relu(TWIN_T2 a, TWIN_T2 b, TWIN_T2 c) {
    return {__hfma_relu(a.x, b.x, c.x), __hfma_relu(a.y, b.y, c.y)};
}

#define TWIN_UNARY(name, expression)                          \
    inline TWIN_T h##name(TWIN_T a) {                         \
        const float v = TWIN_TO(a);                           \
        return TWIN_FROM(expression);                         \
    }                                                         \
    inline TWIN_T2 h2##name(TWIN_T2 a) { return {h##name(a.x), h##name(a.y)}; }
TWIN_UNARY(sqrt, std::sqrt(v))
TWIN_UNARY(rsqrt, rsqrtf(v))
TWIN_UNARY(rcp, 1.f / v)
TWIN_UNARY(log, std::log(v))
TWIN_UNARY(log2, std::log2(v))
TWIN_UNARY(log10, std::log10(v))
TWIN_UNARY(exp, std::exp(v))
TWIN_UNARY(exp2, std::exp2(v))
TWIN_UNARY(tanh, std::tanh(v))
TWIN_UNARY(cos, std::cos(v))
TWIN_UNARY(sin, std::sin(v))
TWIN_UNARY(trunc, std::trunc(v))
TWIN_UNARY(ceil, std::ceil(v))
TWIN_UNARY(floor, std::floor(v))
TWIN_UNARY(rint, std::nearbyint(v))
#undef TWIN_UNARY

inline TWIN_T atomicAdd(TWIN_T* address, TWIN_T value, TWIN_WHERE) {
    return twin::atomic_update(address, [&](TWIN_T old) { return TWIN_FROM(TWIN_TO(old) + TWIN_TO(value)); }, twin::Scope::device, where);
}
inline TWIN_T2 atomicAdd(TWIN_T2* address, TWIN_T2 value, TWIN_WHERE) {
    return {atomicAdd(&address->x, value.x, where), atomicAdd(&address->y, value.y, where)};
}
