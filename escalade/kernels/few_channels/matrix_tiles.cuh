// GEMM tile of 16 filters x 64 pixels by mma.sync, a CTA of four warps, independent of where the operands come from.
//
// Both tiles are stored as 32-bit words along k: one value rounded to TF32, or a pair of 16-bit values. In words, the
// fragments of m16n8k8 and m16n8k16 are alike. The prelude of the including file defines Product (float means TF32) and
// UNROLL.
#pragma once

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;     // problem.storage
using Product = float;     // product: type of the operands
constexpr int UNROLL = 1;  // unroll
#endif

#include "common/elements.cuh"
#include "common/mma_tile.cuh"

constexpr int TILE_FILTERS = 16;
constexpr int TILE_PIXELS = 64;
constexpr int TILE_WORDS = 16;
constexpr int WORD_VALUES = 4 / sizeof(Product);
constexpr int TILE_DEPTH = TILE_WORDS * WORD_VALUES;
constexpr int THREADS = 128;

struct Tiles {  // padded so that the lanes of a fragment hit different banks
    u32 weights[TILE_FILTERS][TILE_WORDS + 4];
    u32 values[TILE_WORDS][TILE_PIXELS + 8];
};

// Word `word` of the values value(k).
template <class Value>
__device__ __forceinline__ u32 word_of(int word, Value value) {
    if constexpr (WORD_VALUES == 1) {
        return to_tf32(value(word));
    } else {
        Pack<Product, 2> pair;
        pair.at[0] = from_float<Product>(value(2 * word));
        pair.at[1] = from_float<Product>(value(2 * word + 1));
        return reinterpret_cast<const u32&>(pair);
    }
}

// Fills the tiles from weight(filter, k), and value(k) of this thread's own pixel; k counts from the tile's start.
template <class Weight, class Value>
__device__ __forceinline__ void fill(Tiles& tiles, Weight weight, Value value) {
#pragma unroll UNROLL
    for (int i = threadIdx.x; i < TILE_FILTERS * TILE_WORDS; i += THREADS) {
        const int filter = i / TILE_WORDS;
        tiles.weights[filter][i % TILE_WORDS] = word_of(i % TILE_WORDS, [&](int k) { return weight(filter, k); });
    }
    const int pixel = threadIdx.x % TILE_PIXELS;
#pragma unroll UNROLL
    for (int word = threadIdx.x / TILE_PIXELS; word < TILE_WORDS; word += THREADS / TILE_PIXELS)
        tiles.values[word][pixel] = word_of(word, value);
}

// A warp has 16 of the pixels: two blocks of eight columns.
__device__ __forceinline__ void multiply(float (&acc)[2][4], const Tiles& tiles) {
    const int group = threadIdx.x % 32 / 4, member = threadIdx.x % 4;
    const int first = threadIdx.x / 32 * 16;
#pragma unroll UNROLL
    for (int step = 0; step < TILE_WORDS; step += 8) {
        const u32 a[4] = {tiles.weights[group][step + member], tiles.weights[group + 8][step + member],
                          tiles.weights[group][step + member + 4], tiles.weights[group + 8][step + member + 4]};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const u32 b[2] = {tiles.values[step + member][first + j * 8 + group],
                              tiles.values[step + member + 4][first + j * 8 + group]};
            multiply_add<Product>(acc[j], a, b);
        }
    }
}

// Calls store(filter, pixel, sum) for every sum of this lane; both indices are relative to the tile.
template <class Store>
__device__ __forceinline__ void for_each_accumulator(const float (&acc)[2][4], Store store) {
    const int group = threadIdx.x % 32 / 4, member = threadIdx.x % 4;
    const int first = threadIdx.x / 32 * 16;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) store(group + e / 2 * 8, first + j * 8 + member * 2 + e % 2, acc[j][e]);
}
