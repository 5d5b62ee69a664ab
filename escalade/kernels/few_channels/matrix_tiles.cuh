// 16 filters x 64 pixels of a product by mma.sync, a block of four warps: the part that is the same wherever the
// operands come from.
//
// Both tiles are kept as 32-bit words along k: one value rounded to TF32, or a pair of 16-bit ones. In words the
// fragments of m16n8k8 and m16n8k16 are alike. The including file's prelude defines Product (float stands for TF32) and
// UNROLL.
#pragma once

#include "common/elements.cuh"
#include "common/mma_tile.cuh"

constexpr int TILE_FILTERS = 16;
constexpr int TILE_PIXELS = 64;
constexpr int TILE_WORDS = 16;
constexpr int WORD_VALUES = 4 / sizeof(Product);
constexpr int TILE_DEPTH = TILE_WORDS * WORD_VALUES;
constexpr int THREADS = 128;

struct Tiles {  // padded so that the lanes of a fragment find different banks
    u32 weights[TILE_FILTERS][TILE_WORDS + 4];
    u32 values[TILE_WORDS][TILE_PIXELS + 8];
};

// Word `word` of values that `value(k)` gives.
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

// `weight(filter, k)` and `value(k)`, the latter of this thread's own pixel, k from the tile's beginning.
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
__device__ __forceinline__ void multiply(float (&sums)[2][4], const Tiles& tiles) {
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
            multiply_add<Product>(sums[j], a, b);
        }
    }
}

// Hands every sum of this lane to `store(filter, pixel, sum)`, both from the tile's beginning.
template <class Store>
__device__ __forceinline__ void for_each_sum(const float (&sums)[2][4], Store store) {
    const int group = threadIdx.x % 32 / 4, member = threadIdx.x % 4;
    const int first = threadIdx.x / 32 * 16;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) store(group + e / 2 * 8, first + j * 8 + member * 2 + e % 2, sums[j][e]);
}
