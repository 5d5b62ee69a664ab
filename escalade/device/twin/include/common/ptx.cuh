// The instructions of escalade/kernels/common/ptx.cuh as CPU functions: same names, same meaning. What they
// do is in runtime/matrices.cpp and runtime/async.cpp.
//
// A shared-memory address is an offset in the block's shared memory, so swizzles see the same low bits as on
// the card.
#pragma once

#include "atomics.h"
#include "collectives.h"

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

namespace twin {

void copy_async(u32 shared, const void* global, u32 bytes, bool inside, Where where);
void copy_async_close_group();
void copy_async_wait_groups(u32 pending);
void wait_for_launch_in_front();

enum class Element { f16, bf16, tf32, e4m3, s8 };

namespace wait {

void load_matrices(u32 row, u32* values, int count, bool transposed, Where where);
void store_matrices(u32 row, const u32* values, int count, bool transposed, Where where);
void multiply(Element element, float* d, const u32* a, const u32* b, Where where);

}  // namespace wait

void* shared_part(void* start, size_t count, size_t element_bytes, Where where);
}  // namespace twin

inline u32 shared_address(const void* pointer, TWIN_WHERE) { return twin::shared_offset(pointer, where); }

constexpr u32 REST = ~0u;
#ifdef TWIN_CHECKS
template <class T>
T* shared_part(T* start, unsigned count, TWIN_WHERE) {
    return static_cast<T*>(twin::shared_part(start, count, sizeof(T), where));
}
#else
template <class T>
T* shared_part(T* start, unsigned) { return start; }
#endif

// ------------------------------------------------------------------ cp.async

inline void copy_async_4(u32 shared, const void* global, bool inside, TWIN_WHERE) {
    twin::copy_async(shared, global, 4, inside, where);
}
inline void copy_async_8(u32 shared, const void* global, bool inside, TWIN_WHERE) {
    twin::copy_async(shared, global, 8, inside, where);
}
inline void copy_async_16(u32 shared, const void* global, bool inside, TWIN_WHERE) {
    twin::copy_async(shared, global, 16, inside, where);
}
inline void copy_async_commit() { twin::copy_async_close_group(); }
template <int PENDING>
void copy_async_wait() { twin::copy_async_wait_groups(PENDING); }

// ------------------------------------------------------------------ 8x8 matrices of 16-bit elements

template <size_t COUNT>
void load_matrices(u32 (&r)[COUNT], u32 row_address, TWIN_WHERE) {
    static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4);
    twin::wait::load_matrices(row_address, r, COUNT, false, where);
}
template <size_t COUNT>
void load_matrices_transposed(u32 (&r)[COUNT], u32 row_address, TWIN_WHERE) {
    static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4);
    twin::wait::load_matrices(row_address, r, COUNT, true, where);
}
template <size_t COUNT>
void store_matrices(u32 row_address, const u32 (&r)[COUNT], TWIN_WHERE) {
    static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4);
    twin::wait::store_matrices(row_address, r, COUNT, false, where);
}
template <size_t COUNT>
void store_matrices_transposed(u32 row_address, const u32 (&r)[COUNT], TWIN_WHERE) {
    static_assert(COUNT == 1 || COUNT == 2 || COUNT == 4);
    twin::wait::store_matrices(row_address, r, COUNT, true, where);
}

// ------------------------------------------------------------------ mma: d += a * b

inline void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], TWIN_WHERE) {
    twin::wait::multiply(twin::Element::f16, d, a, b, where);
}
inline void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], TWIN_WHERE) {
    twin::wait::multiply(twin::Element::bf16, d, a, b, where);
}
inline void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], TWIN_WHERE) {
    twin::wait::multiply(twin::Element::tf32, d, a, b, where);
}
inline void mma_m16n8k32_e4m3(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], TWIN_WHERE) {
    twin::wait::multiply(twin::Element::e4m3, d, a, b, where);
}

// Rounds to nearest, ties away from zero; a NaN becomes the canonical one, as cvt.rna does.
inline u32 to_tf32(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7F800000) == 0x7F800000) return bits & 0x007FFFFF ? 0x7FFFFFFF : bits;
    return (bits + 0x1000) & ~0x1FFFu;
}

// ------------------------------------------------------------------ fp16 pairs

namespace twin {

#if defined(__aarch64__)
typedef __fp16 Half;
#else
typedef _Float16 Half;
#endif

}  // namespace twin

inline u32 pack_half2(float low, float high) {
    return __builtin_bit_cast(u16, twin::Half(low)) | u32(__builtin_bit_cast(u16, twin::Half(high))) << 16;
}
inline float2 unpack_half2(u32 packed) {
    return {float(__builtin_bit_cast(twin::Half, u16(packed))),
            float(__builtin_bit_cast(twin::Half, u16(packed >> 16)))};
}

inline void store_if(bool wanted, float* start, int at, float value) {
    if (wanted) start[at] = value;
}
inline float load_if(bool wanted, const float* start, int at) { return wanted ? start[at] : 0.f; }
inline void store_16(void* global, uint4 value) { *static_cast<uint4*>(global) = value; }

// ------------------------------------------------------------------ bfloat16 pairs

namespace twin {

inline u32 to_bfloat16(float value) {  // to nearest, ties to even; a NaN becomes the canonical one, as in cvt.rn
    const u32 bits = __builtin_bit_cast(u32, value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

}  // namespace twin

inline u32 pack_bfloat2(float low, float high) {
    return twin::to_bfloat16(low) | twin::to_bfloat16(high) << 16;
}

// ------------------------------------------------------------------ e4m3: s eeee mmm, no infinities, 0x7F is NaN

namespace twin {

inline unsigned char to_e4m3(float value) {
    u32 bits = __builtin_bit_cast(u32, value);
    const u32 sign = bits >> 24 & 0x80;
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000) return 0x7F;
    if (bits >= 0x43E00000) return sign | 0x7E;  // 448 and beyond
    if (bits < 0x3C800000) {                     // below 2^-6 in steps of 2^-9: adding 2^14 rounds to them
        const float magnitude = __builtin_bit_cast(float, bits) + 16384.f;
        return sign | (__builtin_bit_cast(u32, magnitude) & 0xFF);
    }
    bits += 0x7FFFF + (bits >> 20 & 1);  // to nearest, ties to even
    return sign | ((bits >> 20) - (120 << 3));
}
inline float from_e4m3(unsigned char code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 0x7F) == 0x7F) return __builtin_nanf("");
    const float magnitude = exponent ? __builtin_bit_cast(float, u32(exponent + 120) << 23 | u32(mantissa) << 20)
                                     : mantissa / 512.f;
    return code & 0x80 ? -magnitude : magnitude;
}

}  // namespace twin

inline u16 to_e4m3x2(float low, float high) { return twin::to_e4m3(low) | twin::to_e4m3(high) << 8; }
inline void e4m3x4_to_half2(u32 (&pairs)[2], u32 four) {
    for (int i = 0; i < 2; ++i, four >>= 16)
        pairs[i] = pack_half2(twin::from_e4m3(four & 0xFF), twin::from_e4m3(four >> 8 & 0xFF));
}

inline float max_nan(float a, float b) { return b > a || b != b ? b : a; }

// ------------------------------------------------------------------ the special-function unit: exact here

inline float exp2_approximate(float value) { return exp2f(value); }
inline float reciprocal_approximate(float value) { return 1.f / value; }
inline float tanh_approximate(float value) { return tanhf(value); }

inline int thread_number() { return static_cast<int>(threadIdx.x); }

inline int anew(int value) { return value; }

inline u32 take_ticket(u32* count, u32 blocks, TWIN_WHERE) {
    twin::fence(twin::Scope::device);
    return atomicInc(count, blocks - 1, where);
}

// ------------------------------------------------------------------ programmatic dependent launch

// Launches run one after another here, so the previous launch has always finished; the checks require the waits anyway.
inline void wait_for_previous_launch() { twin::wait_for_launch_in_front(); }
inline void let_next_launch_start() {}
