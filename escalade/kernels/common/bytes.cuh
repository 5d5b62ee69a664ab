// Pairs of one-byte elements in the low half of a register, the first in the low byte.
#pragma once

#include "common/e4m3.cuh"
#include "common/s8.cuh"

template <class Byte>
__device__ __forceinline__ u32 pack_bytes(float low, float high);  // the high half is undefined
template <class Byte>
__device__ __forceinline__ float2 unpack_bytes(u32 two);  // ignores the high half

template <>
__device__ __forceinline__ u32 pack_bytes<e4m3>(float low, float high) { return to_e4m3x2(low, high); }
template <>
__device__ __forceinline__ float2 unpack_bytes<e4m3>(u32 two) {
    u32 pairs[2];
    e4m3x4_to_half2(pairs, two);
    return unpack_half2(pairs[0]);
}

template <>
__device__ __forceinline__ u32 pack_bytes<s8>(float low, float high) { return to_s8x2(low, high); }
template <>
__device__ __forceinline__ float2 unpack_bytes<s8>(u32 two) { return s8x2_to_floats(two); }
