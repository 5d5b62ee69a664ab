// A warp's share of a GEMM on mma.sync: operands from smem, accumulators in registers.
//
// Both operands are in smem as rows of ROW_BYTES along k (a: output rows, b: output columns), in 16-byte chunks. One
// k-step takes 32 bytes of every row: 32 8-bit, 16 16-bit or 8 32-bit elements; ldmatrix distributes the registers
// alike.
#pragma once

#include "common/e4m3.cuh"
#include "common/ptx.cuh"

constexpr int STEP_BYTES = 32;

// Offset of a byte of a row in a tile. Chunks are XOR-permuted so that the same chunk of eight rows, which one phase of
// ldmatrix reads, covers all 32 banks; rows that share a 128-byte line differ anyway.
template <int ROW_BYTES>
__device__ __forceinline__ u32 swizzled(int row, int byte) {
    constexpr int ROWS_IN_LINE = 128 / ROW_BYTES;
    constexpr int CHUNKS = ROW_BYTES / 16;
    const int chunk = (byte / 16) ^ (row / ROWS_IN_LINE % CHUNKS);
    return row * ROW_BYTES + chunk * 16 + byte % 16;
}

template <class Element>
__device__ __forceinline__ void multiply_add(float (&acc)[4], const u32 (&a)[4], const u32 (&b)[2]);
template <>
__device__ __forceinline__ void multiply_add<float>(float (&acc)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    mma_m16n8k8_tf32(acc, a, b);
}
#ifdef __CUDA_FP16_H__
template <>
__device__ __forceinline__ void multiply_add<__half>(float (&acc)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    mma_m16n8k16_f16(acc, a, b);
}
#endif
#ifdef __CUDA_BF16_H__
template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&acc)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    mma_m16n8k16_bf16(acc, a, b);
}
#endif

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
template <>
__device__ __forceinline__ void multiply_add<e4m3>(float (&acc)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    mma_m16n8k32_e4m3(acc, a, b);
}
#else
// mma.sync on sm_90 does not take e4m3 natively; what ptxas emits for it accumulates twice. So pairs are widened to
// fp16, which is exact: the low pairs of all registers are the operands of one MMA, the high pairs of another.
template <>
__device__ __forceinline__ void multiply_add<e4m3>(float (&acc)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    u32 wide_a[2][4], wide_b[2][2];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        u32 pairs[2];
        e4m3x4_to_half2(pairs, a[e]);
        wide_a[0][e] = pairs[0], wide_a[1][e] = pairs[1];
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        u32 pairs[2];
        e4m3x4_to_half2(pairs, b[e]);
        wide_b[0][e] = pairs[0], wide_b[1][e] = pairs[1];
    }
    mma_m16n8k16_f16(acc, wide_a[0], wide_b[0]);
    mma_m16n8k16_f16(acc, wide_a[1], wide_b[1]);
}
#endif

// Operands of one k-step: TILES_M blocks of 16 rows by TILES_N blocks of 8 columns.
template <int TILES_M, int TILES_N>
struct Fragments {
    u32 a[TILES_M][4];
    u32 b[TILES_N][2];

    // Addresses from `fragment_address_a` and `_b` of this step.
    template <int ROW_BYTES>
    __device__ __forceinline__ void load(u32 address_a, u32 address_b) {
#pragma unroll
        for (int i = 0; i < TILES_M; ++i) load_matrices(a[i], address_a + i * 16 * ROW_BYTES);
#pragma unroll
        for (int j = 0; j < TILES_N; j += 2) {
            u32 two_blocks[4];
            load_matrices(two_blocks, address_b + j * 8 * ROW_BYTES);
            b[j][0] = two_blocks[0], b[j][1] = two_blocks[1];
            b[j + 1][0] = two_blocks[2], b[j + 1][1] = two_blocks[3];
        }
    }

    __device__ __forceinline__ void round_to_tf32() {
#pragma unroll
        for (int i = 0; i < TILES_M; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) a[i][e] = to_tf32(__uint_as_float(a[i][e]));
#pragma unroll
        for (int j = 0; j < TILES_N; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) b[j][e] = to_tf32(__uint_as_float(b[j][e]));
    }
};

// A lane's ldmatrix row address at step 0; step i is this address ^ (i * STEP_BYTES), because the swizzle is an XOR of
// chunks and tiles start on lines. The permutation repeats every 16 rows.
template <int ROW_BYTES>
__device__ __forceinline__ u32 fragment_address_a(u32 tile, int first_row, int lane) {
    return tile + swizzled<ROW_BYTES>(first_row + lane % 16, lane / 16 * 16);
}

template <int ROW_BYTES>
__device__ __forceinline__ u32 fragment_address_b(u32 tile, int first_row, int lane) {
    return tile + swizzled<ROW_BYTES>(first_row + lane / 16 * 8 + lane % 8, lane / 8 % 2 * 16);
}

template <class Element, int TILES_M, int TILES_N>
__device__ __forceinline__ void multiply_add(float (&acc)[TILES_M][TILES_N][4], const u32 (&a)[TILES_M][4],
                                             const u32 (&b)[TILES_N][2]) {
#pragma unroll
    for (int i = 0; i < TILES_M; ++i)
#pragma unroll
        for (int j = 0; j < TILES_N; ++j) {
            // Odd rows of blocks run backwards, so that consecutive MMAs share a b fragment.
            const int column = i % 2 ? TILES_N - 1 - j : j;
            multiply_add<Element>(acc[i][column], a[i], b[column]);
        }
}

// fp32 operands with fp32 accuracy: each is the sum of two TF32 numbers; of the four products, low * low, below the
// last bit of the others, is omitted. An infinity has no low part: its sums become NaN.
__device__ __forceinline__ u32 split_off_low(u32& bits) {
    const float value = __uint_as_float(bits);
    bits = to_tf32(value);
    return to_tf32(value - __uint_as_float(bits));
}

// Fewer instructions: tensor cores ignore what is below TF32 in the low part, so it is truncated, not rounded. Its sign
// is random, so there is no bias. A NaN stays NaN at least in the low part.
__device__ __forceinline__ u32 split_off_low_fast(u32& bits) {
    const float value = __uint_as_float(bits);
    bits = (bits + 0x1000) & 0xFFFFE000;
    return __float_as_uint(value - __uint_as_float(bits));
}

template <int TILES_M, int TILES_N>
__device__ __forceinline__ void multiply_add_split(float (&acc)[TILES_M][TILES_N][4],
                                                   Fragments<TILES_M, TILES_N>& high) {
    u32 low_b[TILES_N][2];
#pragma unroll
    for (int j = 0; j < TILES_N; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) low_b[j][e] = split_off_low(high.b[j][e]);
#pragma unroll
    for (int i = 0; i < TILES_M; ++i) {
        u32 low_a[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) low_a[e] = split_off_low(high.a[i][e]);
#pragma unroll
        for (int j = 0; j < TILES_N; ++j) multiply_add<float>(acc[i][j], low_a, high.b[j]);
#pragma unroll
        for (int j = 0; j < TILES_N; ++j) multiply_add<float>(acc[i][j], high.a[i], low_b[j]);
#pragma unroll
        for (int j = 0; j < TILES_N; ++j) multiply_add<float>(acc[i][j], high.a[i], high.b[j]);
    }
}
