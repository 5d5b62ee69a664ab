// Pairs of 16-bit elements in one register, the first in the low half: operands of tensor cores.
#pragma once

#include "common/ptx.cuh"

template <class Element>
__device__ __forceinline__ u32 pack_pair(float low, float high);
template <class Element>
__device__ __forceinline__ float2 unpack_pair(u32 pair);

#ifdef __CUDA_FP16_H__
template <>
__device__ __forceinline__ u32 pack_pair<__half>(float low, float high) { return pack_half2(low, high); }
template <>
__device__ __forceinline__ float2 unpack_pair<__half>(u32 pair) { return unpack_half2(pair); }
#endif

#ifdef __CUDA_BF16_H__
template <>
__device__ __forceinline__ u32 pack_pair<__nv_bfloat16>(float low, float high) { return pack_bfloat2(low, high); }
// A bfloat16 is the upper half of the fp32 of the same value.
template <>
__device__ __forceinline__ float2 unpack_pair<__nv_bfloat16>(u32 pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000)};
}
#endif
