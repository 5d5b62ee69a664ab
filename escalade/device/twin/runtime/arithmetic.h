// CUDA's arithmetic that needs no header. Fast approximations (__expf and similar) are computed exactly, so the effects
// of their error do not show here.
#pragma once

#include "language.h"

#include <bit>
#include <ctime>

// ------------------------------------------------------------------ loads and stores with a cache hint

#define TWIN_LOAD(name) \
    template <class T> __forceinline__ T name(const T* address) { return *address; }
#define TWIN_STORE(name) \
    template <class T> __forceinline__ void name(T* address, std::type_identity_t<T> value) { *address = value; }
TWIN_LOAD(__ldg)
TWIN_LOAD(__ldcg)
TWIN_LOAD(__ldca)
TWIN_LOAD(__ldcs)
TWIN_LOAD(__ldlu)
TWIN_LOAD(__ldcv)
TWIN_STORE(__stwb)
TWIN_STORE(__stcg)
TWIN_STORE(__stcs)
TWIN_STORE(__stwt)
#undef TWIN_LOAD
#undef TWIN_STORE

// ------------------------------------------------------------------ integers

// Mixed signedness converts to unsigned, as in CUDA's overloads.
template <class A, class B>
    requires(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>)
constexpr auto min(A a, B b) -> std::common_type_t<A, B> {
    typedef std::common_type_t<A, B> T;
    if constexpr (std::is_floating_point_v<T>) return std::fmin(T(a), T(b));
    else return T(a) < T(b) ? T(a) : T(b);
}
template <class A, class B>
    requires(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>)
constexpr auto max(A a, B b) -> std::common_type_t<A, B> {
    typedef std::common_type_t<A, B> T;
    if constexpr (std::is_floating_point_v<T>) return std::fmax(T(a), T(b));
    else return T(a) < T(b) ? T(b) : T(a);
}

inline int __popc(unsigned v) { return std::popcount(v); }
inline int __popcll(unsigned long long v) { return std::popcount(v); }
inline int __clz(int v) { return std::countl_zero(unsigned(v)); }
inline int __clzll(long long v) { return std::countl_zero((unsigned long long)(v)); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline unsigned __brev(unsigned v) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; ++bit) reversed |= (v >> bit & 1) << (31 - bit);
    return reversed;
}
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
inline int __mul24(int a, int b) { return (a << 8 >> 8) * (b << 8 >> 8); }
inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xFFFFFF) * (b & 0xFFFFFF); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return unsigned(((unsigned long long)high << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return unsigned(((unsigned long long)high << 32 | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned choice = selector >> 4 * i & 15;
        unsigned byte = unsigned(bytes >> 8 * (choice & 7)) & 255;
        if (choice & 8) byte = byte & 128 ? 255 : 0;  // the sign, replicated
        result |= byte << 8 * i;
    }
    return result;
}
inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 4; ++i) sum += int(int8_t(a >> 8 * i)) * int(int8_t(b >> 8 * i));
    return sum;
}

// ------------------------------------------------------------------ floats

template <class To, class From>
__forceinline__ To twin_bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    return __builtin_bit_cast(To, value);
}
inline int __float_as_int(float v) { return twin_bits<int>(v); }
inline unsigned __float_as_uint(float v) { return twin_bits<unsigned>(v); }
inline float __int_as_float(int v) { return twin_bits<float>(v); }
inline float __uint_as_float(unsigned v) { return twin_bits<float>(v); }
inline long long __double_as_longlong(double v) { return twin_bits<long long>(v); }
inline double __longlong_as_double(long long v) { return twin_bits<double>(v); }

inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
// A cast between the operation and its use keeps g++ from contracting it: that is what _rn promises.
inline float __fadd_rn(float a, float b) { volatile float r = a + b; return r; }
inline float __fsub_rn(float a, float b) { volatile float r = a - b; return r; }
inline float __fmul_rn(float a, float b) { volatile float r = a * b; return r; }
inline double __dadd_rn(double a, double b) { volatile double r = a + b; return r; }
inline double __dsub_rn(double a, double b) { volatile double r = a - b; return r; }
inline double __dmul_rn(double a, double b) { volatile double r = a * b; return r; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float v) { return 1.f / v; }
inline float __fsqrt_rn(float v) { return std::sqrt(v); }
inline float __frsqrt_rn(float v) { return float(1. / std::sqrt(double(v))); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float v) { return v > 0.f ? (v < 1.f ? v : 1.f) : 0.f; }
inline float rsqrtf(float v) { return float(1. / std::sqrt(double(v))); }
inline double rsqrt(double v) { return 1. / std::sqrt(v); }
inline float rsqrt(float v) { return rsqrtf(v); }
inline float __expf(float v) { return std::exp(v); }
inline float __exp10f(float v) { return std::pow(10.f, v); }
inline float __logf(float v) { return std::log(v); }
inline float __log2f(float v) { return std::log2(v); }
inline float __log10f(float v) { return std::log10(v); }
inline float __powf(float a, float b) { return std::pow(a, b); }
inline float __sinf(float v) { return std::sin(v); }
inline float __cosf(float v) { return std::cos(v); }
inline float __tanf(float v) { return std::tan(v); }
inline void __sincosf(float v, float* sine, float* cosine) { *sine = std::sin(v), *cosine = std::cos(v); }

namespace twin {

// sin(pi v) and cos(pi v), exact at multiples of a half.
inline void sincospi(double v, double& sine, double& cosine) {
    const double turned = std::remainder(v, 2.);  // in [-1, 1]
    const double quarter = std::nearbyint(2. * turned), rest = (turned - quarter / 2.) * 3.14159265358979323846;
    const double s = std::sin(rest), c = std::cos(rest);
    switch (int(quarter) & 3) {
        case 0: sine = s, cosine = c; break;
        case 1: sine = c, cosine = -s; break;
        case 2: sine = -s, cosine = -c; break;
        default: sine = -c, cosine = s; break;
    }
}

}  // namespace twin

inline void sincospi(double v, double* sine, double* cosine) { twin::sincospi(v, *sine, *cosine); }
inline void sincospif(float v, float* sine, float* cosine) {
    double s, c;
    twin::sincospi(v, s, c);
    *sine = float(s), *cosine = float(c);
}
inline float sinpif(float v) { float s, c; sincospif(v, &s, &c); return s; }
inline float cospif(float v) { float s, c; sincospif(v, &s, &c); return c; }
inline float normcdff(float v) { return .5f * std::erfc(-v * 0.70710678118654752f); }

inline int __float2int_rn(float v) { return int(std::nearbyint(v)); }
inline int __float2int_rz(float v) { return int(v); }
inline int __float2int_rd(float v) { return int(std::floor(v)); }
inline int __float2int_ru(float v) { return int(std::ceil(v)); }
inline unsigned __float2uint_rn(float v) { return unsigned(std::nearbyint(v)); }
inline unsigned __float2uint_rz(float v) { return unsigned(v); }
inline float __int2float_rn(int v) { return float(v); }
inline float __uint2float_rn(unsigned v) { return float(v); }
inline float __double2float_rn(double v) { return float(v); }

// ------------------------------------------------------------------ time

// Not by <chrono>, which alone took as long to compile as all the other headers.
inline long long clock64() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}
inline clock_t clock() { return clock_t(clock64()); }
