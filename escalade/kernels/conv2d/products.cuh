// One step of a warpgroup's product, by the type of the operands: 32 bytes of k of 64 rows and all columns.
#pragma once

#include "common/e4m3.cuh"
#include "common/hopper.cuh"

template <class Element>
struct Product;

#ifdef __CUDA_FP16_H__
template <>
struct Product<__half> {
    template <int N>
    __device__ __forceinline__ static void add(float (&sums)[N], u64 rows, u64 columns, bool accumulate) {
        wgmma(sums, rows, columns, accumulate);
    }
};
#endif

#ifdef __CUDA_BF16_H__
template <>
struct Product<__nv_bfloat16> {
    template <int N>
    __device__ __forceinline__ static void add(float (&sums)[N], u64 rows, u64 columns, bool accumulate) {
        wgmma_bf16(sums, rows, columns, accumulate);
    }
};
#endif

template <>
struct Product<float> {  // as TF32
    template <int N>
    __device__ __forceinline__ static void add(float (&sums)[N], u64 rows, u64 columns, bool accumulate) {
        wgmma_tf32(sums, rows, columns, accumulate);
    }
};

template <>
struct Product<e4m3> {
    template <int N>
    __device__ __forceinline__ static void add(float (&sums)[N], u64 rows, u64 columns, bool accumulate) {
        wgmma_e4m3(sums, rows, columns, accumulate);
    }
};

// sums = rows * columns^T, or added to what they are.
template <class Element, int N>
__device__ __forceinline__ void multiply(float (&sums)[N], u64 rows, u64 columns, bool accumulate) {
    Product<Element>::add(sums, rows, columns, accumulate);
}
