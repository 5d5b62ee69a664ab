// A tile of a stem: its position, and the epilogue of its rows.
//
// Accumulators are those of mma and wgmma with filters as rows and pixels as columns: with group = lane / 4 and member
// = lane % 4, a lane has pixels 2*member and 2*member + 1 of every 8, and for each block of 16 filters two that are
// adjacent in y (pack.cu). So a pooling window of stride 2 has two of its columns in one lane and at most one in the
// adjacent lane: pooling takes one shuffle per 8 pixels, and no smem.
//
// The prelude of the including file defines, besides the needs of shape.cuh, Element, Output, HAS_RELU, FILTERS, POOL (0: none,
// 2: 2x2 stride 2, 3: 3x3 stride 2 padding 1), COLUMNS (of the convolution, a multiple of 8), HALO (adjacent tiles
// overlap by a column: pooling, several tiles per row of y) and MASK_COLUMNS (tiles exceed the edge).
#pragma once

#include "common/bytes.cuh"
#include "common/epilogue.cuh"
#include "common/pairs.cuh"
#include "common/ptx.cuh"
#include "stem/shape.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Output = float;                 // problem.stored
constexpr bool HAS_RELU = false;      // problem.relu
constexpr int FILTERS = 1;            // problem.filters
constexpr int POOL = 0;               // tiling.pool
constexpr int COLUMNS = 32;           // tiling.columns: convolution columns per tile
constexpr int HALO = 0;               // tiling.halo: columns that two tiles compute
constexpr bool MASK_COLUMNS = false;  // tiling.masks_columns
#endif

constexpr int POOL_STRIDE = POOL ? 2 : 1;
constexpr int TILE_COLUMNS = COLUMNS / POOL_STRIDE - HALO;  // of y

// Two elements in a register, the lower filter in the lower half.
template <class T>
struct Pairs;
#ifdef __CUDA_FP16_H__
template <>
struct Pairs<__half> {
    using Two = __half2;
    static constexpr u32 LOWEST = 0xFC00FC00, LAST_EXPONENT_BIT = 0x04000400;  // minus infinities
    __device__ __forceinline__ static Two of(float low, float high) { return __floats2half2_rn(low, high); }
};
#endif
#ifdef __CUDA_BF16_H__
template <>
struct Pairs<__nv_bfloat16> {
    using Two = __nv_bfloat162;
    static constexpr u32 LOWEST = 0xFF80FF80, LAST_EXPONENT_BIT = 0x00800080;
    __device__ __forceinline__ static Two of(float low, float high) { return __floats2bfloat162_rn(low, high); }
};
#endif
using Two = Pairs<Element>::Two;
constexpr u32 LOWEST = Pairs<Element>::LOWEST;

__device__ __forceinline__ u32 pair_of(float low, float high) {
    const Two two = Pairs<Element>::of(low, high);
    return reinterpret_cast<const u32&>(two);
}

// Max of each half; NaN propagates, as in PyTorch.
__device__ __forceinline__ u32 larger(u32 a, u32 b) {
    const Two two = __hmax2_nan(reinterpret_cast<const Two&>(a), reinterpret_cast<const Two&>(b));
    return reinterpret_cast<const u32&>(two);
}

// Two adjacent filters after their activation. ReLU is cheaper on pairs.
__device__ __forceinline__ u32 finished(float low, float high) {
    const u32 pair = pair_of(activated<false>(low), activated<false>(high));
    return HAS_RELU ? larger(pair, 0) : pair;
}

__device__ __forceinline__ bool inside(int position, int size) {
    return static_cast<unsigned>(position) < static_cast<unsigned>(size);
}

// ------------------------------------------------------------------ position of a tile

struct Tile {
    long long image;
    int row, column;            // of y, first
    int conv_row, conv_column;  // first computed; may be outside the convolution

    // Tile number `in_row` of row `row` of y.
    __device__ __forceinline__ Tile(long long image, int row, int in_row)
        : image(image),
          row(row),
          column(in_row * TILE_COLUMNS),
          conv_row(row * POOL_STRIDE - (POOL == 3)),
          conv_column((in_row * TILE_COLUMNS - HALO) * POOL_STRIDE) {}
};

// ------------------------------------------------------------------ epilogue

// Epilogue of a row of the convolution, for a warp with BLOCKS blocks of 16 filters: bias, activation, rounding, and
// pooling with the previous rows, whose running max is `maxima`. Without ADD_BIAS the sums already include it.
template <int BLOCKS, int COLUMN_BLOCKS, bool ADD_BIAS = true>
struct RowWriter {
    using Accumulators = float[COLUMN_BLOCKS][BLOCKS][4];

    const StemShape& shape;
    Output* y;  // this lane's first filter of the image's first pixel
    float bias[BLOCKS][2];
    int first_column;                 // of y, this lane's in the first column block
    int column_offset, column_limit;  // column i of y belongs to the tile if i - column_offset is in [0, column_limit)
    int conv_column;                  // of the convolution, this lane's first
    u32 maxima[COLUMN_BLOCKS][BLOCKS];

    // `filter` is the warp's first.
    __device__ __forceinline__ RowWriter(const StemShape& shape, const Tile& tile, Output* out, const Element* biases,
                                         int filter)
        : shape(shape) {
        const int lane = threadIdx.x % 32, group = lane / 4;
        filter += 2 * BLOCKS * group;
        y = out + tile.image * shape.output_height * shape.output_width * FILTERS + filter;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                bias[b][half] = ADD_BIAS ? to_float(biases[filter + 2 * b + half]) : 0.f;
        column_offset = tile.column;
        column_limit = min(TILE_COLUMNS, shape.output_width - tile.column);
    }

    // Moves to the columns of the convolution from `column` (even) on; resets the pooling.
    __device__ __forceinline__ void move_to(int column) {
        const int member = threadIdx.x % 4;
        conv_column = column + 2 * member;
        first_column = POOL ? column / 2 + member : conv_column;
#pragma unroll
        for (int j = 0; j < COLUMN_BLOCKS; ++j)
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) maxima[j][b] = LOWEST;
    }

    // Adds a row. If it `completes` a window, stores the maxima to row `row` of y and starts the next. `edge` holds, in
    // lanes of member 3, the last column of the previous segment on entry and of this one on return.
    __device__ __forceinline__ void add(const Accumulators& acc, u32 (&edge)[BLOCKS], bool completes, int row) {
        const int lane = threadIdx.x % 32, member = lane % 4;
        u32 latest[COLUMN_BLOCKS][BLOCKS];
#pragma unroll
        for (int j = 0; j < COLUMN_BLOCKS; ++j) {
            u32 pairs[2][BLOCKS];
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int b = 0; b < BLOCKS; ++b) {
                    u32 pair = ADD_BIAS ? finished(acc[j][b][i] + bias[b][0], acc[j][b][2 + i] + bias[b][1])
                                        : finished(acc[j][b][i], acc[j][b][2 + i]);
                    if (MASK_COLUMNS && !inside(conv_column + 8 * j + i, shape.conv_width)) pair = LOWEST;
                    pairs[i][b] = pair;
                }
            if constexpr (POOL == 0) {
                store(pairs[0], row, j * 8);
                store(pairs[1], row, j * 8 + 1);
            } else {
#pragma unroll
                for (int b = 0; b < BLOCKS; ++b) {
                    u32 now = larger(pairs[0][b], pairs[1][b]);
                    if (POOL == 3) {
                        // The column to the left is the left lane's second; member 0's is in the previous block.
                        const u32 offered = member == 3 ? edge[b] : pairs[1][b];
                        now = larger(now, __shfl_sync(~0u, offered, member == 0 ? lane + 3 : lane - 1));
                        edge[b] = pairs[1][b];
                    }
                    maxima[j][b] = larger(maxima[j][b], now);
                    latest[j][b] = now;
                }
            }
        }
        if (POOL && completes) complete(row);
        if (POOL == 3 && completes) {
#pragma unroll
            for (int j = 0; j < COLUMN_BLOCKS; ++j)
#pragma unroll
                for (int b = 0; b < BLOCKS; ++b) maxima[j][b] = latest[j][b];
        }
    }

    // A row outside the convolution: only pooling windows extend past its edge.
    __device__ __forceinline__ void add_missing_row(bool completes, int row) {
        if (completes) complete(row);
    }

private:
    __device__ __forceinline__ void complete(int row) {
#pragma unroll
        for (int j = 0; j < COLUMN_BLOCKS; ++j) {
            store(maxima[j], row, j * (8 / POOL_STRIDE));
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) maxima[j][b] = LOWEST;
        }
    }

    __device__ __forceinline__ void store(const u32 (&pairs)[BLOCKS], int row, int offset) {
        Output* pixel = y + (row * shape.output_width + first_column) * FILTERS + offset * FILTERS;
        if (inside(first_column - column_offset + offset, column_limit)) store_pairs(pixel, pairs);
    }

    template <class Stored>
    __device__ __forceinline__ static void store_pairs(Stored* pixel, const u32 (&pairs)[BLOCKS]) {
        if constexpr (sizeof(Stored) == 1) {
            Pack<u16, BLOCKS> pack;
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                const float2 two = unpack_pair<Element>(pairs[b]);
                pack.at[b] = static_cast<u16>(pack_bytes<Stored>(two.x, two.y));
            }
            store_pack(reinterpret_cast<u16*>(pixel), pack);
        } else {
            Pack<u32, BLOCKS> pack;
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) pack.at[b] = pairs[b];
            store_pack(reinterpret_cast<u32*>(pixel), pack);
        }
    }
};

// True if row `local` of the convolution rows of a tile (or of a band in it) ends the pooling window of a row of y.
__device__ __forceinline__ bool completes(int local) {
    return POOL == 3 ? local > 0 && local % 2 == 0 : POOL == 2 ? local % 2 == 1 : true;
}

// That row of y, relative to the band's first.
__device__ __forceinline__ int completed(int local) { return POOL == 3 ? local / 2 - 1 : local / POOL_STRIDE; }

// Rows of the convolution for `rows` rows of y.
__device__ __forceinline__ int conv_rows(int rows) { return rows * POOL_STRIDE + (POOL == 3); }
