// Staging of images as operands in smem: copied, converted if the stored type differs, and checked for non-finite
// values.
#pragma once

#include "common/halves.cuh"
#include "common/pairs.cuh"
#include "common/warp.cuh"
#include "few_channels/tensor_core_tile.cuh"

template <int BYTES>
__device__ __forceinline__ void copy_async(u32 shared, const void* global, bool inside) {
    if constexpr (BYTES == 16) copy_async_16(shared, global, inside);
    if constexpr (BYTES == 8) copy_async_8(shared, global, inside);
    if constexpr (BYTES == 4) copy_async_4(shared, global, inside);
}

// Copies `images` images from `first` on, as stored; zeros in their padding and for missing images.
__device__ __forceinline__ void fetch(Source* staged, const Source* __restrict__ x, long long first, int images) {
    x += first * IMAGE;
    if constexpr (COPY_BYTES > 0) {
        const char* source = reinterpret_cast<const char*>(x);
        const int bytes = images * IMAGE * static_cast<int>(sizeof(Source));
        const u32 target = shared_address(staged);
#pragma unroll 1
        for (int at = threadIdx.x * COPY_BYTES; at < STAGED * static_cast<int>(sizeof(Source));
             at += THREADS * COPY_BYTES) {
            if (at >= bytes || at + COPY_BYTES <= bytes) {
                const int to = DIRECT ? operand_at(at / 2) * 2 : at;
                copy_async<COPY_BYTES>(target + to, source + at, at < bytes);
            } else {  // an odd number of images may end inside a copy
                const int end = (at + COPY_BYTES) / sizeof(Source);
#pragma unroll 1
                for (int i = at / sizeof(Source); i < end; ++i)
                    staged[DIRECT ? operand_at(i) : i] = i < images * IMAGE ? x[i] : Source(0.f);
            }
        }
        copy_async_commit();
    } else {
#pragma unroll 1
        for (int at = threadIdx.x; at < STAGED; at += THREADS) {
            const int c = at % PIXEL, column = at / PIXEL % STAGED_WIDTH - PAD_W;
            const int row = at / PIXEL / STAGED_WIDTH % STAGED_HEIGHT - PAD_H, image = at / STAGED_IMAGE;
            const bool exists = image < images && row >= 0 && row < HEIGHT && column >= 0 && column < WIDTH;
            const int pixel = row * WIDTH + column;
            staged[DIRECT ? operand_at(at) : at] =
                exists && c < CHANNELS
                    ? x[image * IMAGE + (NHWC ? pixel * CHANNELS + c : c * HEIGHT * WIDTH + pixel)]
                    : Source(0.f);
        }
    }
}

// Last exponent bit of two packed operands.
template <class T>
constexpr u32 LAST_EXPONENT_BITS = 0;
#ifdef __CUDA_FP16_H__
template <>
constexpr u32 LAST_EXPONENT_BITS<__half> = 0x04000400;
#endif
#ifdef __CUDA_BF16_H__
template <>
constexpr u32 LAST_EXPONENT_BITS<__nv_bfloat16> = 0x00800080;
#endif

// Detects infinite or NaN operands: their exponent is all ones, and adding one carries into the sign.
struct NonFiniteCheck {
    u32 carries = 0;
    __device__ __forceinline__ void add(u32 pair) { carries |= (pair & 0x7FFF7FFF) + LAST_EXPONENT_BITS<Operand>; }
    __device__ __forceinline__ bool found() const { return carries & 0x80008000; }
};

// True if this thread's part of a staged tile is not finite.
__device__ __forceinline__ bool inspect(const Operand* operands) {
    NonFiniteCheck check;
#pragma unroll 2
    for (int at = threadIdx.x * 8; at < OPERANDS; at += THREADS * 8) {
        const Pack<u32, 4> four = load_pack<u32, 4>(reinterpret_cast<const u32*>(operands + at));
#pragma unroll
        for (int i = 0; i < 4; ++i) check.add(four.at[i]);
    }
    return check.found();
}

// Converts a tile; true if it is not finite.
__device__ __forceinline__ bool convert(Operand* operands, const Source* staged) {
    NonFiniteCheck check;
#pragma unroll 2
    for (int at = threadIdx.x * 4; at < STAGED; at += THREADS * 4) {
        const Pack<Source, 4> four = load_pack<Source, 4>(staged + at);
        Pack<u32, 2> pairs;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            pairs.at[i] = pack_pair<Operand>(to_float(four.at[2 * i]), to_float(four.at[2 * i + 1]));
            check.add(pairs.at[i]);
        }
        store_pack(reinterpret_cast<u32*>(operands + operand_at(at)), pairs);
    }
    return check.found();
}

// Converts to upper, then lower halves; returns the scaling exponent, or NOT_FINITE.
__device__ __forceinline__ int convert_split(Operand* operands, const Source* staged) {
    __shared__ u32 warp_largest[WARPS];
    const int thread = thread_number();
    u32 largest = 0;
#pragma unroll 2
    for (int at = thread * 4; at < STAGED; at += THREADS * 4) {
        const Pack<Source, 4> four = load_pack<Source, 4>(staged + at);
#pragma unroll
        for (int i = 0; i < 4; ++i) largest = max(largest, __float_as_uint(to_float(four.at[i])) & 0x7FFFFFFF);
    }
    largest = warp_max(largest);
    if (thread % 32 == 0) warp_largest[thread / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; ++i) largest = max(largest, warp_largest[i]);
    const int exponent = scaling_exponent(largest);
    const float scale = power_of_two(exponent);
#pragma unroll 2
    for (int at = thread * 4; at < STAGED; at += THREADS * 4) {
        const Pack<Source, 4> four = load_pack<Source, 4>(staged + at);
        Pack<u32, 2> upper, lower;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Halves halves = split(to_float(four.at[2 * i]) * scale, to_float(four.at[2 * i + 1]) * scale);
            upper.at[i] = halves.upper, lower.at[i] = halves.lower;
        }
        store_pack(reinterpret_cast<u32*>(operands + operand_at(at)), upper);
        store_pack(reinterpret_cast<u32*>(operands + BUFFER + operand_at(at)), lower);
    }
    return largest < INFINITY_BITS ? exponent : NOT_FINITE;
}

// True if the power of two that unscales a sum is a normal number; false also for filters with a non-finite weight.
__device__ __forceinline__ bool in_range(int tile_exponent, const int* exponents) {
    bool in_range = true;
#pragma unroll 1
    for (int f = thread_number(); f < FILTERS; f += THREADS) in_range &= abs(tile_exponent + exponents[f]) <= 126;
    return in_range;
}
