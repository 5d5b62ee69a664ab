// Shared by the tensor-core kernels: an MMA over pixels in memory order, the epilogue to a part, and the bias gradient.
// A tile consists of boxes: rows of 64 filters or channels (128 bytes, swizzled), one per pixel.
#pragma once

#include "common/elements.cuh"
#include "common/ring.cuh"
#include "common/warp.cuh"

constexpr int BOX = 64;  // filters or channels
constexpr int ROW_BYTES = BOX * sizeof(Element);
static_assert(ROW_BYTES == 128, "a row is the swizzle span");
constexpr int STEP_PIXELS = 16;  // per MMA
constexpr int STEP_BYTES = STEP_PIXELS * ROW_BYTES;

// Prologue of every CTA: a ring whose stages `readers` warps release, and two tensor maps.
template <class Stages>
__device__ __forceinline__ void begin(const Stages& ring, u32 readers, const TensorMap& gradient_map,
                                      const TensorMap& x_map) {
    if (threadIdx.x == 0) {
        ring.init(readers);
        fence_barrier_init();
        prefetch_map(gradient_map);
        prefetch_map(x_map);
    }
    wait_for_previous_launch();
    __syncthreads();
}

// sums[64 filters][columns] += gradients * inputs over 16 pixels.
template <int COUNT>
__device__ __forceinline__ void multiply(float (&acc)[COUNT], u64 gradients, u64 inputs) {
    if constexpr (BF16) wgmma_bf16_transposed(acc, gradients, inputs, 1);
    else wgmma_transposed(acc, gradients, inputs, 1);
}

// Stores 64 filters x 64 channels of one tap: sums[FIRST] and the following 31. `to` is the first filter's first
// channel, filters are `pitch` apart; `filters` and `channels` bound those that exist. Four lanes store eight
// contiguous sums.
template <int FIRST, class To, int COUNT>
__device__ __forceinline__ void store_box(const float (&acc)[COUNT], To* to, long long pitch, int filters,
                                          int channels) {
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 % 4 * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + half * 8;
        if (row >= filters) continue;
#pragma unroll
        for (int block = 0; block < BOX / 8; ++block) {
            const int first = FIRST + block * 4 + half * 2;
            if (block * 8 < channels)  // a multiple of 8
                store_pack(to + row * pitch + block * 8 + column,
                           Pack<To, 2>{{from_float<To>(acc[first]), from_float<To>(acc[first + 1])}});
        }
    }
}

// A warp's sums over the pixels of a box of gradients: each lane has 8 filters of every fourth pixel.
struct BiasSums {
    float sums[8] = {};

    __device__ __forceinline__ void add(const unsigned char* box, int pixels) {
        const int lane = threadIdx.x % 32;
        for (int pixel = lane / 8; pixel < pixels; pixel += 4) {
            const unsigned char* row = box + pixel * ROW_BYTES;
            const auto pack = *reinterpret_cast<const Pack<Element, 8>*>(row + ((lane % 8 ^ pixel % 8) << 4));
#pragma unroll
            for (int e = 0; e < 8; ++e) sums[e] += to_float(pack.at[e]);
        }
    }

    // The first `filters` are stored.
    __device__ __forceinline__ void store(float* to, int filters) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            float sum = sums[e];
            sum += __shfl_xor_sync(ALL_LANES, sum, 8);
            sum += __shfl_xor_sync(ALL_LANES, sum, 16);
            if (lane < 8 && lane * 8 + e < filters) to[lane * 8 + e] = sum;
        }
    }
};
