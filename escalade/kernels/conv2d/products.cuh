// One k-step of a warpgroup MMA, by operand type: 64 rows, all columns, 32 bytes of k.
//
// A K-major operand has 128 bytes of k per row or column of the MMA. An MN-major operand (16-bit elements) has 128
// bytes per k: blocks of 64 k by 64 rows or columns, one after another. Both occupy the same bytes.
#pragma once

#include "common/bytes.cuh"
#include "common/hopper.cuh"

enum class MNMajor { none, rows, columns };  // the MN-major operand of the MMA

template <bool MN_MAJOR>
__device__ __forceinline__ u64 k_tile_descriptor(u32 address) {
    return MN_MAJOR ? transposed_descriptor(address, 64 * 128) : operand_descriptor(address);
}
template <bool MN_MAJOR>
constexpr int STEP = (MN_MAJOR ? 16 * 128 : 32) >> 4;  // descriptor increment per k-step

template <class Element>
struct Product;

#ifdef __CUDA_FP16_H__
template <>
struct Product<__half> {
    template <MNMajor MN_MAJOR, int N>
    __device__ __forceinline__ static void add(float (&acc)[N], u64 rows, u64 columns, bool accumulate) {
        if constexpr (MN_MAJOR == MNMajor::rows) wgmma_rows_transposed(acc, rows, columns, accumulate);
        else if constexpr (MN_MAJOR == MNMajor::columns) wgmma_columns_transposed(acc, rows, columns, accumulate);
        else wgmma(acc, rows, columns, accumulate);
    }
};
#endif

#ifdef __CUDA_BF16_H__
template <>
struct Product<__nv_bfloat16> {
    template <MNMajor MN_MAJOR, int N>
    __device__ __forceinline__ static void add(float (&acc)[N], u64 rows, u64 columns, bool accumulate) {
        if constexpr (MN_MAJOR == MNMajor::rows) wgmma_bf16_rows_transposed(acc, rows, columns, accumulate);
        else if constexpr (MN_MAJOR == MNMajor::columns) wgmma_bf16_columns_transposed(acc, rows, columns, accumulate);
        else wgmma_bf16(acc, rows, columns, accumulate);
    }
};
#endif

template <>
struct Product<float> {  // as TF32
    template <MNMajor MN_MAJOR, int N>
    __device__ __forceinline__ static void add(float (&acc)[N], u64 rows, u64 columns, bool accumulate) {
        static_assert(MN_MAJOR == MNMajor::none);
        wgmma_tf32(acc, rows, columns, accumulate);
    }
};

template <>
struct Product<e4m3> {
    template <MNMajor MN_MAJOR, int N>
    __device__ __forceinline__ static void add(float (&acc)[N], u64 rows, u64 columns, bool accumulate) {
        static_assert(MN_MAJOR == MNMajor::none);
        wgmma_e4m3(acc, rows, columns, accumulate);
    }
};

template <>
struct Product<s8> {
    template <MNMajor MN_MAJOR, int N>
    __device__ __forceinline__ static void add(int (&acc)[N], u64 rows, u64 columns, bool accumulate) {
        static_assert(MN_MAJOR == MNMajor::none);
        wgmma_s8(acc, rows, columns, accumulate);
    }
};

// acc = rows * columns^T, or acc += it.
template <class Element, MNMajor MN_MAJOR = MNMajor::none, int N>
__device__ __forceinline__ void multiply(typename SumOf<Element>::Type (&acc)[N], u64 rows, u64 columns, bool accumulate) {
    Product<Element>::template add<MN_MAJOR>(acc, rows, columns, accumulate);
}
